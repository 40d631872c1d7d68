"""Comparison and synchronisation with NetBox: one pass, its stored reading, the leader's loop."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

from sqlalchemy import Connection, Engine

from reconciler.db import settings as site
from reconciler.db.engine import reading, retrying
from reconciler.inventory.compare import TWINS, Comparison, Inventory, compare
from reconciler.inventory.expected import ALLOCATION, is_retired, read_machines, read_nodes
from reconciler.inventory.netbox import (
    Client,
    Device,
    IpAddress,
    MacAddress,
    Machine,
    Prefix,
    Unfinished,
    VmInterface,
    Vrf,
    by_query,
    netbox_access,
)
from reconciler.inventory.networks import MANAGED, Network
from reconciler.inventory.patches import PURPOSES
from reconciler.inventory.readings import Reading, Readings
from reconciler.inventory.writer import WRITTEN, Writer
from reconciler.model.act import Act
from reconciler.profiles import profile_skus
from reconciler.records import nodes as node_records
from reconciler.runs.spec import RunError
from reconciler.settings import Settings

log = logging.getLogger("gpuaas.netbox")
READINGS = Readings("netbox", "NetBox", "netbox_reading")
# NetBox's limit for the name of a device.
_LONGEST_NAME = 64
_ALLOCATION_ID = re.compile("[0-9a-f-]{36}")
_NODE_ID = re.compile("[a-z0-9-]{1,63}")


@dataclass
class NetboxReading(Reading):
    """A comparison with NetBox."""

    devices: int = 0
    requests: int = 0


def ask(conn: Connection, settings: Settings, act: Act, *, apply: bool) -> int:
    """Record a request for a pass; returns its number."""
    netbox_access(settings)
    return READINGS.ask(conn, act, apply=apply)


def tend(engine: Engine, settings: Settings) -> None:
    """Loop: a pass when it is asked for, after changes of state, and at intervals."""
    if not settings.netbox_url:
        return
    due = READINGS.due(engine)
    changed = due.changed or not due.last.get("complete")
    prompt = settings.netbox_sync and changed and not due.failed
    applied, complete = due.last.get("applied"), due.last.get("complete")
    unfinished = bool(applied and not complete and not due.failed)
    if due.requested or prompt or due.over or unfinished:
        apply = settings.netbox_sync or due.apply or unfinished
        run(engine, settings, NetboxReading(due.at, due.event_id, due.request_number, apply))


def run(engine: Engine, settings: Settings, document: NetboxReading) -> NetboxReading:
    """One pass: read both sides, compare, write if the reading says so, store the reading."""
    comparison = Comparison()
    with READINGS.failing(document, log):
        try:
            with Client(netbox_access(settings)) as netbox:
                try:
                    comparison = _compare(engine, settings, netbox, document)
                    if document.applied:
                        _require_alone(comparison)
                        # Writes have their own deadline, however long reading took.
                        netbox.begin()
                        Writer(engine, netbox, comparison, document.done, document.at).write()
                finally:
                    document.requests = netbox.requests
            document.complete = True
            if document.applied:
                # Findings with an action were resolved by the writes.
                comparison.findings = [row for row in comparison.findings if not row.action]
        except Unfinished as rest:
            comparison.note("unfinished", "this pass", rest.expected, rest.found, rest.remedy)
    READINGS.keep(engine, document, comparison.findings, log)
    return document


def _compare(
    engine: Engine, settings: Settings, netbox: Client, document: NetboxReading
) -> Comparison:
    devices = {
        device.id: device for tag in PURPOSES.values() for device in netbox.every(Device, tag=tag)
    }
    machines = list(netbox.every(Machine, tag=MANAGED))
    allocation_ids = _texts(machines, ALLOCATION, _ALLOCATION_ID)
    with reading(engine) as conn:
        nodes = read_nodes(conn)
        slices = read_machines(conn, allocation_ids)
        # After the devices: each fingerprint is stored before it is written.
        written = site.read(conn, WRITTEN, {})
    names = {device.name for device in devices.values()}
    ids = _texts(devices.values(), "gpuaas_node_id", _NODE_ID)
    missing = [
        expected.node.name
        for expected in nodes
        if expected.node.name not in names and expected.node.id not in ids | names
        if not is_retired(expected.node)
    ]
    for some in by_query(name for name in missing if len(name) <= _LONGEST_NAME):
        devices |= {device.id: device for device in netbox.every(Device, name=some)}
    sites = sorted({device.site.id for device in devices.values()})
    # By a request for each site: a network of a location does not show its site.
    networks = {id: [row.prefix for row in netbox.every(Prefix, site_id=str(id))] for id in sites}
    document.nodes, document.devices, document.machines = len(nodes), len(devices), len(machines)
    refusal, slice_network = None, None
    if machines or slices:
        try:
            slice_network = _slice_network(netbox)
        except RunError as forbidden:
            if forbidden.code != "netbox_forbidden":
                raise
            # The token has only the rights that an earlier version needed.
            refusal = forbidden
    inventory = Inventory(list(devices.values()), machines, networks, slice_network, written)
    result = compare(nodes, slices, inventory, profile_skus(settings.profiles_dir))
    if refusal:
        subject = "networks of slices"
        result.note("forbidden", subject, refusal.expected, refusal.found, refusal.remedy)
    for expected in nodes:
        facts = result.facts.get(expected.node.id)
        if facts != expected.node.netbox:
            retrying(engine, partial(node_records.update, id=expected.node.id, netbox=facts))
    return result


def _require_alone(comparison: Comparison) -> None:
    """Refuse to write beside another service with this site's records: each would undo what the
    other writes, creates and deletes.
    """
    if comparison.twins:
        raise RunError(
            "netbox_other_service",
            expected="no other service with this site's authority that writes into NetBox",
            found=f"its values, or older ones, at {', '.join(comparison.twins)}",
            remedy=TWINS,
        )


def _slice_network(netbox: Client) -> Network:
    return Network(
        vrfs=list(netbox.every(Vrf, tag=MANAGED)),
        interfaces=list(netbox.every(VmInterface, tag=MANAGED)),
        macs=list(netbox.every(MacAddress, tag=MANAGED)),
        addresses=list(netbox.every(IpAddress, tag=MANAGED)),
    )


def _texts(
    objects: Iterable[Device | Machine], name: str, pattern: re.Pattern[str]
) -> frozenset[str]:
    """Values of a custom field that are ids; this service writes no others."""
    values = (item.custom_fields.get(name) for item in objects)
    return frozenset(v for v in values if isinstance(v, str) and pattern.fullmatch(v))

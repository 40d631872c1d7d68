"""Holdings of a host: all objects of slices on it, of every owner, without a verdict.

Each part is read independently; a failed read makes its part *unknown*, never *empty*.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from ansible_collections.gpuaas.slice.plugins.module_utils.core import (
    _command,
    _ledger,
    _object_names,
)
from ansible_collections.gpuaas.slice.plugins.module_utils.core._errors import Refusal
from ansible_collections.gpuaas.slice.plugins.module_utils.disk import _block
from ansible_collections.gpuaas.slice.plugins.module_utils.fabric import _slice_fabric
from ansible_collections.gpuaas.slice.plugins.module_utils.network import _guards, _refusals
from ansible_collections.gpuaas.slice.plugins.module_utils.slice import (
    _dnsmasq,
    _domain,
    _libvirt,
    _qos,
    _slots,
    _traces,
)

Rows = list[dict[str, Any]]

# The part that lists each kind of trace.
PARTS = {
    "domain": "domains",
    "qemu_process": "processes",
    **dict.fromkeys((*_traces.FILES, "relay"), "files"),
    "reservation": "reservations",
    "ovs_port": "ports",
    "flows": "guards",
    "ingress": "ingress",
    "qos": "limits",
}


def look(
    slots: Collection[_slots.Slot], bridge: str, limit: _qos.Limit | None = None
) -> dict[str, Any]:
    """By part: `{known, detail, found}`. slots: approved bundles, whose devices are checked. limit:
    rate limit of each running machine's port.

    Connections are not included, because any host program that contacts an idle slot's guest
    creates one.
    """
    kinds = _traces.looks(bridge)
    parts: dict[str, Callable[[], Rows]] = {
        part: _traces_in(part, kinds) for part in PARTS.values()
    }
    parts |= {
        "domains": lambda: _domains(kinds["domain"], limit),
        "leases": _leases,
        "addresses": _addresses,
        "devices": lambda: _devices(slots),
    }
    return {name: _answer(part) for name, part in parts.items()}


def refused() -> dict[str, Any]:
    """Counters of the packets that guards refused: `{known, detail, found}`."""
    return _answer(lambda: _refusals.rows(_guards.recorded()))


def _answer(part: Callable[[], Rows]) -> dict[str, Any]:
    try:
        return {"known": True, "detail": "", "found": part()}
    except (Refusal, OSError, ValueError) as why:
        return {"known": False, "detail": f"unknown: {why}"[:2000], "found": []}


def _traces_in(part: str, kinds: dict[str, _traces.Look]) -> Callable[[], Rows]:
    looks = [look for kind, look in kinds.items() if PARTS[kind] == part]
    return lambda: [dict(trace.row) for look in looks for trace in look()]


def _domains(traces: _traces.Look, limit: _qos.Limit | None) -> Rows:
    listed = {trace.row["name"]: trace.row for trace in traces()}
    definitions = _libvirt.definitions(listed)
    rows = [{**listed[name], **_devices_of(xml)} for name, xml in definitions.items()]
    if any(row["off_by_guest"] for row in rows) and _host_stops():
        # The host is shutting down its guests; they did not power off by themselves.
        rows = [{**row, "off_by_guest": False} for row in rows]
    for row in rows if limit else ():
        if row["active"] and row["allocation_id"]:
            row["limited"] = _qos.observe(row["allocation_id"]).holds(limit)
    return rows


def _host_stops() -> bool:
    answer = _command.run(["systemctl", "is-system-running"], ok=range(256))
    return answer.out.strip() == "stopping"


def _devices_of(xml: str) -> dict[str, list[str]]:
    description = _domain.parse(xml)
    return {"devices": list(description["hostdevs"]), "disks": list(description["disks"])}


def _leases() -> Rows:
    return [
        {
            "slot_id": entry.slot_id,
            "allocation_id": entry.allocation_id,
            "fence": entry.fence,
            "disk": entry.disk_identity,
            "dirty": entry.dirty,
        }
        for entry in _ledger.entries()
    ]


def _addresses() -> Rows:
    return [{"mac": entry.mac, "ip": entry.ip} for entry in _dnsmasq.leases()]


def _devices(slots: Collection[_slots.Slot]) -> Rows:
    """Reasons against giving a slot's devices to a guest.

    Use by a slice is no reason here: the domains and processes already identify the slice.
    """
    own_pids = list(_libvirt.processes(_object_names.PREFIX))
    rows: Rows = []
    for slot in slots:
        _disk, problems = _block.judged(slot, own_pids=own_pids)
        problems = [*problems, *_slots.passthrough(_slots.addresses(slot), own_pids=own_pids)]
        if slot.get("fabric_vf_pci_address"):
            problems += _slice_fabric.unguarded(str(slot["fabric_vf_pci_address"]))
        rows += [{"slot_id": slot["slot_id"], **_problem(problem)} for problem in problems]
    return rows


def _problem(refusal: Refusal) -> dict[str, str]:
    return {"code": refusal.code, "expected": refusal.expected, "found": refusal.found[:2000]}

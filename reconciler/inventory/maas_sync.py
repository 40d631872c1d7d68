"""Comparison with MAAS: one pass, its stored reading, the leader's loop.

A pass reads tags, finds the machines of nodes, and keeps what protects and shows them in MAAS: the
lock, the tag of intent after a conversion, annotations. It never deploys or releases a machine.
"""

from __future__ import annotations

import hashlib
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import sqlalchemy as sa
from sqlalchemy import Connection, Engine

from reconciler.db import journal, leader, locks
from reconciler.db.engine import reading, retrying
from reconciler.db.schema import Node, slots
from reconciler.inventory.expected import is_retired
from reconciler.inventory.maas import (
    FORBIDDEN,
    LISTS,
    Client,
    MaasAccess,
    Machine,
    Status,
    had_no_effect,
    maas_access,
)
from reconciler.inventory.machines import (
    REQUESTED,
    UNSURE,
    UNSURE_LOCK,
    Comparison,
    ExpectedNode,
    NewNode,
    binding,
    compare,
    is_ours,
    lock_comment,
    tags_of,
)
from reconciler.inventory.patches import BLOCKED, PURPOSES, purposes_of
from reconciler.inventory.readings import Reading, Readings
from reconciler.lifecycle import installation
from reconciler.model.act import Act
from reconciler.model.errors import Problem
from reconciler.model.states import NodeMode, SlotState
from reconciler.profiles import profile_skus
from reconciler.records import nodes as node_records
from reconciler.runs.spec import LauncherAway, RunError
from reconciler.settings import Settings
from reconciler.shipped import SCRIPTS

log = logging.getLogger("gpuaas.maas")
READINGS = Readings("maas", "MAAS", "maas_reading")
# Scripts that MAAS runs on machines, by their type.
MAAS_SCRIPTS = {
    "commissioning": SCRIPTS / "maas/commissioning/50-gpuaas-slice-firmware-preflight.sh",
    "release": SCRIPTS / "maas/release/60-gpuaas-slice-disks.sh",
}
# Machines without an answer that end a pass.
_MOST_SILENCES = 3
_ACT = Act("reconciler", "machines of MAAS")
_UNBOUND = "admin.maas.unbound"


class Pass(Client):
    """A pass over all machines. The next pass does what is left at the deadline.

    Each change requires the leader's term, so a process that no longer leads stops writing.
    """

    # MAAS takes up to half a second for each machine of a list, and sends nothing meanwhile. Any
    # other request has the time of a task's, so that a machine that hangs leaves time for others.
    DEADLINE_S, REQUEST_S = 240.0, 120.0

    def __init__(self, access: MaasAccess, engine: Engine) -> None:
        super().__init__(access)
        self._engine = engine

    def _request(self, method: str, path: str, **arguments: Any) -> tuple[bytes, int]:
        if method != "GET":
            leader.require_of(self._engine)
        with nullcontext() if path.startswith(LISTS) else self.within(Client.REQUEST_S):
            return super()._request(method, path, **arguments)


def ask(conn: Connection, settings: Settings, act: Act, *, apply: bool) -> int:
    """Record a request for a pass; returns its number."""
    maas_access(settings)
    return READINGS.ask(conn, act, apply=apply)


def tend(engine: Engine, settings: Settings) -> None:
    """Loop: a pass when it is asked for, after changes of state, and at intervals."""
    if not settings.maas_url:
        return
    due = READINGS.due(engine)
    if due.requested or (due.changed and not due.failed) or due.over:
        run(engine, settings, Reading(due.at, due.event_id, due.request_number, due.apply))


def run(engine: Engine, settings: Settings, document: Reading) -> Reading:
    """One pass: read both sides, compare, write, store the reading."""
    result = Comparison()
    done: Counter[str] = Counter()
    with READINGS.failing(document, log):
        with Pass(maas_access(settings), engine) as maas:
            result = _compare(engine, settings, maas, document)
            _scripts(maas, result, done, apply=document.applied)
            for expected, machine in result.bound:
                node = expected.node
                if retrying(engine, partial(_bind, node=node, machine=machine)):
                    bound = replace(expected, node=replace(node, maas=binding(machine)))
                    result.pairs.append((bound, machine))
                    done["nodes bound"] += 1
            if document.applied:
                for new in result.added:
                    with _named(result, new.id):
                        done["nodes added"] += retrying(engine, partial(_add, new=new))
                # Findings with an action were resolved above.
                result.findings = [row for row in result.findings if not row.action]
            for node_id, tags in result.tags.items():
                retrying(engine, partial(_keep_tags, node_id=node_id, tags=tags))
            _write_all(engine, maas, result, done)
        document.complete = True
    document.done = dict(+done)
    READINGS.keep(engine, document, result.findings, log)
    return document


def unbind(conn: Connection, node_id: str, act: Act) -> Node:
    """Forget which machine of MAAS the node is. A lock in MAAS stays."""
    with locks.node(conn, node_id) as node:
        node_records.update(conn, node_id, maas=None)
        journal.audit(conn, act, _UNBOUND, "node", node_id, detail={"was": node.maas})
    return node_records.get(conn, node_id)


def _compare(engine: Engine, settings: Settings, maas: Client, document: Reading) -> Comparison:
    user = maas.user().username
    machines, unread = dict[str, Machine](), dict[str, RunError]()
    for tag in PURPOSES.values():
        tagged, others = maas.machines(tag)
        machines |= {row.system_id: row for row in tagged}
        unread |= others
    networks = [subnet.cidr for subnet in maas.subnets()]
    with reading(engine) as conn:
        living = (node for node in node_records.every(conn) if not is_retired(node))
        nodes = [_expected(conn, node) for node in living]
    bound = {str(row.node.maas["system_id"]) for row in nodes if row.node.maas}
    untagged = sorted(bound - machines.keys() - unread.keys())
    unread |= _read_untagged(maas, untagged, machines)
    document.nodes, document.machines = len(nodes), len(machines)
    profiles = profile_skus(settings.profiles_dir)
    return compare(nodes, machines, networks, profiles, user, unread)


def _read_untagged(
    maas: Client, system_ids: Sequence[str], machines: dict[str, Machine]
) -> dict[str, RunError]:
    """Add bound machines whose tags were taken away, if MAAS still has them. Returns why others
    cannot be read: a machine that MAAS cannot show must not keep the others from their locks.
    """
    unread: dict[str, RunError] = {}
    for system_id in system_ids:
        try:
            machines[system_id] = maas.machine(system_id)
        except RunError as refusal:
            if refusal.code == "maas_not_found":
                continue
            unread[system_id] = refusal
            silences = [row for row in unread.values() if isinstance(row, LauncherAway)]
            if len(silences) >= _MOST_SILENCES:
                raise
    return unread


def _expected(conn: Connection, node: Node) -> ExpectedNode:
    query = sa.select(slots.c.status).where(
        slots.c.node_id == node.id, slots.c.retired_at.is_(None)
    )
    states = Counter(conn.execute(query).scalars())
    blocked = states[SlotState.CLEANUP_BLOCKED]
    annotations = {"gpuaas.node": node.id, "gpuaas.mode": node.mode}
    annotations |= {"gpuaas.slots": str(states.total()), "gpuaas.blocked": str(blocked)}
    return ExpectedNode(node, installation.needs_lock(conn, node), annotations)


def shipped_digest(kind: str) -> str:
    """SHA-256 of the script of this type; OSError without it."""
    return hashlib.sha256(MAAS_SCRIPTS[kind].read_bytes()).hexdigest()


def _scripts(maas: Client, result: Comparison, done: Counter[str], *, apply: bool) -> None:
    for kind, path in MAAS_SCRIPTS.items():
        subject = f"{kind} script {path.stem}"
        try:
            digest = shipped_digest(kind)
        except OSError as missing:
            remedy = "install this version again, or build it (`python -m scripts.standalone`)"
            result.note("script", subject, f"a script in {path}", type(missing).__name__, remedy)
            continue
        actual = maas.script_digest(path.stem)
        if actual == digest:
            continue
        if apply:
            maas.upload(path.stem, kind, path.read_bytes(), new=not actual)
            done["scripts uploaded"] += 1
        else:
            text, remedy = (
                f"SHA-256 {actual}" if actual else "none",
                "`gpuaas maas sync` uploads it",
            )
            result.note("script", subject, f"SHA-256 {digest}", text, remedy, "upload")


def _bind(conn: Connection, node: Node, machine: Machine) -> int:
    with locks.node(conn, node.id) as current:
        if current.maas or current.name != node.name or current.address != node.address:
            return 0
        bound = {**binding(machine), **_returned(conn, node.id, machine)}
        values = {"maas": bound, "maas_tags": tags_of(machine)}
        node_records.update(conn, node.id, **values)
        journal.audit(conn, _ACT, "node.maas.bound", "node", node.id, detail=values)
        return 1


def _returned(conn: Connection, node_id: str, machine: Machine) -> dict[str, bool]:
    """The mark `returned` from before the node was unbound: MAAS may have given the machine to
    others.
    """
    for row in journal.audit_rows(conn, action=_UNBOUND, subject_id=node_id):
        was = row.detail["was"] or {}
        if was.get("system_id") == machine.system_id:
            return {"returned": True} if was.get("returned") else {}
    return {}


def _add(conn: Connection, new: NewNode) -> int:
    mode = NodeMode.of_new(new.purpose)
    fields = {"address": new.address, "profile": new.profile}
    node = node_records.create(conn, _ACT, id=new.id, mode=mode, **fields)
    return _bind(conn, node, new.machine)


def _keep_tags(conn: Connection, node_id: str, tags: list[str]) -> None:
    """Tags as MAAS has them replace typed ones. Without a change nothing is written."""
    if node_records.get(conn, node_id).maas_tags != tags:
        node_records.change(conn, node_id, _ACT, maas_tags=tags)


@contextmanager
def _named(result: Comparison, node_id: str) -> Iterator[None]:
    """Record a refusal about one node as a finding and continue. No answer ends the pass."""
    try:
        yield
    except LauncherAway:
        raise
    except (Problem, RunError) as refusal:
        result.note(
            *("not_written", f"node {node_id}", refusal.expected),
            *(f"{refusal.code}: {refusal.found}", refusal.remedy),
        )


def _write_all(engine: Engine, maas: Client, result: Comparison, done: Counter[str]) -> None:
    """Write to all machines. A machine about which MAAS does not answer, for example because of an
    error of its own, must not keep the others from their locks; several mean MAAS itself.
    """
    silences: list[LauncherAway] = []
    for expected, machine in result.pairs:
        try:
            _write(engine, maas, result, expected, machine, done)
        except LauncherAway as silence:
            silences.append(silence)
            if len(silences) >= _MOST_SILENCES:
                break
    if silences:
        raise silences[0]


def _write(
    engine: Engine,
    maas: Client,
    result: Comparison,
    expected: ExpectedNode,
    machine: Machine,
    done: Counter[str],
) -> None:
    """Write to one machine. The lock comes even if an annotation is refused."""
    node, system_id = expected.node, machine.system_id
    remembered = dict(node.maas or {})
    comment = f"gpuaas.slice, node {node.id}"
    deployed = machine.status == Status.DEPLOYED

    def keep(**values: Any) -> None:
        if {**remembered, **values} != remembered:
            remembered.update(values)
            bound = remembered["system_id"]
            retrying(engine, partial(_remember, node=node, system_id=bound, values=values))

    with _named(result, node.id):
        if purposes_of(machine) != [expected.purpose]:
            # The new tag first: with both tags the machine is left alone.
            maas.tag(PURPOSES[expected.purpose], system_id, on=True)
            for purpose, tag in PURPOSES.items():
                if purpose != expected.purpose:
                    maas.tag(tag, system_id, on=False)
            done["tags set"] += 1
        keep(purpose=expected.purpose, **({"series": machine.distro_series} if deployed else {}))
    locked, reason = machine.locked, lock_comment(node.id)
    if locked and remembered.get("locked") == REQUESTED:
        # Asked at once, because MAAS shows the newest events only.
        keep(locked=maas.has_lock(system_id, comment=reason) or UNSURE)
    superfluous = locked and remembered.get("locked") and not expected.locked
    if superfluous and not is_ours(remembered["locked"], maas.has_lock(system_id, comment=reason)):
        result.note("lock_unsure", f"node {node.id}", *UNSURE_LOCK)
    elif superfluous and retrying(engine, partial(_unlocking, node=node, system_id=system_id)):
        remembered["locked"] = UNSURE
        with _named(result, node.id), _undone(lambda: keep(locked=True)):
            maas.unlock(system_id, comment=comment)
            done["machines unlocked"] += 1
            locked = False
    if not locked:
        keep(locked=False)
    # MAAS refuses annotations of a locked machine, so it keeps those from before.
    changed = {
        name: value
        for name, value in expected.annotations.items()
        if machine.workload_annotations.get(name) != value
    }
    if deployed and not locked and changed:
        with _named(result, node.id):
            maas.annotate(system_id, changed)
            done["machines annotated"] += 1
    if deployed and not locked and expected.locked:
        # Recorded before the request, so that a lock whose answer is lost may be found to be ours.
        keep(locked=REQUESTED)
        with _named(result, node.id):
            try:
                maas.lock(system_id, comment=reason)
            except RunError as refusal:
                if had_no_effect(refusal):
                    # MAAS refused, so a lock that exists now is a person's.
                    keep(locked=False)
                raise
            keep(locked=True)
            done["machines locked"] += 1
    # Tags need an administrator's rights in MAAS, and can be changed on a locked machine.
    with _named(result, node.id):
        done["tags set"] += _tag_blocked(maas, expected, machine)


def _tag_blocked(maas: Client, expected: ExpectedNode, machine: Machine) -> int:
    blocked = expected.annotations.get("gpuaas.blocked", "0") != "0"
    if blocked == machine.tagged(BLOCKED):
        return 0
    maas.tag(BLOCKED, machine.system_id, on=blocked)
    return 1


@contextmanager
def _undone(restore: Callable[[], None]) -> Iterator[None]:
    """Restore a record that was written before a request, if MAAS forbids the request."""
    try:
        yield
    except RunError as refusal:
        if refusal.code == FORBIDDEN:
            restore()
        raise


def _remember(conn: Connection, node: Node, system_id: str, values: Mapping[str, Any]) -> None:
    with locks.node(conn, node.id) as current:
        if current.maas and current.maas.get("system_id") == system_id:
            node_records.update(conn, node.id, maas={**current.maas, **values})


def _unlocking(conn: Connection, node: Node, system_id: str) -> bool:
    """Whether the machine still needs no lock; if so, the record says that an unlock is requested.

    This comes before the request: if its answer is lost, a lock seen later may be a person's.
    """
    with locks.node(conn, node.id) as current:
        bound = current.maas or {}
        # A tenant may have come since the pass began.
        if bound.get("system_id") != system_id or installation.needs_lock(conn, current):
            return False
        node_records.update(conn, node.id, maas={**bound, "locked": UNSURE})
        return True

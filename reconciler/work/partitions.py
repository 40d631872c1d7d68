"""Partitions of projects on an InfiniBand fabric: joined before a machine starts, left at its end.

Every change is proven by reading the partitions back. A virtual function belongs to the partition
of its tenant and to no other one but the default partition, in which it is a limited member: such
members reach the subnet manager and not each other.

The requests are made outside of transactions. One task at a time works on a node, so nothing else
changes the functions of its slots meanwhile. A worker that was paused may have lost its task, and
another tenant may have the slots. So the lease is renewed and the claims are read again after the
first answer: the time for the requests that follow has begun before it, and ends before the lease.
"""

from __future__ import annotations

import re
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from sqlalchemy import Connection, Engine

from reconciler.db import journal, locks
from reconciler.db.engine import reading, transaction
from reconciler.db.schema import Task, allocations, claims, nodes, slots
from reconciler.lifecycle import gate
from reconciler.lifecycle.task_failures import act_of
from reconciler.model import fabric
from reconciler.model.errors import Problem, Refusal
from reconciler.model.fabric import Isolation
from reconciler.model.states import LIVE_CLAIMS, ClaimState
from reconciler.model.storable import storable_text
from reconciler.records import allocations as allocation_records
from reconciler.records import queue, segments
from reconciler.settings import Settings
from reconciler.work.handler import Work, canceled, open_work
from reconciler.work.ufm import DEFAULT, FULL, LIMITED, Client, Partition, ufm_access

# GUIDs that slice mode derives. A host cannot name the GUID of a switch or of a vendor's card.
_GUID = re.compile("02(:[0-9a-f]{2}){7}")
# UFM's subnet manager applies a change within seconds.
_READ_AGAIN_S = 0.5
_EMPTY = Partition({})

Partitions = Mapping[int, Partition]
Expected = tuple[str, int | None] | None


@dataclass(frozen=True)
class Tenant:
    """A project and its partition. numbers: of the site. guids: of the machine's functions."""

    project: str
    key: int
    numbers: range
    guids: frozenset[str]


def join(engine: Engine, settings: Settings, task: Task) -> None:
    """Make the machine's functions members of the partition of its project, and of no other.

    Refused if that cannot be proven; the machine then does not start.
    """
    with transaction(engine) as conn:
        work = open_work(conn, settings, task)
        if fabric.isolation(work.profile) is not Isolation.PARTITION:
            return
        tenant = _tenant(work)
    with Client(ufm_access(settings)) as ufm:
        before = ufm.partitions()
        _refuse_full_default(before, tenant.guids)
        strangers = before.get(tenant.key, _EMPTY).members.keys() - tenant.guids
        # Read after the partitions: another machine of the project may have joined meanwhile.
        with transaction(engine) as conn:
            _renew_lease(conn, settings, task)
            _require_claims(_identities(conn, task), task)
            strangers -= _mates(conn, tenant.project)
            ours = set(conn.execute(sa.select(slots.c.fabric_identity)).scalars())
        if strangers - ours:
            raise _strangers(tenant.key, strangers - ours)
        if strangers:
            ufm.remove(tenant.key, strangers)
        _leave(ufm, before, tenant.guids, (n for n in tenant.numbers if n != tenant.key))
        if _problems(before, tenant.guids, tenant.key):
            ufm.add(tenant.key, tenant.guids)
        problems = _read_back(ufm, tenant.guids, tenant.key, strangers)
        if problems:
            # Without proof the functions are in no tenant's partition.
            ufm.remove(tenant.key, tenant.guids)
            raise _unproven(f"in partition 0x{tenant.key:x} alone", problems)
    _audit(engine, task, "joined", tenant.guids, f"0x{tenant.key:x}")


def leave(engine: Engine, settings: Settings, task: Task) -> None:
    """Remove the functions of the task's slots from every tenant's partition.

    This is done before the run: a function without a partition reaches no other, whatever its guest
    does.
    """
    with reading(engine) as conn:
        work = open_work(conn, settings, task)
        if fabric.isolation(work.profile) is not Isolation.PARTITION:
            return
        numbers = fabric.numbers(work.profile)
        # Slots that were approved before GUIDs were recorded have never been in a partition.
        guids = frozenset(_identities(conn, task).values()) - {""}
    if not guids:
        return
    with Client(ufm_access(settings)) as ufm:
        before = ufm.partitions()
        with transaction(engine) as conn:
            _renew_lease(conn, settings, task)
            guids &= frozenset(_identities(conn, task).values())
        if not guids:
            return
        _leave(ufm, before, guids, numbers)
        problems = _read_back(ufm, guids, None, among=numbers)
        if problems:
            raise _unproven("in no tenant's partition", problems)
    _audit(engine, task, "left", guids, "none")


def look(engine: Engine, settings: Settings, task: Task) -> None:
    """Compare the partitions with the slots of a node, and close the gate of slots that differ.

    Functions of idle slots are removed from tenants' partitions; nothing is added.
    """
    outcome: dict[str, Any] | None = None
    removed: frozenset[str] = frozenset()
    with reading(engine) as conn:
        work = open_work(conn, settings, task)
        shared = fabric.isolation(work.profile) is Isolation.PARTITION
        expected = _expected(work) if shared else {}
        if not shared and work.node.fabric_reading is None:
            return
    if shared:
        outcome, removed = _compare(engine, settings, task, expected)
    if removed:
        _audit(engine, task, "removed", removed, "none")
    with transaction(engine) as conn:
        act = act_of(task).because("partitions of the fabric were read", outcome or {})
        with locks.node(conn, task.node_id) as node:
            update = sa.update(nodes).where(nodes.c.id == node.id)
            conn.execute(update.values(fabric_reading=outcome))
            if outcome:
                gate.review(conn, node.id, act)
            if outcome and node.fabric_reading and outcome != node.fabric_reading:
                gate.open_gate(conn, node.id, act)


def _renew_lease(conn: Connection, settings: Settings, task: Task) -> None:
    """Problem `stale_lease` if another worker may have the task, and later tasks the node."""
    queue.heartbeat(conn, task.id, task.lease_token, seconds=settings.task_lease_s)


def _tenant(work: Work) -> Tenant:
    numbers = fabric.numbers(work.profile)
    project = allocation_records.get(work.conn, work.allocation_id).project_id
    guids = _identities(work.conn, work.task)
    _require_claims(guids, work.task)
    for slot_id, guid in guids.items():
        if not _GUID.fullmatch(guid):
            raise Problem(
                "fabric_guid_missing",
                expected=f"an approved GUID of slice mode for slot {slot_id}",
                found=guid or "none was approved",
                remedy="discover the node, withdraw the slot and approve it again",
            )
    key = segments.assign(work.conn, project, Isolation.PARTITION, numbers)
    return Tenant(project, key, numbers, frozenset(guids.values()))


def _require_claims(guids: Mapping[str, str], task: Task) -> None:
    if guids.keys() != task.fences.keys():
        raise canceled("claims that still stand", "a later claim on a slot of the task")


def _mates(conn: Connection, project_id: str) -> set[str]:
    """GUIDs of the functions of a project's live machines."""
    query = (
        sa.select(slots.c.fabric_identity)
        .join(claims, claims.c.slot_id == slots.c.id)
        .join(allocations, allocations.c.id == claims.c.allocation_id)
        .where(allocations.c.project_id == project_id, claims.c.state.in_(LIVE_CLAIMS))
    )
    return set(conn.execute(query).scalars())


def _identities(conn: Connection, task: Task) -> dict[str, str]:
    """The approved GUIDs of the slots that the task still holds, never those that a host reports.

    The function of a slot with a later claim is another tenant's.
    """
    columns = (slots.c.id, slots.c.fence, slots.c.fabric_identity)
    query = sa.select(*columns).where(slots.c.id.in_(task.fences))
    held = (row for row in conn.execute(query) if row.fence == task.fences[row.id])
    return {row.id: str(row.fabric_identity) for row in held}


def _expected(work: Work) -> dict[str, Expected]:
    """GUID and partition of each slot; None for the partition of an idle slot, and None for a slot
    in motion.
    """
    numbers = fabric.numbers(work.profile)
    live = (
        sa.select(claims.c.slot_id, claims.c.state, allocations.c.project_id)
        .join(allocations, allocations.c.id == claims.c.allocation_id)
        .where(claims.c.node_id == work.task.node_id, claims.c.state.in_(LIVE_CLAIMS))
    )
    held = {row.slot_id: row for row in work.conn.execute(live)}
    query = sa.select(slots.c.id, slots.c.fabric_identity)
    query = query.where(slots.c.node_id == work.task.node_id, slots.c.retired_at.is_(None))
    expected: dict[str, Expected] = {}
    for row in work.conn.execute(query).all():
        claim = held.get(row.id)
        if claim is None:
            expected[row.id] = (row.fabric_identity, None)
        elif claim.state == ClaimState.ACTIVE:
            key = segments.find(work.conn, claim.project_id, Isolation.PARTITION, numbers)
            expected[row.id] = (row.fabric_identity, key or 0)
        else:
            expected[row.id] = None
    return expected


def _compare(
    engine: Engine, settings: Settings, task: Task, expected: Mapping[str, Expected]
) -> tuple[dict[str, Any], frozenset[str]]:
    """The reading of a node, and the GUIDs that were removed."""
    problems: dict[str, str] = {}
    removed: frozenset[str] = frozenset()
    error = ""
    try:
        with Client(ufm_access(settings)) as ufm:
            partitions = ufm.partitions()
            with transaction(engine) as conn:
                _renew_lease(conn, settings, task)
                work = open_work(conn, settings, task)
                expected = _expected(work)
            judged = {slot_id: row for slot_id, row in expected.items() if row}
            idle = frozenset(guid for guid, key in judged.values() if guid and key is None)
            numbers = fabric.numbers(work.profile)
            removed = _leave(ufm, partitions, idle, numbers)
            if removed:
                _read_back(ufm, removed, None, among=numbers)
                partitions = ufm.partitions()
        for slot_id, (guid, key) in judged.items():
            wrong = _problems(partitions, [guid], key) if guid else ["no GUID was approved"]
            wrong += _full_default(partitions, [guid])
            if wrong:
                problems[slot_id] = storable_text("; ".join(wrong))[:500]
    except Refusal as refusal:
        if refusal.code == "stale_lease":
            raise
        error = storable_text(str(refusal))[:500]
    return {"error": error, "slots": sorted(expected), "problems": problems}, removed


def _leave(
    ufm: Client, partitions: Partitions, guids: Collection[str], keys: Iterable[int]
) -> frozenset[str]:
    """Remove the GUIDs from these partitions; returns those that were in any."""
    removed: frozenset[str] = frozenset()
    for key in keys:
        members = partitions.get(key, _EMPTY).members.keys() & set(guids)
        if members:
            ufm.remove(key, members)
            removed |= members
    return removed


def _read_back(
    ufm: Client,
    guids: Collection[str],
    key: int | None,
    strangers: Collection[str] = (),
    among: range = range(DEFAULT),
) -> list[str]:
    """Read until the partitions are as they must be; the last problems at the deadline."""
    while True:
        partitions = {n: p for n, p in ufm.partitions().items() if n in among}
        problems = _problems(partitions, guids, key)
        for guid in partitions.get(key or 0, _EMPTY).members.keys() & set(strangers):
            problems.append(f"{guid} is still in partition 0x{key or 0:x}")
        if not problems or ufm.left_s < 4 * _READ_AGAIN_S:
            return problems
        time.sleep(_READ_AGAIN_S)


def _problems(partitions: Partitions, guids: Collection[str], key: int | None) -> list[str]:
    """Differences of the GUIDs' memberships from full membership of `key` alone; None: of none."""
    problems = []
    for guid in sorted(guids):
        inside = {n: p.members[guid] for n, p in partitions.items() if guid in p.members}
        inside.pop(DEFAULT, None)
        if key is not None and inside.pop(key, "") != FULL:
            problems.append(f"{guid} is no full member of partition 0x{key:x}")
        problems += [f"{guid} is in partition 0x{number:x}" for number in sorted(inside)]
    return problems


def _full_default(partitions: Partitions, guids: Collection[str]) -> list[str]:
    """A port that the default partition does not list has its general membership there."""
    default = partitions.get(DEFAULT, _EMPTY)
    memberships = {guid: default.members.get(guid) or default.default for guid in sorted(guids)}
    return [
        f"{guid} is a member of the default partition with {membership or 'unknown'} membership"
        for guid, membership in memberships.items()
        if membership != LIMITED
    ]


def _refuse_full_default(partitions: Partitions, guids: Collection[str]) -> None:
    wrong = _full_default(partitions, guids)
    if wrong:
        raise Problem(
            "partition_default_full",
            expected="limited membership of ports in the default partition 0x7fff",
            found=wrong[0],
            remedy="set default_membership = limited in UFM's gv.cfg; UFM shows it since 6.19",
        )


def _strangers(key: int, strangers: Collection[str]) -> Problem:
    return Problem(
        "partition_strangers",
        expected=f"partition 0x{key:x} with functions of one project only",
        found=", ".join(sorted(strangers))[:300],
        remedy="remove them in UFM, or take another range for fabric.partitions of the profile",
    )


def _unproven(expected: str, problems: list[str]) -> Problem:
    return Problem(
        "partition_unproven",
        expected=f"the fabric functions of the machine {expected}",
        found="; ".join(problems)[:300],
        remedy="look at the partition and its jobs in UFM, then ask again",
    )


def _audit(engine: Engine, task: Task, verb: str, guids: Collection[str], key: str) -> None:
    """The proof of a change: what was read back."""
    with transaction(engine) as conn:
        detail = {"partition": key, "guids": sorted(guids), "task_id": task.id}
        action, act = f"fabric.partition.{verb}", act_of(task)
        journal.audit(conn, act, action, "node", task.node_id, detail=detail)

"""Invariant checks on the whole database, which read it in streams to bound memory."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from itertools import groupby
from operator import itemgetter
from typing import Any

import sqlalchemy as sa

from reconciler.db import clock, rows
from reconciler.db.journal import ENTITIES
from reconciler.db.rows import Record
from reconciler.db.schema import (
    Claim,
    Node,
    Proof,
    Slot,
    Task,
    allocations,
    claims,
    history,
    nodes,
    recovery_cases,
    slots,
    tasks,
    usage,
)
from reconciler.db.schema import proofs as proof_table
from reconciler.lifecycle import gate
from reconciler.model import transitions
from reconciler.model.proof import accepts, nothing_written
from reconciler.model.states import (
    LIVE_CLAIMS,
    UNCLEAN_SLOTS,
    AllocationState,
    ClaimKind,
    ClaimState,
    NodeMode,
    NodeState,
    ProofKind,
    RecoveryState,
    SlotState,
    TaskState,
)
from reconciler.records import proofs, reports
from reconciler.records.claims import exclusive_ended_at
from reconciler.records.queue import GRACE_S, OPEN
from reconciler.records.usage import SOLD, left_active

# Rows per fetch of a stream.
_AT_ONCE = 500


@dataclass(frozen=True)
class Violation:
    """invariant: I1 … I20, or the CTRL row that promises it. subject: by kind and id."""

    invariant: str
    subject: str
    found: str


Violations = Iterator[Violation]


def stream(conn: sa.Connection, query: sa.Select[Any]) -> Iterator[Record]:
    """Yield the rows of a query in small batches."""
    for row in conn.execute(query, execution_options={"yield_per": _AT_ONCE}).mappings():
        yield dict(row)


def beside(
    conn: sa.Connection, *queries: sa.Select[Any]
) -> Iterator[tuple[str, tuple[list[Record], ...]]]:
    """Merge queries that are `in_order`, so that memory holds the rows of a single key."""
    streams = (_numbered(conn, number, query) for number, query in enumerate(queries))
    for key, rows_of in groupby(heapq.merge(*streams, key=itemgetter(0)), key=itemgetter(0)):
        parts: tuple[list[Record], ...] = tuple([] for _ in queries)
        for _, number, row in rows_of:
            parts[number].append(row)
        yield key, parts


def _numbered(
    conn: sa.Connection, number: int, query: sa.Select[Any]
) -> Iterator[tuple[str, int, Record]]:
    key = query.selected_columns[0].name
    for row in stream(conn, query):
        yield row[key], number, row


def in_order(dialect: str, *queries: sa.Select[Any]) -> tuple[sa.Select[Any], ...]:
    """The queries by their first column as Python compares it: the database's collation may be that
    of a language.
    """
    collation = "C" if dialect == "postgresql" else "BINARY"
    return tuple(
        query.order_by(sa.collate(query.selected_columns[0], collation)) for query in queries
    )


def history_complete(conn: sa.Connection) -> Violations:
    """I20: every state has its history, without a gap."""
    for entity in ENTITIES:
        for key, (now, written) in beside(conn, *_histories(conn.dialect.name, entity)):
            # The initial mode of a node is in the history of the node, not of its mode.
            last = now[0]["state"] if now and entity == "node_mode" else None
            for row in written:
                if row["gap"]:
                    gap = f"comes from {row['source']}, it was {row['before']}"
                    yield Violation("I20", f"{entity} {key}", f"history row {row['id']} {gap}")
                if row["after"] is None:
                    last = row["target"]
            if now and last != now[0]["state"]:
                seen = "nothing" if last is None else last
                problem = f"{now[0]['state']}, its history ends with {seen}"
                yield Violation("I20", f"{entity} {key}", problem)


@cache
def _histories(dialect: str, entity: str) -> tuple[sa.Select[Any], ...]:
    """States of an entity; and per history the last row, and each row whose source differs from the
    target before it.
    """
    where = ENTITIES[entity]
    states = sa.select(where.table.c.id, where.table.c[where.state].label("state"))
    whose, when = history.c.entity_id, history.c.id
    before = sa.func.lag(history.c.target).over(partition_by=whose, order_by=when)
    after = sa.func.lead(when).over(partition_by=whose, order_by=when)
    row = (whose, when, history.c.source, history.c.target)
    query = sa.select(*row, before.label("before"), after.label("after"))
    chain = query.where(history.c.entity == entity).subquery()
    gap = sa.and_(chain.c.before.is_not(None), chain.c.before != chain.c.source)
    ends_and_gaps = sa.select(chain, gap.label("gap"))
    return in_order(dialect, states, ends_and_gaps.where(sa.or_(gap, chain.c.after.is_(None))))


def usage_counted(conn: sa.Connection) -> Violations:
    """CTRL-14: each use has one usage record, from activation to the request of its release."""
    for key, (began, records, claimed, left) in beside(conn, *_uses(conn.dialect.name)):
        if len(records) != len(began):
            problem = f"{len(records)} usage records, {'ever' if began else 'never'} active"
            yield Violation("CTRL-14", f"allocation {key}", problem)
            continue
        if not began:
            continue
        (record,) = records
        for name, expected in (
            ("started_at", began[0]["activated_at"]),
            ("ended_at", _end_of(claimed, left, record)),
            ("claims", _sold(claimed)),
        ):
            seen = _sold(record[name]) if name == "claims" else record[name]
            if seen != expected:
                problem = f"usage record with {name} {seen}, from allocation and claims {expected}"
                yield Violation("CTRL-14", f"allocation {key}", problem)


@cache
def _uses(dialect: str) -> tuple[sa.Select[Any], ...]:
    """Allocations that were ever active, usage records, claims, and the ends of their activity."""
    active = sa.select(history.c.entity_id).where(
        history.c.entity == "allocation", history.c.target == AllocationState.ACTIVE
    )
    used = sa.or_(allocations.c.activated_at.is_not(None), allocations.c.id.in_(active))
    first = sa.select(allocations.c.id, allocations.c.activated_at).where(used)
    recorded = sa.select(
        usage.c.allocation_id, usage.c.started_at, usage.c.ended_at, usage.c.claims
    )
    sold = (claims.c[name] for name in SOLD)
    held = sa.select(claims.c.allocation_id, claims.c.ended_at, *sold)
    left = sa.select(history.c.entity_id, history.c.at).where(*left_active())
    return in_order(dialect, first, recorded, held, left)


def _end_of(held: list[Record], left: list[Record], record: Record) -> float | None:
    """When the use ended. A clock that went back counts as zero time."""
    if not left:
        return None
    ends = [claim["ended_at"] for claim in held]
    # An earlier version counted to the end of the last claim.
    former: float | None = None if None in ends else max([*ends, record["started_at"]])
    last: float = max(left[0]["at"], record["started_at"])
    return former if record["ended_at"] == former else last


def _sold(listed: list[Record]) -> list[tuple[str, ...]]:
    return sorted(tuple(str(claim[name]) for name in SOLD) for claim in listed)


# Every worker checks deadlines every few seconds. A deadline that ends a run takes GRACE_S more.
# An entity that is later than this is not being checked.
UNSEEN_S = 2 * GRACE_S
_CLAIMS_OF = {
    AllocationState.REQUESTED: ClaimState.RESERVED,
    AllocationState.PROVISIONING: ClaimState.PROVISIONING,
    AllocationState.ACTIVE: ClaimState.ACTIVE,
    AllocationState.RELEASING: ClaimState.RELEASING,
}
_HELD = (SlotState.RESERVED, SlotState.PROVISIONING, SlotState.ACTIVE, SlotState.RELEASING)


def check(conn: sa.Connection) -> list[Violation]:
    """Every violation. In a reading transaction, all checks see the same snapshot."""
    return [violation for ask in CHECKS for violation in ask(conn)]


def one_claim_each(conn: sa.Connection) -> Violations:
    """I1: at most one live claim per slot, GPU, disk, fabric function, MAC and address."""
    live = _live(conn, ClaimKind.SLICE)
    for names in (
        ("slot_id",),
        ("node_id", "gpu_pci_address"),
        ("nvme_identity",),
        ("node_id", "fabric_vf_pci_address"),
        ("management_mac",),
        ("node_id", "private_ip"),
    ):
        holders = defaultdict(list)
        for claim in live:
            if getattr(claim, names[-1]):
                holders[tuple(getattr(claim, name) for name in names)].append(claim.id)
        for key, ids in holders.items():
            if len(ids) > 1:
                what = f"{names[-1]} {' '.join(map(str, key))}"
                yield Violation("I1", what, f"live claims {', '.join(ids)}")


def whole_or_sliced(conn: sa.Connection) -> Violations:
    """I2: a whole-machine claim excludes slice claims, and each kind needs its node mode."""
    modes = _pairs(conn, nodes.c.id, nodes.c.mode)
    whole: dict[str, list[str]] = defaultdict(list)
    for claim in _live(conn, ClaimKind.NODE_EXCLUSIVE):
        whole[claim.node_id].append(claim.id)
    for node_id, ids in whole.items():
        if len(ids) > 1:
            yield Violation("I2", f"node {node_id}", f"whole machine claimed by {', '.join(ids)}")
    for kind, mode in (
        (ClaimKind.NODE_EXCLUSIVE, NodeMode.BAREMETAL),
        (ClaimKind.SLICE, NodeMode.SLICE),
    ):
        for claim in _live(conn, kind):
            if modes[claim.node_id] != mode:
                problem = f"live on node {claim.node_id} in mode {modes[claim.node_id]}"
                yield Violation("I2", f"claim {claim.id}", problem)


def committed_together(conn: sa.Connection) -> Violations:
    """I3: allocation, claims and slots agree."""
    live: dict[str, list[Claim]] = defaultdict(list)
    for claim in _live(conn):
        live[claim.allocation_id].append(claim)
    for row in stream(conn, sa.select(allocations.c.id, allocations.c.state)):
        expected = _CLAIMS_OF.get(row["state"])
        states = {claim.state for claim in live.get(row["id"], ())}
        if states != ({expected} if expected else set()):
            problem = f"{row['state']}, with claims {', '.join(sorted(states)) or 'none'}"
            yield Violation("I3", f"allocation {row['id']}", problem)
    held = {claim.slot_id: claim for listed in live.values() for claim in listed if claim.slot_id}
    for slot in rows.every(conn, sa.select(slots), Slot):
        holding = held.get(slot.id)
        state, status = (holding.state if holding else ""), slot.status
        fine = status == state if status in _HELD else not state or status in UNCLEAN_SLOTS
        if not fine or (holding and holding.disk_generation != slot.disk_generation):
            problem = f"{status} at disk generation {slot.disk_generation}, its claim"
            theirs = f"{state} at {holding.disk_generation}" if holding else "none"
            yield Violation("I3", f"slot {slot.id}", f"{problem} {theirs}")


def proven(conn: sa.Connection) -> Violations:
    """I4, I6: an available slot has a proof that is newer than every use of its disk."""
    in_use = _proofs_in_use(conn)
    installed = _pairs(conn, nodes.c.id, nodes.c.install_id)
    left = cache(partial(exclusive_ended_at, conn))
    for slot in _on_sale(conn):
        proof = in_use.get(slot.available_proof_id or "")
        if proof is None:
            yield Violation("I4", f"slot {slot.id}", "available without a proof")
            continue
        for wrong, problem in (
            (proof.disk_identity != slot.nvme_identity, "a proof of another disk"),
            (proof.node_id != slot.node_id, "a proof from another node"),
            (proof.disk_generation != slot.disk_generation, "a proof from before its tenant"),
            (proof.created_at < left(slot.node_id), "a proof from before the machine's tenant"),
            (proof.install_id != installed[slot.node_id], "a proof to another installation"),
            (not _says_clean(slot, proof), f"a {proof.kind} proof that does not say so"),
            (slot.retired_at is not None, "its approval withdrawn"),
        ):
            if wrong:
                yield Violation("I4", f"slot {slot.id}", f"available with {problem}")


def fenced(conn: sa.Connection) -> Violations:
    """I10: no live claim or open task has a fence above the fence of its slot."""
    fences = _pairs(conn, slots.c.id, slots.c.fence)
    for claim in _live(conn, ClaimKind.SLICE):
        if claim.fence > fences[claim.slot_id or ""]:
            problem = f"fence {claim.fence}, of its slot {fences[claim.slot_id or '']}"
            yield Violation("I10", f"claim {claim.id}", problem)
    open_tasks = sa.select(tasks).where(tasks.c.state.in_(OPEN))
    for task in rows.every(conn, open_tasks, Task):
        for slot_id, fence in task.fences.items():
            if fence > fences.get(slot_id, fence):
                problem = f"fence {fence} for slot {slot_id}, which is at {fences[slot_id]}"
                yield Violation("I10", f"task {task.id}", problem)


def in_time(conn: sa.Connection) -> Violations:
    """I12: no entity stays in an unstable state past its deadline."""
    now = clock.read(conn)
    for entity in ENTITIES:
        for key, value, at in conn.execute(_unstable(entity)):
            if at is None:
                yield Violation("I12", f"{entity} {key}", f"{value} without a deadline")
            elif transitions.DEADLINES[entity, value].event and at < now - UNSEEN_S:
                yield Violation("I12", f"{entity} {key}", f"{value} past {clock.iso(at)}, unseen")


@cache
def _unstable(entity: str) -> sa.Select[Any]:
    where = ENTITIES[entity]
    state, deadline = where.table.c[where.state], where.table.c[where.deadline]
    unstable = [name for of, name in transitions.DEADLINES if of == entity]
    return sa.select(where.table.c.id, state, deadline).where(state.in_(unstable))


def recovered_by_proof(conn: sa.Connection) -> Violations:
    """I4: a recovery case that succeeded names a proof for each of its slots."""
    query = sa.select(recovery_cases).where(recovery_cases.c.state == RecoveryState.RECOVERED)
    for case in stream(conn, query):
        count = len(case["slot_ids"])
        named = sa.select(sa.func.count()).where(proof_table.c.id.in_(case["proof_ids"]))
        named_count = conn.execute(named).scalar_one()
        if named_count != count:
            problem = f"recovered with {named_count} proofs for {count} slots"
            yield Violation("I4", f"recovery_case {case['id']}", problem)


def unknown_frees_nothing(conn: sa.Connection) -> Violations:
    """I13: after a lost run, a slot is sold only with a newer wipe proof."""
    in_use = _proofs_in_use(conn)
    holders = _last_holders(conn)
    last = sa.func.max(sa.func.coalesce(tasks.c.finished_at, 0.0))
    query = sa.select(tasks.c.allocation_id, last).where(tasks.c.state == TaskState.LOST)
    lost = {row[0]: row[1] for row in conn.execute(query.group_by(tasks.c.allocation_id))}
    for slot in _on_sale(conn):
        at = lost.get(holders.get((slot.id, slot.disk_generation), ""))
        proof = in_use.get(slot.available_proof_id or "")
        if at is None or proof is None:
            continue
        if proof.kind != ProofKind.WIPE or proof.created_at < at:
            problem = f"available by a {proof.kind} proof, a lost run of its last tenant unanswered"
            yield Violation("I13", f"slot {slot.id}", problem)


def this_boot(conn: sa.Connection) -> Violations:
    """I16: nodes with available slots pass parity under the current boot and installation."""
    by_node: dict[str, list[Slot]] = defaultdict(list)
    for slot in _on_sale(conn):
        by_node[slot.node_id].append(slot)
    for node_id, on_sale in by_node.items():
        node = rows.get(conn, Node, node_id)
        parity = reports.latest_parity(conn, node_id)
        why = "reboot required" if node.reboot_required else ""
        if parity and parity.failures:
            why = f"parity with {parity.failures} failures"
        for name, seen in (
            ("discovery", reports.latest_discovery(conn, node_id)),
            ("parity", parity),
        ):
            if seen is None:
                why = f"no {name}"
            elif any(
                not getattr(node, key) or getattr(seen, key) != getattr(node, key)
                for key in ("boot_id", "install_id")
            ):
                why = f"{name} of another boot or installation"
        if why:
            ids = ", ".join(slot.id for slot in on_sale)
            yield Violation("I16", f"node {node_id}", f"{why}, and on sale: {ids}")


def unblocked(conn: sa.Connection) -> Violations:
    """I16: no available slot has a blocker from the latest discovery."""
    host = cache(partial(gate.host, conn))
    for slot in _on_sale(conn):
        blockers = gate.judge(conn, slot, proofs.current(conn, slot), host(slot.node_id))
        codes = [row.code for row in blockers if row.code.startswith("discovery:")]
        if codes:
            yield Violation("I16", f"slot {slot.id}", f"on sale with {', '.join(codes)}")


def gone(conn: sa.Connection) -> Violations:
    """I3: a retired node has no live claims and no approved slots."""
    retired = sa.select(nodes.c.id).where(nodes.c.state == NodeState.RETIRED)
    live = sa.select(claims.c.node_id, claims.c.id).where(
        claims.c.node_id.in_(retired), claims.c.state.in_(LIVE_CLAIMS)
    )
    kept = sa.select(slots.c.node_id, slots.c.id).where(
        slots.c.node_id.in_(retired), slots.c.retired_at.is_(None)
    )
    for what, query in (("live claim", live), ("approved slot", kept)):
        for node_id, key in conn.execute(query):
            yield Violation("I3", f"node {node_id}", f"retired, with {what} {key}")


CHECKS: tuple[Callable[[sa.Connection], Violations], ...] = (
    one_claim_each,
    whole_or_sliced,
    committed_together,
    proven,
    recovered_by_proof,
    fenced,
    in_time,
    unknown_frees_nothing,
    this_boot,
    unblocked,
    gone,
    history_complete,
    usage_counted,
)


def _pairs(conn: sa.Connection, key: sa.Column[Any], value: sa.Column[Any]) -> dict[str, Any]:
    return {row[0]: row[1] for row in conn.execute(sa.select(key, value))}


_LIVE = sa.select(claims).where(claims.c.state.in_(LIVE_CLAIMS))
_ON_SALE = sa.select(slots).where(slots.c.status == SlotState.AVAILABLE)
_IN_USE = sa.select(proof_table).join(slots, slots.c.available_proof_id == proof_table.c.id)


def _live(conn: sa.Connection, kind: ClaimKind | None = None) -> list[Claim]:
    return [claim for claim in rows.every(conn, _LIVE, Claim) if kind in (None, claim.kind)]


def _on_sale(conn: sa.Connection) -> list[Slot]:
    return rows.every(conn, _ON_SALE, Slot)


def _proofs_in_use(conn: sa.Connection) -> dict[str, Proof]:
    return {proof.id: proof for proof in rows.every(conn, _IN_USE, Proof)}


def _says_clean(slot: Slot, proof: Proof) -> bool:
    document = proof.document
    if proof.kind == ProofKind.UNTOUCHED:
        return nothing_written(document)
    return document.get("verified") is True and accepts(proofs.policy(slot), proof.method)


def _last_holders(conn: sa.Connection) -> dict[tuple[str, int], str]:
    """Last holders of available slots only, because holders of all past claims are too many."""
    columns = (claims.c.slot_id, claims.c.disk_generation, claims.c.allocation_id)
    this = sa.and_(
        claims.c.slot_id == slots.c.id, claims.c.disk_generation == slots.c.disk_generation
    )
    query = sa.select(*columns).join(slots, this)
    query = query.where(claims.c.kind == ClaimKind.SLICE, slots.c.status == SlotState.AVAILABLE)
    return {(slot, number): key for slot, number, key in conn.execute(query)}

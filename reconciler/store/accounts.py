"""What was written down of the past, held against what is: history, and usage.

Part of `store.invariants`. Both grow with every day of a site: they are read in order, beside what
they tell of, and never whole.
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

from reconciler.domain.states import AllocationState
from reconciler.store.lifecycle import ENTITIES
from reconciler.store.rows import Record
from reconciler.store.tables import allocations, claims, history, usage
from reconciler.store.violations import Found, Violation, beside

# What a usage record keeps of a claim.
_SOLD = ("kind", "slot_id", "slot_index", "nvme_size_bytes")


def told(conn: sa.Connection) -> Found:
    """I20: every state has its history, without a gap."""
    for entity, where in ENTITIES.items():
        states = sa.select(where.table.c.id, where.table.c[where.state].label("state"))
        for key, (now, written) in beside(conn, states, _gaps_and_ends(entity)):
            # The mode that a node is made with belongs to the history of the node itself.
            last = now[0]["state"] if now and entity == "node_mode" else None
            for row in written:
                if row["gap"]:
                    said = f"comes from {row['source']}, it was {row['before']}"
                    yield Violation("I20", f"{entity} {key}", f"history row {row['id']} {said}")
                if row["after"] is None:
                    last = row["target"]
            if now and last != now[0]["state"]:
                seen = "nothing" if last is None else last
                found = f"{now[0]['state']}, its history ends with {seen}"
                yield Violation("I20", f"{entity} {key}", found)


def _gaps_and_ends(entity: str) -> sa.Select[Any]:
    """Of each history the last row, and those that do not begin where the one before them ended."""
    whose, when = history.c.entity_id, history.c.id
    before = sa.func.lag(history.c.target).over(partition_by=whose, order_by=when)
    after = sa.func.lead(when).over(partition_by=whose, order_by=when)
    row = (whose, when, history.c.source, history.c.target)
    query = sa.select(*row, before.label("before"), after.label("after"))
    chain = query.where(history.c.entity == entity).subquery()
    gap = sa.and_(chain.c.before.is_not(None), chain.c.before != chain.c.source)
    found = sa.select(chain, gap.label("gap"))
    return found.where(sa.or_(gap, chain.c.after.is_(None)))


def counted(conn: sa.Connection) -> Found:
    """CTRL-14: what was ever used is recorded once, from its first moment to its claims' last."""
    active = sa.select(history.c.entity_id).where(
        history.c.entity == "allocation", history.c.target == AllocationState.ACTIVE
    )
    used = sa.or_(allocations.c.activated_at.is_not(None), allocations.c.id.in_(active))
    first = sa.select(allocations.c.id, allocations.c.activated_at).where(used)
    ended = (usage.c.started_at, usage.c.ended_at, usage.c.end_state)
    recorded = sa.select(usage.c.allocation_id, *ended, usage.c.claims)
    sold = (claims.c[name] for name in _SOLD)
    held = sa.select(claims.c.allocation_id, claims.c.state, claims.c.ended_at, *sold)
    for key, (began, records, own) in beside(conn, first, recorded, held):
        if len(records) != len(began):
            told = f"{len(records)} usage records, {'ever' if began else 'never'} active"
            yield Violation("CTRL-14", f"allocation {key}", told)
            continue
        if not began:
            continue
        (record,) = records
        last, state = _end_of(own, record)
        for name, expected in (
            ("started_at", began[0]["activated_at"]),
            ("ended_at", last),
            ("end_state", state),
            ("claims", _sold(own)),
        ):
            seen = _sold(record[name]) if name == "claims" else record[name]
            if seen != expected:
                told = f"usage record with {name} {seen}, from allocation and claims {expected}"
                yield Violation("CTRL-14", f"allocation {key}", told)


def _end_of(held: list[Record], record: Record) -> tuple[float | None, str]:
    """When all its claims had ended, and how; a clock that went back counts as no time."""
    ends = [claim["ended_at"] for claim in held]
    if None in ends:
        return None, ""
    return max([*ends, record["started_at"]]), min((claim["state"] for claim in held), default="")


def _sold(listed: list[Record]) -> list[tuple[str, ...]]:
    return sorted(tuple(str(one[name]) for name in _SOLD) for one in listed)

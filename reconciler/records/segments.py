"""Network segments of projects on the fabric: a VLAN or a partition key for each project.

A project keeps its number until the site has no other left. A number never passes to another
project while anything of the former project is live.
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

from reconciler.db import clock, rows
from reconciler.db.schema import allocations, claims, segments, slots
from reconciler.model.errors import Problem
from reconciler.model.fabric import Isolation
from reconciler.model.states import ENDED_ALLOCATIONS, IDLE_SLOTS, LIVE_CLAIMS

# Each repetition follows a launch of another transaction that was quicker.
_ATTEMPTS = 20


def assign(conn: sa.Connection, project_id: str, kind: Isolation, numbers: range) -> int:
    """Number of a project within `numbers`; Problem `fabric_numbers_used_up` when all are in use.

    Its row stays locked until the transaction ends, so that it cannot be taken from a project
    whose launch begins now.
    """
    for _ in range(_ATTEMPTS):
        number = _kept(conn, project_id, kind, numbers)
        if number is not None:
            return number
        taken = {int(row.number) for row in conn.execute(_in_range(kind, numbers))}
        free = next((number for number in numbers if number not in taken), None)
        if free is None:
            return _take_over(conn, project_id, kind, numbers)
        _insert(conn, project_id, kind, free, numbers.start)
    raise _used_up(kind, numbers, "other launches took every free number first")


def find(conn: sa.Connection, project_id: str, kind: Isolation, numbers: range) -> int | None:
    """Number of a project within `numbers`, if it has a number."""
    query = _in_range(kind, numbers).where(segments.c.project_id == project_id)
    return conn.execute(query.order_by(segments.c.number)).scalars().first()


def live(conn: sa.Connection, project_id: str) -> bool:
    """Whether a machine of the project may be on the fabric, or what a failure left of it."""
    open_allocation = sa.exists().where(
        allocations.c.project_id == project_id, allocations.c.state.not_in(ENDED_ALLOCATIONS)
    )
    held = (
        sa.select(claims.c.id)
        .join(allocations, allocations.c.id == claims.c.allocation_id)
        .join(slots, slots.c.id == claims.c.slot_id)
        .where(
            allocations.c.project_id == project_id,
            sa.or_(
                claims.c.state.in_(LIVE_CLAIMS),
                # No later claim: traces of this project may be on the slot.
                sa.and_(
                    claims.c.disk_generation == slots.c.disk_generation,
                    slots.c.status.not_in(IDLE_SLOTS),
                ),
            ),
        )
    )
    return bool(conn.execute(sa.select(sa.or_(open_allocation, held.exists()))).scalar())


def _kept(conn: sa.Connection, project_id: str, kind: Isolation, numbers: range) -> int | None:
    update = (
        sa.update(segments)
        .where(
            segments.c.project_id == project_id,
            segments.c.kind == kind.value,
            segments.c.number.between(numbers.start, numbers.stop - 1),
        )
        .values(used_at=clock.now())
        .returning(segments.c.number)
    )
    return min(conn.execute(update).scalars(), default=None)


def _in_range(kind: Isolation, numbers: range) -> sa.Select[Any]:
    return sa.select(segments.c.number).where(
        segments.c.kind == kind.value, segments.c.number.between(numbers.start, numbers.stop - 1)
    )


def _insert(conn: sa.Connection, project_id: str, kind: Isolation, number: int, first: int) -> None:
    """Insert, unless another transaction took the number or served this project meanwhile."""
    values = {
        "kind": kind.value,
        "number": number,
        "project_id": project_id,
        "first_number": first,
        "used_at": clock.now(),
    }
    insert = rows.conflict_insert(conn.dialect.name, segments)
    conn.execute(insert.values(**values).on_conflict_do_nothing())


def _take_over(conn: sa.Connection, project_id: str, kind: Isolation, numbers: range) -> int:
    """Give the number that was unused for longest to the project."""
    oldest = _in_range(kind, numbers).add_columns(segments.c.project_id)
    query = oldest.order_by(segments.c.used_at).with_for_update(skip_locked=True)
    for number, former in conn.execute(query).all():
        # A new statement, which sees every launch that was committed before the lock.
        if live(conn, former):
            continue
        update = sa.update(segments).where(
            segments.c.kind == kind.value, segments.c.number == number
        )
        values = {"project_id": project_id, "first_number": numbers.start, "used_at": clock.now()}
        conn.execute(update.values(**values))
        return int(number)
    raise _used_up(kind, numbers, "a project with live machines has each of them")


def _used_up(kind: Isolation, numbers: range, found: str) -> Problem:
    return Problem(
        "fabric_numbers_used_up",
        expected=f"a free number for a {kind} among {numbers.start} to {numbers.stop - 1}",
        found=found,
        remedy=f"extend fabric.{kind}s of the hardware profile",
    )

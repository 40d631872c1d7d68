"""Usage records of allocations, for billing.

A record is opened by the transaction in which the allocation becomes active. It is closed by the
transaction in which its release is asked for: the wipe of its disks is the provider's. So a restart
can neither lose nor repeat usage. An allocation that never became active has no record.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from reconciler.db import clock, rows
from reconciler.db.rows import Order, Page, part
from reconciler.db.schema import Allocation, Usage, claims, history, usage
from reconciler.model.errors import Problem
from reconciler.model.states import AllocationState, ClaimState

ORDER = Order(usage, ("started_at", "allocation_id"))
_COPIED = (
    *("project_id", "node_id", "capacity_shape", "sku", "region", "pool", "gpu_count"),
    *("price", "currency"),
)
# Fields of a claim that a record stores.
SOLD = ("kind", "slot_id", "slot_index", "nvme_size_bytes")


@dataclass(frozen=True)
class Period:
    """A period with its start and without its end, in epoch seconds of the database."""

    start: float
    end: float


@dataclass(frozen=True, kw_only=True)
class Share(Usage):
    """A usage record with its share of a period, in whole milliseconds."""

    counted_ms: int


@dataclass(frozen=True)
class Total:
    """The records of one project, shape, SKU and price together."""

    project_id: str
    capacity_shape: str
    sku: str
    price: str
    currency: str | None
    allocations: int
    counted_ms: int
    gpu_ms: int


def begin(conn: sa.Connection, allocation_id: str) -> None:
    """Open the usage record of an allocation that has just become active."""
    allocation = rows.get(conn, Allocation, allocation_id)
    query = sa.select(*(claims.c[name] for name in SOLD))
    held = query.where(claims.c.allocation_id == allocation_id).order_by(claims.c.position)
    rows.add(
        conn,
        Usage,
        {
            "allocation_id": allocation_id,
            **{name: getattr(allocation, name) for name in _COPIED},
            "claims": rows.every(conn, held),
            # Billing starts at the activation time that the tenant sees.
            "started_at": allocation.activated_at or clock.now(),
        },
    )


def end(conn: sa.Connection, allocation_id: str) -> None:
    """Close the usage record when the allocation stops to be active. A second call changes nothing,
    but for a release that an earlier version began.
    """
    left = sa.select(history.c.at).where(*left_active(), history.c.entity_id == allocation_id)
    at = left.order_by(history.c.id).limit(1).scalar_subquery()
    update = sa.update(usage).where(
        usage.c.allocation_id == allocation_id, usage.c.ended_at.is_(None)
    )
    # A clock that went back counts as zero time.
    late = sa.case((at < usage.c.started_at, usage.c.started_at), else_=at)
    conn.execute(update.values(ended_at=late, end_state=ClaimState.RELEASED.value))


def left_active() -> tuple[sa.ColumnElement[bool], ...]:
    """Conditions of the changes of state by which allocations stop to be active."""
    active = AllocationState.ACTIVE
    return (
        history.c.entity == "allocation",
        history.c.source == active,
        history.c.target != active,
    )


def period(conn: sa.Connection, start: float | None, end: float | None) -> Period:
    """The requested period; by default from time 0 until now."""
    if start is not None and end is not None and start > end:
        raise Problem(
            "period_invalid",
            422,
            expected="a period that ends after it begins",
            found="a period that ends earlier",
            remedy="exchange start and end",
        )
    now = clock.read(conn)
    # Future time is not counted, so the same request may return more usage later.
    return Period(_within(start, now, 0.0), _within(end, now, now))


def _within(moment: float | None, now: float, otherwise: float) -> float:
    return otherwise if moment is None else min(max(moment, 0.0), now)


def every(
    conn: sa.Connection, span: Period, *, project_id: str | None = None, page: Page | None = None
) -> list[Share]:
    """Records that overlap the period, oldest first, each with its share of the period.

    Ends are rounded before they are compared, so that the counts of two adjacent periods add up
    exactly to the count of both together.
    """
    return rows.every(conn, part(_overlapping(span, project_id), ORDER, page), Share)


def unfinished(conn: sa.Connection) -> list[Usage]:
    """Records of allocations that are active, the oldest first."""
    query = sa.select(usage).where(usage.c.ended_at.is_(None))
    return rows.every(conn, query.order_by(usage.c.started_at, usage.c.allocation_id), Usage)


def totals(conn: sa.Connection, span: Period, *, project_id: str | None = None) -> list[Total]:
    """Sums over all records, by project, shape, SKU and price, as the lines of a bill."""
    each = _overlapping(span, project_id).subquery()
    names = ("project_id", "capacity_shape", "sku", "price", "currency")
    by = [each.c[name] for name in names]
    query = sa.select(
        *by,
        sa.func.count().label("allocations"),
        _whole(sa.func.sum(each.c.counted_ms)).label("counted_ms"),
        _whole(sa.func.sum(each.c.counted_ms * each.c.gpu_count)).label("gpu_ms"),
    )
    return rows.every(conn, query.group_by(*by).order_by(*by), Total)


def _overlapping(span: Period, project_id: str | None) -> sa.Select[Any]:
    start, end = round(span.start * 1000), round(span.end * 1000)
    began, ended = _ms(usage.c.started_at), _ms(usage.c.ended_at)
    last = sa.case((ended < end, ended), else_=end)
    first = sa.case((began > start, began), else_=start)
    counted = (last - first).label("counted_ms")
    # Unrounded conditions in addition to the rounded ones, because an index can answer them.
    query = sa.select(usage, counted).where(
        usage.c.started_at < span.end + 1,
        sa.or_(usage.c.ended_at.is_(None), usage.c.ended_at > span.start - 1),
        began < end,
        sa.or_(usage.c.ended_at.is_(None), ended > start),
    )
    return rows.where(query, usage, project_id=project_id)


def _ms(moment: sa.ColumnElement[float]) -> sa.ColumnElement[int]:
    return _whole(sa.func.round(moment * 1000.0))


def _whole(number: sa.ColumnElement[Any]) -> sa.ColumnElement[int]:
    return sa.cast(number, sa.BigInteger)

"""Restore from a backup: distrust every record about hosts until it is proven again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import sqlalchemy as sa

from reconciler.db import clock, journal, rows, settings
from reconciler.db.schema import (
    Task,
    allocations,
    claims,
    leaders,
    nodes,
    pools,
    service_processes,
    slots,
    tasks,
)
from reconciler.lifecycle import host, recovery_cases
from reconciler.model.act import Act
from reconciler.model.states import LIVE_CLAIMS, AllocationState, SlotState
from reconciler.records import console_sessions, tokens
from reconciler.records.claims import fence_at
from reconciler.records.leasing import DUE

_DONE = "admin.service.restored"


def doubt(
    conn: sa.Connection, act: Act, *, backup: str = "", ended: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Close every gate until its host is discovered and proven, and pass by unknown fences.

    The records lack all use of disks since the backup, so earlier proofs do not count.
    backup: its name, by which `result` finds the result. ended: results of earlier restore steps.
    """
    closed: list[str] = []
    for node_id, boot in conn.execute(sa.select(nodes.c.id, nodes.c.boot_id)).all():
        of_node = (slots.c.node_id == node_id, slots.c.status == SlotState.AVAILABLE)
        closed += conn.execute(sa.select(slots.c.id).where(*of_node)).scalars()
        host.restarted(conn, node_id, act, since=boot)
    live = claims.c.state.in_(LIVE_CLAIMS)
    fence = fence_at(clock.read(conn))
    # Its generation is the fence of an allocation's next power action (`lifecycle.power`).
    powered = sa.update(allocations).where(allocations.c.state == AllocationState.ACTIVE)
    conn.execute(powered.values(generation=_above(allocations.c.generation, fence)))
    held = sa.exists().where(live, claims.c.slot_id == slots.c.id)
    conn.execute(sa.update(slots).where(~held).values(fence=_above(slots.c.fence, fence)))
    _distrust(conn, held)
    # Also voids proofs of disks that were taken over and are in no slot by these records.
    settings.write(conn, settings.RESTORED, clock.read(conn), act)
    whole = sa.exists().where(live, claims.c.node_id == nodes.c.id, claims.c.slot_id.is_(None))
    conn.execute(sa.update(nodes).where(~whole).values(fence=_above(nodes.c.fence, fence)))
    settings.set_site_scheduling(conn, False, act)
    recovery_cases.end_restored(conn, act)
    tokens.end_enrolments(conn)
    # They may have been replaced since the backup.
    conn.execute(sa.update(pools).values(token_hash=""))
    console_sessions.end_all(conn)
    # The stored processes and terms are from before the restore.
    conn.execute(sa.update(leaders).values(expires_at=0))
    conn.execute(sa.delete(service_processes))
    done = {**(ended or {}), "closed_slots": closed}
    journal.audit(conn, act, _DONE, "service", backup, detail=done)
    return done


def result(conn: sa.Connection, backup: str) -> dict[str, Any] | None:
    """The result of `doubt` for this backup. None if it has not run."""
    for row in journal.audit_rows(conn, action=_DONE, subject_id=backup):
        return dict(row.detail)
    return None


def unfinished(conn: sa.Connection) -> list[Task]:
    """Mark every waiting task as possibly started since the backup, and return these tasks."""
    due = tasks.c.state.in_(DUE)
    begun = sa.func.coalesce(tasks.c.started_at, clock.now())
    conn.execute(sa.update(tasks).where(due).values(started_at=begun))
    return rows.every(
        conn, sa.select(tasks).where(due).order_by(tasks.c.created_at, tasks.c.id), Task
    )


def _above(column: sa.Column[int], fence: int) -> sa.ColumnElement[int]:
    return sa.case((column < fence, fence), else_=column + 1)


def _distrust(conn: sa.Connection, held: sa.Exists) -> None:
    """Advance the generation of every disk that a launch could get, as if it had been sold since.

    A slot with a tenant, or one that waits for evidence, keeps its generation, because the
    generation links it to its allocation.
    """
    beside = slots.alias("beside")
    needed = sa.exists().where(
        beside.c.nvme_identity == slots.c.nvme_identity,
        beside.c.status.not_in((SlotState.AVAILABLE, SlotState.DISABLED)),
    )
    free = sa.update(slots).where(~held, ~needed)
    conn.execute(free.values(disk_generation=slots.c.disk_generation + 1))
    # Earlier evidence of absence or of a wipe must not count, because later use is unknown.
    blocked = sa.update(slots).where(slots.c.status == SlotState.CLEANUP_BLOCKED)
    conn.execute(blocked.values(status_since=clock.now()))

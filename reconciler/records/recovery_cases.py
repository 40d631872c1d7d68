"""Recovery cases: finding them, holding them, and the steps that their history keeps."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

from reconciler.db import journal, rows
from reconciler.db.schema import RecoveryCase, recovery_cases
from reconciler.model.errors import not_found
from reconciler.model.states import OPEN_CASES

_OPEN = recovery_cases.c.state.in_(OPEN_CASES)
_LATEST = (recovery_cases.c.created_at.desc(), recovery_cases.c.id.desc())
# In the evidence of a case's history: what each step of the runbook showed.
STEPS = "steps"


def get(conn: sa.Connection, id: str) -> RecoveryCase:
    """The case with an id."""
    return rows.get(conn, RecoveryCase, id)


def hold(conn: sa.Connection, id: str) -> RecoveryCase:
    """The case, still until this transaction ends; its allocation is held before it."""
    return rows.get(conn, RecoveryCase, id, lock=True)


def open_of(conn: sa.Connection, allocation_id: str) -> RecoveryCase | None:
    """The open case of an allocation; there is one at most."""
    query = sa.select(recovery_cases).where(recovery_cases.c.allocation_id == allocation_id, _OPEN)
    return rows.first(conn, query, RecoveryCase)


def latest(conn: sa.Connection, allocation_id: str) -> RecoveryCase:
    """The case of an allocation that was opened last; Problem when there never was one."""
    query = sa.select(recovery_cases).where(recovery_cases.c.allocation_id == allocation_id)
    case = rows.first(conn, query.order_by(*_LATEST), RecoveryCase)
    if case is None:
        raise not_found("recovery_case", allocation_id)
    return case


def every_open(conn: sa.Connection) -> list[RecoveryCase]:
    """The open cases of the site, the oldest first."""
    query = sa.select(recovery_cases).where(_OPEN)
    return rows.every(
        conn, query.order_by(recovery_cases.c.created_at, recovery_cases.c.id), RecoveryCase
    )


def steps(conn: sa.Connection, id: str) -> list[dict[str, Any]]:
    """Every step so far, in order: `step`, `at`, `evidence`."""
    return [
        {"step": step["step"], "at": row.at, "evidence": step["evidence"]}
        for row in journal.history_of(conn, "recovery_case", id)
        for step in row.evidence.get(STEPS, ())
    ]

"""Recovery cases: reading, locking, and the steps in their history."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

from reconciler.db import journal, rows
from reconciler.db.schema import RecoveryCase, recovery_cases
from reconciler.model.errors import not_found
from reconciler.model.states import OPEN_CASES, RecoveryState

_OPEN = recovery_cases.c.state.in_(OPEN_CASES)
_LATEST = (recovery_cases.c.created_at.desc(), recovery_cases.c.id.desc())
# Key in the evidence of a case's history, with the result of each step of the runbook.
STEPS = "steps"


def get(conn: sa.Connection, id: str) -> RecoveryCase:
    """The case with an id."""
    return rows.get(conn, RecoveryCase, id)


def hold(conn: sa.Connection, id: str) -> RecoveryCase:
    """The case, locked until this transaction ends. The caller locks its allocation first."""
    return rows.get(conn, RecoveryCase, id, lock=True)


def open_of(conn: sa.Connection, allocation_id: str) -> RecoveryCase | None:
    """The open case of an allocation, or None. The schema allows at most 1."""
    query = sa.select(recovery_cases).where(recovery_cases.c.allocation_id == allocation_id, _OPEN)
    return rows.first(conn, query, RecoveryCase)


def latest(conn: sa.Connection, allocation_id: str) -> RecoveryCase:
    """The latest case of an allocation; Problem when it never had a case."""
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
    """Every step so far, in order, with `step`, `at` and `evidence`."""
    return [
        {"step": step["step"], "at": row.at, "evidence": step["evidence"]}
        for row in journal.history_of(conn, "recovery_case", id)
        for step in row.evidence.get(STEPS, ())
    ]


def failed_in(conn: sa.Connection, case: RecoveryCase) -> str | None:
    """The state in which a case failed; None unless it failed."""
    if case.state != RecoveryState.FAILED:
        return None
    return journal.history_of(conn, "recovery_case", case.id)[-1].source

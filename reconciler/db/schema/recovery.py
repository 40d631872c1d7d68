"""Recovery cases: one attempt each to bring back the slots of one allocation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from reconciler.db.schema.base import (
    Row,
    document,
    flag,
    key,
    lifecycle,
    metadata,
    moment,
    one_of,
    reference,
    row_of,
    stamp,
    text,
    unique,
)
from reconciler.model.states import RecoveryState

recovery_cases = sa.Table(
    "recovery_cases",
    metadata,
    key(),
    reference("allocation_id", "allocations"),
    reference("node_id", "nodes"),
    *lifecycle(),
    # Who asks for it, and in whose name everything of it is done.
    text("requested_by", None),
    text("role"),
    text("reason"),
    stamp("requested_at"),
    # Whether what the host still holds of the allocation may be removed.
    flag("remove_leftovers"),
    # The slots that the allocation held when the case was opened.
    document("slot_ids", list),
    # The task by which the host is asked now, or was asked last.
    reference("task_id", "tasks", required=False),
    document("task_ids", list),
    document("proof_ids", list),
    # Whether the host is asked again after the clean-up.
    flag("confirm"),
    # {} unless it cannot go on: code, expected, found, remedy.
    document("waits_for"),
    # {} unless it failed: code, expected, found, remedy.
    document("failure"),
    text("correlation_id"),
    stamp(),
    moment("finished_at"),
    one_of("state", RecoveryState),
    sa.Index("ix_recovery_cases_allocation_id", "allocation_id", "created_at"),
    unique(
        "uq_recovery_cases_open",
        "allocation_id",
        where="state IN ('opened', 'verifying', 'cleaning', 'confirming')",
    ),
)


@row_of(recovery_cases, "recovery_case")
@dataclass(frozen=True, kw_only=True)
class RecoveryCase(Row):
    """One attempt to bring back the slots of one allocation."""

    id: str
    allocation_id: str
    node_id: str
    state: str
    state_reason: str
    state_since: float
    deadline_at: float | None
    generation: int
    requested_by: str
    role: str
    reason: str
    requested_at: float
    remove_leftovers: bool
    slot_ids: list[Any]
    task_id: str | None
    task_ids: list[Any]
    proof_ids: list[Any]
    confirm: bool
    waits_for: dict[str, Any]
    failure: dict[str, Any]
    correlation_id: str
    created_at: float
    finished_at: float | None

"""Table of recovery cases."""

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
    # The actor who requested the case; all its steps are done in this actor's name.
    text("requested_by", None),
    text("role"),
    text("reason"),
    stamp("requested_at"),
    # Whether the allocation's traces on the host may be removed.
    flag("remove_leftovers"),
    # Slots of the allocation when the case was opened.
    document("slot_ids", list),
    # The current or last verification task on the host.
    reference("task_id", "tasks", required=False),
    document("task_ids", list),
    document("proof_ids", list),
    # Whether the host is verified again after the clean-up.
    flag("confirm"),
    # {} unless the case cannot go on: code, expected, found, remedy.
    document("waits_for"),
    # {} unless the case failed: code, expected, found, remedy.
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
    """An attempt to bring back the slots of an allocation."""

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

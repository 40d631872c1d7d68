"""Table of usage records for billing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from reconciler.db.schema.base import (
    Row,
    document,
    metadata,
    moment,
    number,
    one_of,
    reference,
    row_of,
    stamp,
    text,
)
from reconciler.model.states import CapacityShape, ClaimState

# A record is opened when an allocation becomes active and closed when its claims end. Triggers
# refuse every other change and every removal. The record refers to the allocation and has its own
# copy of the sold capacity.
usage = sa.Table(
    "usage_records",
    metadata,
    sa.Column(
        "allocation_id", sa.Text, sa.ForeignKey("allocations.id"), primary_key=True, nullable=False
    ),
    reference("project_id", "projects"),
    reference("node_id", "nodes"),
    text("capacity_shape", None),
    text("sku"),
    text("region"),
    text("pool"),
    number("gpu_count", None),
    # Copy of the claims: kind, slot, index and disk size.
    document("claims", list),
    stamp("started_at"),
    moment("ended_at"),
    text("end_state"),
    one_of("capacity_shape", CapacityShape),
    sa.CheckConstraint(
        f"(ended_at IS NULL AND end_state = '') OR (ended_at >= started_at AND"
        f" end_state IN ('{ClaimState.RELEASED}', '{ClaimState.FAILED}'))",
        name="ended_with_state",
    ),
    sa.Index("ix_usage_records_project_id", "project_id", "started_at"),
    sa.Index("ix_usage_records_ended_at", "ended_at"),
)


@row_of(usage, "usage")
@dataclass(frozen=True, kw_only=True)
class Usage(Row):
    """Use of capacity by an allocation, for billing."""

    allocation_id: str
    project_id: str
    node_id: str
    capacity_shape: str
    sku: str
    region: str
    pool: str
    gpu_count: int
    claims: list[Any]
    started_at: float
    ended_at: float | None
    end_state: str

"""Indexes for lists, deadlines and counts on a site with years of history."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0058"
down_revision = "0057"

_LIVE = "state IN ('requested', 'provisioning', 'active', 'releasing')"
_DEADLINE = "deadline_at IS NOT NULL"


def upgrade() -> None:
    for name, table, columns in (
        ("ix_state_history_node_id", "state_history", ["node_id", "at", "id"]),
        ("ix_allocations_project_id", "allocations", ["project_id", "created_at", "id"]),
    ):
        op.drop_index(name, table)
        op.create_index(name, table, columns)
    for table in ("tasks", "allocations"):
        op.create_index(f"ix_{table}_created_at", table, ["created_at", "id"])
    _partial("ix_allocations_live", "allocations", "project_id", _LIVE)
    _partial("ix_claims_deadline_at", "allocation_resource_claims", "deadline_at", _DEADLINE)
    _partial("ix_ingress_rules_deadline_at", "ingress_rules", "deadline_at", _DEADLINE)


def _partial(name: str, table: str, column: str, where: str) -> None:
    condition: Any = sa.text(where)
    op.create_index(name, table, [column], sqlite_where=condition, postgresql_where=condition)

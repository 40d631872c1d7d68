"""Indexes for the effects of a request, by its correlation id."""

from __future__ import annotations

from alembic import op

revision = "0018"
down_revision = "0017"


def upgrade() -> None:
    """Task events have no correlation id of their own, because they are found by their task."""
    for table in ("state_history", "audit_log", "tasks"):
        op.create_index(f"ix_{table}_correlation_id", table, ["correlation_id"])

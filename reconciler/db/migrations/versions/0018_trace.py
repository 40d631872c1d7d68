"""Finding what one request has led to without reading all that ever happened."""

from __future__ import annotations

from alembic import op

revision = "0018"
down_revision = "0017"


def upgrade() -> None:
    """Of what tasks report nothing is kept twice: it is found by its task."""
    for table in ("state_history", "audit_log", "tasks"):
        op.create_index(f"ix_{table}_correlation_id", table, ["correlation_id"])

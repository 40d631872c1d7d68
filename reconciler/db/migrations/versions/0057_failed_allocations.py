"""An index of failed allocations, which each launch of their project asks for."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0057"
down_revision = "0056"


def upgrade() -> None:
    where = "state = 'failed'"
    op.create_index(
        *("ix_allocations_failed", "allocations", ["project_id", "created_at"]),
        sqlite_where=sa.text(where),
        postgresql_where=sa.text(where),
    )

"""Sessions of the web console."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0033"
down_revision = "0032"


def upgrade() -> None:
    op.create_table(
        "console_sessions",
        *(sa.Column(name, sa.Text(), nullable=False) for name in ("id", "hash", "token_id")),
        *(sa.Column(name, sa.Double(), nullable=False) for name in ("created_at", "expires_at")),
        *(sa.Column(name, sa.Text(), nullable=False) for name in ("address", "agent")),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("hash"),
        sa.ForeignKeyConstraint(["token_id"], ["api_tokens.id"]),
    )

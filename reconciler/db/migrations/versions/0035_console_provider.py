"""Sessions of the console by login through an OpenID provider. Those that are open end."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0035"
down_revision = "0034"

DOCUMENT = sa.JSON().with_variant(postgresql.JSONB(), "postgresql")


def upgrade() -> None:
    op.drop_table("console_sessions")
    op.create_table(
        "console_sessions",
        *(sa.Column(name, sa.Text(), nullable=False) for name in ("id", "hash")),
        sa.Column("token_id", sa.Text(), nullable=True),
        sa.Column("claims", DOCUMENT, nullable=False),
        sa.Column("login", sa.Text(), nullable=True),
        *(sa.Column(name, sa.Double(), nullable=False) for name in ("created_at", "expires_at")),
        *(sa.Column(name, sa.Text(), nullable=False) for name in ("address", "agent")),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("hash"),
        sa.UniqueConstraint("login"),
        sa.CheckConstraint(
            "(token_id IS NULL) = (login IS NOT NULL)", name="console_sessions_holder"
        ),
        sa.ForeignKeyConstraint(["token_id"], ["api_tokens.id"]),
    )

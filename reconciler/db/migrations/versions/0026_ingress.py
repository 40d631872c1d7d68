"""Rules of public ingress: forwarding of public addresses to guests of slices."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0026"
down_revision = "0025"

DOCUMENT = sa.JSON().with_variant(postgresql.JSONB(), "postgresql")


def _columns(kind: sa.types.TypeEngine[Any], *names: str) -> list[sa.Column[Any]]:
    return [sa.Column(name, kind, nullable=False) for name in names]


def upgrade() -> None:
    op.create_table(
        "ingress_rules",
        sa.Column("id", sa.Text(), nullable=False),
        *_columns(sa.Text(), "state", "state_reason"),
        *_columns(sa.Double(), "state_since"),
        sa.Column("deadline_at", sa.Double()),
        *_columns(sa.BigInteger(), "generation"),
        *_columns(sa.Text(), "allocation_id", "project_id", "protocol", "public_address"),
        *_columns(sa.BigInteger(), "public_port", "guest_port"),
        *_columns(DOCUMENT, "sources"),
        *_columns(sa.Text(), "reason"),
        *_columns(sa.Double(), "expires_at"),
        *_columns(DOCUMENT, "failure"),
        sa.Column("task_id", sa.Text()),
        *_columns(sa.Text(), "requested_by", "correlation_id"),
        *_columns(sa.Double(), "created_at"),
        sa.Column("ended_at", sa.Double()),
        sa.PrimaryKeyConstraint("id"),
        sa.CheckConstraint(
            "state IN ('requested', 'applied', 'removing', 'removed', 'failed')",
            name="state",
        ),
        sa.CheckConstraint("protocol IN ('tcp')", name="protocol"),
        *(
            sa.ForeignKeyConstraint([column], [f"{table}.id"])
            for column, table in (
                ("allocation_id", "allocations"),
                ("project_id", "projects"),
                ("task_id", "tasks"),
            )
        ),
    )
    op.create_index(
        "ix_ingress_rules_allocation_id", "ingress_rules", ["allocation_id", "created_at"]
    )
    live = sa.text("state IN ('requested', 'applied', 'removing')")
    op.create_index(
        "uq_ingress_rules_listener",
        "ingress_rules",
        ["public_address", "protocol", "public_port"],
        unique=True,
        sqlite_where=live,
        postgresql_where=live,
    )

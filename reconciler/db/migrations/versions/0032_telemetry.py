"""Telemetry of slices: a ring of 24 hours per allocation."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0032"
down_revision = "0031"


def upgrade() -> None:
    op.create_table(
        "telemetry_samples",
        sa.Column("allocation_id", sa.Text(), nullable=False),
        sa.Column("minute", sa.BigInteger(), nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.Column("host", sa.JSON().with_variant(postgresql.JSONB(), "postgresql"), nullable=False),
        sa.Column(
            "guest",
            sa.JSON(none_as_null=True).with_variant(
                postgresql.JSONB(none_as_null=True), "postgresql"
            ),
            nullable=True,
        ),
        sa.PrimaryKeyConstraint("allocation_id", "minute", name=op.f("pk_telemetry_samples")),
        sa.ForeignKeyConstraint(
            ["allocation_id"], ["allocations.id"], name=op.f("fk_telemetry_samples_allocation_id")
        ),
    )
    op.create_index("ix_telemetry_samples_at", "telemetry_samples", ["at"])

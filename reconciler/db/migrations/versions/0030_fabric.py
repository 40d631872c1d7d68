"""Networks of projects on the fabric: numbers, identities of functions, reading of partitions."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0030"
down_revision = "0029"


DOCUMENT = sa.JSON(none_as_null=True).with_variant(
    postgresql.JSONB(none_as_null=True), "postgresql"
)
APPROVED = sa.text("retired_at IS NULL AND fabric_identity <> ''")


def upgrade() -> None:
    op.add_column("nodes", sa.Column("fabric_reading", DOCUMENT, nullable=True))
    op.add_column(
        "node_resource_slots",
        sa.Column("fabric_identity", sa.Text(), nullable=False, server_default=""),
    )
    op.create_index(
        "uq_slots_fabric_identity",
        "node_resource_slots",
        ["fabric_identity"],
        unique=True,
        sqlite_where=APPROVED,
        postgresql_where=APPROVED,
    )
    op.create_table(
        "fabric_segments",
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("number", sa.BigInteger(), nullable=False),
        sa.Column("project_id", sa.Text(), nullable=False),
        sa.Column("first_number", sa.BigInteger(), nullable=False),
        sa.Column("used_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("kind", "number", name=op.f("pk_fabric_segments")),
        sa.UniqueConstraint(
            "project_id",
            "kind",
            "first_number",
            name=op.f("uq_fabric_segments_project_id_kind_first_number"),
        ),
        sa.ForeignKeyConstraint(
            ["project_id"], ["projects.id"], name=op.f("fk_fabric_segments_project_id")
        ),
        sa.CheckConstraint(
            "kind IN ('vlan', 'partition', 'single_tenant')", name=op.f("ck_fabric_segments_kind")
        ),
    )

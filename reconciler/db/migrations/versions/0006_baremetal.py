"""Whole machines: tenant address, disks of the claim, and host baseline."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from reconciler.db.migrations.columns import DOCUMENT, documents, moments, points, stamps, texts

revision = "0006"
down_revision = "0005"


def upgrade() -> None:
    """Existing nodes have no tenant address, so they are not sold until they get an address."""
    for name in ("tenant_address", "telemetry_url", "unclean_allocation_id"):
        op.add_column("nodes", sa.Column(name, sa.Text(), nullable=False, server_default=""))
    for name, default in (("tenant_port", "22"), ("fence", "0")):
        column = sa.Column(name, sa.BigInteger(), nullable=False, server_default=default)
        op.add_column("nodes", column)
    disks = sa.Column("disks", DOCUMENT, nullable=False, server_default="[]")
    op.add_column("allocation_resource_claims", disks)
    op.create_table(
        "host_baselines",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        *texts("node_id"),
        sa.Column("task_id", sa.Text(), nullable=True),
        *texts("boot_id", "install_id"),
        *documents("document"),
        *moments("observed_at"),
        *stamps("created_at"),
        *texts("allocation_id"),
        points("fk_host_baselines_node_id", "node_id", "nodes"),
        sa.PrimaryKeyConstraint("id", name="pk_host_baselines"),
    )
    op.create_index("ix_host_baselines_allocation_id", "host_baselines", ["allocation_id"])

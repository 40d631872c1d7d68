"""Fabric interface and address of a node, which differ between nodes of the same profile."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0015"
down_revision = "0014"


def upgrade() -> None:
    """Existing nodes keep the values of their profile."""
    for name in ("fabric_interface", "fabric_address"):
        op.add_column("nodes", sa.Column(name, sa.Text(), nullable=False, server_default=""))

"""Tags of a machine in MAAS, by which parity predicts the result of its next deployment."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from reconciler.db.migrations.columns import DOCUMENT

revision = "0021"
down_revision = "0020"


def upgrade() -> None:
    """The tags of existing nodes are unknown, which differs from an empty list."""
    op.add_column("nodes", sa.Column("maas_tags", DOCUMENT, nullable=True))

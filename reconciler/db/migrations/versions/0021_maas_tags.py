"""The tags of a machine in MAAS, by which parity tells what its next deployment makes of it."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from reconciler.db.migrations.columns import DOCUMENT

revision = "0021"
down_revision = "0020"


def upgrade() -> None:
    """Of nodes from before nobody has said them, which is not the same as: none."""
    op.add_column("nodes", sa.Column("maas_tags", DOCUMENT, nullable=True))

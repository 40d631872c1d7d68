"""A node knows when its boot was learned: a look that began before is not believed against it."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0017"
down_revision = "0016"


def upgrade() -> None:
    """Of nodes from before nobody knows; whatever is seen next is believed."""
    op.add_column("nodes", sa.Column("boot_learned_at", sa.Double()))

"""A host's own place on the fabric: a profile is shared, an address is not."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0015"
down_revision = "0014"


def upgrade() -> None:
    """Nodes from before have what their profile says, as they had until now."""
    for name in ("fabric_interface", "fabric_address"):
        op.add_column("nodes", sa.Column(name, sa.Text(), nullable=False, server_default=""))

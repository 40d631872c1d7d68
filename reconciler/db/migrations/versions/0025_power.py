"""Power of a slice: whether its project stopped it, and the boot under which it was started.

Nothing shows under which boot a slice was started before, so the host's present boot counts.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0025"
down_revision = "0024"


def upgrade() -> None:
    op.add_column(
        "allocations", sa.Column("stopped", sa.Boolean, nullable=False, server_default=sa.false())
    )
    for name in ("power_action", "started_boot_id"):
        op.add_column("allocations", sa.Column(name, sa.Text, nullable=False, server_default=""))
    allocations = sa.table(
        "allocations", *map(sa.column, ("node_id", "state", "capacity_shape", "started_boot_id"))
    )
    nodes = sa.table("nodes", sa.column("id"), sa.column("boot_id"))
    boot = sa.select(nodes.c.boot_id).where(nodes.c.id == allocations.c.node_id).scalar_subquery()
    op.execute(
        sa.update(allocations)
        .where(allocations.c.state == "active", allocations.c.capacity_shape == "gpu_slice")
        .values(started_boot_id=boot)
    )

"""When a node's last task of a kind was asked for, without reading all that it ever had.

What is done every few minutes for each host is most of a site's tasks after some weeks.
"""

from __future__ import annotations

from alembic import op

revision = "0020"
down_revision = "0019"


def upgrade() -> None:
    op.create_index("ix_tasks_latest", "tasks", ["kind", "node_id", "created_at"])

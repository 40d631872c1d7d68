"""Index for the latest task of a kind on a node.

Without it, every task of the node is read. Periodic tasks for each host make most of a site's
tasks after some weeks.
"""

from __future__ import annotations

from alembic import op

revision = "0020"
down_revision = "0019"


def upgrade() -> None:
    op.create_index("ix_tasks_latest", "tasks", ["kind", "node_id", "created_at"])

"""Host installation of a proof, because a proof does not count after a reimage."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0014"
down_revision = "0013"

GUARD = "wipe_proofs_no_update"


def upgrade() -> None:
    """Existing proofs get the installation of the last discovery before them.

    Proofs are otherwise never changed, so their update trigger is removed during this change.
    """
    column = sa.Column("install_id", sa.Text(), nullable=False, server_default="")
    op.add_column("wipe_proofs", column)
    postgresql = op.get_bind().dialect.name == "postgresql"
    op.execute(f"DROP TRIGGER {GUARD}" + (" ON wipe_proofs" if postgresql else ""))
    op.execute(
        "UPDATE wipe_proofs SET install_id = COALESCE("
        "(SELECT seen.install_id FROM topology_discoveries seen"
        " WHERE seen.node_id = wipe_proofs.node_id AND seen.created_at <= wipe_proofs.created_at"
        " ORDER BY seen.id DESC LIMIT 1),"
        " (SELECT nodes.install_id FROM nodes WHERE nodes.id = wipe_proofs.node_id), '')"
    )
    head = f"CREATE TRIGGER {GUARD} BEFORE UPDATE ON wipe_proofs FOR EACH ROW"
    if postgresql:
        op.execute(f"{head} EXECUTE FUNCTION gpuaas_append_only()")
    else:
        op.execute(f"{head} BEGIN SELECT RAISE(ABORT, 'wipe_proofs is append-only'); END")

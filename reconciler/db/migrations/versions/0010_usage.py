"""Usage records, and triggers that protect the bundle copy of claims."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from reconciler.db.migrations.columns import (
    documents,
    moments,
    numbers,
    one_of,
    points,
    stamps,
    texts,
)

revision = "0010"
down_revision = "0009"

CLAIM = (
    "id allocation_id kind node_id slot_id position slot_index gpu_pci_address nvme_device"
    " nvme_identity nvme_serial nvme_eui nvme_size_bytes management_mac private_ip"
    " fabric_vf_pci_address numa_node fence disk_generation disks created_at"
)
USAGE = (
    "allocation_id project_id node_id capacity_shape sku region pool gpu_count claims started_at"
)

# Whether a row with the key of the new row exists already.
_CLAIMED = "SELECT 1 FROM allocation_resource_claims WHERE id = NEW.id"
_USED = "SELECT 1 FROM usage_records WHERE allocation_id = NEW.allocation_id"


def upgrade() -> None:
    """Allocations that were active before get their usage record from their claims."""
    op.create_table(
        "usage_records",
        *texts("allocation_id", "project_id", "node_id", "capacity_shape"),
        *texts("sku", "region", "pool"),
        *numbers("gpu_count"),
        *documents("claims"),
        *stamps("started_at"),
        *moments("ended_at"),
        *texts("end_state"),
        one_of("ck_usage_records_capacity_shape", "capacity_shape", "baremetal gpu_slice"),
        sa.CheckConstraint(
            "(ended_at IS NULL AND end_state = '') OR (ended_at >= started_at AND"
            " end_state IN ('released', 'failed'))",
            name=op.f("ck_usage_records_ended_with_state"),
        ),
        points("fk_usage_records_allocation_id", "allocation_id", "allocations"),
        points("fk_usage_records_project_id", "project_id", "projects"),
        points("fk_usage_records_node_id", "node_id", "nodes"),
        sa.PrimaryKeyConstraint("allocation_id", name="pk_usage_records"),
    )
    op.create_index("ix_usage_records_project_id", "usage_records", ["project_id", "started_at"])
    op.create_index("ix_usage_records_ended_at", "usage_records", ["ended_at"])
    op.execute(_BACKFILL.format(snapshot=_SNAPSHOT[op.get_bind().dialect.name]))
    _keep("allocation_resource_claims", _CLAIMED, CLAIM)
    _keep("usage_records", _USED, USAGE, "OLD.ended_at IS NOT NULL")


_PAIRS = ", ".join(
    f"'{name}', c.{name}" for name in ("kind", "slot_id", "slot_index", "nvme_size_bytes")
)
_SNAPSHOT = {
    "sqlite": f"json_group_array(json_object({_PAIRS}))",
    "postgresql": f"jsonb_agg(jsonb_build_object({_PAIRS}) ORDER BY c.position)",
}

# Claims of an allocation change state together, so any of them shows how it ended.
_BACKFILL = """
INSERT INTO usage_records (allocation_id, project_id, node_id, capacity_shape, sku, region, pool,
  gpu_count, claims, started_at, ended_at, end_state)
SELECT a.id, a.project_id, MIN(c.node_id), a.capacity_shape, a.sku, a.region, a.pool,
  a.gpu_count, {snapshot}, a.activated_at,
  CASE WHEN COUNT(c.ended_at) = COUNT(*) THEN
    CASE WHEN MAX(c.ended_at) < a.activated_at THEN a.activated_at ELSE MAX(c.ended_at) END
  END,
  CASE WHEN COUNT(c.ended_at) = COUNT(*) THEN MIN(c.state) ELSE '' END
FROM allocations a JOIN allocation_resource_claims c ON c.allocation_id = a.id
WHERE a.activated_at IS NOT NULL GROUP BY a.id
"""


def _keep(table: str, there: str, columns: str, frozen: str = "") -> None:
    """Triggers that refuse removal of rows, changes of `columns`, and any change once `frozen`."""
    if op.get_bind().dialect.name == "postgresql":
        changed = " OR ".join(f"NEW.{name} IS DISTINCT FROM OLD.{name}" for name in columns.split())
        body = f"EXECUTE FUNCTION {table}_keep()"
        op.execute(
            f"CREATE FUNCTION {table}_keep() RETURNS trigger LANGUAGE plpgsql AS $$"
            f" BEGIN RAISE EXCEPTION '{table} keeps what was sold'; END $$"
        )
    else:
        changed = " OR ".join(f"NEW.{name} IS NOT OLD.{name}" for name in columns.split())
        body = f"BEGIN SELECT RAISE(ABORT, '{table} keeps what was sold'); END"
    when = f"{changed} OR {frozen}" if frozen else changed
    op.execute(
        f"CREATE TRIGGER {table}_keep_update BEFORE UPDATE ON {table} FOR EACH ROW"
        f" WHEN ({when}) {body}"
    )
    op.execute(f"CREATE TRIGGER {table}_keep_delete BEFORE DELETE ON {table} FOR EACH ROW {body}")
    # Row triggers see neither TRUNCATE nor INSERT OR REPLACE.
    if op.get_bind().dialect.name == "postgresql":
        op.execute(f"CREATE TRIGGER {table}_keep_all BEFORE TRUNCATE ON {table} {body}")
    else:
        op.execute(
            f"CREATE TRIGGER {table}_keep_replace BEFORE INSERT ON {table} FOR EACH ROW"
            f" WHEN EXISTS ({there}) {body}"
        )

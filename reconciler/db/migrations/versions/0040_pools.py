"""Worker pools, the hosts that run them, and leases of devices."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0040"
down_revision = "0039"

DOCUMENT = sa.JSON().with_variant(postgresql.JSONB(), "postgresql")
_LIVE = "state IN ('requested', 'starting', 'running', 'draining', 'stopping')"


def _columns(kind: sa.types.TypeEngine[Any], *names: str) -> list[sa.Column[Any]]:
    return [sa.Column(name, kind, nullable=False) for name in names]


def _index(name: str, table: str, columns: list[str], where: str, *, unique: bool = False) -> None:
    condition = sa.text(where)
    op.create_index(
        *(name, table, columns),
        unique=unique,
        sqlite_where=condition,
        postgresql_where=condition,
    )


def upgrade() -> None:
    op.create_table(
        "pool_hosts",
        *_columns(sa.Text(), "id", "name", "boot_id"),
        *_columns(sa.BigInteger(), "memory_bytes", "memory_used_bytes"),
        *_columns(sa.Text(), "isolation"),
        *_columns(DOCUMENT, "models", "devices"),
        *_columns(sa.Double(), "seen_at"),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_pool_hosts")),
    )
    op.create_table(
        "worker_pools",
        *_columns(sa.Text(), "id", "state", "state_reason"),
        *_columns(sa.Double(), "state_since"),
        sa.Column("deadline_at", sa.Double()),
        *_columns(sa.BigInteger(), "generation"),
        *_columns(sa.Text(), "name", "host_id"),
        sa.Column("project_id", sa.Text()),
        *_columns(sa.BigInteger(), "seat"),
        *_columns(DOCUMENT, "models"),
        *_columns(sa.BigInteger(), "replicas", "memory_mib"),
        *_columns(sa.Boolean(), "kill_on_oom"),
        *_columns(DOCUMENT, "devices"),
        *_columns(sa.BigInteger(), "drain_s", "grace_s"),
        *_columns(sa.Text(), "ends_as"),
        *_columns(DOCUMENT, "failure"),
        *_columns(sa.Text(), "requested_by", "correlation_id"),
        *_columns(sa.Double(), "created_at"),
        sa.Column("ended_at", sa.Double()),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_worker_pools")),
        sa.ForeignKeyConstraint(
            ["host_id"], ["pool_hosts.id"], name=op.f("fk_worker_pools_host_id")
        ),
        sa.ForeignKeyConstraint(
            ["project_id"], ["projects.id"], name=op.f("fk_worker_pools_project_id")
        ),
        sa.CheckConstraint(
            f"{_LIVE[:-1]}, 'stopped', 'evicted', 'failed')", name=op.f("ck_worker_pools_state")
        ),
    )
    for column in ("name", "seat"):
        _index(f"uq_worker_pools_{column}", "worker_pools", [column], _LIVE, unique=True)
    op.create_index("ix_worker_pools_created_at", "worker_pools", ["created_at", "id"])
    op.create_table(
        "orchestrator_leases",
        *_columns(sa.Text(), "id", "pool_id", "host_id", "device"),
        *_columns(sa.Double(), "since"),
        sa.Column("until", sa.Double()),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_orchestrator_leases")),
        sa.ForeignKeyConstraint(
            ["pool_id"], ["worker_pools.id"], name=op.f("fk_orchestrator_leases_pool_id")
        ),
        sa.ForeignKeyConstraint(
            ["host_id"], ["pool_hosts.id"], name=op.f("fk_orchestrator_leases_host_id")
        ),
    )
    _index(
        *("uq_orchestrator_leases_device", "orchestrator_leases", ["host_id", "device"]),
        "until IS NULL",
        unique=True,
    )
    op.create_index("ix_orchestrator_leases_pool_id", "orchestrator_leases", ["pool_id"])
    for kind, default, names in (
        (sa.Text(), "", ("pool_id", "boot_id", "cgroup", "ending")),
        (sa.BigInteger(), "0", ("start_ticks", "memory_bytes", "oom_kills")),
    ):
        for name in names:
            added = sa.Column(name, kind, nullable=False, server_default=default)
            op.add_column("pool_workers", added)
    _index("ix_pool_workers_live", "pool_workers", ["pool_id"], "ended_at IS NULL")

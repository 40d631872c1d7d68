"""SSH gateway: members' keys, and sessions."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0031"
down_revision = "0030"


def _columns(kind: sa.types.TypeEngine[Any], *names: str) -> list[sa.Column[Any]]:
    return [sa.Column(name, kind, nullable=False) for name in names]


def _references(table: str, *others: str) -> list[sa.ForeignKeyConstraint]:
    columns = {"projects": "project_id", "api_tokens": "token_id", "allocations": "allocation_id"}
    return [
        sa.ForeignKeyConstraint(
            [columns[other]], [f"{other}.id"], name=op.f(f"fk_{table}_{columns[other]}")
        )
        for other in others
    ]


def upgrade() -> None:
    op.create_table(
        "ssh_keys",
        *_columns(sa.Text(), "id", "project_id", "public_key", "name"),
        sa.Column("token_id", sa.Text()),
        *_columns(sa.Text(), "registered_by"),
        *_columns(sa.Double(), "created_at"),
        sa.Column("expires_at", sa.Double()),
        sa.Column("revoked_at", sa.Double()),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_ssh_keys")),
        sa.UniqueConstraint(
            "project_id", "public_key", name=op.f("uq_ssh_keys_project_id_public_key")
        ),
        *_references("ssh_keys", "projects", "api_tokens"),
    )
    op.create_table(
        "ssh_sessions",
        *_columns(sa.Text(), "id", "allocation_id", "project_id"),
        *_columns(sa.Text(), "actor", "fingerprint", "address"),
        *_columns(sa.Double(), "opened_at", "seen_at"),
        sa.Column("closed_at", sa.Double()),
        *_columns(sa.Text(), "reason"),
        *_columns(sa.BigInteger(), "bytes_in", "bytes_out"),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_ssh_sessions")),
        *_references("ssh_sessions", "allocations", "projects"),
    )
    op.create_index("ix_ssh_sessions_project_id", "ssh_sessions", ["project_id", "opened_at"])
    still = sa.text("closed_at IS NULL")
    op.create_index(
        "ix_ssh_sessions_open",
        "ssh_sessions",
        ["seen_at"],
        sqlite_where=still,
        postgresql_where=still,
    )

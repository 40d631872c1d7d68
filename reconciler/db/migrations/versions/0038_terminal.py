"""Terminals: tickets, recordings, and how each session through the gateway came."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0038"
down_revision = "0037"

SEQUENCE = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    for name, default in (("way", "jump"), ("recording_digest", "")):
        op.add_column(
            "ssh_sessions", sa.Column(name, sa.Text(), nullable=False, server_default=default)
        )
    op.add_column(
        "projects",
        sa.Column("records_terminals", sa.Boolean(), nullable=False, server_default=sa.false()),
    )
    names = ("hash", "holder", "actor", "allocation_id", "project_id")
    op.create_table(
        "terminal_tickets",
        *(sa.Column(name, sa.Text(), nullable=False) for name in names),
        sa.Column("expires_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("hash"),
        sa.ForeignKeyConstraint(["allocation_id"], ["allocations.id"]),
        sa.ForeignKeyConstraint(["project_id"], ["projects.id"]),
    )
    op.create_table(
        "terminal_recordings",
        sa.Column("id", SEQUENCE, nullable=False, autoincrement=True),
        *(sa.Column(name, sa.Text(), nullable=False) for name in ("session_id", "project_id")),
        sa.Column("at", sa.Double(), nullable=False),
        sa.Column("size", sa.BigInteger(), nullable=False),
        sa.Column("lines", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("id"),
        sa.ForeignKeyConstraint(["session_id"], ["ssh_sessions.id"]),
        sa.ForeignKeyConstraint(["project_id"], ["projects.id"]),
    )
    op.create_index("ix_terminal_recordings_session_id", "terminal_recordings", ["session_id"])

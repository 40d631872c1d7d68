"""Column helpers for migrations. Frozen: a change here would change applied migrations."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

DOCUMENT = sa.JSON().with_variant(postgresql.JSONB(), "postgresql")
SEQUENCE = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
LIVE = "state IN ('reserved', 'provisioning', 'active', 'releasing')"


def texts(*names: str) -> list[sa.Column[Any]]:
    """Text columns that are never null."""
    return [sa.Column(name, sa.Text(), nullable=False) for name in names]


def optional(*names: str) -> list[sa.Column[Any]]:
    """Nullable text columns."""
    return [sa.Column(name, sa.Text(), nullable=True) for name in names]


def numbers(*names: str) -> list[sa.Column[Any]]:
    """Integer columns that are never null."""
    return [sa.Column(name, sa.BigInteger(), nullable=False) for name in names]


def flags(*names: str) -> list[sa.Column[Any]]:
    """Boolean columns that are never null."""
    return [sa.Column(name, sa.Boolean(), nullable=False) for name in names]


def documents(*names: str) -> list[sa.Column[Any]]:
    """JSON columns that are never null."""
    return [sa.Column(name, DOCUMENT, nullable=False) for name in names]


def stamps(*names: str) -> list[sa.Column[Any]]:
    """Time columns that are never null."""
    return [sa.Column(name, sa.Double(), nullable=False) for name in names]


def moments(*names: str) -> list[sa.Column[Any]]:
    """Nullable time columns, for times that may still be in the future."""
    return [sa.Column(name, sa.Double(), nullable=True) for name in names]


def one_of(name: str, column: str, values: str) -> sa.CheckConstraint:
    """Check constraint: the column holds only these values."""
    listed = ", ".join(f"'{value}'" for value in values.split())
    # op.f marks the name as complete, so that no naming convention is applied to it.
    return sa.CheckConstraint(f"{column} IN ({listed})", name=op.f(name))


def points(constraint: str, column: str, table: str) -> sa.ForeignKeyConstraint:
    """Foreign key from the column to the id of another table."""
    return sa.ForeignKeyConstraint([column], [f"{table}.id"], name=constraint)


def unique(name: str, table: str, columns: str, condition: str) -> None:
    """Unique index over the rows of a condition; both engines have partial indexes."""
    op.create_index(
        name,
        table,
        columns.split(),
        unique=True,
        sqlite_where=sa.text(condition),
        postgresql_where=sa.text(condition),
    )

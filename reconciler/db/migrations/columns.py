"""What the migrations write often. Frozen: a change here would change the past."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

DOCUMENT = sa.JSON().with_variant(postgresql.JSONB(), "postgresql")
SEQUENCE = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
LIVE = "state IN ('reserved', 'provisioning', 'active', 'releasing')"


def texts(*names: str) -> list[sa.Column[Any]]:
    """Text that is never null."""
    return [sa.Column(name, sa.Text(), nullable=False) for name in names]


def optional(*names: str) -> list[sa.Column[Any]]:
    """Text that may be missing."""
    return [sa.Column(name, sa.Text(), nullable=True) for name in names]


def numbers(*names: str) -> list[sa.Column[Any]]:
    """Whole numbers that are never null."""
    return [sa.Column(name, sa.BigInteger(), nullable=False) for name in names]


def flags(*names: str) -> list[sa.Column[Any]]:
    """Yes or no."""
    return [sa.Column(name, sa.Boolean(), nullable=False) for name in names]


def documents(*names: str) -> list[sa.Column[Any]]:
    """JSON."""
    return [sa.Column(name, DOCUMENT, nullable=False) for name in names]


def stamps(*names: str) -> list[sa.Column[Any]]:
    """Times that are always there."""
    return [sa.Column(name, sa.Double(), nullable=False) for name in names]


def moments(*names: str) -> list[sa.Column[Any]]:
    """Times that may not have come."""
    return [sa.Column(name, sa.Double(), nullable=True) for name in names]


def one_of(name: str, column: str, values: str) -> sa.CheckConstraint:
    """The column holds one of these values, whoever writes."""
    listed = ", ".join(f"'{value}'" for value in values.split())
    # op.f: the name is whole already, no convention is to be applied to it.
    return sa.CheckConstraint(f"{column} IN ({listed})", name=op.f(name))


def points(constraint: str, column: str, table: str) -> sa.ForeignKeyConstraint:
    """The column holds the id of a row of another table."""
    return sa.ForeignKeyConstraint([column], [f"{table}.id"], name=constraint)


def unique(name: str, table: str, columns: str, condition: str) -> None:
    """Uniqueness over some rows; both engines have partial indexes."""
    op.create_index(
        name,
        table,
        columns.split(),
        unique=True,
        sqlite_where=sa.text(condition),
        postgresql_where=sa.text(condition),
    )

"""Column types and constraints with the same meaning in SQLite and PostgreSQL."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import JSONB

from reconciler.db import clock

metadata = sa.MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "ck": "ck_%(table_name)s_%(constraint_name)s",
        "fk": "fk_%(table_name)s_%(column_0_N_name)s",
        "pk": "pk_%(table_name)s",
    }
)

DOCUMENT = sa.JSON().with_variant(JSONB(), "postgresql")
MAYBE_DOCUMENT = sa.JSON(none_as_null=True).with_variant(JSONB(none_as_null=True), "postgresql")
SEQUENCE = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


class Row:
    """A row of a table as it was read. Its fields are the table's columns, in their order."""

    TABLE: ClassVar[sa.Table]
    # Name of the entity in errors, in history and in the transition table.
    ENTITY: ClassVar[str]

    if TYPE_CHECKING:
        # Every row with states has these columns; each class declares them.
        id: Any
        generation: int


R = TypeVar("R", bound=type[Row])


def row_of(table: sa.Table, entity: str) -> Callable[[R], R]:
    """Set the table and the entity name of a row class."""

    def register(kind: R) -> R:
        kind.TABLE, kind.ENTITY = table, entity
        return kind

    return register


def key() -> sa.Column[str]:
    """Primary key of every table except logs."""
    return sa.Column("id", sa.Text, primary_key=True)


def sequence() -> sa.Column[int]:
    """Primary key of a log: later rows have larger numbers."""
    return sa.Column("id", SEQUENCE, primary_key=True, autoincrement=True)


def text(name: str, default: str | None = "") -> sa.Column[str]:
    """Text column that is never null. default None: the writer must give a value."""
    return sa.Column(name, sa.Text, nullable=False, default=default)


def number(name: str, default: int | None = 0) -> sa.Column[int]:
    """Integer column that is never null."""
    return sa.Column(name, sa.BigInteger, nullable=False, default=default)


def flag(name: str) -> sa.Column[bool]:
    """Boolean column, false by default."""
    return sa.Column(name, sa.Boolean, nullable=False, default=False)


def document(name: str, default: type = dict) -> sa.Column[Any]:
    """JSON column, empty by default."""
    return sa.Column(name, DOCUMENT, nullable=False, default=default, info={"holds": default})


def maybe_list(name: str) -> sa.Column[Any]:
    """JSON list column, with SQL null for "unknown": neither the JSON value null nor []."""
    return sa.Column(name, MAYBE_DOCUMENT, info={"holds": list})


def moment(name: str) -> sa.Column[float]:
    """Nullable time column: epoch seconds of the database's clock."""
    return sa.Column(name, sa.Double)


def stamp(name: str = "created_at") -> sa.Column[float]:
    """Time column with the time at which the row was written."""
    return sa.Column(name, sa.Double, nullable=False, default=clock.now())


def reference(name: str, target: str, *, required: bool = True) -> sa.Column[str]:
    """Foreign key to the id of another row, which cannot be removed while this row exists."""
    return sa.Column(name, sa.Text, sa.ForeignKey(f"{target}.id"), nullable=not required)


def lifecycle(state: str = "state") -> list[sa.Column[Any]]:
    """State columns that `db.journal` maintains for every entity."""
    return [
        text(state, None),
        text(f"{state}_reason"),
        stamp(f"{state}_since"),
        moment("deadline_at"),
        number("generation"),
    ]


def one_of(column: str, states: type[StrEnum]) -> sa.CheckConstraint:
    """Check constraint: the column holds only these states."""
    names = ", ".join(f"'{state.value}'" for state in states)
    told = {"column": column, "states": states}
    return sa.CheckConstraint(f"{column} IN ({names})", name=column, info=told)


def unique(name: str, *columns: str, where: str) -> sa.Index:
    """Unique index over the rows of a condition; both engines have partial indexes."""
    return partial(name, *columns, where=where, unique=True)


def partial(name: str, *columns: str, where: str, unique: bool = False) -> sa.Index:
    """Index over the rows of a condition."""
    condition = sa.text(where)
    return sa.Index(
        name, *columns, unique=unique, sqlite_where=condition, postgresql_where=condition
    )

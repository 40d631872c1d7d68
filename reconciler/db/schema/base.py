"""Row classes, and tables derived from them with the same meaning in SQLite and PostgreSQL.

A field of a row class is a column, unless it has a default value of its own. The type of the field
gives the type of the column; only `X | None` is nullable:

    str     text; the writer must give a value
    int     integer; the writer must give a value
    bool    false by default
    float   time in epoch seconds of the database's clock, by default that of the insert
    dict    JSON object, empty by default
    list    JSON list, empty by default

`Annotated` adds what the type cannot tell: a `Default`, a `Reference`, the states of a check
constraint (an enum class), `KEY`, or a computed column. A field `id` is the primary key; an `id`
that is an int numbers the rows of a log, so that later rows have larger numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import MISSING, dataclass, fields
from enum import Enum, StrEnum
from types import NoneType, UnionType
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    ClassVar,
    TypeVar,
    Union,
    dataclass_transform,
    get_args,
    get_origin,
    get_type_hints,
)

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

_DOCUMENT = sa.JSON().with_variant(JSONB(), "postgresql")
# None is stored as SQL null, which means "unknown", and not as the JSON value null.
_MAYBE_DOCUMENT = sa.JSON(none_as_null=True).with_variant(JSONB(none_as_null=True), "postgresql")
_SEQUENCE = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
_TYPES: dict[Any, type[sa.types.TypeEngine[Any]]] = {
    str: sa.Text,
    int: sa.BigInteger,
    bool: sa.Boolean,
    float: sa.Double,
}


class _Key(Enum):
    KEY = "primary key"


KEY = _Key.KEY


@dataclass(frozen=True)
class Default:
    """Value of a column that the writer leaves out."""

    value: str | int


@dataclass(frozen=True)
class Reference:
    """Foreign key to the id of a row that cannot be removed meanwhile. null: may be null."""

    table: str
    null: bool = False


Text = Annotated[str, Default("")]
Number = Annotated[int, Default(0)]
NodeId = Annotated[str, Reference("nodes")]
ProjectId = Annotated[str, Reference("projects")]
AllocationId = Annotated[str, Reference("allocations")]
TaskId = Annotated[str, Reference("tasks")]


class Row:
    """A row of a table as it was read."""

    TABLE: ClassVar[sa.Table]
    # Name of the entity in errors, in history and in the transition table.
    ENTITY: ClassVar[str]

    if TYPE_CHECKING:
        # Every row with states has these columns; each class declares them.
        id: Any
        generation: int


@dataclass(frozen=True, kw_only=True)
class StateRow(Row):
    """Row with a state that `db.journal` maintains."""

    id: str
    state: str
    state_reason: Text
    state_since: float
    deadline_at: float | None
    generation: Number


@dataclass(frozen=True, kw_only=True)
class StatusRow(Row):
    """Row with a state that `db.journal` maintains, in columns named `status`."""

    id: str
    status: str
    status_reason: Text
    status_since: float
    deadline_at: float | None
    generation: Number


R = TypeVar("R", bound=type[Row])


@dataclass_transform(kw_only_default=True, frozen_default=True)
def table(name: str, entity: str, *items: sa.schema.SchemaItem) -> Callable[[R], R]:
    """Make a frozen dataclass of a row class, and its table with these constraints and indexes."""

    def make(kind: R) -> R:
        kind = dataclass(frozen=True, kw_only=True)(kind)  # type: ignore[assignment]
        kind.TABLE = sa.Table(name, metadata, *_columns(kind), *items)
        kind.ENTITY = entity
        return kind

    return make


def _columns(kind: type[Row]) -> Iterator[sa.schema.SchemaItem]:
    hints = get_type_hints(kind, include_extras=True)
    for field in fields(kind):  # type: ignore[arg-type]
        if field.default is MISSING:
            yield from _column(field.name, hints[field.name])


def _column(name: str, hint: Any) -> Iterator[sa.schema.SchemaItem]:
    """Column of a field, and its check constraint when its states are given."""
    notes: list[Any] = []
    nullable = False
    while (origin := get_origin(hint)) in (Annotated, Union, UnionType):
        if origin is Annotated:
            notes += hint.__metadata__
            hint = hint.__origin__
        else:
            (hint,) = (part for part in get_args(hint) if part is not NoneType)
            nullable = True
    items: list[Any] = []
    default: Any = {bool: False, float: clock.now()}.get(hint)
    info = {}
    sql_type: Any = _TYPES.get(hint)
    if sql_type is None:
        default, info = origin, {"holds": origin}
        sql_type = _MAYBE_DOCUMENT if nullable else _DOCUMENT
    for note in notes:
        if isinstance(note, Default):
            default = note.value
        elif isinstance(note, Reference):
            items.append(sa.ForeignKey(f"{note.table}.id"))
            nullable = nullable or note.null
        elif isinstance(note, sa.Computed):
            items.append(note)
    numbered = name == "id" and hint is int
    yield sa.Column(
        name,
        _SEQUENCE if numbered else sql_type,
        *items,
        primary_key=name == "id" or KEY in notes,
        autoincrement=numbered or "auto",
        nullable=nullable,
        default=None if nullable else default,
        info=info,
    )
    for states in notes:
        if isinstance(states, type) and issubclass(states, StrEnum):
            info = {"column": name, "states": states}
            yield sa.CheckConstraint(f"{name} IN {sql_list(states)}", name=name, info=info)


def unique(name: str, *columns: str, where: str) -> sa.Index:
    """Unique index over the rows of a condition; both engines have partial indexes."""
    return partial(name, *columns, where=where, unique=True)


def in_states(states: Iterable[str]) -> str:
    """Condition for the rows in some states, as text for a partial index."""
    return f"state IN {sql_list(states)}"


def sql_list(values: Iterable[str]) -> str:
    """Values for IN, as text of a condition."""
    return f"({', '.join(repr(str(value)) for value in values)})"


def partial(name: str, *columns: str, where: str, unique: bool = False) -> sa.Index:
    """Index over the rows of a condition."""
    condition = sa.text(where)
    return sa.Index(
        name, *columns, unique=unique, sqlite_where=condition, postgresql_where=condition
    )

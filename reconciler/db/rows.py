"""Database rows: reading, inserting singly or as a batch, and paging."""

from __future__ import annotations

import secrets
import threading
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, TypeVar, overload

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.dml import ReturningInsert
from sqlalchemy.sql.functions import FunctionElement

from reconciler.db.schema.base import Row
from reconciler.model.errors import not_found

Key = str | int | float


@dataclass(frozen=True)
class Order:
    """Columns by which a list is sorted; together they are unique among its rows."""

    table: sa.Table | sa.Subquery
    columns: tuple[str, ...]
    descending: bool = False

    def keys(self, row: Row | Mapping[str, Any]) -> tuple[Key, ...]:
        """Position of the row in the list."""
        values = vars(row) if isinstance(row, Row) else row
        return tuple(values[name] for name in self.columns)

    def fits(self, keys: tuple[object, ...]) -> bool:
        """Whether these can be the keys of a row."""
        types = [self.table.c[name].type.python_type for name in self.columns]
        return [type(key) for key in keys] == types


@dataclass(frozen=True)
class Page:
    """At most `limit` rows behind the position `after`; () is the beginning."""

    limit: int
    after: tuple[Key, ...] = ()


def part(query: sa.Select[Any], order: Order, page: Page | None) -> sa.Select[Any]:
    """The query in this order, limited to the page; None means the whole list."""
    columns = [order.table.c[name] for name in order.columns]
    sorting = [column.desc() if order.descending else column.asc() for column in columns]
    query = query.order_by(*sorting)
    if page is None:
        return query
    if page.after:
        place = sa.tuple_(*columns)
        last = sa.tuple_(
            *(sa.literal(key, column.type) for key, column in zip(page.after, columns, strict=True))
        )
        query = query.where(place < last if order.descending else place > last)
    return query.limit(page.limit)


# A row of a query that names its columns itself, so that no class has them.
Record = dict[str, Any]
R = TypeVar("R", bound=Row)
T = TypeVar("T")
Made = tuple[tuple[str, sa.ColumnElement[Any]], ...]
_PENDING = "gpuaas_kept_together"
_JSON = sa.JSON().with_variant(JSONB(), "postgresql")


@dataclass(frozen=True)
class Shape:
    """Common form of rows that share an INSERT.

    plain: columns given as values. made: columns given as SQL expressions. returned: columns that
    the INSERT returns.
    """

    table: sa.Table
    plain: tuple[str, ...]
    made: Made
    returned: tuple[str, ...]


@dataclass(frozen=True)
class BatchRow:
    """A row of a batch. record: receives the columns that the INSERT returns."""

    shape: Shape
    plain: dict[str, Any]
    record: dict[str, Any]


@contextmanager
def batch_insert(conn: sa.Connection) -> Iterator[None]:
    """Collect the inserts of this block and write them at its end, in the same transaction.

    Records have the columns that the database makes only after the block. An exception in the block
    after an insert rolls back the whole transaction. Otherwise other changes in it, such as a
    change of state, would be committed without the insert.
    """
    # Keep the dict: after a lost connection, conn.info is another dict or raises.
    info = conn.info
    if _PENDING in info:
        yield
        return
    kept: list[BatchRow] = []
    info[_PENDING] = kept
    try:
        yield
    except BaseException:
        transaction = conn.get_transaction()
        if kept and transaction is not None:
            transaction.rollback()
        raise
    finally:
        info.pop(_PENDING, None)
    _write(conn, kept)


def _insert(conn: sa.Connection, row: BatchRow) -> None:
    """Insert the row now, or at the end of the batch."""
    kept: list[BatchRow] | None = conn.info.get(_PENDING)
    if kept is None:
        _single(conn, row)
    else:
        kept.append(row)


def _write(conn: sa.Connection, kept: Sequence[BatchRow]) -> None:
    if conn.dialect.name != "postgresql":
        for row in kept:
            _single(conn, row)
        return
    alike: dict[Shape, list[BatchRow]] = {}
    for row in kept:
        alike.setdefault(row.shape, []).append(row)
    given = {
        f"rows{number}": [row.plain for row in rows] for number, rows in enumerate(alike.values())
    }
    receiving = {row.plain["id"]: row for row in kept if row.shape.returned}
    for stored in conn.execute(_combined(tuple(alike)), given).mappings():
        row = receiving[stored["id"]]
        row.record.update({name: stored[name] for name in row.shape.returned})


def _single(conn: sa.Connection, row: BatchRow) -> None:
    result = conn.execute(_single_statement(row.shape), row.plain)
    if row.shape.returned:
        row.record.update(result.mappings().one())


@lru_cache(maxsize=256)
def _single_statement(shape: Shape) -> sa.Insert:
    values: dict[str, Any] = {name: sa.bindparam(name) for name in shape.plain}
    insert = sa.insert(shape.table).values(values | dict(shape.made))
    if not shape.returned:
        return insert.inline()
    return insert.returning(*(shape.table.c[name] for name in shape.returned))


@lru_cache(maxsize=64)
def _combined(shapes: tuple[Shape, ...]) -> sa.Select[Any] | sa.CompoundSelect[Any]:
    """A single statement with an INSERT for each shape; it returns ids and the returned columns."""
    parts = [(shape, _into(shape, f"rows{at}").cte(f"into{at}")) for at, shape in enumerate(shapes)]
    silent = [part for shape, part in parts if not shape.returned]
    returned = {name: shape.table.c[name].type for shape in shapes for name in shape.returned}
    selects = [
        sa.select(
            part.c.id,
            *(
                part.c[name] if name in shape.returned else sa.cast(sa.null(), kind).label(name)
                for name, kind in returned.items()
            ),
        )
        for shape, part in parts
        if shape.returned
    ]
    if not selects:
        return sa.select(sa.literal("").label("id")).where(sa.false()).add_cte(*silent)
    return sa.union_all(*selects).add_cte(*silent)


def _into(shape: Shape, name: str) -> sa.Insert | ReturningInsert[Any]:
    # All rows are a single parameter, because psycopg parses statements with many parameters anew
    # each time.
    columns = [sa.column(name, shape.table.c[name].type) for name in shape.plain]
    rows = sa.func.jsonb_to_recordset(sa.bindparam(name, type_=JSONB()))
    given = rows.table_valued(*columns).render_derived(name, with_types=True)
    made = [value.label(name) for name, value in shape.made]
    names = [*shape.plain, *(name for name, _ in shape.made)]
    insert = sa.insert(shape.table).from_select(
        names, sa.select(*given.c, *made), include_defaults=False
    )
    if not shape.returned:
        return insert.inline()
    return insert.returning(*(shape.table.c[name] for name in ("id", *shape.returned)))


class _elements(FunctionElement[Any]):
    name = "given"
    inherit_cache = True


@compiles(_elements, "sqlite")
def _sqlite(element: _elements, compiler: Any, **options: Any) -> str:
    return f"json_each{compiler.process(element.clause_expr, **options)}"


@compiles(_elements, "postgresql")
def _postgresql(element: _elements, compiler: Any, **options: Any) -> str:
    return f"jsonb_array_elements{compiler.process(element.clause_expr, **options)}"


def given(name: str, **fields: type) -> sa.Subquery:
    """Rows that a statement gets as its parameter of this name: a list of dicts with these fields.

    fields: str, int or dict, for a document. A parameter for each value would make another
    statement for each number of rows, and both drivers would parse it anew.
    """
    each = _elements(sa.bindparam(name, type_=_JSON)).table_valued("value").c.value
    return sa.select(*(_field(each, *field) for field in fields.items())).subquery(name)


def _field(document: sa.ColumnElement[Any], name: str, kind: type) -> sa.Label[Any]:
    key: sa.ColumnClause[str] = sa.literal_column(f"'{name}'")
    if kind is dict:
        return sa.type_coerce(document.op("->")(key), _JSON).label(name)
    text = sa.type_coerce(document.op("->>")(key), sa.Text())
    return (text if kind is str else sa.cast(text, sa.BigInteger())).label(name)


def literal(value: str) -> sa.ColumnElement[str]:
    """A state in the statement itself, because with a parameter no planner can match a partial
    index.
    """
    return sa.literal_column(f"'{value}'", sa.Text)


def literals(states: Iterable[str]) -> list[sa.ColumnElement[str]]:
    """The same for several states."""
    return [literal(state) for state in states]


def new_id() -> str:
    """A new random identifier."""
    return str(uuid.uuid4())


class _Ordered:
    """UUID version 8 of RFC 9562: nanoseconds since the machine started, then random bits."""

    def __init__(self) -> None:
        self._last = 0
        self._lock = threading.Lock()

    def __call__(self) -> str:
        with self._lock:
            self._last = max(time.monotonic_ns(), self._last + 1)
            high, low = divmod(self._last, 1 << 12)
        value = high << 80 | 8 << 76 | low << 64 | 2 << 62 | secrets.randbits(62)
        return str(uuid.UUID(int=value))


# A new identifier that sorts as text behind every earlier identifier of this process. It decides
# the order where the database's clock (whole milliseconds in SQLite) does not. It is not a time.
ordered_id = _Ordered()


@overload
def first(conn: sa.Connection, query: sa.Select[Any]) -> Record | None: ...
@overload
def first(conn: sa.Connection, query: sa.Select[Any], kind: type[R]) -> R | None: ...
def first(conn: sa.Connection, query: sa.Select[Any], kind: type[R] | None = None) -> Any:
    """The first row or None, as this kind or as a dict of the query's columns."""
    row = conn.execute(query.limit(1)).mappings().first()
    return None if row is None else (kind or dict)(**row)


@overload
def every(conn: sa.Connection, query: sa.Select[Any]) -> list[Record]: ...
@overload
def every(conn: sa.Connection, query: sa.Select[Any], kind: type[T]) -> list[T]: ...
def every(conn: sa.Connection, query: sa.Select[Any], kind: type[T] | None = None) -> Any:
    """All rows, as this kind or as dicts of the query's columns."""
    make = kind or dict
    return [make(**row) for row in conn.execute(query).mappings()]


def get(conn: sa.Connection, kind: type[R], key: str, *, lock: bool = False) -> R:
    """The row with an id; Problem `<entity>_not_found` when it does not exist.

    lock: keep other writers of the row out until the transaction ends. The lock admits inserts of
    rows that refer to this row: otherwise a launch would wait for the transaction that locked its
    node, which in turn may wait for the launch's slots.
    """
    row = conn.execute(_by_id(kind.TABLE, lock=lock), {"key": key}).mappings().first()
    if row is None:
        raise not_found(kind.ENTITY, key)
    return kind(**row)


@cache
def _by_id(table: sa.Table, *, lock: bool) -> sa.Select[Any]:
    query = sa.select(table).where(table.c.id == sa.bindparam("key"))
    return query.with_for_update(key_share=True) if lock else query


def of_project(
    conn: sa.Connection, kind: type[R], project_id: str, key: str, *, lock: bool = False
) -> R:
    """The project's row with an id. To a project, the rows of others do not exist."""
    # Read before it is locked, so that a project cannot lock the rows of another.
    row = get(conn, kind, key)
    if vars(row)["project_id"] != project_id:
        raise not_found(kind.ENTITY, key)
    return get(conn, kind, key, lock=True) if lock else row


def add(conn: sa.Connection, kind: type[R], values: Mapping[str, Any]) -> R:
    """Insert a row and return it as stored; a value may be an SQL expression.

    The INSERT returns only the columns that the database makes, because reading a wide row takes
    longer than writing it.
    """
    table = kind.TABLE
    plain, made = _split(table, values)
    returned = (*made, *(name for name in _generated(table) if name not in plain))
    row = kind(**{name: plain.get(name) for name in _names(table)})
    shape = Shape(table, tuple(plain), tuple(made.items()), returned)
    # Columns that the database makes are filled in when the batch is written. Until then only the
    # writer has the row.
    _insert(conn, BatchRow(shape, plain, vars(row)))
    return row


def insert(conn: sa.Connection, table: sa.Table, values: Mapping[str, Any]) -> None:
    """Insert a row without returning it."""
    plain, made = _split(table, values)
    shape = Shape(table, tuple(plain), tuple(made.items()), ())
    _insert(conn, BatchRow(shape, plain, {}))


def conflict_insert(dialect: str, table: sa.Table) -> postgresql.Insert | sqlite.Insert:
    """An INSERT that may say what is done when the row exists already."""
    return (postgresql.insert if dialect == "postgresql" else sqlite.insert)(table)


def _split(table: sa.Table, values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Values that are parameters of the statement, and SQL expressions that are part of it."""
    made = {name: value for name, value in values.items() if isinstance(value, sa.ClauseElement)}
    plain = {name: value() if callable(value) else value for name, value in _defaults(table)}
    plain.update(values)
    for name in made:
        del plain[name]
    made.update((name, value) for name, value in _expressions(table) if name not in values)
    return plain, made


@cache
def _names(table: sa.Table) -> tuple[str, ...]:
    return tuple(column.name for column in table.columns)


@cache
def _generated(table: sa.Table) -> tuple[str, ...]:
    """Columns that the database fills: computed columns, and the row number of a log."""
    number = table.autoincrement_column
    computed = [column.name for column in table.columns if column.computed is not None]
    return (*computed, number.name) if number is not None else tuple(computed)


@cache
def _defaults(table: sa.Table) -> tuple[tuple[str, Any], ...]:
    """Default values of columns."""
    return tuple(
        # The default of a document column is its type, so that each row gets a new empty value.
        (column.name, column.info.get("holds", column.default.arg))
        for column in table.columns
        if isinstance(column.default, sa.ColumnDefault) and not column.default.is_clause_element
    )


@cache
def _expressions(table: sa.Table) -> tuple[tuple[str, sa.ColumnElement[Any]], ...]:
    """Defaults of columns that are SQL expressions."""
    return tuple(
        (column.name, column.default.arg)
        for column in table.columns
        if isinstance(column.default, sa.ColumnDefault) and column.default.is_clause_element
    )


def where(query: sa.Select[Any], table: sa.Table, **values: Any) -> sa.Select[Any]:
    """Filter the query by column values; None means no filter on that column."""
    for name, value in values.items():
        if value is not None:
            query = query.where(table.c[name] == value)
    return query

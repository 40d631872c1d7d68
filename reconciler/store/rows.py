"""Reading rows as dictionaries."""

from __future__ import annotations

import secrets
import threading
import time
import uuid
from collections.abc import Mapping
from functools import cache
from typing import Any

import sqlalchemy as sa

from reconciler.domain.errors import not_found
from reconciler.store import together
from reconciler.store.together import Record, Row, Shape

__all__ = ["Record"]


def new_id() -> str:
    """A fresh identifier."""
    return str(uuid.uuid4())


class _Ordered:
    """Version 8 of RFC 9562: nanoseconds since the machine started, then what nobody can guess."""

    def __init__(self) -> None:
        self._last = 0
        self._lock = threading.Lock()

    def __call__(self) -> str:
        with self._lock:
            self._last = max(time.monotonic_ns(), self._last + 1)
            high, low = divmod(self._last, 1 << 12)
        value = high << 80 | 8 << 76 | low << 64 | 2 << 62 | secrets.randbits(62)
        return str(uuid.UUID(int=value))


# A fresh identifier, as text behind all that this process has given: it decides where the
# database's clock, of whole milliseconds in SQLite, sees no order. It tells no time.
ordered_id = _Ordered()


def first(conn: sa.Connection, query: sa.Select[Any]) -> Record | None:
    """The first row, if there is one."""
    row = conn.execute(query.limit(1)).mappings().first()
    return None if row is None else dict(row)


def every(conn: sa.Connection, query: sa.Select[Any]) -> list[Record]:
    """All rows."""
    return [dict(row) for row in conn.execute(query).mappings()]


def get(
    conn: sa.Connection, table: sa.Table, key: str, entity: str, *, lock: bool = False
) -> Record:
    """The row with an id; lock keeps other writers of it out until the transaction ends.

    Not those who write rows that point to it: a launch would wait for whoever holds its node, who
    may wait for its slots.
    """
    query = sa.select(table).where(table.c.id == key)
    row = first(conn, query.with_for_update(key_share=True) if lock else query)
    if row is None:
        raise not_found(entity, key)
    return row


def add(conn: sa.Connection, table: sa.Table, values: Mapping[str, Any]) -> Record:
    """Insert a row and give it back as stored; a value may be an SQL expression.

    Only what the database makes itself is asked back: reading a wide row takes longer than to
    write it.
    """
    plain, made = _split(table, values)
    asked = (*made, *(name for name in _generated(table) if name not in plain))
    record = {name: plain.get(name) for name in _names(table)}
    shape = Shape(table, tuple(plain), tuple(made.items()), asked)
    together.insert(conn, Row(shape, plain, record))
    return record


def tell(conn: sa.Connection, table: sa.Table, values: Mapping[str, Any]) -> None:
    """Insert a row that the writer has no further use for."""
    plain, made = _split(table, values)
    shape = Shape(table, tuple(plain), tuple(made.items()), ())
    together.insert(conn, Row(shape, plain, {}))


def _split(table: sa.Table, values: Mapping[str, Any]) -> tuple[Record, dict[str, Any]]:
    """What goes beside the statement, and the SQL expressions that are part of it."""
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
    """What the database fills by itself: numbers of a log, and what it derives."""
    number = table.autoincrement_column
    found = [column.name for column in table.columns if column.computed is not None]
    return (*found, number.name) if number is not None else tuple(found)


@cache
def _defaults(table: sa.Table) -> tuple[tuple[str, Any], ...]:
    """What a column holds when nobody says."""
    return tuple(
        # A document's is its type: an empty one of it for each row.
        (column.name, column.info.get("holds", column.default.arg))
        for column in table.columns
        if isinstance(column.default, sa.ColumnDefault) and not column.default.is_clause_element
    )


@cache
def _expressions(table: sa.Table) -> tuple[tuple[str, sa.ColumnElement[Any]], ...]:
    """The same for what the database is to work out."""
    return tuple(
        (column.name, column.default.arg)
        for column in table.columns
        if isinstance(column.default, sa.ColumnDefault) and column.default.is_clause_element
    )


def where(query: sa.Select[Any], table: sa.Table, **wanted: Any) -> sa.Select[Any]:
    """Narrow the query to the columns that have a wanted value; None wants nothing."""
    for name, value in wanted.items():
        if value is not None:
            query = query.where(table.c[name] == value)
    return query

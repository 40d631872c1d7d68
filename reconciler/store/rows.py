"""Reading rows as dictionaries."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Any

import sqlalchemy as sa

from reconciler.domain.errors import not_found

Record = dict[str, Any]


def new_id() -> str:
    """A fresh identifier."""
    return str(uuid.uuid4())


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
    """The row with an id; lock keeps other writers of it out until the transaction ends."""
    query = sa.select(table).where(table.c.id == key)
    row = first(conn, query.with_for_update() if lock else query)
    if row is None:
        raise not_found(entity, key)
    return row


def add(conn: sa.Connection, table: sa.Table, values: Mapping[str, Any]) -> Record:
    """Insert a row and give it back as stored; a value may be an SQL expression."""
    computed = {
        name: value for name, value in values.items() if isinstance(value, sa.ClauseElement)
    }
    statement = sa.insert(table).returning(table)
    if computed:
        statement = statement.values(computed)
    # Beside the statement, not in it: building one around each value takes longer than to run it.
    plain = {name: value for name, value in values.items() if name not in computed}
    return dict(conn.execute(statement, plain).mappings().one())


def where(query: sa.Select[Any], table: sa.Table, **wanted: Any) -> sa.Select[Any]:
    """Narrow the query to the columns that have a wanted value; None wants nothing."""
    for name, value in wanted.items():
        if value is not None:
            query = query.where(table.c[name] == value)
    return query

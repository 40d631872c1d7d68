"""Rows that go into the database at once, in one statement where the engine can."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.sql.dml import ReturningInsert

Record = dict[str, Any]
Made = tuple[tuple[str, sa.ColumnElement[Any]], ...]

_KEPT = "gpuaas_kept_together"


@dataclass(frozen=True)
class Shape:
    """What is alike in rows that one INSERT takes: columns that are given, and those asked back.

    made: given as SQL expressions.
    """

    table: sa.Table
    plain: tuple[str, ...]
    made: Made
    asked: tuple[str, ...]


@dataclass(frozen=True)
class Row:
    """record: where the columns that are asked back go."""

    shape: Shape
    plain: Record
    record: Record


@contextmanager
def together(conn: sa.Connection) -> Iterator[None]:
    """What is inserted meanwhile is written at the end, in the same transaction.

    Columns that the database makes are in the records only then. Whoever fails in here after
    something was inserted has the whole transaction undone: what was done beside it, such as the
    change of a state, may not be committed without it.
    """
    # Held here: a connection that was lost meanwhile has another one, or refuses to say.
    info = conn.info
    if _KEPT in info:
        yield
        return
    kept: list[Row] = []
    info[_KEPT] = kept
    try:
        yield
    except BaseException:
        transaction = conn.get_transaction()
        if kept and transaction is not None:
            transaction.rollback()
        raise
    finally:
        info.pop(_KEPT, None)
    _write(conn, kept)


def insert(conn: sa.Connection, row: Row) -> None:
    """Insert the row, now or with the others."""
    kept: list[Row] | None = conn.info.get(_KEPT)
    if kept is None:
        _single(conn, row)
    else:
        kept.append(row)


def _write(conn: sa.Connection, kept: Sequence[Row]) -> None:
    if conn.dialect.name != "postgresql":
        for row in kept:
            _single(conn, row)
        return
    alike: dict[Shape, list[Row]] = {}
    for row in kept:
        alike.setdefault(row.shape, []).append(row)
    given = {
        f"rows{number}": [row.plain for row in rows] for number, rows in enumerate(alike.values())
    }
    asking = {row.plain["id"]: row for row in kept if row.shape.asked}
    for found in conn.execute(_combined(tuple(alike)), given).mappings():
        row = asking[found["id"]]
        row.record.update({name: found[name] for name in row.shape.asked})


def _single(conn: sa.Connection, row: Row) -> None:
    found = conn.execute(_one(row.shape), row.plain)
    if row.shape.asked:
        row.record.update(found.mappings().one())


@lru_cache(maxsize=256)
def _one(shape: Shape) -> sa.Insert:
    values: Record = {name: sa.bindparam(name) for name in shape.plain}
    insert = sa.insert(shape.table).values(values | dict(shape.made))
    if not shape.asked:
        return insert.inline()
    return insert.returning(*(shape.table.c[name] for name in shape.asked))


@lru_cache(maxsize=64)
def _combined(shapes: tuple[Shape, ...]) -> sa.Select[Any] | sa.CompoundSelect[Any]:
    """One statement with an INSERT for each shape; its rows: ids, and what was asked for."""
    parts = [(shape, _into(shape, f"rows{at}").cte(f"into{at}")) for at, shape in enumerate(shapes)]
    silent = [part for shape, part in parts if not shape.asked]
    asked = {name: shape.table.c[name].type for shape in shapes for name in shape.asked}
    found = [
        sa.select(
            part.c.id,
            *(
                part.c[name] if name in shape.asked else sa.cast(sa.null(), kind).label(name)
                for name, kind in asked.items()
            ),
        )
        for shape, part in parts
        if shape.asked
    ]
    if not found:
        return sa.select(sa.literal("").label("id")).where(sa.false()).add_cte(*silent)
    return sa.union_all(*found).add_cte(*silent)


def _into(shape: Shape, name: str) -> sa.Insert | ReturningInsert[Any]:
    # All rows are one parameter: psycopg takes a statement apart anew each time that has many.
    columns = [sa.column(name, shape.table.c[name].type) for name in shape.plain]
    rows = sa.func.jsonb_to_recordset(sa.bindparam(name, type_=JSONB()))
    given = rows.table_valued(*columns).render_derived(name, with_types=True)
    made = [value.label(name) for name, value in shape.made]
    names = [*shape.plain, *(name for name, _ in shape.made)]
    insert = sa.insert(shape.table).from_select(
        names, sa.select(*given.c, *made), include_defaults=False
    )
    if not shape.asked:
        return insert.inline()
    return insert.returning(*(shape.table.c[name] for name in ("id", *shape.asked)))

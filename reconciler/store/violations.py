"""What the checks of the invariants answer, and how they read more than fits into memory."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import Any

import sqlalchemy as sa

from reconciler.store.rows import Record

# Rows that are read at once.
_AT_ONCE = 500


@dataclass(frozen=True)
class Violation:
    """invariant: I1 … I20, or the CTRL row that promises it. subject: by kind and id."""

    invariant: str
    subject: str
    found: str


Found = Iterator[Violation]


def stream(conn: sa.Connection, query: sa.Select[Any]) -> Iterator[Record]:
    """The rows, a few at a time."""
    for row in conn.execute(query, execution_options={"yield_per": _AT_ONCE}).mappings():
        yield dict(row)


def beside(
    conn: sa.Connection, *queries: sa.Select[Any]
) -> Iterator[tuple[str, tuple[list[Record], ...]]]:
    """What each query has of a key, its first column; never all of a site's past at once."""
    streams = (_in_order(conn, number, query) for number, query in enumerate(queries))
    for key, rows_of in groupby(heapq.merge(*streams, key=itemgetter(0)), key=itemgetter(0)):
        found: tuple[list[Record], ...] = tuple([] for _ in queries)
        for _, number, row in rows_of:
            found[number].append(row)
        yield key, found


def _in_order(
    conn: sa.Connection, number: int, query: sa.Select[Any]
) -> Iterator[tuple[str, int, Record]]:
    key = query.selected_columns[0]
    # As Python compares: the database's own order may be that of a language.
    order = sa.collate(key, "C" if conn.dialect.name == "postgresql" else "BINARY")
    for row in stream(conn, query.order_by(order)):
        yield row[key.name], number, row

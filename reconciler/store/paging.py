"""Lists in parts: each part goes on behind the last row of the one before it.

What is added or removed meanwhile neither repeats a row nor hides one: a part begins behind a
place in the order, not behind a number of rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

Key = str | int | float


@dataclass(frozen=True)
class Order:
    """The columns by which a list is sorted; together they are unique among its rows."""

    table: sa.Table | sa.Subquery
    columns: tuple[str, ...]
    descending: bool = False

    def keys(self, row: Mapping[str, Any]) -> tuple[Key, ...]:
        """The row's place in the list."""
        return tuple(row[name] for name in self.columns)

    def fits(self, keys: tuple[object, ...]) -> bool:
        """Whether these can be the keys of a row."""
        wanted = [self.table.c[name].type.python_type for name in self.columns]
        return [type(key) for key in keys] == wanted


@dataclass(frozen=True)
class Page:
    """At most `limit` rows behind the place `after`; () is the beginning."""

    limit: int
    after: tuple[Key, ...] = ()


def part(query: sa.Select[Any], order: Order, page: Page | None) -> sa.Select[Any]:
    """The query in this order, narrowed to one page; None is the whole list."""
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

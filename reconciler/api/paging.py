"""Lists page by page: `limit` rows, and a cursor that says where the next page begins."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import Depends, Query

from reconciler.api import views
from reconciler.db.rows import Key, Order, Page
from reconciler.model.errors import Problem

Record = dict[str, Any]

DEFAULT_LIMIT = 100
# A page is read in one transaction and held in memory as a whole.
LIMIT = 1000
_LONGEST_CURSOR = 1024
# The widest whole number that both databases take.
_WIDEST = 1 << 63


@dataclass(frozen=True)
class Part:
    """Which part of a list the caller wants."""

    limit: int
    cursor: str

    def page(self, order: Order) -> Page:
        """As the store reads it: one row more than shown tells whether there is a next page."""
        return Page(self.limit + 1, _keys(self.cursor, order) if self.cursor else ())

    def told(
        self,
        order: Order,
        rows: Sequence[Record],
        tell: Callable[[Record], Any] = views.record,
    ) -> Record:
        """One page, as every list route answers it; `next` is null on the last."""
        shown = rows[: self.limit]
        more = len(rows) > self.limit
        return {
            "items": [tell(row) for row in shown],
            "next": _cursor(order, shown[-1]) if more else None,
        }


def _part(
    limit: Annotated[
        int, Query(ge=1, le=LIMIT, description="At most so many items.")
    ] = DEFAULT_LIMIT,
    cursor: Annotated[
        str, Query(max_length=_LONGEST_CURSOR, description="`next` of the page before.")
    ] = "",
) -> Part:
    return Part(limit, cursor)


Paging = Annotated[Part, Depends(_part)]


def _cursor(order: Order, row: Record) -> str:
    # It holds nothing that its reader was not shown, and opens nothing: the query it goes into is
    # the caller's own.
    place = json.dumps([order.table.name, *order.keys(row)]).encode()
    return base64.urlsafe_b64encode(place).decode().rstrip("=")


def _keys(cursor: str, order: Order) -> tuple[Key, ...]:
    try:
        padded = cursor.encode("ascii") + b"=" * (-len(cursor) % 4)
        place = json.loads(base64.b64decode(padded, b"-_", validate=True), parse_constant=_refuse)
    except (UnicodeError, binascii.Error, ValueError, RecursionError) as error:
        raise _invalid() from error
    if not isinstance(place, list) or place[:1] != [order.table.name]:
        raise _invalid()
    keys = tuple(place[1:])
    if not order.fits(keys) or not all(_storable(key) for key in keys):
        raise _invalid()
    return keys


def _storable(key: Key) -> bool:
    if isinstance(key, str):
        # Half a surrogate pair is JSON, but no text that a database takes.
        return "\0" not in key and not any("\ud800" <= letter <= "\udfff" for letter in key)
    return isinstance(key, float) or -_WIDEST <= key < _WIDEST


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no place in a list")


def _invalid() -> Problem:
    return Problem(
        "cursor_invalid",
        400,
        expected="`next` of a page of this list",
        found="another text",
        remedy="begin again without a cursor",
    )

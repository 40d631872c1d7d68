"""Requests and answers: correlation ids, paging, ETags and idempotency keys."""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Annotated, Any, Generic, TypeVar

from fastapi import Depends, Header, Query, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field
from sqlalchemy import Connection

from reconciler.api.models import Answer, Record
from reconciler.db import locks
from reconciler.db.rows import Key, Order, Page
from reconciler.db.schema import Row
from reconciler.model.act import invalid_idempotency_key, require_idempotency_key
from reconciler.model.errors import Problem

T = TypeVar("T")
R = TypeVar("R", bound=Row | Record)

# -- Correlation ids ----------------------------------------------------------------------------

CORRELATION_HEADER = "X-Correlation-Id"


def correlation_id(request: Request) -> str:
    """Correlation id of the request: from the caller or newly made. Every record and log line that
    the request leads to carries it.
    """
    return str(request.scope.get("correlation_id", ""))


def body_size(headers: Mapping[str, str]) -> int:
    """Bytes of the body that a request states; 0 without a number."""
    length = headers.get("content-length", "")
    return int(length) if length.isdecimal() else 0


# -- Paging -------------------------------------------------------------------------------------

DEFAULT_LIMIT = 100
# A page is read in a transaction and held in memory as a whole.
LIMIT = 1000
_LONGEST_CURSOR = 1024
# Both databases store integers below this limit.
_INTEGER_LIMIT = 1 << 63


class PageOf(Answer, Generic[T]):
    """A page of a list."""

    items: list[T]
    next: str | None = Field(description="The `cursor` of the next page; null on the last.")


@dataclass(frozen=True)
class PageRequest:
    """The part of a list that the caller requested."""

    limit: int
    cursor: str

    def page(self, order: Order) -> Page:
        """The page to read. It has an extra row, which shows whether another page follows."""
        return Page(self.limit + 1, _decode_cursor(self.cursor, order) if self.cursor else ())

    def answer(self, order: Order, rows: Sequence[R], items: Iterable[T]) -> PageOf[T]:
        """The answer for the rows of `page` and the items that were made of them."""
        more = len(rows) > self.limit
        next = _encode_cursor(order, rows[self.limit - 1]) if more else None
        return PageOf[T](items=list(islice(items, self.limit)), next=next)


def _page_request(
    limit: Annotated[
        int, Query(ge=1, le=LIMIT, description="The largest number of items in the answer.")
    ] = DEFAULT_LIMIT,
    cursor: Annotated[
        str, Query(max_length=_LONGEST_CURSOR, description="`next` of the previous page.")
    ] = "",
) -> PageRequest:
    return PageRequest(limit, cursor)


Paging = Annotated[PageRequest, Depends(_page_request)]


def _encode_cursor(order: Order, row: Row | Record) -> str:
    # A cursor needs no signature: it holds only values that its reader has seen, and it only
    # positions the caller's own query.
    place = json.dumps([order.table.name, *order.keys(row)]).encode()
    return base64.urlsafe_b64encode(place).decode().rstrip("=")


def _decode_cursor(cursor: str, order: Order) -> tuple[Key, ...]:
    try:
        padded = cursor.encode("ascii") + b"=" * (-len(cursor) % 4)
        place = json.loads(
            base64.b64decode(padded, b"-_", validate=True), parse_constant=_refuse_constant
        )
    except (UnicodeError, binascii.Error, ValueError, RecursionError) as error:
        raise _invalid_cursor() from error
    if not isinstance(place, list) or place[:1] != [order.table.name]:
        raise _invalid_cursor()
    keys = tuple(place[1:])
    if not order.fits(keys) or not all(_storable(key) for key in keys):
        raise _invalid_cursor()
    return keys


def _storable(key: Key) -> bool:
    if isinstance(key, str):
        # JSON allows half a surrogate pair, databases do not.
        return "\0" not in key and not any("\ud800" <= letter <= "\udfff" for letter in key)
    return isinstance(key, float) or -_INTEGER_LIMIT <= key < _INTEGER_LIMIT


def _refuse_constant(constant: str) -> None:
    raise ValueError(f"{constant} is no place in a list")


def _invalid_cursor() -> Problem:
    return Problem(
        "cursor_invalid",
        400,
        expected="the value of `next` in a page of this list",
        found="another value",
        remedy="begin again without a cursor",
    )


# -- ETag and If-Match --------------------------------------------------------------------------

# A weak tag never matches in If-Match (RFC 9110). Both databases store the number.
_TAG = re.compile(r'(?<!W/)"(\d{1,18})"')


@dataclass(frozen=True)
class Guard:
    """The generations on which the caller decided; None when any generation is accepted."""

    generations: frozenset[int] | None

    def check(self, conn: Connection, entity: str, key: str) -> None:
        """Problem `precondition_failed` when the record has changed since the caller read it."""
        if self.generations is not None:
            locks.require_generation(conn, entity, key, self.generations)


def _guard(
    if_match: Annotated[
        str | None,
        Header(
            alias="If-Match",
            max_length=200,
            description="The ETag on which the caller decided; 412 when it is outdated.",
        ),
    ] = None,
) -> Guard:
    if if_match is None or if_match.strip() == "*":
        return Guard(None)
    # A malformed tag counts as a tag that the record does not have.
    return Guard(frozenset(int(number) for number in _TAG.findall(if_match)))


IfMatch = Annotated[Guard, Depends(_guard)]


def etag(document: Mapping[str, Any]) -> dict[str, str]:
    """The ETag header of a record: its generation, which every change raises. Empty for a document
    without a generation.
    """
    generation = document.get("generation")
    return {} if generation is None else {"ETag": f'"{generation}"'}


def tagged(answer: Answer) -> JSONResponse:
    """The answer with its ETag."""
    document = encode(answer)
    return JSONResponse(document, headers=etag(document))


def encode(answer: BaseModel) -> Record:
    """The answer as JSON values."""
    return answer.model_dump(mode="json", by_alias=True)


# -- Idempotency keys ---------------------------------------------------------------------------

IDEMPOTENCY_HEADERS = ("Idempotency-Key", "X-Idempotency-Key")


def idempotency_key(headers: Mapping[str, str]) -> str:
    """The request's idempotency key, from either header; "" if there is none."""
    keys = {headers[name] for name in IDEMPOTENCY_HEADERS if name in headers}
    if not keys:
        return ""
    if len(keys) > 1:
        raise invalid_idempotency_key("one key, in one of its two headers", "two different keys")
    return require_idempotency_key(keys.pop())

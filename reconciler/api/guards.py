"""ETag and If-Match: a record's ETag is its generation, which every change of it raises."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import Depends, Header
from fastapi.responses import JSONResponse
from sqlalchemy import Connection

from reconciler.db import locks

Record = dict[str, Any]

# A weak tag never matches in If-Match (RFC 9110); the number is one that both databases take.
_TAG = re.compile(r'(?<!W/)"(\d{1,18})"')


@dataclass(frozen=True)
class Guard:
    """generations: those on which the caller decided; None when any will do."""

    generations: frozenset[int] | None

    def check(self, conn: Connection, entity: str, key: str) -> None:
        """Problem precondition_failed when the record has changed since the caller read it."""
        if self.generations is not None:
            locks.require_generation(conn, entity, key, self.generations)


def _guard(
    if_match: Annotated[
        str | None,
        Header(max_length=200, description="The ETag that was decided on; 412 if it is old."),
    ] = None,
) -> Guard:
    if if_match is None or if_match.strip() == "*":
        return Guard(None)
    # What is no tag of ours is a tag that the record does not have.
    return Guard(frozenset(int(number) for number in _TAG.findall(if_match)))


IfMatch = Annotated[Guard, Depends(_guard)]


def tag(document: Record) -> dict[str, str]:
    """The header with which the document goes out; none for what has no generation."""
    generation = document.get("generation")
    return {} if generation is None else {"ETag": f'"{generation}"'}


def tagged(document: Record) -> JSONResponse:
    """The document with its ETag."""
    return JSONResponse(document, headers=tag(document))

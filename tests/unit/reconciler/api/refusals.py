"""Checks of refusals: a code, three texts, and an unchanged database."""

from __future__ import annotations

from collections.abc import Callable
from http import HTTPStatus
from typing import Any

import sqlalchemy as sa

from reconciler.db.engine import reading
from reconciler.db.schema import metadata
from tests.unit.reconciler.api.stack import Stack


def kept(stack: Stack) -> dict[str, list[Any]]:
    """Every row of every table: slots, claims, allocations, tasks, history, outbox, audit."""
    with reading(stack.engine) as conn:
        return {
            table.name: list(conn.execute(sa.select(table).order_by(*table.primary_key)))
            for table in metadata.sorted_tables
        }


def refused(stack: Stack, ask: Callable[[], Any]) -> dict[str, Any]:
    """The document with which the request is refused; it must have changed nothing."""
    before = kept(stack)
    answer = ask()
    document: dict[str, Any] = answer.json()
    assert HTTPStatus.BAD_REQUEST <= answer.status_code < HTTPStatus.INTERNAL_SERVER_ERROR
    assert all(document[name] for name in ("code", "expected", "found", "remedy")), document
    assert kept(stack) == before, document["code"]
    return document

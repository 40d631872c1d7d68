"""What every refusal has in common: a code, three texts, and a database as it was."""

from __future__ import annotations

from collections.abc import Callable
from http import HTTPStatus
from typing import Any

import sqlalchemy as sa

from reconciler.db.engine import reading
from reconciler.db.schema import metadata
from tests.unit.reconciler.api.world import World


def kept(world: World) -> dict[str, list[Any]]:
    """Every row of every table: slots, claims, allocations, tasks, history, outbox, audit."""
    with reading(world.engine) as conn:
        return {
            table.name: list(conn.execute(sa.select(table).order_by(*table.primary_key)))
            for table in metadata.sorted_tables
        }


def refused(world: World, ask: Callable[[], Any]) -> dict[str, Any]:
    """The document with which the request is refused; it must have changed nothing."""
    before = kept(world)
    answer = ask()
    document: dict[str, Any] = answer.json()
    assert HTTPStatus.BAD_REQUEST <= answer.status_code < HTTPStatus.INTERNAL_SERVER_ERROR
    assert all(document[name] for name in ("code", "expected", "found", "remedy")), document
    assert kept(world) == before, document["code"]
    return document

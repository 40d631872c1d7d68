"""An update that was decided on one picture of a record is refused once the picture is old."""

from __future__ import annotations

from collections.abc import Collection

import sqlalchemy as sa

from reconciler.domain.errors import Problem
from reconciler.store import order, rows
from reconciler.store.lifecycle import ENTITIES


def require(conn: sa.Connection, entity: str, key: str, generations: Collection[int]) -> None:
    """Hold the record until the transaction ends; refuse unless it is at one of these."""
    if entity == "slot":
        # What is asked for may have to judge it.
        order.hold_slot(conn, key)
    elif entity == "task":
        # Its end changes what it is about, and that is locked first.
        order.hold_task(conn, key)
    found = rows.get(conn, ENTITIES[entity].table, key, entity, lock=True)["generation"]
    if found not in generations:
        raise Problem(
            "precondition_failed",
            412,
            expected=f"{entity} {key} at the generation that If-Match names",
            found=f"generation {found}",
            remedy=f"read the {entity} again, decide anew, and send its ETag",
            detail={"generation": found},
        )

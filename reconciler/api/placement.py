"""Where a launch would go, and why not: the scheduler's judgement of every node."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query
from sqlalchemy import Connection

from reconciler.api.models import Filter
from reconciler.api.security import Admin
from reconciler.lifecycle import placement
from reconciler.model.scheduler.snapshot import Want

router = APIRouter(prefix="/admin/placement", tags=["placement"])

Record = dict[str, Any]


@router.get("/explain")
def explain(
    context: Admin,
    gpus: Annotated[int, Query(ge=1, le=1024, description="Of the slice.")],
    *,
    region: Filter = None,
    pool: Filter = None,
    node_id: Filter = None,
) -> Record:
    """Judge a request as a launch would, and reserve nothing."""
    want = Want(gpus, region or "", pool or "", node_id or "")

    def read(conn: Connection) -> Record:
        found, explanation = placement.judge(conn, want)
        if found is None:
            return {"placement": None, "explanation": explanation}
        score = found.score._asdict()
        place = {"node_id": found.node_id, "slot_ids": found.slot_ids, "score": score}
        return {"placement": place, "explanation": explanation}

    return context.read(read)

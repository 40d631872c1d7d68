"""Placement: where a launch would go, and why not elsewhere."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query
from pydantic import Field
from sqlalchemy import Connection
from typing_extensions import TypeAliasType

from reconciler.api.models import Answer, Filter
from reconciler.api.security import Admin
from reconciler.lifecycle import placement
from reconciler.model import hardware
from reconciler.profiles import profile_offers

router = APIRouter(prefix="/admin/placement", tags=["placement"])

SlotCounts = TypeAliasType(
    "SlotCounts",
    Annotated[
        dict[str, int], Field(description="Slots by the code of the reason why they are not free.")
    ],
)


class PlacementScore(Answer):
    """Compared field by field in this order; the lowest wins."""

    clean: int
    numa_nodes: int
    switches: int
    left: int
    odd: int
    odd_near: int
    node_id: str
    indexes: list[int]


class Placement(Answer):
    """The node and the slots that a launch would get."""

    node_id: str
    slot_ids: list[str]
    score: PlacementScore


class NearestRequest(Answer):
    """A similar request that would be placed."""

    gpus: int
    region: str
    pool: str


class NodeExplanation(Answer):
    """The slots of one node, and the largest slice that it could give."""

    node_id: str
    slots: int
    free: int
    largest: int
    reasons: SlotCounts


class Explanation(Answer):
    """Every slot is counted once: free, or under one reason. Only the nearest nodes are listed."""

    summary: str
    wanted: int
    free: int
    largest: int
    slots: int
    reasons: SlotCounts
    nearest: list[NearestRequest]
    nodes: list[NodeExplanation]
    nodes_left_out: int


class PlacementJudgement(Answer):
    """The scheduler's decision about a request; placement is null when nothing fits."""

    placement: Placement | None
    explanation: Explanation


@router.get("/explain")
def explain(
    context: Admin,
    gpus: Annotated[int, Query(ge=1, le=1024, description="GPUs of the slice.")],
    *,
    region: Filter = None,
    pool: Filter = None,
    node_id: Filter = None,
) -> PlacementJudgement:
    """Judge a request as a launch would, and reserve nothing."""
    offers = profile_offers(context.settings.profiles_dir)
    want = hardware.want(offers, gpus, region=region or "", pool=pool or "", node_id=node_id or "")

    def read(conn: Connection) -> PlacementJudgement:
        placed, explanation = placement.judge(conn, want)
        return PlacementJudgement.of({"placement": placed, "explanation": explanation})

    return context.read(read)

"""Where a request goes: feasible, then the best, or an explanation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from reconciler.planning.feasible import feasible
from reconciler.planning.score import Score, choose
from reconciler.planning.snapshot import Snapshot, Want


@dataclass(frozen=True)
class Placement:
    """All slots are on one node; the first is the one the machine boots from."""

    node_id: str
    slot_ids: tuple[str, ...]
    score: Score


@dataclass(frozen=True)
class NoFit:
    """Nothing fits, and why."""

    explanation: dict[str, Any]


def place(snapshot: Snapshot, want: Want) -> Placement | None:
    """The same snapshot and the same want always give the same answer; None: nothing fits."""
    options = [choose(feasible(node, want), want.gpus) for node in snapshot.nodes]
    found = [option for option in options if option]
    if not found:
        return None
    score, group = min(found, key=lambda option: option[0])
    return Placement(score.node_id, tuple(slot.id for slot in group), score)

"""Placement of a bare-metal request: the best feasible machine, or an explanation. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from reconciler.model.scheduler.explain import TOLD, counted
from reconciler.model.scheduler.place import NoFit


@dataclass(frozen=True, kw_only=True)
class MachineView:
    """A node. refusal: why it cannot be given, "" when it can. sliced: it was a slice host."""

    id: str
    region: str = ""
    pool: str = ""
    profile: str = ""
    refusal: str = ""
    sliced: bool = False


@dataclass(frozen=True)
class MachineWant:
    """A request; an empty field means "any". profiles: hardware profiles that fit."""

    region: str = ""
    pool: str = ""
    node_id: str = ""
    profiles: tuple[str, ...] = ()


def choose(machines: Iterable[MachineView], want: MachineWant) -> str | NoFit:
    """The id of a node. Deterministic: the same machines and want give the same answer.

    Nodes that were never slice hosts come first, because the others have approved slots to go back
    to.
    """
    judged = [(machine, _reason(machine, want)) for machine in machines]
    free = [machine for machine, reason in judged if not reason]
    if free:
        return min(free, key=lambda machine: (machine.sliced, machine.id)).id
    return NoFit(_explain(judged))


def _reason(machine: MachineView, want: MachineWant) -> str:
    for wanted, found, reason in (
        (want.node_id, machine.id, "other_node"),
        (want.region, machine.region, "other_region"),
        (want.pool, machine.pool, "other_pool"),
    ):
        if wanted and wanted != found:
            return reason
    if want.profiles and machine.profile not in want.profiles:
        return "other_sku"
    return machine.refusal


def _explain(judged: list[tuple[MachineView, str]]) -> dict[str, Any]:
    """Explanation in the form of `scheduler.explain`, with a machine as the unit."""
    nodes = [
        {"node_id": machine.id, "slots": 1, "free": 0, "largest": 0, "reasons": {reason: 1}}
        for machine, reason in sorted(judged, key=lambda pair: pair[0].id)
    ]
    return {
        "summary": "no machine free",
        "wanted": 1,
        "free": 0,
        "largest": 0,
        "slots": len(nodes),
        "reasons": counted(Counter(reason for _, reason in judged)),
        "nearest": [],
        "nodes": nodes[:TOLD],
        "nodes_not_told": max(0, len(nodes) - TOLD),
    }

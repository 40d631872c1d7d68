"""Explanation of a failed placement ("8 GPUs free, no 4 on one node"), with alternatives."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from reconciler.model.scheduler.feasible import Feasible, feasible
from reconciler.model.scheduler.place import largest, place
from reconciler.model.scheduler.snapshot import Snapshot, Want

Explanation = dict[str, Any]

# Most nodes that are listed, the nearest to fitting first. The sums cover all nodes.
TOLD = 50


def explain(snapshot: Snapshot, want: Want) -> Explanation:
    """Explain a request. Each slot is counted once: as free, or under the reason why it is not.

    largest: the most GPUs that a single node could give a slice now. nearest: requests that would
    be placed, the most similar first.
    """
    judged = [feasible(node, want) for node in snapshot.nodes]
    fits = {node.node.id: largest(node) for node in judged}
    reasons = sum((node.reasons for node in judged), Counter[str]())
    free = sum(len(node.free) for node in judged)
    most = max(fits.values(), default=0)
    ranked = sorted(judged, key=lambda node: (-fits[node.node.id], -len(node.free), node.node.id))
    return {
        "summary": _summary(judged, free, most, want.gpus),
        "wanted": want.gpus,
        "free": free,
        "largest": most,
        "slots": sum(len(node.node.slots) for node in judged),
        "reasons": counted(reasons),
        "nearest": _nearest(snapshot, want, most),
        "nodes": [_node(node, fits[node.node.id]) for node in ranked[:TOLD]],
        "nodes_not_told": max(0, len(ranked) - TOLD),
    }


def public(explanation: Mapping[str, Any]) -> Explanation:
    """The part that a tenant may see: sums without nodes."""
    hidden = ("nodes", "nodes_not_told")
    return {key: value for key, value in explanation.items() if key not in hidden}


def counted(reasons: Counter[str]) -> dict[str, int]:
    """Counts by reason, the most frequent first."""
    return dict(sorted(reasons.items(), key=lambda pair: (-pair[1], pair[0])))


def _node(judged: Feasible, fits: int) -> dict[str, Any]:
    return {
        "node_id": judged.node.id,
        "slots": len(judged.node.slots),
        "free": len(judged.free),
        "largest": fits,
        "reasons": counted(judged.reasons),
    }


def _nearest(snapshot: Snapshot, want: Want, most: int) -> list[dict[str, Any]]:
    if _fits(snapshot, want, want.gpus):
        return []
    found = []
    # The whole request in any region and pool; a requested node stays requested.
    placed = place(snapshot, replace(want, region="", pool=""))
    if placed and (want.region or want.pool):
        node = next(node for node in snapshot.nodes if node.id == placed.node_id)
        found.append({"gpus": want.gpus, "region": node.region, "pool": node.pool})
    for fewer in range(min(most, want.gpus - 1), 0, -1):
        if _fits(snapshot, want, fewer):
            found.append({"gpus": fewer, "region": want.region, "pool": want.pool})
            break
    return found


def _fits(snapshot: Snapshot, want: Want, gpus: int) -> bool:
    return place(snapshot, replace(want, gpus=gpus)) is not None


def _summary(judged: list[Feasible], free: int, most: int, wanted: int) -> str:
    noun = "GPU" if free == 1 else "GPUs"
    if not free:
        return "no GPU free"
    if max(len(node.free) for node in judged) >= wanted > most:
        return f"{free} {noun} free, no {wanted} that NVLink joins on one node"
    if most < wanted:
        return f"{free} {noun} free, no {wanted} on one node"
    return f"{free} {noun} free, {most} on one node"

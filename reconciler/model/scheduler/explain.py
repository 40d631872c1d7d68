"""Explanation of a failed placement ("8 GPUs free, no 4 on one node"), with alternatives."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from reconciler.model.scheduler.place import largest, place
from reconciler.model.scheduler.snapshot import (
    Feasible,
    NodeView,
    Snapshot,
    Want,
    feasible,
    refusal,
)

Explanation = dict[str, Any]

# Most nodes that are listed, the nearest to fitting first. The sums cover all nodes.
LISTED = 50


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
        "reasons": _by_frequency(reasons),
        "nearest": _nearest(snapshot, want, most),
        "nodes": [_node(node, fits[node.node.id]) for node in ranked[:LISTED]],
        "nodes_left_out": max(0, len(ranked) - LISTED),
    }


def explain_machines(nodes: Iterable[NodeView], want: Want) -> Explanation:
    """Explain why no whole machine is free, in the form of `explain` with a machine as the unit."""
    reasons = {node.id: refusal(node, want) for node in nodes}
    listed = [
        {"node_id": key, "slots": 1, "free": 0, "largest": 0, "reasons": {reasons[key]: 1}}
        for key in sorted(reasons)
    ]
    return {
        "summary": "no machine free",
        "wanted": 1,
        "free": 0,
        "largest": 0,
        "slots": len(listed),
        "reasons": _by_frequency(Counter(reasons.values())),
        "nearest": [],
        "nodes": listed[:LISTED],
        "nodes_left_out": max(0, len(listed) - LISTED),
    }


def public(explanation: Mapping[str, Any]) -> Explanation:
    """The part that a tenant may see: sums without nodes."""
    hidden = ("nodes", "nodes_left_out")
    return {key: value for key, value in explanation.items() if key not in hidden}


def _by_frequency(reasons: Counter[str]) -> dict[str, int]:
    return dict(sorted(reasons.items(), key=lambda pair: (-pair[1], pair[0])))


def _node(judged: Feasible, fits: int) -> dict[str, Any]:
    return {
        "node_id": judged.node.id,
        "slots": len(judged.node.slots),
        "free": len(judged.free),
        "largest": fits,
        "reasons": _by_frequency(judged.reasons),
    }


def _nearest(snapshot: Snapshot, want: Want, most: int) -> list[dict[str, Any]]:
    if _fits(snapshot, want, want.gpus):
        return []
    offers = []
    # The whole request in any region and pool; a requested node stays requested.
    placed = place(snapshot, replace(want, region="", pool=""))
    if placed and (want.region or want.pool):
        node = next(node for node in snapshot.nodes if node.id == placed.node_id)
        offers.append({"gpus": want.gpus, "region": node.region, "pool": node.pool})
    for fewer in range(min(most, want.gpus - 1), 0, -1):
        if _fits(snapshot, want, fewer):
            offers.append({"gpus": fewer, "region": want.region, "pool": want.pool})
            break
    return offers


def _fits(snapshot: Snapshot, want: Want, gpus: int) -> bool:
    return place(snapshot, replace(want, gpus=gpus)) is not None


def _summary(judged: list[Feasible], free: int, most: int, gpus: int) -> str:
    noun = "GPU" if free == 1 else "GPUs"
    if not free:
        return "no GPU free"
    roomy = [node for node in judged if len(node.free) >= gpus]
    if roomy and gpus > most:
        joined = any(node.node.nvlink_sets for node in roomy)
        where = "that NVLink joins on one node" if joined else "on one NUMA node"
        return f"{free} {noun} free, no {gpus} {where}"
    if most < gpus:
        return f"{free} {noun} free, no {gpus} on one node"
    return f"{free} {noun} free, {most} on one node"

"""Where to put a request: the best of the nodes on which it fits. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, NamedTuple

from reconciler.model.scheduler.feasible import Feasible, feasible
from reconciler.model.scheduler.snapshot import NvlinkSets, SlotView, Snapshot, Want

Group = tuple[SlotView, ...]
# Slots that only their index tells apart, the lowest first.
Cell = list[SlotView]


class Score(NamedTuple):
    """Compared from the left.

    clean: 1 for a node without slices: those are kept for bare metal.
    numa_nodes, switches: across how many the group spreads; less is nearer.
    left: free slots that stay on the node; few is good, so that large gaps stay whole.
    odd: those of them that share a NUMA node, and odd_near those that share a PCIe switch, with
    the group: what is broken into is used up first.
    node_id, indexes: make the order total.
    """

    clean: int
    numa_nodes: int
    switches: int
    left: int
    odd: int
    odd_near: int
    node_id: str
    indexes: tuple[int, ...]


def choose(node: Feasible, count: int) -> tuple[Score, Group] | None:
    """The best group of `count` slots of the node, the one that it boots from first."""
    options = ((score(node, group), group) for group in groups(node, count))
    best = min(options, key=lambda option: option[0], default=None)
    return None if best is None else (best[0], _boot_first(best[1]))


def score(node: Feasible, group: Sequence[SlotView]) -> Score:
    """Rank the group on its node."""
    numa = {slot.numa_node for slot in group}
    near = {_place(slot) for slot in group}
    left = len(node.free) - len(group)
    beside = sum(slot.numa_node in numa for slot in node.free) - len(group)
    close = sum(_place(slot) in near for slot in node.free) - len(group)
    return Score(
        clean=0 if node.sliced else 1,
        numa_nodes=len(numa),
        switches=len(near),
        left=left,
        odd=beside,
        odd_near=close,
        node_id=node.node.id,
        indexes=tuple(sorted(slot.index for slot in group)),
    )


def groups(node: Feasible, count: int) -> Iterator[Group]:
    """Every group that may serve one slice, but for those that only swap equal slots."""
    if not 1 <= count <= len(node.free):
        return
    if count > 1 and node.node.nvlink_sets:
        yield from _allowed(node.free, node.node.nvlink_sets, count)
        return
    cells: dict[tuple[int, str], Cell] = {}
    for slot in node.free:
        cells.setdefault(_place(slot), []).append(slot)
    yield from _spread([cells[place] for place in sorted(cells)], count)


def largest(node: Feasible) -> int:
    """The most GPUs that one slice can have on the node now."""
    sizes = range(len(node.free), 0, -1)
    return next((size for size in sizes if next(groups(node, size), None)), 0)


def _allowed(free: Sequence[SlotView], sets: NvlinkSets, count: int) -> Iterator[Group]:
    by_module = {slot.module: slot for slot in reversed(free) if slot.module >= 0}
    for modules in sorted(sorted(one) for one in sets if len(one) == count):
        if all(module in by_module for module in modules):
            yield tuple(by_module[module] for module in modules)


def _spread(cells: list[Cell], count: int) -> Iterator[Group]:
    """Every way to take `count` slots out of the cells, from each cell its first ones."""
    for width in range(1, min(len(cells), count) + 1):
        for chosen in combinations(cells, width):
            if sum(map(len, chosen)) >= count:
                yield from _fill(chosen, count)


def _fill(cells: Sequence[Cell], count: int) -> Iterator[Group]:
    """At least one of each of the cells, `count` together."""
    cell, *rest = cells
    if not rest:
        if 1 <= count <= len(cell):
            yield tuple(cell[:count])
        return
    room = sum(map(len, rest))
    for taken in range(max(1, count - room), min(len(cell), count - len(rest)) + 1):
        for others in _fill(rest, count - taken):
            yield (*cell[:taken], *others)


def _place(slot: SlotView) -> tuple[int, str]:
    return slot.numa_node, slot.switch


def _boot_first(group: Group) -> Group:
    """The larger part first: the boot slot and most of the memory sit on one NUMA node."""
    share = Counter(slot.numa_node for slot in group)
    return tuple(
        sorted(group, key=lambda slot: (-share[slot.numa_node], slot.numa_node, slot.index))
    )


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

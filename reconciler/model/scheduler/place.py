"""Placement: the best group of slots over all nodes, or the best whole machine. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import NamedTuple

from reconciler.model.scheduler.snapshot import (
    Feasible,
    NodeView,
    NvlinkSets,
    SlotView,
    Snapshot,
    Want,
    feasible,
    refusal,
)

Group = tuple[SlotView, ...]
# Slots that differ only in their index, the lowest first.
Cell = list[SlotView]


class Score(NamedTuple):
    """Rank of a group; fields are compared from the left, and the lowest wins.

    clean: 1 for a node without slices, because such nodes are kept for bare metal.
    numa_nodes, switches: number of those that the group spreads over; fewer is nearer.
    left: free slots that stay on the node. Fewer is better, so that large gaps stay whole.
    odd, odd_near: remaining free slots on the group's NUMA nodes, and on its PCIe switches. Fewer
    is better, so that partly used ones are filled first.
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
    """The best group of `count` slots of the node, with the boot slot first."""
    options = ((score(node, group), group) for group in groups(node, count))
    best = min(options, key=lambda option: option[0], default=None)
    return None if best is None else (best[0], _boot_first(best[1]))


def score(node: Feasible, group: Sequence[SlotView]) -> Score:
    """Score of the group on its node."""
    numa = {slot.numa_node for slot in group}
    near = {_position(slot) for slot in group}
    left = len(node.free) - len(group)
    beside = sum(slot.numa_node in numa for slot in node.free) - len(group)
    close = sum(_position(slot) in near for slot in node.free) - len(group)
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
    """Every group that may serve a slice, without groups that only swap equal slots."""
    if not 1 <= count <= len(node.free):
        return
    for free in [node.free] if node.spans else by_numa(node.free):
        if count > 1 and node.node.nvlink_sets:
            yield from _allowed(free, node.node.nvlink_sets, count)
            continue
        cells: dict[tuple[int, str], Cell] = {}
        for slot in free:
            cells.setdefault(_position(slot), []).append(slot)
        yield from _spread([cells[position] for position in sorted(cells)], count)


def by_numa(slots: Iterable[SlotView]) -> list[Cell]:
    """The slots by NUMA node. Slots of an unknown node count as neighbours."""
    parts: dict[int, Cell] = {}
    for slot in slots:
        parts.setdefault(slot.numa_node, []).append(slot)
    return [parts[node] for node in sorted(parts)]


def largest(node: Feasible) -> int:
    """The most GPUs that a slice can have on the node now."""
    sizes = range(len(node.free), 0, -1)
    return next((size for size in sizes if next(groups(node, size), None)), 0)


def _allowed(free: Sequence[SlotView], sets: NvlinkSets, count: int) -> Iterator[Group]:
    by_module = {slot.module: slot for slot in reversed(free) if slot.module >= 0}
    for modules in sorted(sorted(modules) for modules in sets if len(modules) == count):
        if all(module in by_module for module in modules):
            yield tuple(by_module[module] for module in modules)


def _spread(cells: list[Cell], count: int) -> Iterator[Group]:
    """Every way to take `count` slots out of the cells, always the first slots of a cell."""
    for width in range(1, min(len(cells), count) + 1):
        for chosen in combinations(cells, width):
            if sum(map(len, chosen)) >= count:
                yield from _fill(chosen, count)


def _fill(cells: Sequence[Cell], count: int) -> Iterator[Group]:
    """Every way to take `count` slots, with at least 1 from each cell."""
    cell, *rest = cells
    if not rest:
        if 1 <= count <= len(cell):
            yield tuple(cell[:count])
        return
    room = sum(map(len, rest))
    for taken in range(max(1, count - room), min(len(cell), count - len(rest)) + 1):
        for others in _fill(rest, count - taken):
            yield (*cell[:taken], *others)


def _position(slot: SlotView) -> tuple[int, str]:
    return slot.numa_node, slot.switch


def _boot_first(group: Group) -> Group:
    """Larger NUMA part first, so that the boot slot and most memory share a NUMA node."""
    share = Counter(slot.numa_node for slot in group)
    return tuple(
        sorted(group, key=lambda slot: (-share[slot.numa_node], slot.numa_node, slot.index))
    )


@dataclass(frozen=True)
class Placement:
    """Chosen slots, all on the same node. The machine boots from the first slot."""

    node_id: str
    slot_ids: tuple[str, ...]
    score: Score


def place(snapshot: Snapshot, want: Want) -> Placement | None:
    """Best placement; None when nothing fits. The same snapshot and want give the same answer."""
    options = [choose(feasible(node, want), want.gpus) for node in snapshot.nodes]
    feasible_options = [option for option in options if option]
    if not feasible_options:
        return None
    score, group = min(feasible_options, key=lambda option: option[0])
    return Placement(score.node_id, tuple(slot.id for slot in group), score)


def choose_machine(nodes: Iterable[NodeView], want: Want, sliced: Collection[str]) -> str | None:
    """The id of the best machine, None when none is free. Deterministic like `place`.

    sliced: nodes that were slice hosts. They come last, because they have approved slots to go back
    to.
    """
    free = [node.id for node in nodes if not refusal(node, want)]
    return min(free, key=lambda key: (key in sliced, key), default=None)

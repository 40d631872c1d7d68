"""Scheduler snapshot: an immutable view of nodes and their slots."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

NvlinkSets = frozenset[frozenset[int]]


@dataclass(frozen=True, kw_only=True)
class SlotView:
    """An approved slot.

    switch: the PCIe bridge that its GPU shares with its neighbours, "" when unknown.
    module: the GPU's place on the NVLink board, -1 when unknown; it is not the PCI order.
    complete: every field of its bundle is known. fabric: address of its fabric function.
    own_function: the fabric function is a virtual function of this slot alone.
    """

    id: str
    index: int
    status: str
    numa_node: int = -1
    switch: str = ""
    module: int = -1
    complete: bool = True
    exclusive_device: bool = True
    proven: bool = True
    fabric: str = ""
    own_function: bool = True


@dataclass(frozen=True, kw_only=True)
class NodeView:
    """A node. refusal: why it takes nothing new, "" when it does.

    nvlink_sets: groups of modules that may serve a slice of several GPUs; without any set, every
    group may. They are the possible partitions of the NVSwitches, so a single GPU needs no set.
    """

    id: str
    region: str = ""
    pool: str = ""
    profile: str = ""
    refusal: str = ""
    slots: tuple[SlotView, ...] = ()
    nvlink_sets: NvlinkSets = frozenset()


@dataclass(frozen=True)
class Snapshot:
    """Some or all nodes at the same moment."""

    nodes: tuple[NodeView, ...]

    @classmethod
    def of(cls, nodes: Iterable[NodeView]) -> Snapshot:
        """Snapshot ordered by id, so that placement does not depend on the order of its input."""
        return cls(tuple(sorted(nodes, key=lambda node: node.id)))

    def without(self, slot_ids: frozenset[str]) -> Snapshot:
        """Copy without the slots of these ids."""
        return Snapshot(
            tuple(
                NodeView(
                    id=node.id,
                    region=node.region,
                    pool=node.pool,
                    profile=node.profile,
                    refusal=node.refusal,
                    slots=tuple(slot for slot in node.slots if slot.id not in slot_ids),
                    nvlink_sets=node.nvlink_sets,
                )
                for node in self.nodes
            )
        )


@dataclass(frozen=True)
class Want:
    """A request; an empty field means "any". profiles: hardware profiles that fit."""

    gpus: int
    region: str = ""
    pool: str = ""
    node_id: str = ""
    profiles: tuple[str, ...] = ()

"""What the scheduler knows: an immutable picture of nodes and their slots."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

NvlinkSets = frozenset[frozenset[int]]


@dataclass(frozen=True, kw_only=True)
class SlotView:
    """One approved slot.

    switch: the PCIe bridge that its GPU shares with its neighbours, "" when nobody said.
    module: the GPU's place on the NVLink board, -1 when nobody said; it is not the PCI order.
    complete: every field of its bundle is known. fabric: address of its fabric function;
    own_function says that it is a virtual function of this slot alone.
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
    """One node; refusal is why it takes nothing new, "" when it does.

    nvlink_sets: the groups of modules that may serve one slice of several GPUs; without any, all
    may. They are what the NVSwitches can be partitioned into, so a lone GPU needs none.
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
    """Some or all nodes at one moment."""

    nodes: tuple[NodeView, ...]

    @classmethod
    def of(cls, nodes: Iterable[NodeView]) -> Snapshot:
        """Ordered by id, so that what follows depends on nothing else."""
        return cls(tuple(sorted(nodes, key=lambda node: node.id)))

    def without(self, slot_ids: frozenset[str]) -> Snapshot:
        """The same without some slots."""
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
    """What is asked for; empty means: any. profiles: the hardware that will do."""

    gpus: int
    region: str = ""
    pool: str = ""
    node_id: str = ""
    profiles: tuple[str, ...] = ()

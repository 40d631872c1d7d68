"""Scheduler snapshot: nodes, their slots, and which slots are feasible for a request."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace

from reconciler.model.states import IDLE_SLOTS, SlotState

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
                replace(node, slots=tuple(slot for slot in node.slots if slot.id not in slot_ids))
                for node in self.nodes
            )
        )


@dataclass(frozen=True)
class Refusal:
    """Why a hardware profile does not serve a request: the parts of a Problem. found: "" for the
    number of GPUs.
    """

    code: str
    expected: str
    remedy: str
    found: str = ""
    status: int = 422


@dataclass(frozen=True)
class Want:
    """A request; an empty field means "any".

    profiles: hardware profiles that fit. barred: other profiles, with the reason. spanning:
    profiles whose slices may span NUMA nodes.
    """

    gpus: int
    region: str = ""
    pool: str = ""
    node_id: str = ""
    profiles: tuple[str, ...] = ()
    barred: tuple[tuple[str, Refusal], ...] = ()
    spanning: tuple[str, ...] = ()


@dataclass(frozen=True)
class Feasible:
    """Free slots of a node. reasons: the count of all other slots by reason code.

    spans: whether a slice may have GPUs of several NUMA nodes.
    """

    node: NodeView
    free: tuple[SlotView, ...]
    reasons: Counter[str]
    spans: bool = False

    @property
    def sliced(self) -> bool:
        """True when a tenant's slice is already on the node."""
        return any(slot.status not in IDLE_SLOTS for slot in self.node.slots)


def feasible(node: NodeView, want: Want) -> Feasible:
    """Check every slot separately. An incomplete `available` row does not count as free."""
    refused = refusal(node, want)
    reasons: Counter[str] = Counter()
    free: list[SlotView] = []
    taken = {slot.fabric for slot in node.slots if slot.fabric and slot.status not in IDLE_SLOTS}
    for slot in sorted(node.slots, key=lambda slot: (slot.index, slot.id)):
        reason = refused or _reason(slot, taken)
        if reason:
            reasons[reason] += 1
        else:
            free.append(slot)
            # A card that several slots name can serve a single slice, so the first slot takes it.
            if slot.fabric and not slot.own_function:
                taken.add(slot.fabric)
    return Feasible(node, tuple(free), reasons, node.profile in want.spanning)


def refusal(node: NodeView, want: Want) -> str:
    """Reason code why nothing on the node serves the request. "" when something may."""
    for requested, value, reason in (
        (want.node_id, node.id, "other_node"),
        (want.region, node.region, "other_region"),
        (want.pool, node.pool, "other_pool"),
    ):
        if requested and requested != value:
            return reason
    if want.profiles and node.profile not in want.profiles:
        return "other_sku"
    for profile, barred in want.barred:
        if profile == node.profile:
            return barred.code
    return node.refusal


def _reason(slot: SlotView, taken: set[str]) -> str:
    if slot.status != SlotState.AVAILABLE:
        return str(slot.status)
    if not slot.exclusive_device:
        return "fractional"
    if not slot.complete:
        return "incomplete"
    if not slot.proven:
        return "unproven"
    if slot.fabric in taken:
        return "fabric_taken"
    return ""

"""Which slots could be given at all, and why the others cannot."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from reconciler.model.scheduler.snapshot import NodeView, SlotView, Want
from reconciler.model.states import SlotState

IDLE = (SlotState.AVAILABLE, SlotState.DISABLED)


@dataclass(frozen=True)
class Feasible:
    """The free slots of one node; reasons counts what is not free, by code."""

    node: NodeView
    free: tuple[SlotView, ...]
    reasons: Counter[str]

    @property
    def sliced(self) -> bool:
        """True when a tenant's slice is already on the node."""
        return any(slot.status not in IDLE for slot in self.node.slots)


def feasible(node: NodeView, want: Want) -> Feasible:
    """Judge every slot by itself: an `available` row that is incomplete counts as not there."""
    refusal = _refusal(node, want)
    reasons: Counter[str] = Counter()
    free: list[SlotView] = []
    taken = {slot.fabric for slot in node.slots if slot.fabric and slot.status not in IDLE}
    for slot in sorted(node.slots, key=lambda slot: (slot.index, slot.id)):
        reason = refusal or _reason(slot, taken)
        if reason:
            reasons[reason] += 1
        else:
            free.append(slot)
            # A card that several slots name can serve one slice: the first takes it.
            if slot.fabric and not slot.own_function:
                taken.add(slot.fabric)
    return Feasible(node, tuple(free), reasons)


def _refusal(node: NodeView, want: Want) -> str:
    for wanted, found, reason in (
        (want.node_id, node.id, "other_node"),
        (want.region, node.region, "other_region"),
        (want.pool, node.pool, "other_pool"),
    ):
        if wanted and wanted != found:
            return reason
    if want.profiles and node.profile not in want.profiles:
        return "other_sku"
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

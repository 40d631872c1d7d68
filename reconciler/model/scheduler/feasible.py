"""Feasible slots of a node for a request, and the reasons against the others."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from reconciler.model.scheduler.snapshot import NodeView, SlotView, Want
from reconciler.model.states import SlotState

IDLE = (SlotState.AVAILABLE, SlotState.DISABLED)


@dataclass(frozen=True)
class Feasible:
    """Free slots of a node. reasons: the count of all other slots by reason code."""

    node: NodeView
    free: tuple[SlotView, ...]
    reasons: Counter[str]

    @property
    def sliced(self) -> bool:
        """True when a tenant's slice is already on the node."""
        return any(slot.status not in IDLE for slot in self.node.slots)


def feasible(node: NodeView, want: Want) -> Feasible:
    """Check every slot separately. An incomplete `available` row does not count as free."""
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
            # A card that several slots name can serve a single slice, so the first slot takes it.
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

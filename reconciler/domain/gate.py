"""May this slot become available? The rules of decisions 9 and 10, over what is known."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from reconciler.domain import discovery
from reconciler.domain.bundle import Bundle
from reconciler.domain.discovery import Blocker
from reconciler.domain.proof import DEFAULT_POLICY, accepts
from reconciler.domain.states import NodeMode, NodeState


@dataclass(frozen=True)
class Sighting:
    """A discovery or parity report: when its run started, and on which boot and installation."""

    observed_at: float
    boot_id: str
    install_id: str
    document: Mapping[str, Any]
    failures: int = 0


@dataclass(frozen=True)
class Proof:
    """The slot's newest proof of a clean disk.

    method: how it was wiped; None when nothing was written since the proof before.
    """

    disk_identity: str
    disk_generation: int
    recorded_at: float
    method: str | None


@dataclass(frozen=True, kw_only=True)
class GateEvidence:
    """Everything that the gate looks at; None where there is nothing.

    others: the bundles of the node's other slots.
    """

    bundle: Bundle
    approved_at: float
    disk_generation: int
    node_state: str
    node_mode: str
    boot_id: str
    install_id: str
    reboot_required: bool
    discovery: Sighting | None
    parity: Sighting | None
    proof: Proof | None
    exclusive_ended_at: float = 0.0
    wipe_policy: str = DEFAULT_POLICY
    others: tuple[Bundle, ...] = ()


def blockers(evidence: GateEvidence) -> tuple[Blocker, ...]:
    """What keeps the slot from being sold, all of it; empty when the gate is open."""
    found = [*_node(evidence)]
    missing = evidence.bundle.missing()
    if missing:
        found.append(Blocker("bundle_incomplete", f"nothing for {', '.join(missing)}"))
    proof = _proof(evidence)
    found.extend(proof)
    found.extend(_sighting("discovery", evidence.discovery, evidence))
    if evidence.discovery is not None:
        found.extend(_discovery(evidence, evidence.discovery))
    found.extend(_sighting("parity", evidence.parity, evidence))
    if evidence.parity is not None and evidence.parity.failures:
        found.append(Blocker("parity_failed", f"{evidence.parity.failures} checks fail"))
    return tuple(found)


def _node(evidence: GateEvidence) -> list[Blocker]:
    found = []
    if evidence.node_mode != NodeMode.SLICE:
        found.append(Blocker("node_not_slice", f"the node's mode is {evidence.node_mode}"))
    if evidence.node_state not in (NodeState.READY, NodeState.DRAINING, NodeState.MAINTENANCE):
        found.append(Blocker("node_not_ready", f"the node is {evidence.node_state}"))
    if evidence.reboot_required:
        found.append(Blocker("reboot_required", "the host must be rebooted first"))
    return found


def _proof(evidence: GateEvidence) -> list[Blocker]:
    proof = evidence.proof
    if proof is None:
        return [Blocker("proof_missing", "no proof that the disk is clean")]
    if proof.disk_identity != evidence.bundle.identity:
        return [Blocker("proof_mismatch", f"the proof is for {proof.disk_identity}")]
    if (
        proof.disk_generation != evidence.disk_generation
        or proof.recorded_at < evidence.exclusive_ended_at
    ):
        return [Blocker("proof_outdated", "the disk has been given to a tenant since the proof")]
    if proof.method is not None and not accepts(evidence.wipe_policy, proof.method):
        refused = f"{proof.method} does not satisfy the policy {evidence.wipe_policy}"
        return [Blocker("proof_class_refused", refused)]
    return []


def _sighting(name: str, sighting: Sighting | None, evidence: GateEvidence) -> list[Blocker]:
    if sighting is None:
        return [Blocker(f"{name}_missing", f"no {name} of this node")]
    stale = [
        reason
        for wrong, reason in (
            (not evidence.boot_id or sighting.boot_id != evidence.boot_id, "before the last boot"),
            (
                not evidence.install_id or sighting.install_id != evidence.install_id,
                "under another installation or host key",
            ),
            (sighting.observed_at < evidence.approved_at, "before the approval"),
        )
        if wrong
    ]
    return [Blocker(f"{name}_stale", f"taken {' and '.join(stale)}")] if stale else []


def _discovery(evidence: GateEvidence, sighting: Sighting) -> list[Blocker]:
    document = sighting.document
    proof = evidence.proof
    # A discovery taken while a tenant had the disk shows the tenant's use of it; the wipe proof
    # is newer. Without this, a slot could only come back after another discovery.
    use = proof is None or sighting.observed_at >= proof.recorded_at
    found = [
        *discovery.node_blockers(document),
        *discovery.bundle_blockers(document, evidence.bundle, use=use, others=evidence.others),
    ]
    if document.get("reboot_required"):
        found.append(Blocker("reboot_required", "the host must be rebooted first"))
    return [Blocker(f"discovery:{row.code}", row.detail) for row in found]

"""May this slot become available? The rules of decisions 9 and 10, over what is known."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from reconciler.model import discovery
from reconciler.model.bundle import Bundle
from reconciler.model.discovery import Blocker
from reconciler.model.proof import DEFAULT_POLICY, accepts
from reconciler.model.states import NodeMode, NodeState

# What speaks of launches that the host failed, rather than of what the host is seen to be.
FAILING = ("launch_failed", "launches_failed")


@dataclass(frozen=True)
class Sighting:
    """A discovery or parity report: when its run started, and on which boot and installation."""

    observed_at: float
    boot_id: str
    install_id: str
    document: Mapping[str, Any]
    failures: int = 0


@dataclass(frozen=True)
class DiskProof:
    """The slot's newest proof of a clean disk.

    method: how it was wiped; None when nothing was written since the proof before. install_id: the
    installation of the host that gave it; another one's ledger knows nothing of it.
    """

    disk_identity: str
    disk_generation: int
    recorded_at: float
    method: str | None
    install_id: str


@dataclass(frozen=True)
class Failures:
    """Launches that failed on the host and touched nothing, one after the other.

    last_at: when the last one ended; last: its code.
    """

    count: int = 0
    last_at: float = 0.0
    last: str = ""


@dataclass(frozen=True, kw_only=True)
class GateEvidence:
    """Everything that the gate looks at; None where there is nothing.

    others: the bundles of the node's other slots. restored_at: when the records were restored from
    a backup, which does not know who had the disk since it was made; 0 for never. drift: what its
    host holds of the slot although nobody has it; "" when nothing of the kind is known.
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
    proof: DiskProof | None
    exclusive_ended_at: float = 0.0
    restored_at: float = 0.0
    wipe_policy: str = DEFAULT_POLICY
    others: tuple[Bundle, ...] = ()
    drift: str = ""
    failures: Failures = Failures()


def blockers(evidence: GateEvidence) -> tuple[Blocker, ...]:
    """What keeps the slot from being sold, all of it; empty when the gate is open."""
    found = [*_node(evidence)]
    missing = evidence.bundle.missing()
    if missing:
        found.append(Blocker("bundle_incomplete", f"nothing for {', '.join(missing)}"))
    if evidence.drift:
        found.append(Blocker("drift", evidence.drift))
    found.extend(_failures(evidence))
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


def _failures(evidence: GateEvidence) -> list[Blocker]:
    """What the host failed at is there for the next tenant, until it is shown that it is not."""
    failures = evidence.failures
    if failures.count >= MOST_FAILURES:
        told = f"{failures.count} launches in a row failed on the host, the last one: "
        return [Blocker("launches_failed", told + failures.last)]
    seen = (evidence.discovery, evidence.parity)
    if failures.count and any(one is None or one.observed_at < failures.last_at for one in seen):
        return [Blocker("launch_failed", f"not looked at since a launch failed: {failures.last}")]
    return []


def _proof(evidence: GateEvidence) -> list[Blocker]:
    proof = evidence.proof
    if proof is None:
        return [Blocker("proof_missing", "no proof that the disk is clean")]
    used = (
        proof.disk_generation != evidence.disk_generation
        or proof.recorded_at < evidence.exclusive_ended_at
    )
    elsewhere = not evidence.install_id or proof.install_id != evidence.install_id
    refused = proof.method is not None and not accepts(evidence.wipe_policy, proof.method)
    for wrong, code, why in (
        (
            proof.disk_identity != evidence.bundle.identity,
            "proof_mismatch",
            f"the proof is for {proof.disk_identity}",
        ),
        (used, "proof_outdated", "the disk has been given to a tenant since the proof"),
        (
            proof.recorded_at < evidence.restored_at,
            "proof_outdated",
            "the proof is from before the records were restored from a backup",
        ),
        (
            elsewhere,
            "proof_stale",
            "the disk was proven clean to another installation or host key",
        ),
        (
            refused,
            "proof_class_refused",
            f"{proof.method} does not satisfy the policy {evidence.wipe_policy}",
        ),
    ):
        if wrong:
            return [Blocker(code, why)]
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


# A launch that fails once may have met a moment; the second time, after the host was looked at and
# found well, what is wrong is something that no look shows.
MOST_FAILURES = 2
# The request, or our own side: another host would have failed as well, or none. After
# `boot_changed` the gate is closed by the new boot, if that was not proven meanwhile.
_ELSEWHERE = frozenset(
    {
        "boot_changed",
        "canceled",
        "deadline_passed",
        "run_not_started",
        "runner_unreadable",
        "variables_invalid",
    }
)


def fails_on_host(code: str) -> bool:
    """Whether a failure with this code may be there for the next launch as well.

    An image that cannot be had is so for all hosts, but for one that has no room for it: were it
    the host's, the failure of one image server would take a whole site off sale.
    """
    if code.startswith("image_"):
        return code == "image_no_room"
    return code not in _ELSEWHERE and not code.startswith("awx_")

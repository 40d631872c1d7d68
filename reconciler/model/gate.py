"""Gate of a slot: the rules by which it may be sold, applied to the recorded evidence."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from reconciler.model import discovery
from reconciler.model.bundle import Bundle
from reconciler.model.discovery import Blocker
from reconciler.model.proof import DEFAULT_POLICY, accepts
from reconciler.model.states import ANSWERING_NODES, NodeMode

# Parity check of the fabric's isolation, and the detail of a check that a profile leaves out.
ISOLATION_CHECK, NOT_APPLICABLE = "fabric_isolation", "not_applicable"

# Most blockers of a discovery, and the length of the host's text in one. Each change of a slot
# keeps them for ever. An honest host has no more, and its discovery has the whole texts.
MOST, LONGEST = 32, 300
# Blockers that come from failed launches and not from a report about the host.
FAILING = ("launch_failed", "launches_failed")


@dataclass(frozen=True)
class Sighting:
    """A discovery or parity report, with the start of its run and its boot and installation."""

    observed_at: float
    boot_id: str
    install_id: str
    document: Mapping[str, Any]
    failures: int = 0


@dataclass(frozen=True)
class DiskProof:
    """The slot's newest proof of a clean disk.

    method: how the disk was wiped; None when nothing was written since the previous proof.
    install_id: the host installation that gave the proof; another installation's ledger does not
    have it. gpu: address of the GPU that was reset with the wipe, "" without evidence.
    """

    disk_identity: str
    disk_generation: int
    recorded_at: float
    method: str | None
    install_id: str
    gpu: str = ""


@dataclass(frozen=True)
class Failures:
    """Consecutive launches that failed on the host without changing anything there.

    last_at: when the last launch ended; last: its code.
    """

    count: int = 0
    last_at: float = 0.0
    last: str = ""


@dataclass(frozen=True, kw_only=True)
class GateEvidence:
    """All input of the gate; None for evidence that does not exist.

    others: the bundles of the node's other slots. restored_at: when the records were restored from
    a backup, 0 for never; a backup lacks every use of the disk since it was made. drift: a trace on
    the host of a slot that no allocation has, "" without any. firmware: code of a blocker of the
    machine's firmware after a tenant was root on it. unwritable: code of a host on which no run can
    write.
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
    reinstall_required: bool = False
    firmware: str = ""
    unwritable: str = ""
    exclusive_ended_at: float = 0.0
    restored_at: float = 0.0
    wipe_policy: str = DEFAULT_POLICY
    others: tuple[Bundle, ...] = ()
    drift: str = ""
    partition: str = ""
    failures: Failures = Failures()


def blockers(evidence: GateEvidence) -> tuple[Blocker, ...]:
    """Every blocker that keeps the slot from being sold; empty when the gate is open."""
    blockers = [*_node(evidence)]
    missing = evidence.bundle.missing()
    if missing:
        blockers.append(Blocker("bundle_incomplete", f"nothing for {', '.join(missing)}"))
    if evidence.drift:
        blockers.append(Blocker("drift", evidence.drift))
    blockers.extend(_failures(evidence))
    proof = _proof(evidence)
    blockers.extend(proof)
    blockers.extend(_sighting("discovery", evidence.discovery, evidence))
    if evidence.discovery is not None:
        blockers.extend(_discovery(evidence, evidence.discovery))
    blockers.extend(_sighting("parity", evidence.parity, evidence))
    if evidence.parity is not None and evidence.parity.failures:
        blockers.append(Blocker("parity_failed", f"{evidence.parity.failures} checks fail"))
    blockers.extend(_fabric(evidence))
    if evidence.parity is not None:
        blockers.extend(_missing(evidence.bundle, evidence.parity))
        blockers.extend(_gpu(evidence, evidence.parity))
    return tuple(blockers)


def _missing(bundle: Bundle, parity: Sighting) -> Iterator[Blocker]:
    lost = parity.document.get("missing_devices", ())
    for device in (bundle.nvme_device, bundle.fabric_vf_pci_address):
        if device in lost:
            yield Blocker("device_missing", f"the host has no {device}")


def _gpu(evidence: GateEvidence, parity: Sighting) -> list[Blocker]:
    """Blockers of the GPU. The newer of parity and proof tells whether its reset still counts."""
    gpu, proof = evidence.bundle.gpu_pci_address, evidence.proof
    if gpu in parity.document.get("dead_gpus", ()):
        return [Blocker("gpu_dead", f"{gpu} is missing or does not answer")]
    reset_in = [gpu in parity.document.get("reset_gpus", ())]
    if proof is not None and proof.recorded_at > parity.observed_at:
        reset_in.append(proof.gpu == gpu)
    if any(reset_in):
        return []
    why = f"{gpu} was not reset since its last use: bind the topology, then run parity"
    return [Blocker("gpu_unproven", why)]


_FIRMWARE = {
    "firmware_unverified": "not compared with the firmware before the last tenant: run discovery",
    "firmware_changed": "it differs from before the last tenant (`gpuaas nodes firmware`)",
}


def _node(evidence: GateEvidence) -> list[Blocker]:
    blockers = []
    if evidence.node_mode != NodeMode.SLICE:
        blockers.append(Blocker("node_not_slice", f"the node's mode is {evidence.node_mode}"))
    if evidence.node_state not in ANSWERING_NODES:
        blockers.append(Blocker("node_not_ready", f"the node is {evidence.node_state}"))
    if evidence.reboot_required:
        blockers.append(Blocker("reboot_required", "the host must be rebooted first"))
    if evidence.reinstall_required:
        text = "a tenant was root on it: install it anew, then enrol it (`gpuaas nodes userdata`)"
        blockers.append(Blocker("reinstall_required", text))
    if evidence.firmware:
        blockers.append(Blocker(evidence.firmware, _FIRMWARE[evidence.firmware]))
    if evidence.unwritable:
        text = "no run can write there: repair it as the failed task says, then run discovery"
        blockers.append(Blocker(evidence.unwritable, text))
    return blockers


def _failures(evidence: GateEvidence) -> list[Blocker]:
    """Blockers after failed launches, because the cause may remain until reports exclude it."""
    failures = evidence.failures
    if failures.count >= MOST_FAILURES:
        text = f"{failures.count} launches in a row failed on the host, the last one: "
        return [Blocker("launches_failed", text + failures.last)]
    seen = (evidence.discovery, evidence.parity)
    if failures.count and any(
        report is None or report.observed_at < failures.last_at for report in seen
    ):
        return [Blocker("launch_failed", f"unverified since a launch failed: {failures.last}")]
    return []


def _fabric(evidence: GateEvidence) -> list[Blocker]:
    """Blocker of a fabric function that is not kept apart from those of other tenants."""
    if evidence.parity is None or not evidence.bundle.fabric_vf_pci_address:
        return []
    check = next(
        (
            row
            for row in discovery.section(evidence.parity.document, "checks")
            if row.get("check") == ISOLATION_CHECK
        ),
        {},
    )
    # The profile cannot declare this check not applicable.
    isolated = check.get("status") == "PASS" and check.get("detail") != NOT_APPLICABLE
    if isolated and not evidence.partition:
        return []
    actual = check.get("detail") or "no such check in the parity report"
    if isolated:
        actual = evidence.partition
    remedy = check.get("remediation") or "run parity again with this version"
    text = (
        f"expected {evidence.bundle.fabric_vf_pci_address} kept apart from other tenants,"
        f" found {actual}; {remedy}, or say fabric.isolation single_tenant in the profile"
    )
    return [Blocker("fabric_not_isolated", text[:2000])]


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
        (elsewhere, "proof_stale", "the disk was proven clean to another installation or host key"),
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
    # A discovery taken while a tenant had the disk shows the tenant's use of it, but a newer wipe
    # proof outdates that use. Otherwise a slot could come back only after another discovery.
    use = proof is None or sighting.observed_at >= proof.recorded_at
    blockers = [
        *discovery.node_blockers(document),
        *discovery.bundle_blockers(document, evidence.bundle, use=use, others=evidence.others),
    ]
    if document.get("reboot_required"):
        blockers.append(Blocker("reboot_required", "the host must be rebooted first"))
    return [Blocker(f"discovery:{row.code}", row.detail[:LONGEST]) for row in blockers[:MOST]]


# The first failed launch may have a temporary cause. After clean reports, a second failure has a
# cause that no report shows.
MOST_FAILURES = 2
# Failures by the request or by the reconciler, so that another host would fail too, or no host.
# Only the reconciler gives these codes.
_ELSEWHERE = frozenset(
    {
        "canceled",
        "deadline_passed",
        "fabric_guid_missing",
        "fabric_numbers_missing",
        "fabric_numbers_used_up",
        "run_not_started",
        "runner_unreadable",
        "variables_invalid",
    }
)


def fails_elsewhere(code: str) -> bool:
    """Whether only the reconciler gives this code, for a failure that is not of the host.

    A host could report such a code for every launch and would never be taken off sale.
    """
    return code in _ELSEWHERE or code.startswith(("awx_", "partition_", "ufm_"))


def fails_on_host(code: str) -> bool:
    """Whether the cause of a failure may be on the host and meet the next launch as well.

    A missing image affects all hosts, so it does not count: otherwise the failure of an image
    server would take a whole site off sale. Only a lack of room for an image is the host's own.
    After `boot_changed`, the new boot closes the gate until it is proven.
    """
    if code.startswith("image_"):
        return code == "image_no_room"
    return code != "boot_changed" and not fails_elsewhere(code)

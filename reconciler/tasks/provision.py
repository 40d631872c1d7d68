"""slice.vm_provision: claimed slots become a reachable VM, or are blocked until proven clean."""

from __future__ import annotations

from typing import Any

from reconciler.store import allocations, outcomes
from reconciler.tasks import boot, image, seed, wanted
from reconciler.tasks.handler import Failure, Handler, Work


def variables(work: Work) -> dict[str, Any]:
    allocation, slots = work.parameters["allocation"], work.parameters["slots"]
    boot.require_proven(work)
    return {
        "slice_allocation": allocation,
        "slice_slots": slots,
        "slice_image": image.document(work.settings, work.parameters["image"]),
        "slice_vm": machine(work.profile, len(slots)),
        "slice_seed": seed.documents(allocation, slots[0]["management_mac"]),
        "slice_ready_deadline": ready_deadline(work),
        "boot_id": work.parameters["boot_id"],
    }


def machine(profile: dict[str, Any], gpus: int) -> dict[str, Any]:
    """The shape of a VM with so many GPUs: the profile's share of CPUs and memory for each."""
    vm = profile["vm"]
    limit = {"mgmt_qos": vm["mgmt_qos"]} if vm.get("mgmt_qos") else {}
    return {
        **limit,
        "mgmt_attachment": vm.get("mgmt_attachment", "tap"),
        "vcpus": vm["vcpus_per_gpu"] * gpus,
        "memory_mib": vm["memory_mib_per_gpu"] * gpus,
        "firmware": vm["firmware"],
        "hugepages": vm["hugepages"],
        "qemu_arguments": vm["qemu_arguments"][vm["firmware"]],
    }


def ready_deadline(work: Work) -> int:
    """Seconds until an unreachable VM counts as failed; a launch may ask for less, not more."""
    allowed: int = work.profile["deadlines"]["ready"]
    allocation = allocations.get(work.conn, work.task["allocation_id"])
    return min(allowed, int(allocation["parameters"].get("ready_deadline_s", allowed)))


def start(work: Work) -> None:
    """Problem `canceled`, which starts no run, when nobody waits for the machine any more."""
    wanted.begin(work)


def succeed(work: Work, evidence: dict[str, Any]) -> dict[str, Any]:
    connection = {
        "host": work.settings.member_address,
        "port": 22,
        "username": work.parameters["allocation"]["username"],
    }
    outcomes.provision_succeeded(
        work.conn,
        work.task["allocation_id"],
        work.act.because("reachable", {"readiness": evidence["readiness"]}),
        connection=connection,
    )
    return evidence


def fail(work: Work, failure: Failure) -> None:
    """A slot goes back at once only when the host itself says that nothing was touched (I6)."""
    evidence = failure.evidence
    # First of all, so that the slots are given back to a closed gate.
    boot.heed(work, failure)
    slots = work.parameters["slots"]
    untouched = {slot["slot_id"]: evidence for slot in slots} if failure.untouched else None
    outcomes.provision_failed(
        work.conn,
        work.task["allocation_id"],
        work.act.because(failure.error["code"], evidence),
        step=failure.step,
        error=failure.error,
        untouched=untouched,
    )


HANDLER = Handler("provision_slice", variables, succeed, fail, start, deadlines=("clone", "ready"))

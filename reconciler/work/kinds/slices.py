"""Task kinds for slices: provision, release, wipe, absence, drift."""

from __future__ import annotations

from typing import Any

from reconciler.db import locks
from reconciler.lifecycle import drift, slices
from reconciler.model.errors import Problem
from reconciler.records import allocations, claims, reports
from reconciler.records import slots as slot_records
from reconciler.settings import Settings
from reconciler.trust.downloads import url as download_url
from reconciler.work import start_guard
from reconciler.work.handler import Failure, Handler, Work


def seed_documents(allocation: dict[str, Any], management_mac: str) -> dict[str, Any]:
    """Cloud-init documents user_data, meta_data and network_config, which the host renders."""
    user = {
        "name": allocation["username"],
        "shell": "/bin/bash",
        "sudo": "ALL=(ALL) NOPASSWD:ALL",
        "lock_passwd": True,
        "ssh_authorized_keys": list(allocation["ssh_keys"]),
    }
    return {
        "user_data": {
            "hostname": allocation["hostname"],
            "users": [user],
            "disable_root": True,
            "ssh_pwauth": False,
        },
        "meta_data": {
            "instance-id": allocation["id"],
            "local-hostname": allocation["hostname"],
        },
        "network_config": {
            "version": 2,
            "ethernets": {
                # The fabric function has a different MAC, so it stays out of the management plane.
                "management": {"match": {"macaddress": management_mac}, "dhcp4": True}
            },
        },
    }


def image_document(settings: Settings, image: dict[str, Any]) -> dict[str, Any]:
    """Name, version, digest and size of the raw image, with its download URL for the host."""
    return {
        "name": image["name"],
        "version": image["version"],
        "digest": image["digest"],
        "size_bytes": image["size_bytes"],
        "url": download_url(settings, image),
        "compression": image["compression"],
    }


def provision_variables(work: Work) -> dict[str, Any]:
    allocation, slots = work.parameters["allocation"], work.parameters["slots"]
    start_guard.require_proven_boot(work)
    return {
        "slice_allocation": allocation,
        "slice_slots": slots,
        "slice_image": image_document(work.settings, work.parameters["image"]),
        "slice_vm": machine_shape(work.profile, len(slots)),
        "slice_seed": seed_documents(allocation, slots[0]["management_mac"]),
        "slice_ready_deadline": ready_deadline(work),
        "boot_id": work.parameters["boot_id"],
    }


def machine_shape(profile: dict[str, Any], gpus: int) -> dict[str, Any]:
    """Shape of a VM: the profile's share of CPUs and memory per GPU, times `gpus`."""
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
    allocation = allocations.get(work.conn, work.allocation_id)
    return min(allowed, int(allocation.parameters.get("ready_deadline_s", allowed)))


def provision_start(work: Work) -> None:
    """Problem `canceled`, which starts no run, if the allocation has ended."""
    start_guard.begin_provision(work)


def provision_succeeded(work: Work, evidence: dict[str, Any]) -> dict[str, Any]:
    connection = {
        "host": work.settings.member_address,
        "port": 22,
        "username": work.parameters["allocation"]["username"],
    }
    slices.provision_succeeded(
        work.conn,
        work.allocation_id,
        work.act.because("reachable", {"readiness": evidence["readiness"]}),
        connection=connection,
    )
    return evidence


def provision_failed(work: Work, failure: Failure) -> None:
    """Free the slots only if the host reports that nothing was touched (I6)."""
    evidence = failure.evidence
    # Close the gate first, so that freed slots meet a closed gate.
    start_guard.close_gate_after_reboot(work, failure)
    slots = work.parameters["slots"]
    untouched = {slot["slot_id"]: evidence for slot in slots} if failure.untouched else None
    slices.provision_failed(
        work.conn,
        work.allocation_id,
        work.act.because(failure.error["code"], evidence),
        step=failure.step,
        error=failure.error,
        untouched=untouched,
    )


PROVISION = Handler(
    "provision_slice",
    provision_variables,
    provision_succeeded,
    provision_failed,
    provision_start,
    deadlines=("clone", "ready"),
)


def release_variables(work: Work) -> dict[str, Any]:
    allocation_id = work.allocation_id
    return {
        "slice_allocation": {"id": allocation_id},
        "slice_slots": claims.bundles(work.conn, allocation_id),
        "slice_shutdown_deadline": work.profile["deadlines"]["shutdown"],
    }


def release_succeeded(work: Work, evidence: dict[str, Any]) -> dict[str, Any]:
    slices.release_succeeded(
        work.conn,
        work.allocation_id,
        work.act.because("wiped and verified"),
        proofs=evidence["proofs"],
        absence=evidence["absence"],
    )
    return evidence


def release_failed(work: Work, failure: Failure) -> None:
    slices.release_failed(
        work.conn,
        work.allocation_id,
        work.act.because(failure.error["code"], failure.evidence),
        step=failure.step,
        error=failure.error,
    )


RELEASE = Handler(
    "release_slice",
    release_variables,
    release_succeeded,
    release_failed,
    deadlines=("shutdown",),
    wiped="slice_slots",
)


def wipe_variables(work: Work) -> dict[str, Any]:
    return {
        "slice_allocation": {"id": work.parameters["allocation"]["id"]},
        "slice_slots": work.parameters["slots"],
        # The VM has no tenant, so a graceful shutdown is not awaited.
        "slice_shutdown_deadline": 0,
    }


def wipe_succeeded(work: Work, evidence: dict[str, Any]) -> dict[str, Any]:
    act = work.act.because("wiped and verified")
    with locks.node(work.conn, work.task.node_id):
        proofs = {slot_id: evidence["proofs"].get(slot_id) for slot_id in _unfenced_slots(work)}
        missing = sorted(slot_id for slot_id, proof in proofs.items() if proof is None)
        if missing:
            raise Problem(
                "proof_missing",
                expected="a wipe proof of every slot of the task",
                found=f"none of {', '.join(missing)}",
                remedy="read the task's output; repair the slots again",
            )
        measured = work.allocation_id or ""
        absence = evidence["absence"]
        slices.cleanup_succeeded(work.conn, measured, act, proofs=proofs, absence=absence)
    return evidence


def _unfenced_slots(work: Work) -> list[str]:
    """Slots of the task that were not fenced off since. Their node is locked.

    The list never comes from the host's answer, which could name slots of other tenants.
    """
    given = {slot["slot_id"]: slot["fence"] for slot in work.parameters["slots"]}
    return claims.unfenced(work.conn, given)


def wipe_failed(work: Work, failure: Failure) -> None:
    with locks.node(work.conn, work.task.node_id):
        slices.cleanup_failed(
            work.conn,
            _unfenced_slots(work),
            work.act.because(failure.error["code"], failure.evidence),
            step=failure.step,
            error=failure.error,
        )


WIPE = Handler(
    "release_slice",
    wipe_variables,
    wipe_succeeded,
    wipe_failed,
    deadlines=("shutdown",),
    wiped="slice_slots",
)


def absence_variables(work: Work) -> dict[str, Any]:
    allocation_id = work.allocation_id
    return {
        "slice_allocation": {"id": allocation_id},
        "slice_slots": claims.bundles(work.conn, allocation_id),
    }


def absence_succeeded(work: Work, evidence: dict[str, Any]) -> dict[str, Any]:
    reports.record_absence(
        work.conn,
        work.allocation_id,
        evidence["absence"],
        work.act.because("absence measured"),
        task_id=work.task.id,
        observed_at=work.task.started_at,
    )
    return evidence


ABSENCE = Handler("verify_absent", absence_variables, absence_succeeded)


def drift_variables(work: Work) -> dict[str, Any]:
    return {"slice_slots": slot_records.bundles(work.conn, work.task.node_id)}


def drift_succeeded(work: Work, evidence: dict[str, Any]) -> dict[str, Any]:
    # Use the start of the task, because it is earlier than the inspection of the host.
    since = work.task.started_at or 0.0
    return drift.reconcile(
        work.conn, work.task.node_id, evidence, work.act.because("compared"), since=since
    )


# A failed comparison changes nothing: the content of the host is as unknown as before (I13).
DRIFT = Handler("reconcile_drift", drift_variables, drift_succeeded)

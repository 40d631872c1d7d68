"""Task kinds for whole machines: provision and release."""

from __future__ import annotations

from typing import Any

from reconciler.db.schema import Pool
from reconciler.lifecycle import baremetal, guest_pool
from reconciler.model.proof import DEFAULT_POLICY
from reconciler.model.states import TaskKind
from reconciler.records import reports
from reconciler.work.handler import Handler, Work
from reconciler.work.kinds.slices import set_provisioning, worker_pool


def provision_variables(work: Work) -> dict[str, Any]:
    pool, secret = worker_pool(work)
    return {
        "slice_allocation": work.parameters["allocation"],
        "slice_fence": work.parameters["fence"],
        "slice_disks": baremetal.claim_of(work.conn, work.allocation_id).disks,
        "boot_id": work.parameters["boot_id"],
        **({"slice_workers": _workers(pool, secret, work)} if pool else {}),
    }


def _workers(pool: Pool, secret: str, work: Work) -> dict[str, Any]:
    unit = guest_pool.unit(pool, work.settings.api_url)
    return {"token": secret, "unit": unit, "replicas": pool.replicas}


def provision_start(work: Work) -> None:
    """Problem `canceled`, which starts no run, if the allocation has ended."""
    set_provisioning(work)
    baremetal.entered(work.conn, work.task.node_id)


def provision_succeeded(work: Work, evidence: dict[str, Any]) -> dict[str, Any]:
    rest = {name: value for name, value in evidence.items() if name != "baseline"}
    baremetal.provision_succeeded(
        work.conn,
        work.allocation_id,
        work.act.because("the tenant can enter", {"account": evidence["account"]}),
        baseline=evidence["baseline"],
        task_id=work.task.id,
    )
    return rest


def release_variables(work: Work) -> dict[str, Any]:
    disks = baremetal.claim_of(work.conn, work.allocation_id).disks
    dead = work.parameters.get("written_off", [])
    variables = {
        "slice_allocation": work.parameters["allocation"],
        "slice_fence": work.parameters["fence"],
        "slice_disks": [disk for disk in disks if disk["slot_id"] not in dead],
        "slice_baseline": reports.baseline(work.conn, work.allocation_id),
    }
    if dead:
        variables["slice_written_off"] = [disk for disk in disks if disk["slot_id"] in dead]
    return variables


def release_succeeded(work: Work, evidence: dict[str, Any]) -> dict[str, Any]:
    baremetal.release_succeeded(
        work.conn,
        work.allocation_id,
        work.act.because("the tenant is gone, its disks are wiped and verified"),
        fence=work.parameters["fence"],
        evidence=evidence,
        written_off=work.parameters.get("written_off", []),
        policy=work.profile.get("wipe_policy", DEFAULT_POLICY),
        task_id=work.task.id,
    )
    return evidence


HANDLERS: dict[str, Handler] = {
    TaskKind.BAREMETAL_PROVISION: Handler(
        "provision_baremetal",
        provision_variables,
        provision_succeeded,
        provision_start,
        wiped="slice_disks",
    ),
    TaskKind.BAREMETAL_RELEASE: Handler(
        "release_baremetal",
        release_variables,
        release_succeeded,
        deadlines=("shutdown",),
        wiped="slice_disks",
    ),
}

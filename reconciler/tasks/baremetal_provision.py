"""baremetal.provision: a machine with clean disks and an account for its tenant.

Over SSH, on the installation that is there. Where MAAS deploys machines it is another handler of
the same kind, with the same ends in store.baremetal.
"""

from __future__ import annotations

from typing import Any

from reconciler.store import baremetal
from reconciler.tasks import boot, wanted
from reconciler.tasks.handler import Failure, Handler, Work


def variables(work: Work) -> dict[str, Any]:
    return {
        "slice_allocation": work.parameters["allocation"],
        "slice_fence": work.parameters["fence"],
        "slice_disks": baremetal.claim_of(work.conn, work.task["allocation_id"])["disks"],
        "boot_id": work.parameters["boot_id"],
    }


def start(work: Work) -> None:
    """Problem `canceled`, which starts no run, when nobody waits for the machine any more."""
    wanted.begin(work)
    baremetal.entered(work.conn, work.task["node_id"])


def succeed(work: Work, evidence: dict[str, Any]) -> dict[str, Any]:
    rest = {name: value for name, value in evidence.items() if name != "baseline"}
    baremetal.provision_succeeded(
        work.conn,
        work.task["allocation_id"],
        work.act.because("the tenant can enter", {"account": evidence["account"]}),
        baseline=evidence["baseline"],
        task_id=work.task["id"],
    )
    return rest


def fail(work: Work, failure: Failure) -> None:
    """The machine is free again only when the host itself says that nothing was touched."""
    evidence = failure.evidence
    boot.heed(work, failure)
    baremetal.provision_failed(
        work.conn,
        work.task["allocation_id"],
        work.act.because(failure.error["code"]),
        step=failure.step,
        error=failure.error,
        untouched=failure.untouched,
        baseline=evidence.get("baseline") or {},
        task_id=work.task["id"],
    )


HANDLER = Handler("provision_baremetal", variables, succeed, fail, start, wiped="slice_disks")

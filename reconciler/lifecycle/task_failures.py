"""Ends of tasks without success: failure, cancellation and loss, with their effect on the subject.

A task whose run may be alive gets a cancel request, and its worker settles it. A task that has not
begun ends here. Its subject gets an ordinary failure, so that nothing keeps waiting for the task.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection

from reconciler.db import locks
from reconciler.db.schema import Task
from reconciler.lifecycle import (
    app_operations,
    baremetal,
    host,
    ingress,
    maintenance,
    power,
    slices,
)
from reconciler.model.act import Act
from reconciler.model.proof import NOTHING_DONE, nothing_written
from reconciler.model.states import TaskKind
from reconciler.records import claims, queue, tokens
from reconciler.records.leasing import DUE

# Refusals of a firmware change by its host before it makes a BIOS job. Any other end, such as that
# of a canceled run, may leave a job, whose power cycle comes when the BMC is ready for it.
_BEFORE_BIOS_JOB = frozenset(
    [
        *("attribute_invalid", "attribute_read_only", "attribute_unknown", "command_missing"),
        *("foreign_pending_values", "host_in_use", "job_in_queue", "plan_changed"),
        *("power_cycle_not_allowed", "staging_failed", "wrong_node"),
    ]
)

# Characters of each part of an error, and of the evidence. That of an honest host has some
# kilobytes.
LONGEST_TEXT, _LONGEST_EVIDENCE = 2000, 64 * 1024


@dataclass(frozen=True)
class Failure:
    """Failure of a run.

    step: the playbook task that failed, "" when the run itself broke. error: code, expected, found,
    remedy, each cut to a length: a host may have put them in words, and the records of the task and
    of its subject keep them for ever. evidence: the report of the playbook, as far as it got; only
    the task keeps it. known: False when the effect on the host is unknown (process lost, contact
    lost). Then nothing may be freed (I13). may_go_on: whether the run may still act on the host.
    """

    step: str
    error: dict[str, str]
    evidence: dict[str, Any]
    known: bool
    may_go_on: bool = False

    def __post_init__(self) -> None:
        texts = {part: text for part, text in self.error.items() if isinstance(text, str)}
        short = {part: text[:LONGEST_TEXT] for part, text in texts.items()}
        object.__setattr__(self, "error", short)

    @property
    def kept(self) -> dict[str, Any]:
        """The evidence as the task keeps it. A host may fail each run with megabytes."""
        length = len(json.dumps(self.evidence))
        left_out = {"left_out": f"{length} bytes; see the output of the task"}
        return self.evidence if length <= _LONGEST_EVIDENCE else left_out

    @property
    def untouched(self) -> bool:
        """Whether the host reports that nothing was written and nothing is left."""
        return self.known and nothing_written(self.evidence)


def act_of(task: Task) -> Act:
    """The actor of all changes that a task causes."""
    return Act(f"task:{task.id}", correlation_id=task.correlation_id or "")


def locked_subject(conn: Connection, task: Task) -> AbstractContextManager[object]:
    """Lock the allocation of a task; work on a node locks nothing here."""
    return locks.allocation(conn, task.allocation_id) if task.allocation_id else nullcontext()


def record(conn: Connection, task: Task, failure: Failure) -> None:
    """Record a failure with the subject of its task, which is locked."""
    if effect := EFFECTS.get(task.kind):
        effect(conn, task, failure)


def cancel(
    conn: Connection,
    task_id: str,
    act: Act,
    *,
    error: Mapping[str, str] | None = None,
    trust_record: bool = True,
) -> Task:
    """Cancel a task; Problem `generation_conflict` if a worker leases it meanwhile.

    After that Problem the caller repeats the whole transaction. error: the cause, if it is not a
    request. trust_record: whether to believe the record if it shows that no run has begun.
    """
    task = queue.get(conn, task_id)
    if task.state not in DUE:
        return queue.cancel(conn, task_id, act)
    cause = dict(error or _request(act))
    untouched = trust_record and queue.never_ran(task)
    evidence = dict(NOTHING_DONE) if untouched else {}
    # Lock order as in `work.settle`: first the subject of the task, then the task. Any other order
    # could deadlock two transactions that end the same allocation.
    with locked_subject(conn, task):
        record(conn, task, Failure("wait for its run", cause, evidence, known=untouched))
    if not untouched:
        claims.fence_off(conn, task.fences)
    return queue.drop(conn, task, act, cause)


def lose(conn: Connection, task: Task, act: Act) -> None:
    """Give up a task whose run has an unknown effect: block, fence off, free nothing."""
    with locked_subject(conn, task):
        record(conn, task, Failure("deadline", task.error, {}, known=False, may_go_on=True))
        fenced = claims.fence_off(conn, task.fences)
        queue.lose(conn, task, act.because(act.reason, {"fenced_slots": fenced}), task.error)


def unfenced_slots(conn: Connection, task: Task) -> list[str]:
    """Slots of the task that were not fenced off since. Their node is locked.

    The list never comes from the host's answer, which could name slots of other tenants.
    """
    fences = {slot["slot_id"]: slot["fence"] for slot in task.parameters["slots"]}
    return claims.unfenced(conn, fences)


def _request(act: Act) -> dict[str, str]:
    return {
        "code": "canceled",
        "expected": "a task that is wanted until its run begins",
        "found": act.reason or "its cancellation, asked for before its run began",
        "remedy": "if it is still wanted, ask for it again; a blocked slot needs `gpuaas recover`,"
        " a machine that is not clean `gpuaas nodes clean-machine`",
    }


def _provision_failed(conn: Connection, task: Task, failure: Failure) -> None:
    """Free the slots only if the host reports that nothing was touched (I6)."""
    # Close the gate first, so that freed slots meet a closed gate.
    _close_gate_after_reboot(conn, task, failure)
    slot_ids = [slot["slot_id"] for slot in task.parameters["slots"]]
    slices.provision_failed(
        conn,
        task.allocation_id or "",
        act_of(task).because(failure.error["code"]),
        step=failure.step,
        error=failure.error,
        untouched=dict.fromkeys(slot_ids, NOTHING_DONE) if failure.untouched else None,
    )
    queue.forget_tenant_data(conn, task)


def _power_failed(conn: Connection, task: Task, failure: Failure) -> None:
    _close_gate_after_reboot(conn, task, failure)
    if not power.replaced(conn, task):
        domain = failure.evidence.get("domain") if failure.known else None
        state = domain.get("state", "") if isinstance(domain, dict) else ""
        power.failed(conn, task, failure.error, machine=state, untouched=failure.untouched)


def _maintenance_failed(conn: Connection, task: Task, failure: Failure) -> None:
    """Prove the host again, which also starts the slices that the run has stopped."""
    if task.kind == TaskKind.NODE_FIRMWARE:
        if not task.parameters.get("apply"):
            return
        refused = failure.known and failure.error["code"] in _BEFORE_BIOS_JOB
        if not (refused or failure.untouched):
            maintenance.hold(conn, task, act_of(task))
    elif failure.may_go_on:
        maintenance.hold(conn, task, act_of(task))
    restarted = failure.error["code"] == host.BOOT_CHANGED
    prove = maintenance.restarted if restarted else maintenance.bring_back
    prove(conn, task, act_of(task).because(failure.error["code"]))


def _release_failed(conn: Connection, task: Task, failure: Failure) -> None:
    act = act_of(task).because(failure.error["code"])
    slices.release_failed(
        conn, task.allocation_id or "", act, step=failure.step, error=failure.error
    )


def _wipe_failed(conn: Connection, task: Task, failure: Failure) -> None:
    act = act_of(task).because(failure.error["code"])
    with locks.node(conn, task.node_id):
        slots = unfenced_slots(conn, task)
        slices.cleanup_failed(conn, slots, act, step=failure.step, error=failure.error)


def _machine_provision_failed(conn: Connection, task: Task, failure: Failure) -> None:
    """Free the machine only if the host reports that nothing was touched."""
    _close_gate_after_reboot(conn, task, failure)
    baremetal.provision_failed(
        conn,
        task.allocation_id or "",
        act_of(task).because(failure.error["code"]),
        step=failure.step,
        error=failure.error,
        untouched=failure.untouched,
        baseline=failure.evidence.get("baseline") or {},
        task_id=task.id,
    )


def _machine_release_failed(conn: Connection, task: Task, failure: Failure) -> None:
    baremetal.release_failed(
        conn,
        task.allocation_id or "",
        act_of(task).because(failure.error["code"]),
        fence=task.parameters["fence"],
        step=failure.step,
        error=failure.error,
    )


def _managed_key_failed(conn: Connection, task: Task, failure: Failure) -> None:
    act = act_of(task).because(failure.error["code"])
    app_operations.failed(conn, task.parameters["operation_id"], act, failure.error)


def _ingress_failed(conn: Connection, task: Task, failure: Failure) -> None:
    """The rule ends only if the host says that it does not forward, or no run began."""
    rule_id, answer = task.parameters["rule_id"], failure.evidence.get("ingress")
    says = failure.known and isinstance(answer, dict) and rule_id not in answer["rules"]
    act = act_of(task).because(failure.error["code"])
    forwards = not (says or failure.untouched)
    ingress.failed(conn, rule_id, act, failure.error, forwards=forwards)


def _close_gate_after_reboot(conn: Connection, task: Task, failure: Failure) -> None:
    """Close the node's gate when the host reports a restart, and have the host proven again."""
    if failure.error["code"] == host.BOOT_CHANGED:
        act = act_of(task).because(failure.error["found"])
        host.restarted_before_start(conn, task.node_id, act, since=task.parameters["boot_id"])


def _installation_failed(conn: Connection, task: Task, _failure: Failure) -> None:
    """End its tickets: they stay on the machine, where its next tenant is root."""
    tokens.end_tickets(conn, task.node_id)


# Effects by kind. Other kinds change no records; their failure is stored in the task.
EFFECTS: dict[str, Callable[[Connection, Task, Failure], None]] = {
    TaskKind.SLICE_VM_PROVISION: _provision_failed,
    TaskKind.SLICE_VM_POWER: _power_failed,
    TaskKind.NODE_DEPLOY: _installation_failed,
    TaskKind.NODE_REBOOT: _maintenance_failed,
    TaskKind.NODE_FIRMWARE: _maintenance_failed,
    TaskKind.SLICE_VM_RELEASE: _release_failed,
    TaskKind.SLICE_WIPE: _wipe_failed,
    TaskKind.BAREMETAL_PROVISION: _machine_provision_failed,
    TaskKind.BAREMETAL_RELEASE: _machine_release_failed,
    TaskKind.SLICE_INGRESS_APPLY: _ingress_failed,
    TaskKind.ALLOCATION_RECONCILE_MANAGED_AUTHORIZED_KEY: _managed_key_failed,
}

"""`gpuaas recover`: opening a recovery case and following it to its end."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any

import typer

from reconciler.cli import output, tasks
from reconciler.cli.session import client
from reconciler.model.errors import Problem
from reconciler.wait_timeout import WaitTimeout

Record = Mapping[str, Any]

# Wait this long for the host to be asked. It usually waits because the host is unreachable.
UNBEGUN_S = 300

commands = typer.Typer()


@commands.command()
def recover(
    allocation: Annotated[str, typer.Argument(help="The allocation's id.")],
    reason: Annotated[
        str, typer.Option(help="For the audit log; without it, follow the newest recovery.")
    ] = "",
    wait: Annotated[bool, typer.Option(help="Until the slots are back.")] = True,
) -> None:
    """Bring the slots of a failed allocation back, with evidence at every step.

    The service does the work. A command that is interrupted stops nothing; the same command follows
    the recovery again.
    """
    case = _open(allocation, reason)
    if not wait:
        output.record({name: value for name, value in case.items() if name != "steps"})
        return
    try:
        evidence = _follow(case)
    except KeyboardInterrupt:
        output.line(f"the recovery goes on; `gpuaas recover {allocation}` follows it again")
        raise
    if output.in_json(evidence):
        return
    # Each step was printed as it came; the slots are what counts at the end.
    after = [{"id": key, **slot} for key, slot in evidence["inventory_after"].items()]
    output.rows(after, "slot_index", "id", "status", "health_state")


def _open(allocation: str, reason: str) -> Record:
    """The open case, or a new case. Without a reason: the newest, whether or not it has ended."""
    path = f"/admin/allocations/{allocation}"
    if not reason:
        try:
            newest: Record = client().get(f"{path}/recovery")
        except Problem as problem:
            if problem.code != "recovery_case_not_found":
                raise
        else:
            return newest
    opened: Record = client().post(f"{path}/recover", {"reason": reason})
    return opened


def _follow(case: Record) -> dict[str, Any]:
    """The evidence of each step by name, once the slots are back.

    Raises Problem with the evidence so far: the failure of the case, or why it does not go on.
    """
    evidence: dict[str, Any] = {}
    timeout = _Timeout()
    while True:
        for step in case["steps"][len(evidence) :]:
            evidence[step["step"]] = step["evidence"]
            output.line(f"  {step['step']}")
            for line in lines(step["step"], step["evidence"]):
                output.line(f"    {line}")
        if case["state"] == "recovered":
            return evidence
        problem = _failure(case) or timeout.over(case)
        if problem is not None:
            # The person decides by this evidence.
            problem.detail["evidence"] = evidence
            raise problem
        time.sleep(1)
        newest: Record = client().get(f"/admin/allocations/{case['allocation_id']}/recovery")
        if newest["id"] != case["id"]:
            output.line(f"recovery case {case['id']} has ended; {newest['id']} was opened since")
            evidence = {}
        case = newest


def _failure(case: Record) -> Problem | None:
    """The failure of the case, or the action of a person for which it waits."""
    if case["state"] == "failed":
        return Problem(**case["failure"])
    wait = case["waits_for"] or {}
    if not wait.get("remedy"):
        return None
    return Problem(
        wait["code"],
        expected=f"recovery case {case['id']} to go on",
        found=wait["detail"],
        remedy=f"{wait['remedy']}; the case goes on then",
    )


class _Timeout:
    """How long the command follows a case: as long as its task or its clean-up may take."""

    def __init__(self) -> None:
        self._unbegun = WaitTimeout(UNBEGUN_S)
        self._slots: dict[str, WaitTimeout] = {}
        self._began = time.monotonic()
        self._shown = ""

    def over(self, case: Record) -> Problem | None:
        """The refusal to follow it any longer. The case itself goes on."""
        text = tasks.wait_text(case)
        # A free worker takes a task sooner than this.
        if text != self._shown and time.monotonic() - self._began > tasks.WORKER_S:
            self._shown = text
            if text:
                output.line(f"    {text}")
        again = f"`gpuaas recover {case['allocation_id']}` follows it again"
        if case["state"] == "cleaning":
            late = self._late_slots(case)
            if not late:
                return None
            return Problem(
                "cleanup_unfinished",
                504,
                expected="the clean-up of every slot to have ended by its deadline",
                found=f"still in cleanup: {', '.join(late)}",
                remedy="it goes on, and nothing is wrong with the slots yet: `gpuaas tasks list"
                f" --node {case['node_id']}` shows the task and what it waits for, `gpuaas doctor`"
                f" whether the service is well; {again}",
            )
        if not self._look_ended(case):
            return None
        return Problem(
            "task_timeout",
            504,
            expected=f"recovery case {case['id']} to know by now what is left on the host",
            found=", ".join(filter(None, (f"state {case['state']}", text))),
            remedy="bring the host back; the case goes on by itself until"
            f" {case['deadline_at']}, and {again}",
        )

    def _look_ended(self, case: Record) -> bool:
        if case["state"] == "opened":
            return self._unbegun.ends(None, None)
        task = client().get(f"/admin/tasks/{case['task_id']}")
        return task["state"] in ("queued", "waiting", "running") and self._unbegun.ends_for(task)

    def _late_slots(self, case: Record) -> list[str]:
        slots = client().items(f"/admin/nodes/{case['node_id']}/resource-slots")
        return [
            f"slot {slot['slot_index']} ({slot['id']}), until {slot['deadline_at']}"
            for slot in slots
            if slot["id"] in case["slot_ids"]
            and slot["status"] == "cleanup"
            and self._slots.setdefault(slot["id"], WaitTimeout()).ends(
                slot["status_since"], slot["deadline_at"]
            )
        ]


# Hosts wrote parts of it, and a line of a host must not look like a step.
_LONGEST = 300


def lines(step: str, evidence: Record) -> Iterator[str]:
    """Summary lines of a step's evidence. The document at the end has all of it."""
    summary = _SUMMARIES.get(step.removesuffix("_after"))
    for line in summary(evidence) if summary else [json.dumps(evidence)]:
        yield " ".join(line.split())[:_LONGEST]


def _allocation(evidence: Record) -> Iterator[str]:
    error = evidence["error"] or {}
    why = _joined(": ", error.get("code"), error.get("found"))
    yield _joined("; ", f"state {evidence['state']}", why)


def _slots(evidence: Record) -> Iterator[str]:
    if not evidence:
        yield "the allocation holds no slot any more"
    for slot_id, slot in evidence.items():
        detail = slot["health_detail"]
        why = _joined(", ", detail.get("step"), detail.get("code"), detail.get("reason"))
        state = f"slot {slot['slot_index']} ({slot_id}): {slot['status']}, {slot['health_state']}"
        yield _joined("; ", state, why)


def _absence(evidence: Record) -> Iterator[str]:
    checks = evidence.get("checks") or {}
    left = {name: check for name, check in checks.items() if not _is_absent(check)}
    if evidence["absent"]:
        yield f"absent: nothing is left on the host by {len(checks)} checks"
    else:
        yield f"not absent: {len(left)} of {len(checks)} checks found something or do not know"
    for name, check in left.items():
        detail = check.get("detail") if isinstance(check, Mapping) else check
        yield f"{name}: {detail}"


def _is_absent(check: object) -> bool:
    return isinstance(check, Mapping) and check.get("absent") is True


def _proofs(evidence: Record) -> Iterator[str]:
    for slot_id, proof in evidence.items():
        if proof is None:
            yield f"slot {slot_id}: no proof of its disk"
        else:
            what = f"{proof['kind']} proof {proof['id']}, {proof['method']}"
            yield f"slot {slot_id}: {what} of {proof['disk_identity']} at {proof['created_at']}"


def _forced(evidence: Record) -> Iterator[str]:
    for slot in evidence["slots"]:
        task = f"task {slot['task_id']}" if slot["task_id"] else ""
        yield _joined("; ", f"slot {slot['slot_index']}: {slot['status']}", task)
    for task in evidence["canceled_tasks"]:
        yield f"canceled: task {task}"


def _repair(evidence: Record) -> Iterator[str]:
    if not evidence["tasks"]:
        yield "no slot is blocked"
    for slot_id, task_id in evidence["tasks"].items():
        yield f"slot {slot_id}: task {task_id}"


def _audit(evidence: Record) -> Iterator[str]:
    for event in evidence["events"]:
        yield f"{event['at']} {event['actor']}: {event['action']}: {event['reason']}"


def _closed(evidence: Record) -> Iterator[str]:
    for slot_id, gate in evidence.items():
        codes = ", ".join(str(row["code"]) for row in gate["gate"]) or f"wanted {gate['wanted']}"
        yield f"slot {slot_id}: {codes}; next: {gate['next']}"


def _joined(between: str, *words: object) -> str:
    return between.join(str(word) for word in words if word)


_SUMMARIES: dict[str, Callable[[Record], Iterator[str]]] = {
    "allocation": _allocation,
    "inventory": _slots,
    "run_canceled": _forced,
    "runtime_absence": _absence,
    "disk_evidence": _proofs,
    "force_cleanup": _forced,
    "repair": _repair,
    "audit": _audit,
    "not_on_sale": _closed,
}

"""Pages of operators: the fleet, allocations, recovery, tasks, audit, and the site."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date, timedelta

from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from reconciler.console import guard
from reconciler.console.stream import Part
from reconciler.console.visit import Document, Refused, Visit
from reconciler.model.errors import Problem
from reconciler.model.recovery import (
    require_healthy_node,
    require_silence,
    require_slices,
    require_stuck,
)
from reconciler.model.states import RecoveryState, SlotState, TaskState
from reconciler.model.transitions import target

_PAGE = 60
# Of each state.
_TASKS = 20
# Findings of `gpuaas doctor`, each with status, check, found, expected and remedy.
Examine = Callable[[], list[dict[str, str]]]
_EXAMINING = threading.Lock()
_ORDER = {"fail": 0, "warn": 1, "ok": 2}
# Steps of the recovery runbook: title, explanation, and the names under which the case records
# the evidence of the step.
_STEPS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    (
        "Record what is blocked",
        "The allocation, and the state of its slots and disks.",
        ("allocation", "inventory"),
    ),
    (
        "Ask the host what is left",
        "A run that may still be alive is ended before.",
        ("run_canceled", "runtime_absence", "disk_evidence"),
    ),
    (
        "Clean up",
        "What is left is removed, and the disks are wiped and verified.",
        ("force_cleanup", "repair"),
    ),
    (
        "Ask the host again",
        "Only when the clean-up began without the host's word that nothing was left.",
        ("runtime_absence_after",),
    ),
    (
        "Prove the slots clean",
        "The state of each slot, the proof of its disk, and why a clean slot is not on sale.",
        ("inventory_after", "disk_evidence_after", "audit", "not_on_sale"),
    ),
)
_ASK, _CLEAN, _ASK_AGAIN = 1, 2, 3
# The step that a case plays in each of its states.
_PLAYED = {
    RecoveryState.OPENED: _ASK,
    RecoveryState.VERIFYING: _ASK,
    RecoveryState.CLEANING: _CLEAN,
    RecoveryState.CONFIRMING: _ASK_AGAIN,
    RecoveryState.RECOVERED: len(_STEPS),
}


async def glance(visit: Visit) -> Response:
    """Nodes by state, slots as cards with the blocked ones first, capacity, and what waits."""
    chosen = visit.query("region", "state", "cursor")
    fleet = await visit.get("/admin/fleet", limit=_PAGE, **chosen)
    blocked: Document = {"items": [], "next": None}
    if any(fleet["slots"].get(status) for status in ("cleanup_blocked", "cleanup")):
        blocked = await visit.get("/admin/fleet", blocked="true", limit=_PAGE)
    tasks = {
        state: await visit.get("/admin/tasks", state=state, limit=_TASKS)
        for state in (TaskState.RUNNING, TaskState.WAITING, TaskState.QUEUED)
    }
    scheduling = await visit.get("/admin/settings/slice-scheduling")
    return visit.page(
        "fleet.html",
        fleet=fleet,
        blocked=blocked["items"],
        more_blocked=blocked["next"] is not None,
        tasks=tasks,
        scheduling=scheduling["enabled"],
        maintenance=await visit.get("/control/maintenance"),
        chosen=chosen,
    )


async def list_allocations(visit: Visit) -> Response:
    """Allocations of all projects."""
    chosen = visit.query("state", "project_id", "node_id", "cursor")
    page = await visit.get("/admin/allocations", limit=50, **chosen)
    return visit.page("allocations.html", page=page, chosen=chosen)


async def read_allocation(visit: Visit) -> Part:
    """The part of an allocation's page that a stream sends: tasks and timeline."""
    detail = await visit.get(f"/admin/allocations/{visit.named('allocation')}")
    ended = detail["state"] in ("released", "failed")
    return Part("admin_allocation.html", {"allocation": detail}, ended)


async def allocation(visit: Visit) -> Response:
    """One allocation with its claims, tasks and timeline."""
    part = await read_allocation(visit)
    reasons = await _why_not(visit, part.values["allocation"])
    return visit.page(part.template, **part.values, ended=part.ended, why_not=reasons)


async def _why_not(visit: Visit, row: Document) -> dict[str, str]:
    """Why an allocation cannot be ended by force, or recovered, now; "" for what is possible."""
    shape, state, node_id = row["capacity_shape"], row["state"], row["node_id"]
    if not node_id:
        return dict.fromkeys(("verify", "release", "clean", "recover"), "It has never had a node.")
    node = await visit.get(f"/admin/nodes/{node_id}")
    slots = await visit.get(f"/admin/nodes/{node_id}/resource-slots")
    held = {claim["slot_id"] for claim in row["claims"]}
    releasing = any(
        slot["id"] in held and slot["status"] == SlotState.RELEASING for slot in slots["items"]
    )

    def release() -> None:
        require_silence(state, node["state"], unclean=node["unclean_allocation_id"] == row["id"])

    def recover() -> None:
        require_stuck(shape, state, releasing=releasing)

    def clean() -> None:
        recover()
        require_healthy_node(state, node["state"], node["health_state"])

    possible = target("allocation", state, "force_release") is not None
    return {
        "verify": _refusal(lambda: require_slices(shape)),
        "release": _refusal(release) if possible else f"It is {state}: there is no use to end.",
        "clean": _refusal(clean),
        "recover": _refusal(recover),
    }


def _refusal(require: Callable[[], None]) -> str:
    """Why a requirement is not met, as the API would say it; "" when it is."""
    try:
        require()
    except Problem as problem:
        return f"{problem.found[:1].upper()}{problem.found[1:]}: {problem.remedy}."
    return ""


async def recovery(visit: Visit) -> Response:
    """The recovery runbook: each step with its evidence, and one button."""
    path = f"/admin/allocations/{visit.named('allocation')}"
    detail = await visit.get(path)
    case = await visit.get_or_none(f"{path}/recovery")
    policy = await visit.get("/admin/settings/recovery-policy")
    move = next((row for row in policy["cases"] if row["allocation_id"] == detail["id"]), None)
    reasons = await _why_not(visit, detail)
    return visit.page(
        "recovery.html",
        allocation=detail,
        case=case,
        steps=recovery_steps(case),
        move=move,
        path=path,
        why_not=reasons["recover"],
    )


@dataclass(frozen=True)
class Step:
    """A step of the runbook. state: done, running, failed, to come, not reached or not needed."""

    title: str
    text: str
    state: str
    evidence: list[Document]


def recovery_steps(case: Document | None) -> list[Step]:
    """All steps of the runbook, for the answer of the API about a case; None before the first."""
    recorded = case["steps"] if case else []
    evidence = [[row for row in recorded if row["step"] in names] for _, _, names in _STEPS]
    states = _states(case, evidence) if case else ["to come"] * len(_STEPS)
    return [
        Step(title, text, state, rows)
        for (title, text, _), state, rows in zip(_STEPS, states, evidence, strict=True)
    ]


def _states(case: Document, evidence: list[list[Document]]) -> list[str]:
    failed_in = case["failed_in"]
    played = _PLAYED[failed_in or case["state"]]
    # The host has answered, so the case failed in the next move.
    if failed_in and played in (_ASK, _ASK_AGAIN) and evidence[played]:
        played += 1
    now = "failed" if failed_in else "running"
    if case["state"] == RecoveryState.OPENED:
        now = "to come"
    states = []
    for number, rows in enumerate(evidence):
        if number < played:
            state = "done"
        elif number == played:
            state = now
        elif failed_in:
            # The last step is also recorded for slots that did not come back.
            state = "failed" if rows else "not reached"
        else:
            state = "to come"
        states.append(state)
    cleaned = {row["step"] for row in evidence[_CLEAN]}
    if cleaned and "repair" not in cleaned:
        states[_ASK_AGAIN] = "not needed"
    return states


async def list_tasks(visit: Visit) -> Response:
    """Tasks, the newest first, each with what it waits for."""
    chosen = visit.query("state", "kind", "node_id", "allocation_id", "cursor")
    page = await visit.get("/admin/tasks", limit=50, **chosen)
    return visit.page("tasks.html", page=page, chosen=chosen)


async def read_task(visit: Visit) -> Part:
    """The part of a task's page that a stream sends: state, progress, output, result."""
    row = await visit.get(f"/admin/tasks/{visit.named('task')}")
    return Part("task.html", {"task": row}, ended=bool(row["finished_at"]))


async def task(visit: Visit) -> Response:
    """One task with its progress and the end of its output."""
    part = await read_task(visit)
    return visit.page(part.template, **part.values)


async def audit(visit: Visit) -> Response:
    """Administrative actions with actor and reason."""
    chosen = visit.query("action", "subject_id", "correlation_id", "cursor")
    page = await visit.get("/admin/audit", limit=50, **chosen)
    return visit.page("audit.html", page=page, chosen=chosen)


async def trace(visit: Visit) -> Response:
    """Everything that followed from one request."""
    correlation = visit.named("correlation")
    path = f"/admin/correlations/{correlation}/timeline"
    entries = await visit.get(path, limit=200, **visit.query("cursor"))
    return visit.page("trace.html", correlation=correlation, entries=entries)


async def images(visit: Visit) -> Response:
    """The catalogue of images, and the form that registers one."""
    page = await visit.get("/admin/images", limit=100, **visit.query("cursor"))
    return visit.page("images.html", images=page)


async def tokens(visit: Visit) -> Response:
    """API tokens. A new token's secret is shown once."""
    chosen = visit.query("project_id", "cursor", "sessions")
    page = await visit.get(
        "/admin/tokens", limit=200, project_id=chosen["project_id"], cursor=chosen["cursor"]
    )
    projects = await visit.get("/admin/projects", limit=1000)
    sessions = await visit.get("/admin/console-sessions", limit=200, cursor=chosen["sessions"])
    return visit.page(
        "tokens.html",
        tokens=page,
        project=chosen["project_id"],
        projects=projects["items"],
        sessions=sessions,
        own=visit.caller.actor,
    )


async def account(visit: Visit) -> Response:
    """The visitor's own tokens. A new token's secret is shown once."""
    tokens = await visit.get("/tokens", limit=50, **visit.query("cursor"))
    projects = await visit.get("/projects", limit=1000)
    return visit.page("account.html", tokens=tokens, projects=projects["items"])


async def usage(visit: Visit) -> Response:
    """Usage of all projects in a period."""
    return await _usage(visit, "/admin/usage", "usage of all projects")


async def project_usage(visit: Visit) -> Response:
    """Usage of one project in a period."""
    project = visit.named("project")
    return await _usage(visit, f"/projects/{project}/usage", f"usage of {project}", project)


async def _usage(visit: Visit, path: str, title: str, project: str = "") -> Response:
    days = visit.query("from", "to")
    # The last day counts, too.
    ends = {"from": days["from"], "to": _day_after(days["to"])}
    period = {name: f"{day}T00:00:00Z" for name, day in ends.items() if day}
    page = await visit.get(path, limit=100, **period, **visit.query("cursor"))
    return visit.page("usage.html", page=page, days=days, heading=title, project=project)


def _day_after(day: str) -> str:
    """The day after a date. Another text stays as it is, and the API refuses it."""
    try:
        return (date.fromisoformat(day) + timedelta(days=1)).isoformat()
    except (ValueError, OverflowError):
        return day


async def inventory(visit: Visit) -> Response:
    """The last comparisons with NetBox and MAAS: what differs, why, and how it ends."""
    return visit.page("inventory.html", readings=await comparisons(visit))


async def comparisons(visit: Visit) -> list[tuple[str, str, Document | None]]:
    """Name, title and last comparison of each inventory of the site; None before the first."""
    return [
        (name, title, await visit.get_or_none(f"/admin/{name}"))
        for name, title in (("netbox", "NetBox"), ("maas", "MAAS"))
    ]


async def replay(visit: Visit) -> Response:
    """What a terminal showed, as it was recorded, for an operator with a reason."""
    answer = visit.page("replay.html", session=visit.named("session"))
    answer.headers["Content-Security-Policy"] = guard.TERMINAL_POLICY
    return answer


async def health(visit: Visit) -> Response:
    """Whether the site can do its work, its processes, its switches, and the machine's checks."""
    examine: Examine | None = visit.request.app.state.examine
    findings = None
    if examine and "examine" in visit.request.query_params:
        findings = await run_in_threadpool(_examined, examine)
    problem: Document = {}
    state: Document = {}
    try:
        state = await visit.get("/health")
    except Refused as refused:
        problem = refused.problem
    policy = await visit.get("/admin/settings/recovery-policy")
    return visit.page(
        "health.html",
        health=state,
        problem=problem,
        policy=policy,
        maintenance=await visit.get("/control/maintenance"),
        offered=examine is not None,
        findings=findings,
        machine=socket.gethostname(),
    )


def _examined(examine: Examine) -> list[dict[str, str]]:
    """The findings, the worst first. One examination at a time: it asks other services."""
    if not _EXAMINING.acquire(blocking=False):
        raise Problem(
            "rate_exceeded",
            429,
            expected="one examination at a time",
            found="another one that has not ended",
            remedy="try again in a minute",
        )
    try:
        return sorted(examine(), key=lambda row: _ORDER.get(row["status"], 0))
    finally:
        _EXAMINING.release()

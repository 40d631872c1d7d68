"""Pages of operators: allocations, the recovery runbook, tasks, audit, traces."""

from __future__ import annotations

from starlette.responses import Response

from reconciler.console.stream import Part
from reconciler.console.visit import Visit


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
    return visit.page(part.template, **part.values, ended=part.ended)


async def recovery(visit: Visit) -> Response:
    """The recovery runbook: each step with its evidence, and one button."""
    path = f"/admin/allocations/{visit.named('allocation')}"
    detail = await visit.get(path)
    case = await visit.get_or_none(f"{path}/recovery")
    policy = await visit.get("/admin/settings/recovery-policy")
    move = next((row for row in policy["cases"] if row["allocation_id"] == detail["id"]), None)
    return visit.page("recovery.html", allocation=detail, case=case, move=move, path=path)


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
    entries = await visit.get(f"/admin/correlations/{correlation}/timeline", limit=200)
    return visit.page("trace.html", correlation=correlation, entries=entries["items"])

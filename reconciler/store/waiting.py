"""What a task waits for: everything that has not begun says why."""

from __future__ import annotations

from collections.abc import Sequence

import sqlalchemy as sa

from reconciler.domain.states import NodeState, TaskState
from reconciler.store import certificates, clock, rows
from reconciler.store.leasing import DUE
from reconciler.store.rows import Record
from reconciler.store.tables import nodes, tasks

# What carries out runs: AWX that says nothing, or this side's disk and identity.
OURS = ("awx_silent", "run_folder_unwritable", "controller_unready")


def reasons(conn: sa.Connection, found: Sequence[Record]) -> dict[str, Record]:
    """By task id, for those that have not begun: `code`, `detail`, and what goes with the code.

    host_unreachable and host_certificate_expired (unreachable_since, attempts, not_before), those
    of OURS (attempts, not_before), later (not_before), node_busy and exclusive_first (task_id),
    worker.
    """
    due = [task for task in found if task["state"] in DUE]
    ids = {task["node_id"] for task in due}
    if not ids:
        return {}
    known = rows.every(conn, sa.select(nodes).where(nodes.c.id.in_(ids)))
    hosts = {node["id"]: node for node in known}
    query = sa.select(tasks).where(
        tasks.c.node_id.in_(ids), tasks.c.state.in_((TaskState.RUNNING, TaskState.QUEUED))
    )
    beside = rows.every(conn, query.order_by(tasks.c.created_at, tasks.c.id))
    now = clock.read(conn)
    why = {task["id"]: _reason(task, hosts[task["node_id"]], beside, now) for task in due}
    until = certificates.ends(conn, ids)
    for task in due:
        reason, end = why[task["id"]], until.get(task["node_id"], now + 1)
        if reason["code"] == "host_unreachable" and end <= now:
            # It may be back for long: nobody would believe that it is the same host.
            problem = certificates.expired(task["node_id"], end, reason["detail"])
            reason["code"] = problem.code
            reason["detail"] = f"{problem.found}; {problem.remedy}"
    return why


def _reason(task: Record, node: Record, beside: Sequence[Record], now: float) -> Record:
    lost = node["state"] == NodeState.UNREACHABLE
    later = task["not_before"] is not None and task["not_before"] > now
    if not lost and later and (ours := task["error"].get("code")) in OURS:
        return {
            "code": ours,
            "detail": task["state_reason"],
            "attempts": task["unreached"],
            "not_before": task["not_before"],
        }
    if lost or (task["unreached"] and later):
        return {
            "code": "host_unreachable",
            "detail": task["state_reason"] if task["unreached"] else node["state_reason"],
            "unreachable_since": node["state_since"] if lost else None,
            "attempts": task["unreached"],
            "not_before": None if lost else task["not_before"],
        }
    if later:
        told = task["state"] == TaskState.WAITING or task["attempt"] > 1
        detail = task["state_reason"] if told else "not before a time"
        return {"code": "later", "detail": detail, "not_before": task["not_before"]}
    for other in beside:
        if other["node_id"] == task["node_id"] and (code := _ahead(task, other)):
            return {
                "code": code,
                "detail": f"{other['kind']} {other['state']}",
                "task_id": other["id"],
            }
    return {"code": "worker", "detail": "a worker that is free"}


def _ahead(task: Record, other: Record) -> str:
    """Why the other one keeps this task from beginning; "" when it does not."""
    same = (task["subject_kind"], task["subject_id"]) == (
        other["subject_kind"],
        other["subject_id"],
    )
    if other["state"] == TaskState.RUNNING:
        return "node_busy" if same or task["exclusive"] or other["exclusive"] else ""
    first = (other["created_at"], other["id"]) < (task["created_at"], task["id"])
    return "exclusive_first" if first and other["exclusive"] and not task["exclusive"] else ""

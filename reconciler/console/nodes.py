"""Pages of a node: its slots, discovery and approval, parity, drift, power, history."""

from __future__ import annotations

import json
from typing import Any

from starlette.responses import Response

from reconciler.console import charts, operators
from reconciler.console.visit import Document, Visit
from reconciler.model.approval import approval_of
from reconciler.model.states import LIVE_ALLOCATIONS, UNUSED_SLOTS


async def add(visit: Visit) -> Response:
    """The form for a new machine."""
    return visit.page("node_new.html")


async def show(visit: Visit) -> Response:
    """One node: its state, its slots, and everything that can be done with it."""
    path = f"/admin/nodes/{visit.named('node')}"
    node = await visit.get(path)
    slots = await visit.get(f"{path}/resource-slots")
    tasks = await visit.get("/admin/tasks", node_id=node["id"], limit=12)
    live = await _live_allocations(visit, node["id"])
    # The other refreshed part of the page comes every few seconds, and needs none of these.
    target = visit.request.headers.get("HX-Target", "")
    measured = await _measured(visit, live) if not target or "telemetry" in target else None
    compared = [] if target else await operators.comparisons(visit)
    drift = None if target else (await visit.get(f"{path}/drift"))["task"]
    looks = [] if target else await _looks_for_drift(visit, node["id"])
    return visit.page(
        "node.html",
        node=node,
        slots=slots["items"],
        tasks=tasks["items"],
        drift=drift,
        latest_look=next(iter(looks), None),
        inventories=[
            (title, reading, _about(node, reading)) for _, title, reading in compared if reading
        ],
        on_it=live,
        measured=measured,
        path=path,
    )


async def discovery(visit: Visit) -> Response:
    """The latest discovery, its candidates with every reason against them, and approval."""
    path = f"/admin/nodes/{visit.named('node')}"
    node = await visit.get(path)
    report = await visit.get(f"{path}/slice-topology/discovery")
    slots = await visit.get(f"{path}/resource-slots")
    document = report["document"] or {}
    taken = {slot["slot_index"] for slot in slots["items"]}
    owners = {slot["nvme_device"]: slot["slot_index"] for slot in slots["items"]}
    disks = [
        disk
        | {
            "slot": owners.get(disk["by_id"]),
            "approval": json.dumps({disk["by_id"]: approval_of(disk)}),
        }
        for disk in document.get("nvme", [])
        if disk.get("by_id")
    ]
    return visit.page(
        "discovery.html",
        node=node,
        report=report,
        candidates=[_candidate(row, taken) for row in document.get("candidates", [])],
        summary=document.get("candidate_summary", {}),
        disks=disks,
        path=path,
    )


async def parity(visit: Visit) -> Response:
    """The latest parity report, checks that did not pass first."""
    path = f"/admin/nodes/{visit.named('node')}"
    node = await visit.get(path)
    report = await visit.get(f"{path}/parity")
    checks = (report["document"] or {}).get("checks", [])
    order = {"FAIL": 0, "WARN": 1}
    checks.sort(key=lambda check: order.get(check["status"], 2))
    return visit.page("parity.html", node=node, report=report, checks=checks, path=path)


async def timeline(visit: Visit) -> Response:
    """Everything that happened on the node, the newest first."""
    path = f"/admin/nodes/{visit.named('node')}"
    node = await visit.get(path)
    entries = await visit.get(f"{path}/timeline", limit=50, **visit.query("cursor"))
    return visit.page("node_timeline.html", node=node, entries=entries)


async def slot(visit: Visit) -> Response:
    """One slot: why its gate is closed, its history, its proofs, and what can be done."""
    path = f"/admin/nodes/{visit.named('node')}"
    node = await visit.get(path)
    detail = await visit.get(f"{path}/resource-slots/{visit.named('slot')}")
    return visit.page(
        "slot.html",
        node=node,
        slot=detail,
        unused=UNUSED_SLOTS,
        path=f"{path}/resource-slots/{detail['id']}",
    )


async def _live_allocations(visit: Visit, node_id: str) -> list[Document]:
    """Allocations that keep the node from maintenance."""
    live: list[Document] = []
    for state in LIVE_ALLOCATIONS:
        page = await visit.get("/admin/allocations", node_id=node_id, state=state)
        live += page["items"]
    return live


async def _looks_for_drift(visit: Visit, node_id: str) -> list[Document]:
    """The newest task that compares the host with the records, whatever has become of it."""
    tasks = await visit.get("/admin/tasks", node_id=node_id, kind="slice.drift_reconcile", limit=1)
    looks: list[Document] = tasks["items"]
    return looks


async def _measured(visit: Visit, live: list[Document]) -> list[tuple[str, list[charts.Chart]]]:
    """Name and charts of each active slice."""
    shown = []
    for row in live:
        if row["state"] == "active" and row["capacity_shape"] == "gpu_slice":
            path = f"/projects/{row['project_id']}/allocations/{row['id']}/telemetry"
            telemetry = await visit.get(path, minutes=charts.PERIODS[0])
            drawn = charts.of_slice(telemetry, charts.PERIODS[0], short=True)
            shown.append((row["hostname"], drawn))
    return shown


def _about(node: Document, reading: Document) -> list[Document]:
    """Differences of an inventory that concern the node, its device or its machine."""
    names = {node["id"], node["name"]}
    subjects = {f"{kind} {name}" for kind in ("node", "device") for name in names}
    machine = f" ({node['maas_system_id']})" if node["maas_system_id"] else None
    return [
        row
        for row in reading["findings"]
        if row["subject"] in subjects or (machine and row["subject"].endswith(machine))
    ]


def _candidate(row: Document, taken: set[int]) -> dict[str, Any]:
    return row | {
        "approved": row["slot_index"] in taken,
        "body": json.dumps({"slot_index": row["slot_index"], **row["bundle"]}),
    }

"""The fleet at a glance."""

from __future__ import annotations

from starlette.responses import Response

from reconciler.console.visit import Document, Visit

_PAGE = 60
_WAITING = 20


async def glance(visit: Visit) -> Response:
    """Nodes by state, slots as cards with the blocked ones first, capacity, and what waits."""
    chosen = visit.query("region", "state", "cursor")
    fleet = await visit.get("/admin/fleet", limit=_PAGE, **chosen)
    blocked: Document = {"items": []}
    if any(fleet["slots"].get(status) for status in ("cleanup_blocked", "cleanup")):
        blocked = await visit.get("/admin/fleet", blocked="true", limit=_PAGE)
    queued = await visit.get("/admin/tasks", state="queued", limit=_WAITING)
    running = await visit.get("/admin/tasks", state="running", limit=_WAITING)
    scheduling = await visit.get("/admin/settings/slice-scheduling")
    return visit.page(
        "fleet.html",
        fleet=fleet,
        blocked=blocked["items"],
        queued=queued["items"],
        running=running["items"],
        scheduling=scheduling["enabled"],
        maintenance=await visit.get("/control/maintenance"),
        chosen=chosen,
    )

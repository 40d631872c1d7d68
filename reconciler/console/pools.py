"""Pages of worker pools, of the site's queue of jobs, and of its maintenance."""

from __future__ import annotations

from typing import Any

from starlette.responses import Response

from reconciler.console import charts
from reconciler.console.visit import Document, Visit
from reconciler.model.jobs import Mode
from reconciler.model.pools import APART, LIVE_POOLS, PoolState, passed_percent
from reconciler.model.states import NodeState

_MIB = 1 << 20


async def list_pools(visit: Visit) -> Response:
    """Living pools, the largest first, the site's queue, machines, and pools that have ended."""
    # The other refreshed part of the page comes every few seconds, and does not need the queue.
    target = visit.request.headers.get("HX-Target", "queue")
    queue = await visit.get("/admin/jobs/queue") if "queue" in target else None
    hosts = (await visit.get("/pools/hosts"))["hosts"]
    return visit.page(
        "pools.html",
        pools=await _living(visit),
        hosts=[
            _with_memory(host) | {"devices": [_with_memory(gpu) for gpu in host["devices"]]}
            for host in hosts
        ],
        names={host["id"]: host["name"] for host in hosts},
        queue=queue,
        charts=[charts.of_queue(queue)] if queue else [],
        ended=await visit.get("/pools", live=False, limit=20, **visit.query("cursor")),
        projects=(await visit.get("/projects", limit=1000))["items"],
        maintenance=await visit.get("/control/maintenance"),
    )


async def show(visit: Visit) -> Response:
    """One pool: its memory, workers and history, and how it is ended."""
    pool = await visit.get(f"/pools/{visit.named('pool')}")
    hosts = (await visit.get("/pools/hosts"))["hosts"]
    changes = await visit.get(f"/pools/{pool['id']}/history", limit=100)
    return visit.page(
        "pool.html",
        pool=_measured(pool),
        meaning_=PoolState(pool["state"]).meaning,
        living=pool["state"] in LIVE_POOLS,
        host=next((host for host in hosts if host["id"] == pool["host_id"]), None),
        changes=changes["items"],
    )


async def maintenance(visit: Visit) -> Response:
    """The mode of the site with what still runs, its switch, the leader, and nodes out of use."""
    state = await visit.get("/control/maintenance")
    queue = await visit.get("/admin/jobs/queue")
    nodes = [
        node
        for each in (NodeState.DRAINING, NodeState.MAINTENANCE)
        for node in (await visit.get("/admin/nodes", state=each, limit=200))["items"]
    ]
    return visit.page(
        "maintenance.html",
        maintenance=state,
        meaning_=Mode(state["mode"]).meaning,
        queue=queue,
        pools=await _living(visit),
        leader=await visit.get("/status/leader"),
        nodes=nodes,
        scheduling=(await visit.get("/admin/settings/slice-scheduling"))["enabled"],
    )


async def _living(visit: Visit) -> list[Document]:
    pools = (await visit.get("/pools", live=True, limit=1000))["items"]
    return sorted(map(_measured, pools), key=lambda pool: (-pool["memory_bytes"], pool["name"]))


def _measured(pool: Document) -> Document:
    """The pool, its workers and its GPUs with their memory. A pool is as near its limit as its
    fullest worker, because the limit is of each. The memory of workers apart is not known.
    """
    pool = pool | {"gpus": [_with_memory(gpu) for gpu in pool["gpus"]]}
    if pool["host_id"] in APART:
        workers = [worker | {"memory": None} for worker in pool["workers"]]
        return pool | {"workers": workers, "memory": None}
    limit = pool["memory_mib"] * _MIB
    workers = [
        worker | {"memory": _memory(worker["memory_bytes"], limit)} for worker in pool["workers"]
    ]
    fullest = max((worker["memory"]["share"] for worker in workers), default=0.0)
    memory = _memory(pool["memory_bytes"], limit * pool["replicas"], fullest)
    return pool | {"workers": workers, "memory": memory}


def _with_memory(of: Document) -> Document:
    return of | {"memory": _memory(of["memory_used_bytes"], of["memory_bytes"])}


def _memory(used: int, limit: int, share: float | None = None) -> dict[str, Any]:
    """Memory in use against its limit. above: the threshold in percent that it has passed, or 0."""
    if share is None:
        share = used / limit if limit else 0.0
    return {"used": used, "limit": limit, "share": share, "above": passed_percent(share)}

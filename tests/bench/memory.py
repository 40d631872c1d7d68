"""Benchmark of the memory of `gpuaas serve`: `python -m tests.bench.memory`; key `memory_mib`.

It measures the real process, with workers and single loops. rest: on an empty site, SQLite, as
`make run` starts it. slots_N: on PostgreSQL with that many slots, first after turns of the loops.
The second figure follows clients that read every list and place slices, all at once, and a further
turn of the loops. Each figure is resident memory (RSS); _pss counts shared pages in part, _peak is
the largest so far. Runs are separate processes and not counted; here they find no playbook and end.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from threading import Barrier
from typing import Any

import httpx

from tests.bench import document
from tests.bench.fleet import records, service, usage
from tests.bench.fleet.service import Service
from tests.postgresql import Server, running

SLOTS = 8
CLIENTS = 4
API = "/api/v1"
# Largest page that the API gives.
PAGE = 1000
_END_S = 300
Figures = dict[str, float]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.memory")
    parser.add_argument("--nodes", type=int, default=1600, help=f"each with {SLOTS} slots")
    # Two turns of the loops, which run every ten seconds.
    parser.add_argument("--settle", type=float, default=25, help="seconds before each look")
    parser.add_argument("--output", type=Path, default=document.PATH)
    given = parser.parse_args()
    with service.running("") as serving:
        figures = {"rest": _look(serving, given.settle)}
    with running(fsync=False) as server:
        figures |= fleet(server, given.nodes, given.settle)
    document.add({"memory_mib": _flat(figures)}, given.output)
    return 0


def fleet(server: Server, nodes: int, settle_s: float) -> dict[str, Figures]:
    """Measure a site of that many nodes: with its loops alone, and after requests."""
    url = server.database("memory")
    secret = records.make(url, nodes, SLOTS)
    name = f"slots_{nodes * SLOTS}"
    with (
        tempfile.TemporaryDirectory(prefix="gpuaas-bench-") as nothing,
        service.running(url, GPUAAS_COLLECTIONS_PATH=nothing) as serving,
    ):
        figures = {f"{name}_loops": _look(serving, settle_s)}
        together = Barrier(CLIENTS, timeout=_END_S)
        with ThreadPoolExecutor(CLIENTS) as clients:
            list(clients.map(partial(ask, serving.address, secret, together), range(CLIENTS)))
        idle(serving.address, secret)
        return figures | {name: _look(serving, settle_s)}


def ask(address: str, secret: str, together: Barrier, client: int) -> None:
    """Read every list to its end as a single client, and launch a slice.

    All clients ask at once for the explanation over the whole fleet, which takes the most memory.
    """
    with _http(address, secret) as http:
        hosts = _list(http, "/admin/nodes")
        for host in hosts[client::50]:
            _list(http, f"/admin/nodes/{host['id']}/resource-slots")
        for path in ("tasks", "allocations", "audit", "images", "projects", "tokens"):
            _list(http, f"/admin/{path}")
        for gpus in (1, SLOTS, 2 * SLOTS):
            together.wait()
            _get(http, f"{API}/admin/placement/explain", gpus=gpus)
        _get(http, "/metrics")
    service.launch(address, secret, client, 1)


def idle(address: str, secret: str) -> None:
    """Wait until no task runs or can run."""
    end = time.monotonic() + _END_S
    with _http(address, secret) as http:
        while any(
            _get(http, f"{API}/admin/tasks", state=state).json()["items"]
            for state in ("queued", "running")
        ):
            if time.monotonic() > end:
                raise RuntimeError(f"tasks that have not ended after {_END_S} s")
            time.sleep(1)


def _look(serving: Service, settle_s: float) -> Figures:
    time.sleep(settle_s)
    return usage.memory_mib(serving.pid)


def _http(address: str, secret: str) -> httpx.Client:
    headers = {"Authorization": f"Bearer {secret}"}
    return httpx.Client(base_url=address, headers=headers, timeout=120)


def _list(http: httpx.Client, path: str) -> list[dict[str, Any]]:
    """Read all pages."""
    items: list[dict[str, Any]] = []
    cursor = ""
    while True:
        page = _get(http, f"{API}{path}", limit=PAGE, cursor=cursor).json()
        items += page["items"]
        cursor = page["next"] or ""
        if not cursor:
            return items


def _get(http: httpx.Client, path: str, **query: str | int) -> httpx.Response:
    answer = http.get(path, params=query)
    answer.raise_for_status()
    return answer


def _flat(figures: dict[str, Figures]) -> Figures:
    """Use the plain name for resident memory, and suffixes for the rest."""
    flat: Figures = {}
    for name, sizes in figures.items():
        flat |= {name if key == "rss" else f"{name}_{key}": size for key, size in sizes.items()}
    return flat


if __name__ == "__main__":
    raise SystemExit(main())

"""Benchmark of the console: `python -m tests.bench.console`; key `console`.

fleet_page_ms: processor time of `gpuaas serve` for the fleet page, the mean of a row of requests of
one operator. The database's processor time is not in it; fleet_page_wall_ms is the whole answer.
pages_per_s: pages by several operators at once, in equal parts of fleet, node, tasks, allocations
and audit. The service and its database run on this machine, as do the clients.
"""

from __future__ import annotations

import argparse
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx

from tests.bench import document
from tests.bench.fleet import records, service, usage
from tests.postgresql import Server, running

SLOTS = 8
CLIENTS = 4
# Pages of each client that are not counted.
WARM = 5
PAGES = ("/fleet", "/nodes/node-00000", "/tasks", "/allocations", "/audit")
SAME = {"Sec-Fetch-Site": "same-origin"}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.console")
    parser.add_argument("--nodes", type=int, default=1600, help=f"each with {SLOTS} slots")
    parser.add_argument("--pages", type=int, default=100, help="of each measurement")
    parser.add_argument("--output", type=Path, default=document.PATH)
    given = parser.parse_args()
    with running(fsync=False) as server:
        document.add({"console": measure(server, given.nodes, given.pages)}, given.output)
    return 0


def measure(server: Server, nodes: int, pages: int) -> dict[str, Any]:
    """Measure a single operator on the fleet page, then several on all pages."""
    url = server.database("console")
    secret = records.make(url, nodes, SLOTS)
    with service.running(url, "--api-only") as serving:
        fleet = PAGES[:1]
        visit(serving.address, secret, fleet, WARM)
        used, began = usage.cpu_s(serving.pid), time.perf_counter()
        visit(serving.address, secret, fleet, pages)
        wall_s, used_s = time.perf_counter() - began, usage.cpu_s(serving.pid) - used
        began = time.perf_counter()
        with ThreadPoolExecutor(CLIENTS) as clients:
            share = [
                clients.submit(visit, serving.address, secret, PAGES, pages // CLIENTS)
                for _ in range(CLIENTS)
            ]
            answered = sum(each.result() for each in share)
        per_s = answered / (time.perf_counter() - began)
    return {
        "slots": nodes * SLOTS,
        "fleet_page_ms": round(used_s / pages * 1000, 1),
        "fleet_page_wall_ms": round(wall_s / pages * 1000, 1),
        "pages_per_s": round(per_s, 1),
        "clients": CLIENTS,
    }


def visit(address: str, secret: str, paths: tuple[str, ...], count: int) -> int:
    """Log in and open pages in turn; return their number."""
    with httpx.Client(base_url=f"{address}/console", headers=SAME, timeout=120) as http:
        entered = http.post("/login", data={"token": secret})
        if entered.status_code != 303:
            raise RuntimeError(f"no login: {entered.status_code}")
        for number in range(count):
            path = paths[number % len(paths)]
            answer = http.get(path)
            if answer.status_code != 200 or "Log out" not in answer.text:
                raise RuntimeError(f"{path}: {answer.status_code}")
    return count


if __name__ == "__main__":
    raise SystemExit(main())

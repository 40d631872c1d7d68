"""Benchmark of claims per second: `python -m tests.bench.claims`; adds to build/bench.json.

claims_store: the whole transaction of a launch (place, lock, claim, allocation, task, history,
outbox, audit: five statements, the last of which inserts twelve rows) without HTTP, against pgbench
inserting single rows of three columns with as many clients on the same server. claims_http_512 and
claims_http_12800: the same through `gpuaas serve`, with the growth of the median from the small
fleet to the large fleet; the peer is OpenStack Placement, installed where it is missing
(tests.bench.fleet.openstack).

where_ms: the mean parts of a launch over HTTP that is alone on the machine. Together they are
alone_ms: the server's parts (tests.bench.fleet.timed), and wire, the rest of the client's time.

Clients are separate processes, as pgbench's are threads in C, so that this program's interpreter
lock is not measured. Every figure is of the same number of claims, so that both fleets are equally
used afterwards. The server writes through to the disk, as in production.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from reconciler.db.engine import open_engine, reading, retrying
from reconciler.lifecycle import launch as launching
from reconciler.records import images
from tests.bench import document
from tests.bench.fleet import openstack, records, service, timed
from tests.postgresql import Server, running

SLOTS = 8
CLIENTS = 4
# Claims of each client that are not counted.
WARM = 5
Figures = dict[str, Any]


def main(words: Sequence[str] | None = None) -> int:
    given = arguments(words)
    if not given.no_peer:
        try:
            openstack.install()
        except openstack.NotInstalled as problem:
            sys.stderr.write(f"{problem}\n")
            return 1
    with running(fsync=True, options="-c max_connections=50") as server:
        figures = measure(server, given)
    document.add(figures, given.output)
    return 0


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Options: fleet sizes, counts, and whether to measure the peer."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.claims")
    parser.add_argument("--small", type=int, default=64, help="nodes of the small fleet")
    parser.add_argument("--large", type=int, default=1600, help="nodes of the large fleet")
    parser.add_argument("--claims", type=int, default=384, help="claims of each measurement")
    parser.add_argument("--profile", type=int, default=64, help="launches of the profile")
    parser.add_argument("--pgbench-s", type=int, default=5, help="seconds of pgbench")
    parser.add_argument("--no-peer", action="store_true", help="without OpenStack Placement")
    parser.add_argument("--output", type=Path, default=document.PATH)
    given = parser.parse_args(words)
    if max(given.claims + CLIENTS * WARM, given.profile + WARM) > given.small * SLOTS:
        parser.error("the small fleet has not that many slots")
    return given


def measure(server: Server, given: argparse.Namespace) -> Figures:
    """Measure all figures; each figure gets a new fleet."""
    sizes = {"small": given.small, "large": given.large}
    store = {name: _store(server, nodes, given.claims) for name, nodes in sizes.items()}
    rows = pgbench(server, seconds=given.pgbench_s)
    http = {name: _http(server, nodes, given.claims) for name, nodes in sizes.items()}
    for name, nodes in sizes.items():
        http[name] |= profile(server, nodes, given.profile)
    peer: dict[str, Figures] = {}
    if not given.no_peer:
        for name, nodes in sizes.items():
            peer[name] = _peer(server, nodes, given.claims)
    for figures in (store, http):
        growth = figures["large"]["p50_ms"] / figures["small"]["p50_ms"]
        figures["large"]["p50_growth"] = round(growth, 2)
    return {
        "claims_store": {
            **store["small"],
            "pgbench_per_s": rows,
            "ratio": round(store["small"]["ours_per_s"] / rows, 3),
            f"slots_{given.large * SLOTS}": store["large"],
        },
        f"claims_http_{given.small * SLOTS}": http["small"]
        | _against(http["small"], peer, "small"),
        f"claims_http_{given.large * SLOTS}": http["large"]
        | _against(http["large"], peer, "large"),
    }


def pgbench(server: Server, *, seconds: int) -> float:
    """Return single rows per second, by as many clients."""
    create = "CREATE TABLE bench_rows (id bigserial PRIMARY KEY, name text, at float8)"
    where = ("-h", str(server.folder), "-U", "gpuaas")
    server.run("psql", *where, "-d", "postgres", "-qc", create)
    script = server.folder / "insert.sql"
    script.write_text("INSERT INTO bench_rows (name, at) VALUES ('a', 1.0);\n")
    script.chmod(0o644)
    words = ("-n", "-c", str(CLIENTS), "-j", str(CLIENTS), "-T", str(seconds), "-f", str(script))
    output = server.run("pgbench", *where, *words, "postgres")
    match = re.search(r"tps = ([\d.]+)", output)
    if match is None:
        raise RuntimeError(f"no figure in the output of pgbench: {output}")
    return round(float(match[1]), 1)


def clients(work: Callable[[int, int], list[float]], claims: int) -> Figures:
    """Run `work(client, claims)` in CLIENTS processes; return claims per second and latencies."""
    context = multiprocessing.get_context("spawn")
    share = claims // CLIENTS
    with context.Pool(CLIENTS) as pool:
        # Importing, connecting and compiling statements are over before the clock starts.
        pool.starmap(work, [(client, WARM) for client in range(CLIENTS)], chunksize=1)
        began = time.monotonic()
        times_by_client = pool.starmap(
            work, [(client, share) for client in range(CLIENTS)], chunksize=1
        )
        seconds = time.monotonic() - began
    times = sorted(seconds_of_claim for client in times_by_client for seconds_of_claim in client)
    return {
        "ours_per_s": round(len(times) / seconds, 1),
        "claims": len(times),
        "clients": CLIENTS,
        "p50_ms": round(statistics.median(times) * 1000, 2),
        "p95_ms": round(times[int(len(times) * 0.95)] * 1000, 2),
    }


def _store(server: Server, nodes: int, claims: int) -> Figures:
    url = server.database("store")
    records.make(url, nodes, SLOTS)
    return clients(partial(allocate, url), claims)


def allocate(url: str, client: int, claims: int) -> list[float]:
    """Claim as a single client; return the seconds of each claim."""
    engine = _engine(url)
    with reading(engine) as conn:
        image = next((row for row in images.every(conn) if row.name == records.IMAGE), None)
    if image is None:
        raise RuntimeError("the fleet has no image")
    launch = launching.Launch(
        project_id=records.PROJECT,
        gpu_count=1,
        username="bench",
        ssh_keys=[records.KEY],
        hostname=f"bench-{client}",
        image_id=image.id,
    )
    times = []
    for _ in range(claims):
        began = time.perf_counter()
        retrying(engine, lambda conn: launching.allocate(conn, launch, records.ACT))
        times.append(time.perf_counter() - began)
    return times


@lru_cache
def _engine(url: str) -> sa.Engine:
    """Return an engine per process, as in a service."""
    return open_engine(url)


def _http(server: Server, nodes: int, claims: int) -> Figures:
    url = server.database("http")
    records.make(url, nodes, SLOTS)
    secret = records.member(url)
    with service.serving(url) as address:
        return clients(partial(service.launch, address, secret), claims)


def profile(server: Server, nodes: int, launches: int) -> Figures:
    """Return the time of a launch by its parts, with a single client and no other load."""
    url = server.database("profile")
    records.make(url, nodes, SLOTS)
    secret = records.member(url)
    with tempfile.TemporaryDirectory(prefix="gpuaas-bench-") as folder:
        lines = Path(folder) / "times"
        with service.running(
            url, "--api-only", module=timed.__name__, BENCH_TIMES=str(lines)
        ) as serving:
            seen = service.launch(serving.address, secret, 0, WARM + launches)[WARM:]
        requests = [json.loads(line) for line in lines.read_text().splitlines()][WARM:]
    if len(requests) != launches:
        raise RuntimeError(f"{launches} launches, and times of {len(requests)} requests")
    whole = statistics.mean(seen)
    parts = {name: statistics.mean(request[name] for request in requests) for name in timed.PARTS}
    parts["wire"] = whole - sum(parts.values())
    where = {name: round(seconds * 1000, 2) for name, seconds in parts.items()}
    return {"alone_ms": round(whole * 1000, 2), "where_ms": where}


def _peer(server: Server, nodes: int, claims: int) -> Figures:
    name = "placement"
    server.database(name)
    with openstack.serving(server, name, nodes, SLOTS) as address:
        figures = clients(partial(openstack.claim, address), claims)
    figures["placement_per_s"] = figures.pop("ours_per_s")
    return figures


def _against(ours: Figures, peer: dict[str, Figures], name: str) -> Figures:
    if name not in peer:
        return {}
    theirs = peer[name]["placement_per_s"]
    return {
        "placement_per_s": theirs,
        "placement_p50_ms": peer[name]["p50_ms"],
        "ratio": round(ours["ours_per_s"] / theirs, 1),
    }


if __name__ == "__main__":
    raise SystemExit(main())

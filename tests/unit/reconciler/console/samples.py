"""Samples of a slice, as the collector stores them, and pools that are busy."""

from __future__ import annotations

import time
from dataclasses import replace

import sqlalchemy as sa

from reconciler.db.engine import transaction
from reconciler.db.schema import pool_workers, telemetry_samples
from reconciler.pools import leases, workers
from tests.unit.reconciler.api.stack import Stack
from tests.unit.reconciler.api.test_jobs import bury, enqueue
from tests.unit.reconciler.pools.test_pools import HOST, begun, host, start


def hour_of_samples(stack: Stack, allocation_id: str) -> None:
    """A sample for each of the last sixty minutes."""
    now = time.time()
    rows = []
    for ago in range(60):
        at = now - ago * 60
        gpu = {"index": 0, "utilisation_percent": ago, "temperature_c": 40 + ago, "power_w": 118.5}
        host = {"state": "running", "cpu_s": 10_000.0 - 30 * ago, "vcpus": 2}
        guest = {"age_s": 4, "cuda": "ready", "gpus": [gpu]}
        place = {"allocation_id": allocation_id, "minute": int(at // 60) % 1440, "at": at}
        rows.append({**place, "host": host, "guest": guest})
    with transaction(stack.engine) as conn:
        conn.execute(sa.insert(telemetry_samples), rows)


def busy_pools(stack: Stack) -> str:
    """Three pools in another order than that of their memory, a dead letter, and three jobs, of
    which the pool `hot` holds two. Returns the id of `hot`, whose GPU is nearly full.
    """
    gpu = {"id": "GPU-0", "memory_bytes": 80 << 30, "memory_used_bytes": 70 << 30}
    host(stack.engine, devices=[gpu])
    mib = {"hot": (512, 480), "big": (2048, 1024), "warm": (1024, 900)}
    ids = {}
    for name, (limit, _) in mib.items():
        wish = {"memory_mib": limit, "devices": ["GPU-0"] if name == "hot" else []}
        ids[name], worker = begun(stack.engine, start(stack.engine, name, **wish))
    bury(stack)
    for _ in range(3):
        enqueue(stack)
    with transaction(stack.engine) as conn:
        loads = {f"w-{name}": (used << 20, 0) for name, (_, used) in mib.items()}
        workers.report(conn, HOST | {"devices": [gpu]}, loads)
        leases.claim(conn, replace(worker, id="w-hot"), limit=2)
        of_hot = sa.update(pool_workers).where(pool_workers.c.id == "w-hot")
        conn.execute(of_hot.values(version="0.0.9+0050"))
    return ids["hot"].id


def dead_letter(stack: Stack) -> str:
    """The id of the dead letter of `busy_pools`."""
    query = {"status": "dead_letter"}
    (row,) = stack.client("admin").get("projects/demo/jobs", params=query).json()["items"]
    return str(row["id"])

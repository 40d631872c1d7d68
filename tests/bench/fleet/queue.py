"""Queued tasks without a host, the workers that execute them, and their durations."""

from __future__ import annotations

import contextlib
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from datetime import datetime
from itertools import pairwise
from pathlib import Path

import sqlalchemy as sa

from reconciler.db.engine import reading, transaction
from reconciler.db.schema import nodes
from reconciler.db.schema import tasks as task_table
from reconciler.model.states import TaskKind, TaskState
from reconciler.records import images, queue
from reconciler.runs.paths import RunPaths, read_json
from tests.bench.fleet import records

_ENDED = (TaskState.SUCCEEDED, TaskState.FAILED, TaskState.CANCELED, TaskState.LOST)


def fill(engine: sa.Engine, count: int) -> list[str]:
    """Queue `count` tasks, spread over all nodes and due at the same instant; return their ids."""
    with transaction(engine) as conn:
        image = next((row for row in images.every(conn) if row.name == records.IMAGE), None)
        if image is None:
            raise RuntimeError("the fleet has no image")
        hosts = list(conn.execute(sa.select(nodes.c.id).order_by(nodes.c.id)).scalars())
        begun = conn.execute(sa.select(sa.func.count()).select_from(task_table)).scalar_one()
        added = []
        for turn in range(begun, begun + count):
            host = hosts[turn % len(hosts)]
            # Duplicate work is queued only once, and the kind reads only the image, so each task
            # gets a turn.
            parameters = {"image_id": image.id, "turn": turn}
            kind = TaskKind.NODE_IMAGE_CACHE
            item = queue.Enqueue(kind, host, "node", host, parameters)
            added.append(queue.enqueue(conn, item, records.ACT).id)
    return added


@contextlib.contextmanager
def workers(
    database_url: str, folder: Path, launcher: str, *, processes: int, at_once: int
) -> Iterator[list[int]]:
    """Start worker processes over a shared folder of runs; return their ids."""
    environment = {
        **os.environ,
        "GPUAAS_DATABASE_URL": database_url,
        "GPUAAS_STATE_DIR": str(folder),
        "GPUAAS_WORKERS": str(at_once),
        "GPUAAS_LOG_LEVEL": "warning",
    }
    words = [sys.executable, "-m", "tests.bench.fleet.worker", launcher]
    log = folder / "workers.log"
    running: list[subprocess.Popen[bytes]] = []
    with log.open("ab") as output:
        try:
            for _ in range(processes):
                process = subprocess.Popen(words, env=environment, stdout=output, stderr=output)
                running.append(process)
            yield [process.pid for process in running]
        finally:
            for process in running:
                process.send_signal(signal.SIGTERM)
            for process in running:
                process.wait(timeout=60)
    if any(process.returncode for process in running):
        raise RuntimeError(f"a worker failed:\n{log.read_text()[-3000:]}")


def wait(engine: sa.Engine, ids: Sequence[str], limit_s: float) -> None:
    """Wait until these tasks have ended well."""
    mine = task_table.c.id.in_(ids)
    query = (
        sa.select(task_table.c.state, sa.func.count().label("count"))
        .where(mine)
        .group_by(task_table.c.state)
    )
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        with reading(engine) as conn:
            counts = {row.state: row.count for row in conn.execute(query)}
        if counts.get(TaskState.SUCCEEDED, 0) == len(ids):
            return
        if any(state in _ENDED and state != TaskState.SUCCEEDED for state in counts):
            with reading(engine) as conn:
                errors = conn.execute(sa.select(task_table.c.error).where(mine)).scalars()
                raise RuntimeError(f"tasks failed: {next(filter(None, errors), counts)}")
        time.sleep(0.25)
    raise RuntimeError(f"after {limit_s:.0f} s: {counts}")


def phases(engine: sa.Engine, ids: Sequence[str]) -> dict[str, float]:
    """Return a task's median seconds by phase, with a process for its run: until the run was
    recorded, until its process had begun, until the process had ended, and until a worker noticed.
    """
    columns = (task_table.c.started_at, task_table.c.finished_at, task_table.c.run_directory)
    with reading(engine) as conn:
        rows = conn.execute(sa.select(*columns).where(task_table.c.id.in_(ids))).all()
    marks = []
    for start, end, directory in rows:
        run = RunPaths(Path(directory))
        entries = (
            (run.manifest, "prepared_at"),
            (run.process, "started_at"),
            (run.outcome, "finished_at"),
        )
        moments = [datetime.fromisoformat(_read(path)[name]).timestamp() for path, name in entries]
        marks.append([start, *moments, end])
    lasted = [[after - before for before, after in pairwise(mark)] for mark in marks]
    names = ("prepare", "start", "play", "notice")
    spread = zip(names, zip(*lasted, strict=True), strict=True)
    return {name: round(statistics.median(values), 2) for name, values in spread}


def _read(path: Path) -> dict[str, str]:
    document = read_json(path)
    if document is None:
        raise FileNotFoundError(path)
    return document


def times(engine: sa.Engine, ids: Sequence[str]) -> tuple[float, float]:
    """Return, by the database's clock, the seconds of all these tasks and the median of a task."""
    query = sa.select(task_table.c.started_at, task_table.c.finished_at)
    with reading(engine) as conn:
        rows = conn.execute(query.where(task_table.c.id.in_(ids))).all()
    whole = max(end for _, end in rows) - min(start for start, _ in rows)
    return whole, statistics.median(end - start for start, end in rows)

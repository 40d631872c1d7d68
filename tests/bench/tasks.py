"""Benchmark of tasks per second through the queue: `python -m tests.bench.tasks`; key `tasks`.

noop: real workers, on PostgreSQL that writes through to the disk, with a launcher that does all but
start a process. runner: the same with ansible-runner and a playbook that does nothing;
runner_where_s are the parts of such a task. where_ms are the parts of a task without a process:
tasks run one after the other in a single process without other load, and with a profiler, which
slows them. inside_ms divides the same time by function.
"""

from __future__ import annotations

import argparse
import cProfile
import tempfile
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy import event

from reconciler.db.engine import open_engine, retrying
from reconciler.db.schema import Task
from reconciler.records import leasing
from reconciler.runs.paths import runner_id
from reconciler.service.process import adopt
from reconciler.settings import Settings
from reconciler.work.worker import attend
from tests.bench import document
from tests.bench.fleet import queue, records, usage
from tests.bench.fleet.worker import noop
from tests.postgresql import Server, running

Figures = dict[str, Any]
# Tasks before those of the profile.
WARM = 2
# Stages of a task in `attend`, in this order, by file and function.
PARTS = {
    "take": ("records/leasing.py", "lease"),
    "prepare": ("work/worker.py", "prepare"),
    "identity": ("work/worker.py", "_site"),
    "run_folder": ("runs/launch.py", "launch"),
    "look": ("runs/collect.py", "observe"),
    "progress": ("work/worker.py", "_report"),
    "settle": ("work/settle.py", "settle"),
}
# Functions inside the stages; they cut across them.
INSIDE = {
    "statements": ("engine/default.py", "do_execute"),
    "commits": ("engine/default.py", "do_commit"),
    "programs": ("subprocess.py", "run"),
    "fsync": ("~", "<built-in method posix.fsync>"),
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.tasks")
    parser.add_argument("--nodes", type=int, default=64)
    parser.add_argument("--processes", type=int, default=4, help="worker processes")
    parser.add_argument("--at-once", type=int, default=2, help="tasks of one process at a time")
    parser.add_argument(
        "--noop", type=int, default=512, help="tasks without a process; 0: not measured"
    )
    parser.add_argument(
        "--runner", type=int, default=16, help="tasks with ansible-runner; 0: not measured"
    )
    parser.add_argument("--profile", type=int, default=128, help="tasks of the profile")
    parser.add_argument("--output", type=Path, default=document.PATH)
    given = parser.parse_args()
    with running(fsync=True, options="-c max_connections=100") as server:
        figures = measure(server, given)
    document.add({"tasks": figures}, given.output)
    return 0


def measure(server: Server, given: argparse.Namespace) -> Figures:
    """Measure all figures; each figure gets a new database and folder."""
    results: Figures = {"processes": given.processes, "at_once": given.at_once}
    for launcher, count in (("noop", given.noop), ("runner", given.runner)):
        if not count:
            continue
        url = server.database(launcher)
        records.make(url, given.nodes, 1)
        with tempfile.TemporaryDirectory(prefix="gpuaas-bench-") as name:
            measured = throughput(url, Path(name), launcher, count, given)
        results |= {f"{launcher}_{key}": value for key, value in measured.items()}
    url = server.database("profile")
    records.make(url, given.nodes, 1)
    with tempfile.TemporaryDirectory(prefix="gpuaas-bench-") as name:
        return results | profile(url, Path(name), given.profile)


def throughput(
    url: str, folder: Path, launcher: str, count: int, given: argparse.Namespace
) -> Figures:
    """Measure `count` tasks that are all due at once, with workers that have warmed up."""
    engine = open_engine(url)
    places = given.processes * given.at_once
    try:
        with queue.workers(
            url, folder, launcher, processes=given.processes, at_once=given.at_once
        ) as pids:
            # Importing, connecting and compiling statements are over before the clock starts.
            queue.wait(engine, queue.fill(engine, 2 * places), 300)
            began = sum(map(usage.cpu_s, pids))
            ids = queue.fill(engine, count)
            queue.wait(engine, ids, 60 + 20 * count)
            used = sum(map(usage.cpu_s, pids)) - began
        whole, middle = queue.times(engine, ids)
        parts = {"where_s": queue.phases(engine, ids)} if launcher == "runner" else {}
    finally:
        engine.dispose()
    return {
        **parts,
        "per_s": round(count / whole, 2),
        "tasks": count,
        "p50_s": round(middle, 3),
        "worker_cpu_ms": round(used / count * 1000, 1),
    }


def profile(url: str, folder: Path, count: int) -> Figures:
    """Return the time of a task by its parts, without a process of its run."""
    settings = Settings(state_dir=folder, database_url=url)
    engine = open_engine(url)
    statements: list[str] = []
    event.listen(engine, "before_cursor_execute", lambda *given: statements.append(given[2]))
    try:
        adopt(settings, engine)
        with noop():
            queue.fill(engine, WARM + count)
            _one_by_one(engine, settings, WARM)
            statements.clear()
            profiler = cProfile.Profile()
            began = time.perf_counter()
            profiler.runcall(_one_by_one, engine, settings, count)
            seconds = time.perf_counter() - began
    finally:
        engine.dispose()
    stats = _Stats(profiler)
    of_one = 1000 / count
    return {
        "profiled_ms": round(seconds * of_one, 1),
        "statements": round(len(statements) / count, 1),
        "where_ms": {name: round(stats.seconds(at) * of_one, 2) for name, at in PARTS.items()},
        "inside_ms": {name: round(stats.seconds(at) * of_one, 2) for name, at in INSIDE.items()},
        "inside_calls": {name: round(stats.calls(at) / count, 1) for name, at in INSIDE.items()},
    }


def _one_by_one(engine: sa.Engine, settings: Settings, count: int) -> None:
    """Do a worker's work without its threads, which a profiler does not see."""
    never = threading.Event()
    for _ in range(count):
        (task,) = retrying(engine, partial(_take, settings))
        attend(engine, settings, task, never)


def _take(settings: Settings, conn: sa.Connection) -> list[Task]:
    return leasing.lease(conn, "bench", runner=runner_id(settings.state_dir))


class _Stats:
    """Calls and seconds of functions, including the functions that they call."""

    def __init__(self, profiler: cProfile.Profile) -> None:
        profiler.create_stats()
        self._rows: dict[tuple[str, int, str], tuple[int, int, float, float, Any]]
        self._rows = vars(profiler)["stats"]

    def calls(self, where: tuple[str, str]) -> int:
        return sum(row[1] for row in self._of(*where))

    def seconds(self, where: tuple[str, str]) -> float:
        return sum(row[3] for row in self._of(*where))

    def _of(self, end: str, function: str) -> list[tuple[int, int, float, float, Any]]:
        """Sum all functions of this name in files with this ending."""
        return [
            row
            for (file, _, name), row in self._rows.items()
            if name == function and file.endswith(end)
        ]


if __name__ == "__main__":
    raise SystemExit(main())

"""Benchmark of jobs per second: `python -m tests.bench.jobs`; keys `jobs` and `jobs_runs`.

Jobs that do nothing, through our workers and those of taskiq, SAQ, streaQ and arq, each in an
environment of its own under build/peers. All use the same Redis, which writes its log every second;
results are kept. Ours write each group of outcomes through to the disk: `redis` has SQLite and
hints by Redis, `embedded` SQLite alone, `postgresql` a server of its own and no Redis. The peers'
functions run in the worker itself, ours in its child process.

Workers are started, warmed up and stopped by a signal while a client fills the queue. The time is
from the signal that lets them go on until every job has ended (ours: in the database). Queues take
turns. A figure is the median of the rounds with that number of workers; `jobs` has the larger of
the two. p99_ms: from sending a job to the end of its function, at half of the best peer's rate, by
single workers. peer_durable_p99_ms: the same with a Redis that writes each command through to the
disk, as our databases do.

depth_slowdown: how much longer claiming and finishing 32 jobs takes with a million queued jobs
of 100 projects than with 10,000; 0.2 is a fifth. Both queues are there at once and take turns with
each group, so that the machine's other work slows both: the median over rounds of the medians'
ratio, on SQLite and, in depth_slowdown_postgresql, on PostgreSQL. jobs_runs: every figure, and the
memory (PSS) of a worker with its child processes.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from reconciler.db.engine import open_engine, reading, transaction
from reconciler.db.migrations import migrate
from reconciler.db.schema import jobs as table
from reconciler.db.schema import pool_workers
from reconciler.model.act import Act
from reconciler.model.jobs import Outcome
from reconciler.pools import leases
from reconciler.records import projects
from tests import postgresql
from tests.bench import document
from tests.bench.fleet import job_queues, usage
from tests.bench.fleet.service import free_port
from tests.redis_server import RedisServer

ROOT = Path(__file__).resolve().parents[2]
PEERS = {
    "taskiq": ("taskiq-redis==1.2.4",),
    "saq": ("saq[hiredis]==0.26.4", "typing-extensions"),
    "streaq": ("streaq==7.2.0",),
    "arq": ("arq==0.28.0",),
}
COMMON = ("hiredis", "uvloop")
OURS = ("redis", "embedded", "postgresql")
EVERY_SECOND = "everysec"
# It runs 32 jobs per half second, so that a full count would take most of the time.
FEWER = {"arq": 10}
WARM = 64
_END_S = 300
ACT = Act("bench", "jobs of the benchmark")
PROJECTS = 100
GROUP = 32
# For the measurement of depth. All groups have fewer jobs than the 10,000 of the smaller queue.
DEPTH_WARM = 16
DEPTH_ROUNDS = 9
DEPTH_GROUPS = 32
Figures = dict[str, Any]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.jobs")
    parser.add_argument("--jobs", type=int, default=5000, help="of each measurement")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--seconds", type=int, default=10, help="of half load")
    parser.add_argument("--depth", type=int, default=1_000_000, help="queued jobs")
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=list(PEERS))
    parser.add_argument("--output", type=Path, default=document.PATH)
    given = parser.parse_args()
    for name in given.peers:
        install(name)
    document.add(measure(given), given.output)
    return 0


def python(name: str) -> Path:
    """The interpreter that has a peer."""
    return ROOT / "build" / "peers" / name / "bin" / "python"


def install(name: str) -> None:
    """Make the environment of a peer if it is missing."""
    importable = [python(name), "-c", f"import {name}, uvloop"]
    with contextlib.suppress(OSError):
        if subprocess.run(importable, check=False, capture_output=True).returncode == 0:
            return
    home = python(name).parents[1]
    sys.stderr.write(f"installing {name} in {home}\n")
    venv.create(home, with_pip=True, clear=True)
    pip = [home / "bin" / "pip", "install", "--quiet", *PEERS[name], *COMMON]
    subprocess.run(pip, check=True)


def measure(given: argparse.Namespace) -> Figures:
    """Measure all queues in turns, then the latency of two of them, then the depth."""
    runs: dict[str, dict[str, list[float]]] = {}
    memory: dict[str, float] = {}
    for _ in range(given.rounds):
        for workers in given.workers:
            for name in (*given.peers, *OURS):
                count = max(given.jobs // FEWER.get(name, 1), 1)
                per_s, mib = throughput(name, workers, count)
                runs.setdefault(name, {}).setdefault(f"{workers}", []).append(round(per_s, 1))
                memory[name] = mib
                sys.stderr.write(f"{name}, {workers} workers: {per_s:.0f}/s\n")
    best = {
        name: max(statistics.median(rounds) for rounds in of.values()) for name, of in runs.items()
    }
    peer = max(given.peers, key=best.__getitem__, default=None)
    singles = [statistics.median(runs[name]["1"]) for name in given.peers or OURS]
    rate = max(int(max(singles) / 2), 1)
    durable = f"{peer}, written through"
    delays: dict[str, list[tuple[float, float]]] = {name: [] for name in OURS}
    delays |= {peer: [], durable: []} if peer else {}
    for _ in range(given.rounds):
        for name, rounds in delays.items():
            fsync = "always" if name == durable else EVERY_SECOND
            rounds.append(latency(name.partition(",")[0], rate, given.seconds, fsync))
    p50, p99 = (
        {
            name: round(statistics.median(each[at] for each in rounds) * 1000, 2)
            for name, rounds in delays.items()
        }
        for at in (0, 1)
    )
    depths = measure_depths(given.depth)
    peer_per_s = best[peer] if peer else None

    def ratio(name: str) -> float | None:
        return round(best[name] / peer_per_s, 2) if peer_per_s else None

    return {
        "jobs": {
            "redis": {
                "ours_per_s": best["redis"],
                "best_peer": peer,
                "best_peer_per_s": peer_per_s,
                "ratio": ratio("redis"),
                "p99_ms": p99["redis"],
                "peer_p99_ms": p99[peer] if peer else None,
                "peer_durable_p99_ms": p99[durable] if peer else None,
            },
            **{
                name: {
                    "ours_per_s": best[name],
                    "ratio_to_best_peer": ratio(name),
                    "p99_ms": p99[name],
                }
                for name in OURS[1:]
            },
            "depth_slowdown": slowdown(depths["sqlite"]),
            "depth_slowdown_postgresql": slowdown(depths["postgresql"]),
        },
        "jobs_runs": {
            "per_s": runs,
            "half_load_per_s": rate,
            "p50_ms": p50,
            "p99_ms": p99,
            "claim_and_finish_ms": depths,
            "memory_mib": memory,
            "load": os.getloadavg()[0],
        },
    }


class Queue:
    """A queue of jobs with its workers and a Redis. database: the URL of ours."""

    def __init__(self, name: str, folder: Path, url: str, database: str) -> None:
        self.name = name
        self.folder = folder
        self.ours = name in OURS
        self.note = folder / "note"
        self.note.touch()
        self.database = database
        url = "" if name in OURS[1:] else url
        self.environment = {
            **os.environ,
            job_queues.NOTE: str(self.note),
            job_queues.URL: url,
            "GPUAAS_REDIS_URL": url,
            "GPUAAS_STATE_DIR": str(folder),
            "GPUAAS_DATABASE_URL": database,
            "GPUAAS_LOG_LEVEL": "warning",
            "PYTHONPATH": str(ROOT),
        }
        self.workers: list[subprocess.Popen[bytes]] = []
        self.engine = open_engine(database) if self.ours else None
        if self.engine is not None:
            site(self.engine)

    def start(self, workers: int) -> None:
        """Start workers and let them work a little."""
        words: list[Any] = self._script("work")
        if self.ours:
            words = [sys.executable, "-m", "reconciler.cli.main", "jobs", "worker"]
            words += ["--model", "m=tests.bench.fleet.job_queues:run"]
        with (self.folder / "log").open("ab") as log:
            for _ in range(workers):
                process = subprocess.Popen(
                    words,
                    env=self.environment,
                    cwd=ROOT,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
                self.workers.append(process)
        self._until(lambda: self._serving() == workers)
        self.send(WARM * workers)
        self.wait(WARM * workers)
        time.sleep(1)

    def send(self, count: int) -> None:
        """Fill the queue."""
        subprocess.run(self._script("send", count), env=self.environment, check=True)

    def offer(self, rate: int, seconds: int) -> None:
        """Send jobs at a rate."""
        subprocess.run(self._script("offer", rate, seconds), env=self.environment, check=True)

    def wait(self, count: int) -> None:
        """Wait until so many jobs have run; ours: until their ends are recorded, too."""
        self._until(lambda: self.note.stat().st_size >= count * job_queues.RECORD.size)
        if self.engine is not None:
            done = sa.select(sa.func.count()).where(table.c.status == "done")

            def recorded(engine: sa.Engine = self.engine) -> bool:
                with reading(engine) as conn:
                    return conn.execute(done).scalar_one() == count

            self._until(recorded)

    def delays(self) -> list[float]:
        """Seconds from the sending of each job to its end."""
        data = self.note.read_bytes()
        return [each[0] for each in job_queues.RECORD.iter_unpack(data)]

    def signal(self, number: signal.Signals) -> None:
        """Signal workers and their child processes."""
        for process in self.workers:
            os.killpg(process.pid, number)

    def pause(self) -> None:
        """Stop the workers, but not in a transaction, which would keep the client out."""
        while True:
            self.signal(signal.SIGSTOP)
            if not self.database.startswith("sqlite"):
                return  # Its transactions do not exclude each other.
            with contextlib.closing(
                sqlite3.connect(self.folder / "reconciler.db", timeout=0)
            ) as db:
                try:
                    db.execute("BEGIN IMMEDIATE")
                    return
                except sqlite3.OperationalError:
                    self.signal(signal.SIGCONT)
            time.sleep(0.05)

    def memory_mib(self) -> float:
        """Mean PSS of a worker with its child processes."""
        total = 0.0
        for process in self.workers:
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            for pid in (process.pid, *map(int, children)):
                total += usage.memory_mib(pid)["pss"]
        return round(total / len(self.workers), 1)

    def close(self) -> None:
        """End the workers."""
        for process in self.workers:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if self.engine is not None:
            self.engine.dispose()

    def _script(self, *words: object) -> list[Any]:
        name = "ours" if self.ours else self.name
        interpreter = sys.executable if self.ours else python(self.name)
        return [interpreter, job_queues.__file__, name, *map(str, words)]

    def _serving(self) -> int:
        if self.engine is None:
            time.sleep(3)  # The peers have no common sign that they are ready.
            return len(self.workers)
        with reading(self.engine) as conn:
            return int(
                conn.execute(sa.select(sa.func.count()).select_from(pool_workers)).scalar_one()
            )

    def _until(self, true: Any) -> None:
        end = time.monotonic() + _END_S
        while not true():
            if time.monotonic() > end or any(each.poll() is not None for each in self.workers):
                raise RuntimeError(f"{self.name}:\n{(self.folder / 'log').read_text()[-3000:]}")
            time.sleep(0.005)


def site(engine: sa.Engine) -> None:
    """An empty site with a project."""
    migrate(engine)
    with transaction(engine) as conn:
        projects.create(conn, "bench", ACT, id="bench")


@contextlib.contextmanager
def queue(name: str, workers: int, fsync: str = EVERY_SECOND) -> Iterator[Queue]:
    """A queue on a Redis of its own, with workers. fsync: when Redis writes through to the disk."""
    build = ROOT / "build"
    with tempfile.TemporaryDirectory(prefix="gpuaas-bench-", dir=build) as folder:
        port = free_port()
        options = ["--port", str(port), "--dir", folder]
        options += ["--appendonly", "yes", "--appendfsync", fsync]
        server = RedisServer(Path(folder), *options)
        server.start()
        database = f"sqlite:///{folder}/reconciler.db"
        with contextlib.ExitStack() as stack:
            stack.callback(server.close)
            if name == "postgresql":
                database = stack.enter_context(postgresql.running(fsync=True)).database("jobs")
            opened = Queue(name, Path(folder), f"redis://127.0.0.1:{port}", database)
            stack.callback(opened.close)
            opened.start(workers)
            yield opened


def throughput(name: str, workers: int, count: int) -> tuple[float, float]:
    """Jobs per second of so many workers, and the memory of a worker."""
    with queue(name, workers) as opened:
        opened.pause()
        opened.send(count)
        began = time.monotonic()
        opened.signal(signal.SIGCONT)
        opened.wait(WARM * workers + count)
        return count / (time.monotonic() - began), opened.memory_mib()


def latency(name: str, rate: int, seconds: int, fsync: str) -> tuple[float, float]:
    """Median and 99th percentile of the seconds of a job, at a rate, by a single worker."""
    with queue(name, 1, fsync) as opened:
        opened.offer(rate, seconds)
        opened.wait(WARM + rate * seconds)
        parts = statistics.quantiles(opened.delays()[WARM:], n=100)
        return parts[49], parts[98]


def measure_depths(depth: int) -> dict[str, dict[str, list[float]]]:
    """Milliseconds to claim and finish a group of jobs, by database and number of queued jobs: the
    median of each round.
    """
    sizes = (depth // 100, depth)
    with tempfile.TemporaryDirectory(prefix="gpuaas-bench-", dir=ROOT / "build") as folder:
        urls = {size: f"sqlite:///{folder}/{size}.db" for size in sizes}
        rounds = {"sqlite": in_turns(urls)}
    with postgresql.running(fsync=True) as server:
        rounds["postgresql"] = in_turns({size: server.database(f"d{size}") for size in sizes})
    return rounds


def slowdown(rounds: dict[str, list[float]]) -> float:
    """By which part the second queue is slower than the first: the median over the rounds."""
    shallow, deep = rounds.values()
    ratios = [more / less for less, more in zip(shallow, deep, strict=True)]
    return round(statistics.median(ratios) - 1, 3)


def in_turns(urls: dict[int, str]) -> dict[str, list[float]]:
    """The rounds of one database: urls by the number of jobs that each gets."""
    with contextlib.ExitStack() as stack:
        queues = {}
        for size, url in urls.items():
            engine = open_engine(url)
            stack.callback(engine.dispose)
            queues[size] = groups(engine, size)
            for _ in range(DEPTH_WARM):
                next(queues[size])
        rounds: dict[str, list[float]] = {f"{size}": [] for size in urls}
        for _ in range(DEPTH_ROUNDS):
            times: dict[int, list[float]] = {size: [] for size in urls}
            for number in range(DEPTH_GROUPS):
                # Either is the first as often, because a commit may slow the next.
                for size in list(queues)[:: 1 if number % 2 else -1]:
                    times[size].append(next(queues[size]))
            for size, each in times.items():
                rounds[f"{size}"].append(round(statistics.median(each) * 1000, 3))
    return rounds


def groups(engine: sa.Engine, depth: int) -> Iterator[float]:
    """The seconds of each group, in a new queue of so many jobs."""
    site(engine)
    with transaction(engine) as conn:
        me = leases.register(conn, host="bench", pid=1, models=["m"])
        for number in range(PROJECTS):
            projects.create(conn, f"p{number}", ACT, id=f"p{number}")
        id = _IDS[engine.dialect.name]
        jobs = sa.text(_QUEUED.format(id=id, depth=depth, projects=PROJECTS))
        conn.execute(jobs)
    if engine.dialect.name == "postgresql":
        # Its autovacuum would do so within a minute, during a round.
        with engine.execution_options(isolation_level="AUTOCOMMIT").connect() as conn:
            conn.exec_driver_sql("VACUUM ANALYZE")
    held: list[Any] = []
    while True:
        began = time.perf_counter()
        with transaction(engine) as conn:
            leases.finish(conn, [(job, Outcome({})) for job in held])
            held = leases.claim(conn, me, limit=GROUP)
        yield time.perf_counter() - began


_QUEUED = """
INSERT INTO orchestrator_jobs (id, project_id, model, input, priority, status, attempts,
  max_attempts, lost, timeout_s, token, worker, error, size, requested_by, correlation_id,
  enqueued_at, updated_at)
WITH RECURSIVE counted(n) AS (SELECT 0 UNION ALL SELECT n + 1 FROM counted WHERE n + 1 < {depth})
SELECT {id}, 'p' || (n % {projects}), 'm', '{{}}', 5,
  'pending', 0, 3, 0, 60, '', '', '{{}}', 2, 'bench', '', 1.0 + n, 1.0 + n FROM counted
"""
_ID = "00000000-0000-8000-8000-"
_IDS = {"sqlite": f"printf('{_ID}%012d', n)", "postgresql": f"'{_ID}' || lpad(n::text, 12, '0')"}


if __name__ == "__main__":
    raise SystemExit(main())

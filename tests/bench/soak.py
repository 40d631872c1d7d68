"""Soak test of jobs: `scripts/perf/orchestrator_soak.sh`. A line of CSV per second, and an SVG.

Offers jobs at a steady rate to workers of its own, with Redis and a database of its own, and plays
a schedule of faults. In the end it waits for the queue to empty: every job that was admitted must
be done, and those of the fault `poison` dead letters. Exit status 1 otherwise.
"""

from __future__ import annotations

import argparse
import csv
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pygal
import sqlalchemy as sa

from reconciler.db import clock
from reconciler.db.engine import open_engine, reading, retrying, transaction
from reconciler.db.migrations import migrate
from reconciler.db.schema import jobs as table
from reconciler.db.schema import pool_workers
from reconciler.model.act import Act
from reconciler.model.errors import Problem
from reconciler.pools import control, hints, jobs
from reconciler.records import projects
from reconciler.settings import Settings
from reconciler.work.loops import follow_drain
from tests.bench.fleet import usage
from tests.redis_server import RedisServer

ACT = Act("soak", "soak test")
PROJECT = "soak"
MODELS = {"wait": "reconciler.pools.drills:wait", "fail": "reconciler.pools.drills:fail"}
# Parts of the time at which faults happen.
FAULTS = ("kill", "stop", "flush", "redis", "poison", "drain")
# Faults that need Redis.
_OF_REDIS = {"flush", "redis"}
SCHEDULE = "0.15:kill,0.3:stop,0.45:flush,0.55:redis,0.65:poison,0.8:drain"
# Longer than a lease.
_STOPPED_S = 40.0
_AWAY_S = 10.0
# Replaces it with --short.
_SHORT_S = 1.0
_POISONED = 20
_TURN_S = 0.1
_EMPTY_S = 180.0
COLUMNS = (
    *("second", "offered", "refused", "done", "p50_ms", "p95_ms", "p99_ms"),
    *("retries", "reclaims", "dlq", "pending", "memory_mib", "mode", "fault"),
)
# For these columns, a line has the difference from the preceding line.
_TOTALS = ("offered", "refused", "done")
Row = dict[str, Any]


class Soak:
    def __init__(self, given: argparse.Namespace, folder: Path) -> None:
        self.given = given
        url = given.database or f"sqlite:///{folder / 'soak.db'}"
        self.engine = open_engine(url)
        migrate(self.engine)
        self.redis = RedisServer(folder) if shutil.which("redis-server") else None
        if self.redis:
            self.redis.start()
        redis_url = self.redis.url if self.redis else ""
        self.hints = hints.of(redis_url)
        self.settings = Settings(state_dir=folder)
        self.cause = folder / "broken"
        self.cause.touch()
        self.offered = self.refused = self.poisoned = 0
        self.ended = threading.Event()
        # Errors of the soak's own threads: a run with less load or fewer faults must not pass.
        self.errors: list[str] = []
        self._log = (folder / "workers.log").open("ab")
        self._environment = {
            **os.environ,
            "GPUAAS_STATE_DIR": str(folder),
            "GPUAAS_DATABASE_URL": url,
            "GPUAAS_REDIS_URL": redis_url,
        }
        self.workers = [self.worker() for _ in range(given.workers)]
        with transaction(self.engine) as conn:
            projects.create(conn, PROJECT, ACT, id=PROJECT)
        self._until(lambda: self._count(pool_workers) >= given.workers, 120)

    def worker(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "reconciler.cli.main", "jobs", "worker"]
        for name, target in MODELS.items():
            command += ["--model", f"{name}={target}"]
        output = {"stdout": self._log, "stderr": self._log}
        return subprocess.Popen(command, env=self._environment, **output)  # type: ignore[call-overload,no-any-return]

    def close(self) -> None:
        for process in self.workers:
            process.kill()
            process.wait()
        if self.redis:
            self.redis.close()
        self.engine.dispose()
        self._log.close()

    def offer(self) -> None:
        """Send jobs at the rate until the end."""
        began, sent = time.monotonic(), 0
        while not self.ended.wait(_TURN_S):
            due = int((time.monotonic() - began) * self.given.rate)
            self.send(due - sent, jobs.NewJob("wait", {"seconds": self.given.work}))
            sent = due

    def send(self, count: int, job: jobs.NewJob) -> None:
        new = [job] * count
        try:
            ids = retrying(self.engine, lambda conn: jobs.enqueue(conn, PROJECT, new, ACT))
        except Problem as problem:
            if problem.code not in ("maintenance", "job_limit"):
                raise
            self.refused += count
            return
        self.offered += count
        self.poisoned += count if job.model == "fail" else 0
        if self.hints:
            self.hints.announce(ids)

    def fault(self, name: str) -> None:
        """Play a fault to its end."""
        match name:
            case "kill":
                victim = self.workers.pop(0)
                victim.kill()
                victim.wait()
                self._take(victim)
                self.workers.append(self.worker())
            case "stop":
                victim = self.workers[0]
                self._take(victim, signal.SIGSTOP)
                if self.given.short:
                    self._until(lambda: not self._held_by(victim), _STOPPED_S)
                else:
                    self.ended.wait(_STOPPED_S)
                victim.send_signal(signal.SIGCONT)
            case "flush" if self.redis:
                self.redis.client.flushall()
            case "redis" if self.redis:
                self.redis.kill()
                self.ended.wait(_SHORT_S if self.given.short else _AWAY_S)
                self.redis.start()
            case "poison":
                self.send(_POISONED, jobs.NewJob("fail", {"broken": str(self.cause)}))
            case "drain":
                retrying(self.engine, lambda conn: control.drain(conn, ACT, 60))
                self._until(self._drained, 120)
                retrying(self.engine, lambda conn: control.resume(conn, ACT))

    def _take(self, worker: subprocess.Popen[bytes], number: signal.Signals | None = None) -> None:
        """Signal a worker. With --short its leases end at once, so that the others do its jobs."""
        with transaction(self.engine) as conn:
            if self.given.short:
                held = sa.update(table).where(_of_worker(worker))
                conn.execute(held.values(lease_expires_at=1.0))
            # Not inside its transaction, which would keep all others out of SQLite.
            if number is not None:
                worker.send_signal(number)

    def _held_by(self, worker: subprocess.Popen[bytes]) -> int:
        return self._count(table, _of_worker(worker))

    def _drained(self) -> bool:
        follow_drain(self.engine, self.settings)
        with reading(self.engine) as conn:
            return control.read(conn).mode == "drained"

    def sample(self, second: int, since: float, fault: str) -> tuple[Row, float]:
        """The line of a second, and the database's time at its end."""
        with reading(self.engine) as conn:
            now = clock.read(conn)
            ended = table.c.status == "done"
            span = sa.and_(ended, table.c.updated_at > since, table.c.updated_at <= now)
            took = sa.select(table.c.updated_at - table.c.enqueued_at).where(span)
            times = sorted(1000 * value for value in conn.execute(took).scalars())
            counts, number = control.counters(conn), jobs.count(conn)
            mode = control.read(conn).mode
        pids = [process.pid for process in self.workers]
        values: dict[str, Any] = {
            **{"second": second, "offered": self.offered, "refused": self.refused},
            "done": number["done"],
            **{f"p{part}_ms": percentile(times, part / 100) for part in (50, 95, 99)},
            **{"retries": counts["job_retries"], "reclaims": counts["reclaimed"]},
            **{"dlq": number["dead_letter"], "pending": number["pending"]},
            "memory_mib": round(memory_mib(pids), 1),
            **{"mode": mode, "fault": fault},
        }
        return values, now

    def left(self) -> int:
        with reading(self.engine) as conn:
            number = jobs.count(conn)
        return number["pending"] + number["running"]

    def counts(self) -> dict[str, int]:
        with reading(self.engine) as conn:
            return {"offered": self.offered, "refused": self.refused, **jobs.count(conn)}

    def _count(self, of: sa.Table, *where: sa.ColumnElement[bool]) -> int:
        query = sa.select(sa.func.count()).select_from(of).where(*where)
        with reading(self.engine) as conn:
            return int(conn.execute(query).scalar_one())

    def _until(self, true: Callable[[], object], seconds: float) -> bool:
        end = time.monotonic() + seconds
        while not true():
            if time.monotonic() > end:
                return False
            time.sleep(0.1)
        return True


def _of_worker(worker: subprocess.Popen[bytes]) -> sa.ColumnElement[bool]:
    """Jobs that a worker holds by the records."""
    mine = sa.select(pool_workers.c.id).where(pool_workers.c.pid == worker.pid)
    return sa.and_(table.c.status == "running", table.c.worker.in_(mine))


def unexplained(counts: dict[str, int], poisoned: int) -> list[str]:
    """Counts of jobs that the schedule does not explain: only those of `poison` do not succeed, and
    the drain waits for those that run.
    """
    expected = {
        **{"pending": 0, "running": 0, "canceled": 0, "dead_letter": poisoned},
        "done": counts["offered"] - poisoned,
    }
    return [
        f"{name} {counts[name]} instead of {number}"
        for name, number in expected.items()
        if counts[name] != number
    ]


def begin(errors: list[str], act: Callable[..., object], *given: str) -> threading.Thread:
    """A thread that acts. Its error is added to others."""

    def watched() -> None:
        try:
            act(*given)
        except Exception as error:
            errors.append(f"{act.__name__} {' '.join(given)}: {error!r}")

    thread = threading.Thread(target=watched, daemon=True)
    thread.start()
    return thread


def percentile(values: list[float], part: float) -> float | str:
    """By the nearest rank; "" without a value."""
    if not values:
        return ""
    return round(values[max(0, math.ceil(part * len(values)) - 1)], 1)


def memory_mib(pids: list[int]) -> float:
    """Proportional memory of processes and their children."""
    sizes = 0.0
    for pid in pids:
        # A process may have just been killed.
        with suppress(OSError, KeyError):
            children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
            sizes += sum(usage.memory_mib(each)["pss"] for each in (pid, *map(int, children)))
    return sizes


def schedule(text: str, seconds: int) -> dict[int, str]:
    """Faults by second. A number below 1 is a fraction of the whole time. ValueError for a fault
    that would not be played.
    """
    faults: dict[int, str] = {}
    for entry in filter(None, text.split(",")):
        at, _, name = entry.partition(":")
        when = int(float(at) * seconds if float(at) < 1 else float(at))
        if name not in FAULTS or when in faults or not 0 <= when < seconds:
            raise ValueError(
                f"expected SECOND:NAME of {', '.join(FAULTS)}, one in a second before {seconds};"
                f" found {entry}"
            )
        faults[when] = name
    return faults


def play(soak: Soak, seconds: int, faults: dict[int, str]) -> list[Row]:
    """Offer jobs and play the faults, with a line for each second until the queue is empty."""
    offering = begin(soak.errors, soak.offer)
    playing: list[threading.Thread] = []
    rows: list[Row] = []
    with reading(soak.engine) as conn:
        since = clock.read(conn)
    began = time.monotonic()
    before = dict.fromkeys(_TOTALS, 0)
    second = 0
    while second < seconds or (soak.left() and second < seconds + _EMPTY_S):
        if second == seconds:
            soak.ended.set()
        fault = faults.get(second, "") if second < seconds else ""
        if fault:
            playing.append(begin(soak.errors, soak.fault, fault))
        time.sleep(max(0.0, began + second + 1 - time.monotonic()))
        row, since = soak.sample(second, since, fault)
        totals = {name: row[name] for name in _TOTALS}
        row |= {name: totals[name] - before[name] for name in _TOTALS}
        before = totals
        rows.append(row)
        second += 1
    soak.ended.set()
    for thread in (offering, *playing):
        thread.join()
    return rows


def picture(rows: list[Row]) -> bytes:
    """Rates on the left axis, latencies in milliseconds on the right one; faults by name below."""
    chart = pygal.Line(
        width=1200,
        height=520,
        title="Jobs per second, and milliseconds from sending to result (right)",
        x_labels=[row["fault"] or str(row["second"]) for row in rows],
        x_labels_major=[row["fault"] for row in rows if row["fault"]],
        show_minor_x_labels=False,
        show_dots=False,
        x_label_rotation=30,
        legend_at_bottom=True,
        js=[],
    )
    for name in ("offered", "refused", "done", "pending", "dlq"):
        chart.add(name, [row[name] for row in rows])
    for name in ("p50_ms", "p99_ms"):
        values = [None if row[name] == "" else row[name] for row in rows]
        chart.add(name, values, secondary=True)
    drawing: bytes = chart.render()
    return drawing


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/perf/orchestrator_soak.sh")
    parser.add_argument("--seconds", type=int, default=600)
    parser.add_argument("--rate", type=float, default=50, help="jobs per second")
    parser.add_argument("--work", type=float, default=0.01, help="seconds of a job")
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--database", default="", help="URL of an empty one; default: SQLite")
    parser.add_argument("--faults", default=SCHEDULE, help=f"SECOND:NAME,… of {' '.join(FAULTS)}")
    parser.add_argument(
        "--short", action="store_true", help="faults take seconds: leases end early"
    )
    parser.add_argument("--output", type=Path, default=Path("build/soak"))
    given = parser.parse_args()
    try:
        faults = schedule(given.faults, given.seconds)
    except ValueError as error:
        parser.error(str(error))
    if _OF_REDIS & set(faults.values()) and shutil.which("redis-server") is None:
        parser.error("redis-server is not installed: choose faults without flush and redis")
    given.output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="gpuaas-soak-") as folder:
        soak = Soak(given, Path(folder))
        try:
            rows = play(soak, given.seconds, faults)
            counts = soak.counts()
            wrong = [*unexplained(counts, soak.poisoned), *soak.errors]
        finally:
            soak.close()
    with (given.output / "soak.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(rows)
    (given.output / "soak.svg").write_bytes(picture(rows))
    words = ", ".join([*(f"{name} {count}" for name, count in counts.items()), *wrong])
    verdict = "failed" if wrong else "passed"
    sys.stdout.write(f"{verdict}: {words}; {given.output}/soak.csv, .svg\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

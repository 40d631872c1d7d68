"""Supervisor of the pools of this machine: starts, replaces, drains and kills their workers.

One process of the service supervises, by a lock in the state folder. Workers outlive it: the next
supervisor finds them by id, start time and mark. What is recorded as ended is proven absent.
"""

from __future__ import annotations

import logging
import math
import signal
import socket
import subprocess
import threading
import time
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from sqlalchemy import Engine

from reconciler.db import clock, rows
from reconciler.db.engine import reading, retrying
from reconciler.db.migrations import program_version
from reconciler.db.schema import Pool, PoolWorker
from reconciler.model.act import Act
from reconciler.model.errors import Problem
from reconciler.model.pools import (
    ENDS_LIMIT,
    ENDS_S,
    SERVING_POOLS,
    WARN_SHARE,
    Load,
    PoolState,
    victim,
)
from reconciler.pools import memory, pools, processes, watch, workers
from reconciler.pools.processes import Process
from reconciler.pools.runner import DIGEST, MODEL_FILE
from reconciler.runs import lock
from reconciler.runs.paths import runner_id
from reconciler.settings import Settings

log = logging.getLogger("gpuaas.pools")

EVERY_S = 1.0
# Interval of reports: host, models, devices, memory of workers.
REPORT_S = 5.0
# nvidia-smi may take seconds.
GPUS_S = 30.0
_WARN_S = 60.0
# A worker beats every 10 s. One that is silent for longer hangs, and is killed.
SILENT_S = 60.0
# A worker that loads its models has no heartbeat, and gives up after `child.START_S`. One that
# still loads then hangs.
LOADING_S = 600.0
# A supervisor that does not come further for so long hangs. It keeps the lock of this machine, so
# that no other process supervises its pools.
_STUCK_S = 300.0
_MIB = 1 << 20
_ACT = Act("reconciler")


@dataclass
class _Worker:
    """A living worker of a pool, with the processes that are left of it."""

    row: PoolWorker
    processes: list[Process]

    @property
    def leader(self) -> list[Process]:
        """Its own process, if it is there. Before that has come up, all there are."""
        if not self.row.pid:
            return self.processes
        return [process for process in self.processes if processes.leads(self.row, process)]


@dataclass
class Supervisor:
    """settings, engine: of the service. only: supervise no pools but these, for their end."""

    settings: Settings
    engine: Engine
    only: frozenset[str] | None = None
    _children: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    _gpus: list[dict[str, Any]] = field(default_factory=list)
    _kills: dict[str, int] = field(default_factory=dict)
    # Workers that have got SIGTERM, and when the grace period of a worker began.
    _signalled: set[str] = field(default_factory=set)
    # Workers of another version that have been asked to end, so that others take their places.
    _replaced: set[str] = field(default_factory=set)
    _ending: dict[str, float] = field(default_factory=dict)
    # Processes of each worker that are there, some of them without their mark by now.
    _processes: dict[str, list[Process]] = field(default_factory=dict)
    _due: dict[str, float] = field(default_factory=dict)
    # The last heartbeat of each worker, and since when it is known here: on the monotonic clock, as
    # above, because that of the database may jump.
    _beats: dict[str, tuple[float, float]] = field(default_factory=dict)
    # When the pass that goes on last came further; inf between two.
    _moved: float = math.inf
    _stopping: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def __post_init__(self) -> None:
        self.host_id = runner_id(self.settings.state_dir)
        self._version = program_version()
        self._group = memory.own_group()
        self._parent = memory.parent_group(self._group)

    def start(self) -> None:
        """Supervise in a thread, as soon as no other process does. Ends the process if it hangs."""
        self._thread = threading.Thread(target=self._run, name="pools", daemon=True)
        self._thread.start()
        # systemd starts the service again, and the next supervisor adopts the workers.
        watch.start(lambda: self._moved, _STUCK_S, self._stopping, "the supervisor of pools")

    def stop(self) -> None:
        """Leave the workers to the next supervisor."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join(timeout=10)

    def _run(self) -> None:
        while not self._stopping.is_set():
            with self.lock() as held:
                while held is not None and not self._stopping.is_set():
                    self._pass()
                    self._stopping.wait(EVERY_S)
            self._stopping.wait(EVERY_S)

    def _pass(self) -> None:
        try:
            self._moved = time.monotonic()
            self.tend()
        except Exception:
            self._beats.clear()  # Without the database, no worker is silent.
            log.exception("pools of this host are left as they are; tried again")
        finally:
            self._moved = math.inf

    def lock(self) -> AbstractContextManager[int | None]:
        """The lock of the supervisor; None while another process has it."""
        return lock.attempt(self.settings.state_dir / "pools.lock")

    def tend(self) -> None:
        """Bring every pool of this host a step further."""
        with reading(self.engine) as conn:
            recorded = workers.on_host(conn, self.host_id)
            now = clock.read(conn)
        # Strays are looked for now and then.
        looks = recorded or self._is_due("report")
        seen = processes.scan(self.host_id) if looks else {}
        boot = lock.boot_id()
        present = {row.id for _, living in recorded for row in living if row.boot_id == boot}
        strays = self._end_strays(seen, present)
        loads: list[Load] = []
        sizes: dict[str, tuple[int, int]] = {}
        for pool, living in recorded:
            if self.only is not None and pool.id not in self.only:
                continue
            self._moved = time.monotonic()
            tracked = [
                _Worker(row, self._left(row.id, seen) if row.id in present else [])
                for row in living
            ]
            try:
                ended = [worker for worker in tracked if self._is_gone(worker)]
                killed = True in [self._end(worker) for worker in ended]
                rest = [worker for worker in tracked if worker not in ended]
                loads.append(self._measure(pool, rest, sizes, killed=killed))
                self._tend(pool, rest, strays=strays)
            except Problem as problem:  # Changed by another transaction.
                log.info("pool %s moved on: %s", pool.name, problem.code)
            except Exception:
                # A pool that fails must not keep the others from being tended.
                log.exception("pool %s is left as it is; tried again", pool.name)
        self._moved = time.monotonic()
        if self.only is None:
            self._report(sizes, strays=strays)
            self._relieve([pool for pool, _ in recorded], loads, now)

    def _tend(self, pool: Pool, living: list[_Worker], *, strays: bool) -> None:
        if pool.state == PoolState.REQUESTED:
            self._move(pool, "begin")
        elif pool.state in SERVING_POOLS:
            self._serve(pool, living)
        elif not living:
            # A process without a record may be of any pool.
            if not strays:
                self._conclude(pool)
        elif pool.state == PoolState.DRAINING:
            with reading(self.engine) as conn:
                busy = workers.holding(conn, [worker.row.id for worker in living])
            for worker in living:
                if worker.row.id not in busy:
                    self._terminate(worker)
        else:
            for worker in living:
                self._end_within(worker, pool.grace_s)

    def _serve(self, pool: Pool, living: list[_Worker]) -> None:
        """Replace workers that have ended or hang, unless that happens too often."""
        for worker in living:
            limit = SILENT_S if worker.row.models else LOADING_S
            silent = self._silence(worker.row) > limit
            # Without the worker's first process, its children are left, which must not go on. A
            # worker that this process has just started may not be listed yet.
            orphaned = not worker.leader and worker.row.id not in self._children
            if silent or orphaned:
                self._kill(worker)
        missing = pool.replicas - len(living)
        if missing > 0:
            with reading(self.engine) as conn:
                ends = workers.recent_ends(conn, pool)
                pause = workers.pause(conn, pool, ends)
            if ends >= ENDS_LIMIT:
                self._give_up(pool, ends)
                return
            if pause <= 0:
                for _ in range(missing):
                    self._add(pool)
        elif any(not worker.row.models for worker in living):
            return
        elif pool.state == PoolState.STARTING:
            self._move(pool, "ready")
        else:
            self._replace(pool, living)

    def _replace(self, pool: Pool, living: list[_Worker]) -> None:
        """Let a worker of another version end. The others follow once the next has loaded."""
        worker = next((worker for worker in living if self._is_other(worker.row)), None)
        if worker is None:
            return
        id = worker.row.id
        if id not in self._replaced:
            self._replaced.add(id)
            log.info("worker %s has version %s: replaced", id, worker.row.version or "unknown")
        self._end_within(worker, pool.grace_s)

    def _is_other(self, row: PoolWorker) -> bool:
        """Whether a service before this one has started it, with a program of another version.

        What this service starts is the installed program, even if that was replaced meanwhile.
        """
        return row.version != self._version and row.id not in self._children

    def _silence(self, row: PoolWorker) -> float:
        """Seconds since the worker's last heartbeat came here."""
        beat, since = self._beats.get(row.id, (None, 0.0))
        if beat != row.beat_at:
            since = time.monotonic()
            self._beats[row.id] = row.beat_at, since
        return time.monotonic() - since

    def _add(self, pool: Pool) -> None:
        id = rows.new_id()
        group = ""
        if self._parent is not None:
            group = memory.make(self._parent, id, pool.memory_mib * _MIB)
        add = partial(
            workers.add,
            pool=pool,
            worker_id=id,
            host=socket.gethostname(),
            boot_id=lock.boot_id(),
            cgroup=group,
        )
        row = retrying(self.engine, add)
        if row is None:
            memory.remove(group)
            return
        folder = processes.models_folder(self.settings)
        targets = processes.models(folder)
        words = [
            f"{name}={targets.get(name, name + MODEL_FILE)}"
            + (f"{DIGEST}{pool.digests[name]}" if name in pool.digests else "")
            for name in pool.models
        ]
        folder.mkdir(mode=0o700, exist_ok=True)
        self._children[id] = processes.start(self.settings, pool, row, words)
        log.info("pool %s: worker %s started", pool.name, id)

    def _left(self, worker_id: str, seen: dict[str, list[Process]]) -> list[Process]:
        """Processes of a worker: those with its mark, and those that had it."""
        marked = dict.fromkeys([*self._processes.get(worker_id, ()), *seen.get(worker_id, ())])
        self._processes[worker_id] = left = [each for each in marked if processes.is_left(each)]
        return left

    def _is_gone(self, worker: _Worker) -> bool:
        child = self._children.get(worker.row.id)
        if worker.processes or (child is not None and child.poll() is None):
            return False
        return not memory.members(worker.row.cgroup)

    def _kill(self, worker: _Worker) -> None:
        """Kill all processes of a worker. One that a driver holds may stay for long."""
        id = worker.row.id
        if self._is_due(id):
            pids = ", ".join(str(process.pid) for process in worker.processes)
            log.warning("worker %s hangs: killing its processes %s", id, pids)
            self._due[id] = time.monotonic() + _WARN_S
        processes.send(worker.processes, signal.SIGKILL)
        memory.kill(worker.row.cgroup)

    def _end(self, worker: _Worker) -> bool:
        """Record the end of a worker; whether the kernel has killed it for its memory."""
        usage = self._of_group(worker.row)
        killed = usage.oom_kills > self._kills.pop(worker.row.id, worker.row.oom_kills)
        child = self._children.pop(worker.row.id, None)
        code = None if child is None else child.returncode
        ending = "not there any more" if code is None else f"exit status {code}"
        if killed:
            ending += ", killed for its memory"
        if worker.row.id in self._replaced:
            ending = workers.REPLACED
        retrying(self.engine, partial(workers.end, worker=worker.row, ending=ending))
        memory.remove(worker.row.cgroup)
        self._signalled.discard(worker.row.id)
        self._replaced.discard(worker.row.id)
        for of_worker in (self._beats, self._ending, self._processes, self._due):
            of_worker.pop(worker.row.id, None)
        log.info("worker %s has ended: %s", worker.row.id, ending)
        return killed

    def _end_strays(self, seen: dict[str, list[Process]], present: set[str]) -> bool:
        """Kill processes of workers that are recorded as ended, or not at all; whether there were
        any. Their pool may have been ended while this machine was cut off.
        """
        strays = {id: self._left(id, seen) for id in {*seen, *self._processes} - present}
        for worker_id, left in strays.items():
            if not left:
                del self._processes[worker_id]
                continue
            log.warning("processes of worker %s, which has ended, are killed", worker_id)
            processes.send(left, signal.SIGKILL)
            if child := self._children.pop(worker_id, None):
                with suppress(subprocess.TimeoutExpired):
                    child.wait(timeout=1)
        return any(strays.values())

    def _terminate(self, worker: _Worker) -> None:
        """Ask a worker once to end; it ends its child itself. A second signal could kill it."""
        if worker.leader and worker.row.id not in self._signalled:
            self._signalled.add(worker.row.id)
            processes.send(worker.leader, signal.SIGTERM)
        elif not worker.leader and worker.row.id not in self._children:
            self._kill(worker)

    def _end_within(self, worker: _Worker, grace_s: int) -> None:
        """Ask a worker to end, and kill it after its grace period."""
        self._terminate(worker)
        since = self._ending.setdefault(worker.row.id, time.monotonic())
        if time.monotonic() - since > grace_s:
            self._kill(worker)

    def _move(self, pool: Pool, event: str) -> None:
        retrying(self.engine, partial(workers.move, pool=pool, event=event, act=_ACT))

    def _conclude(self, pool: Pool) -> None:
        act = _ACT.because("none of its processes is left", {"host_id": self.host_id})
        state = PoolState(pool.ends_as)
        retrying(self.engine, partial(workers.conclude, pool=pool, act=act, state=state))
        log.info("pool %s is %s", pool.name, state)

    def _give_up(self, pool: Pool, ends: int) -> None:
        failure = {
            "code": "workers_ended",
            "expected": "workers that go on",
            "found": f"{ends} that ended by themselves within {ENDS_S / 60:.0f} minutes",
            "remedy": "read the service's log on its host, correct the model, start it again",
        }
        act = _ACT.because("its workers ended too often")
        values = {"ends_as": PoolState.FAILED.value, "failure": failure}
        retrying(self.engine, partial(pools.end, pool=pool, act=act, values=values))

    def _measure(
        self,
        pool: Pool,
        living: list[_Worker],
        sizes: dict[str, tuple[int, int]],
        *,
        killed: bool,
    ) -> Load:
        """Memory of a pool; without a memory controller, its limit is enforced here."""
        limit = pool.memory_mib * _MIB
        for worker in living:
            id = worker.row.id
            # The supervisor before this one has counted the kills of that time.
            before = self._kills.setdefault(id, worker.row.oom_kills)
            usage = self._usage(worker, limit, before)
            if usage.oom_kills > before:
                killed = True
                self._due["report"] = 0.0
                log.warning("worker %s of pool %s exceeded its memory", id, pool.name)
            self._kills[id] = usage.oom_kills
            sizes[id] = (usage.bytes, usage.oom_kills)
        used = [sizes[worker.row.id][0] for worker in living]
        share = max(used, default=0) / limit
        return Load(pool.id, sum(used), share, pool.kill_on_oom, killed)

    def _usage(self, worker: _Worker, limit: int, kills: int) -> memory.Usage:
        if worker.row.cgroup:
            return self._of_group(worker.row)
        resident = memory.of_processes(process.pid for process in worker.processes)
        size = sum(resident.values())
        if size <= limit:
            return memory.Usage(size, kills)
        # As the kernel does it: the largest process ends, which is the one that runs the call.
        largest = max(worker.processes, key=lambda process: resident.get(process.pid, 0))
        processes.send([largest], signal.SIGKILL)
        return memory.Usage(size, kills + 1)

    def _of_group(self, row: PoolWorker) -> memory.Usage:
        try:
            return memory.of_group(row.cgroup)
        except OSError:  # Without a group, or after a restart of the machine.
            return memory.Usage(0, row.oom_kills)

    def _is_due(self, name: str) -> bool:
        return time.monotonic() >= self._due.get(name, 0.0)

    def _report(self, sizes: dict[str, tuple[int, int]], *, strays: bool) -> None:
        if not self._is_due("report"):
            return
        if self._is_due("gpus"):
            self._gpus = memory.gpus()
            self._due["gpus"] = time.monotonic() + GPUS_S
        total, used = memory.of_host(self._group)
        host = {
            "id": self.host_id,
            "name": socket.gethostname(),
            "boot_id": lock.boot_id(),
            "memory_bytes": total,
            "memory_used_bytes": used,
            "isolation": f"cgroup{self._parent.version}" if self._parent else "process",
            "models": processes.offered(processes.models_folder(self.settings)),
            # A process without a pool may still use any of them.
            "devices": [] if strays else self._gpus,
        }
        retrying(self.engine, partial(workers.report, host=host, loads=sizes))
        self._due["report"] = 0.0 if strays else time.monotonic() + REPORT_S

    def _relieve(self, recorded: list[Pool], loads: list[Load], now: float) -> None:
        """Evict the largest pool that must end for memory, one after the other."""
        total, used = memory.of_host(self._group)
        share = used / total
        fullest = max((load.share for load in loads), default=0.0)
        if recorded and max(share, fullest) >= WARN_SHARE and self._is_due("warn"):
            log.warning(
                "memory: %.0f %% of this host, %.0f %% of a worker", share * 100, fullest * 100
            )
            self._due["warn"] = time.monotonic() + _WARN_S
        ending = {pool.id: pool for pool in recorded if pool.state == PoolState.STOPPING}
        if any((pool.deadline_at or 0) > now for pool in ending.values()):
            return  # Its memory comes free soon.
        # One that cannot end, because a driver holds its processes, must not keep the others.
        chosen = victim([load for load in loads if load.pool_id not in ending], share)
        if chosen is None:
            return
        failure = {
            "code": "memory_exceeded",
            "expected": "less than 90 % of the memory of host and workers in use",
            "found": f"{share:.0%} of the host and {chosen.share:.0%} of a worker"
            + (", with a process killed" if chosen.killed else ""),
            "remedy": "start it again with more memory or fewer workers",
        }
        act = _ACT.because("kill_on_oom: the largest pool when memory ran out")
        retrying(self.engine, partial(pools.evict, key=chosen.pool_id, act=act, failure=failure))

"""Worker: leases tasks, launches their runs or attaches to them, and settles the outcomes.

The worker keeps no state of its own. Runs outlive it and the database holds all pending work. If a
worker is killed at any instant, the next worker that leases the task continues it.
"""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Engine, exc

from reconciler import logs
from reconciler.db import migrations
from reconciler.db.engine import reading, retrying, transaction
from reconciler.db.schema import Task
from reconciler.lifecycle import task_failures
from reconciler.lifecycle.task_failures import Failure, act_of, locked_subject
from reconciler.model.errors import Problem
from reconciler.model.proof import NOTHING_DONE
from reconciler.model.states import BY_MAAS, TaskState
from reconciler.model.storable import storable_parts, storable_text
from reconciler.records import certificates, leasing, queue, tokens
from reconciler.runs import collect
from reconciler.runs.awx.client import awx_access
from reconciler.runs.collect import Phase
from reconciler.runs.launch import Site, launch
from reconciler.runs.paths import RunPaths, run_directory, runner_id
from reconciler.runs.spec import LauncherAway, NodeAccess, RunError, RunSpec
from reconciler.runs.ssh import SshAccess
from reconciler.settings import Settings
from reconciler.trust.ca import (
    Identity,
    Trust,
    open_trust,
    operator_identity,
    revoke_host,
    telemetry_identity,
)
from reconciler.trust.keygen import TrustError, public_key
from reconciler.work import maas
from reconciler.work.handler import Handler, canceled, open_work
from reconciler.work.kinds import HANDLERS
from reconciler.work.loops import isolated, tidy_on
from reconciler.work.settle import MISFITS, settle
from reconciler.work.telemetry import Telemetry
from reconciler.work.watch import Watch

log = logging.getLogger("gpuaas.worker")

# Interval for checking unattended runs, because all workers may be busy with other tasks.
UNATTENDED_EVERY_S = 10.0
# The worker counts as stuck after this time. A pass is shorter even on a busy database.
STUCK_S = 60.0
# Validity of the SSH identity that probes silent hosts.
PROBE_S = 300
NOT_BEGUN = (Phase.ABSENT, Phase.PREPARED)
# After so many runs that never reached their host, one has to last so long before it counts as
# under way: no connection takes so long to fail.
_UNREACHED, _REACHED_S = 5, 300.0
# Errors of this machine before a run begins, such as a full disk or a failing ssh-keygen.
_CONTROLLER_ERRORS = (OSError, TrustError, subprocess.SubprocessError)


class Worker:
    """Attends up to `settings.workers` tasks at a time, in threads of this process."""

    def __init__(self, settings: Settings, engine: Engine) -> None:
        self._settings = settings
        self._engine = engine
        self._runner = runner_id(settings.state_dir)
        self._owner = f"{socket.gethostname()}:{os.getpid()}"
        self._stopping = threading.Event()
        # Set when a thread becomes free and on stop, so that the loop ends its pause early.
        self._wake = threading.Event()
        self._looked_at = time.monotonic()
        self._busy: set[str] = set()
        self._dropped: list[Task] = []
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(max(settings.workers, 1), thread_name_prefix="task")
        self._thread = threading.Thread(target=self._run, name="worker", daemon=True)
        compared = settings.drift_interval_s > 0
        watch = Watch(engine, lambda: _access(engine, settings, PROBE_S), drift=compared)
        # A daemon thread, because a probe of a silent host may outlast the time allowed for stop.
        self._watch = threading.Thread(
            target=watch.run, args=(self._stopping,), name="watch", daemon=True
        )
        telemetry = Telemetry(
            engine,
            lambda: _access(engine, settings, PROBE_S, telemetry_identity),
            drift=compared,
        )
        self._telemetry = threading.Thread(
            target=telemetry.run, args=(self._stopping,), name="telemetry", daemon=True
        )
        # Every machine tidies its own folder, because the leader sees only its own.
        self._tidy = threading.Thread(
            target=tidy_on, args=(engine, settings, self._stopping), name="tidy", daemon=True
        )

    def start(self) -> None:
        self._thread.start()
        self._watch.start()
        self._telemetry.start()
        self._tidy.start()

    def cease(self) -> None:
        """Lease no more tasks, without waiting for those that this worker attends."""
        self._stopping.set()
        self._wake.set()

    def stop(self) -> None:
        """Stop attending. Runs go on; their leases end now, so that another worker can attach."""
        self.cease()
        self._thread.join(timeout=10)
        self._tidy.join(timeout=10)
        self._pool.shutdown(wait=True)
        retrying(self._engine, lambda conn: queue.abandon(conn, self._owner))

    def looking(self) -> bool:
        """Whether the leasing loop is alive and not stuck."""
        return self._thread.is_alive() and time.monotonic() - self._looked_at < STUCK_S

    def _run(self) -> None:
        looked = -UNATTENDED_EVERY_S
        while not self._stopping.is_set():
            self._looked_at = time.monotonic()
            try:
                if time.monotonic() - looked > UNATTENDED_EVERY_S:
                    self._free_what_the_dead_hold()
                    self._end_unwanted_runs()
                    looked = time.monotonic()
                self._let_go()
                self._lease()
            except Problem as refusal:
                # The heartbeat ends a process that meets a newer schema.
                trace = refusal.code != "schema_outdated"
                log.error("no task is leased: %s", refusal, exc_info=trace)
            except Exception:
                # A short outage of the database must not end the only leasing loop.
                log.exception("looking for work failed; trying again")
            self._wake.wait(self._settings.poll_s)
            self._wake.clear()

    def _free_what_the_dead_hold(self) -> None:
        # Tasks of a worker that was killed on this machine need not wait for the end of the lease.
        # If that worker is alive after all, out of sight of this process, its writes are refused
        # like those of any holder that was too slow. The run is attached to, not repeated.
        with reading(self._engine) as conn:
            owners = queue.holders(conn, self._runner)
        for owner in owners:
            host, _, pid = owner.rpartition(":")
            if host == socket.gethostname() and _is_dead(int(pid)):
                log.info("worker %s is gone; its tasks are free", owner)
                retrying(self._engine, partial(queue.abandon, owner=owner))

    def _let_go(self) -> None:
        # Tasks dropped during a database outage continue as soon as the database is back.
        with self._lock:
            dropped = list(self._dropped)
        for task in dropped:
            retrying(self._engine, partial(queue.let_go, task=task))
            with self._lock:
                self._dropped.remove(task)

    def _end_unwanted_runs(self) -> None:
        # A run can be canceled only on the machine that has its folder. The request may have come
        # from another machine.
        with reading(self._engine) as conn:
            unwanted = queue.canceled_runs(conn, self._runner)
        for task in unwanted:
            with isolated(log, "the run of task %s is not canceled", task.id):
                collect.cancel(Path(task.run_directory))

    def _lease(self) -> None:
        with self._lock:
            free = self._settings.workers - len(self._busy)
        if free <= 0:
            return
        others = self._settings.workers - 1
        # One place of three or more is for another project than the one that has all others, whose
        # hosts or guests may hang until the deadlines of their runs.
        places = [(free, None)] if others < 2 else [(free - 1, None), (1, others)]
        for limit, share in places:
            lease = partial(_lease, owner=self._owner, limit=limit, share=share)
            lease = partial(lease, runner=self._runner, seconds=self._settings.task_lease_s)
            taken = retrying(self._engine, lease) if limit else []
            for task in taken:
                with self._lock:
                    self._busy.add(task.id)
                self._pool.submit(self._attend, task)
            if len(taken) < limit:
                break

    def _attend(self, task: Task) -> None:
        ended = False
        try:
            with logs.about(task=task.id, correlation=task.correlation_id or ""):
                log.info("%s begins, attempt %d", task.kind, task.attempt)
                attend(self._engine, self._settings, task, self._stopping)
            ended = True
        except Problem as problem:
            # stale_lease: another worker attends now. Other problems recur at the next lease.
            log.warning("task %s left: %s", task.id, problem)
        except Exception as failure:
            if isinstance(failure, exc.DBAPIError) and _is_away(failure):
                log.warning("task %s left, the database is away: %s", task.id, failure.orig)
                with self._lock:
                    self._dropped.append(task)
            else:
                log.exception("task %s left by an error of the worker; its lease will end", task.id)
        finally:
            with self._lock:
                self._busy.discard(task.id)
            # Only after success: a failing task would otherwise be retried without a pause.
            if ended:
                self._wake.set()


def _lease(conn: Connection, **limits: Any) -> list[Task]:
    migrations.refuse_migration(conn)
    return leasing.lease(conn, **limits)


def _is_away(failure: exc.DBAPIError) -> bool:
    """Whether the database is away. A statement that it refuses fails again at once."""
    gone = isinstance(failure, exc.OperationalError | exc.InterfaceError)
    return gone or failure.connection_invalidated


def _is_dead(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        pass
    return False


def attend(engine: Engine, settings: Settings, task: Task, stopping: threading.Event) -> None:
    """Attend a leased task until it ends, or leave it running when the worker stops."""
    if task.kind in BY_MAAS:
        maas.attend(engine, settings, task)
        return
    handler = HANDLERS[task.kind]
    directory = run_directory(settings.state_dir, queue.run_id(task))
    since, attached = task.progress_offset, False
    began, extended = time.monotonic(), not (task.allocation_id or task.fences)
    while True:
        state = collect.observe(directory)
        # The worker that prepared the run may have been refused its launch. The lock's file shows
        # that it was that, and not the deletion of a living run's folder.
        deleted = attached and not RunPaths(directory).lock.exists()
        if state.phase in NOT_BEGUN and not since and not deleted:
            if not _begin(engine, settings, handler, task, directory):
                return
            state, attached = collect.observe(directory), False
        attached = True
        # A host may answer each probe and no run; its launch must not go on for ever.
        lasts = time.monotonic() - began > _REACHED_S
        if not extended and (task.unreached < _UNREACHED or lasts):
            retrying(engine, lambda conn: queue.extend_deadlines(conn, queue.get(conn, task.id)))
            extended = True
        # Another worker may have freed the lock after this one was kept out by it: then to begin it
        # is this one's turn.
        if state.phase is Phase.ABSENT and (since or not RunPaths(directory).lock.exists()):
            outcome = collect.end_without_folder(directory, by_awx=settings.launcher == "awx")
            if outcome is not None:
                settle(engine, settings, handler, task, outcome)
                return
        if state.outcome is not None:
            # Report the lines that came after the last pass.
            _report(engine, settings, task, directory, since)
            settle(engine, settings, handler, task, state.outcome)
            return
        if stopping.wait(settings.poll_s):
            return
        try:
            since = _report(engine, settings, task, directory, since)
        except Problem:
            _end_unwanted(engine, task, directory)
            raise


def _begin(
    engine: Engine, settings: Settings, handler: Handler, task: Task, directory: Path
) -> bool:
    """Launch the run; False after the task was settled because no run could be launched."""
    try:
        spec = prepare(engine, settings, handler, task, queue.run_id(task))
        handler.arrange(engine, settings, task)
        # That may have taken most of a lease, and the launch needs one of its own.
        _require_uncanceled(retrying(engine, partial(_beat, settings=settings, task=task)))
        launch(_site(engine, settings, spec.deadline_s), spec)
    except (Problem, RunError, *_CONTROLLER_ERRORS, *MISFITS) as error:
        if isinstance(error, Problem) and error.code == "schema_outdated":
            # A worker of the newer version attends the task once this lease has ended.
            raise
        # A launcher can fail after its child began. The run then reports its own outcome.
        if collect.observe(directory).phase in NOT_BEGUN:
            _settle_without_run(engine, settings, task, error)
            return False
    return True


def prepare(
    engine: Engine, settings: Settings, handler: Handler, task: Task, run_id: str
) -> RunSpec:
    """Resolve all variables and record that the run is about to start."""
    with transaction(engine) as conn:
        migrations.refuse_migration(conn)
        work = open_work(conn, settings, task)
        _require_uncanceled(queue.get(conn, task.id))
        # Start no run on a host without a valid certificate. Its result could not be trusted, so
        # the effect would be unknown.
        certificates.require_valid(conn, task.node_id)
        correlation = task.correlation_id or task.id
        specific = handler.variables(work)
        variables = {
            "slice_run": {
                "id": run_id,
                "task_id": task.id,
                "kind": task.kind,
                "node_id": task.node_id,
                "correlation_id": correlation,
            },
            "slice_profile": work.profile,
            **specific,
        }
        handler.start(work)
        directory = run_directory(settings.state_dir, run_id)
        deadline_s = handler.deadline_s(work, specific)
        queue.started(
            conn,
            task.id,
            task.lease_token,
            run_id=run_id,
            run_directory=str(directory),
            deadline_s=deadline_s,
        )
        node = work.node
        # Runs on this machine read revoked keys from a file (`_access`). AWX jobs cannot read it.
        awx = settings.launcher == "awx"
        revoked = tokens.revoked_host_keys(conn, node.id) if awx else []
    return RunSpec(
        run_id=run_id,
        playbook=handler.playbook,
        node=NodeAccess(
            node.id,
            node.address,
            node.port,
            node.ssh_user,
            revoked=tuple(map(public_key, revoked)),
        ),
        variables=variables,
        deadline_s=deadline_s,
        correlation_id=correlation,
    )


def _require_uncanceled(task: Task) -> None:
    if task.cancel_requested:
        raise canceled(
            "a task that is still wanted", "its cancellation, asked for before its run began"
        )


def _beat(conn: Connection, settings: Settings, task: Task) -> Task:
    return queue.heartbeat(conn, task.id, task.lease_token, seconds=settings.task_lease_s)


def _report(engine: Engine, settings: Settings, task: Task, directory: Path, since: int) -> int:
    lines, since = collect.progress(directory, since)
    queued_s = collect.queued_limit_s(directory)

    def report(conn: Connection) -> Task:
        if lines:
            queue.progress(conn, task.id, task.lease_token, *lines, offset=since)
        if queued_s is not None:
            queue.begins_later(conn, task.id, task.lease_token, deadline_s=queued_s)
        return _beat(conn, settings, task)

    if retrying(engine, report).cancel_requested:
        collect.cancel(directory)
    return since


def _end_unwanted(engine: Engine, task: Task, directory: Path) -> None:
    """After the loss of a lease: cancel the run, unless another worker attends the task."""
    with reading(engine) as conn:
        over = queue.get(conn, task.id).state != TaskState.RUNNING
    if over:
        collect.cancel(directory)


def _settle_without_run(engine: Engine, settings: Settings, task: Task, error: Exception) -> None:
    """A controller error delays the task, because neither task nor host caused it and the task goes
    on after the repair. Any other error ends it.
    """
    if isinstance(error, MISFITS):
        log.error("no variables for the run of task %s", task.id, exc_info=error)
        error = RunError(
            "variables_invalid",
            expected="records and a hardware profile with all that the run needs",
            found=f"{type(error).__name__}: {error}"[:300],
            remedy="complete the hardware profile of the node (`gpuaas doctor`), then ask again",
        )
    if isinstance(error, _CONTROLLER_ERRORS):
        cause = f"{type(error).__name__}: {error}"
        if isinstance(error, TrustError):
            cause = f"{error.code}: {error.found}"
        error = LauncherAway(
            "controller_unready",
            expected=f"our SSH identity and the files of a run, made in {settings.state_dir}",
            found=cause[:300],
            remedy="free space there, or repair what is named; the task goes on by itself",
        )
    if isinstance(error, LauncherAway):
        act = act_of(task).because(storable_text(str(error)))
        parts = storable_parts(error)
        with transaction(engine) as conn:
            queue.wait_for_host(conn, task.id, task.lease_token, act.reason, act=act, error=parts)
    elif isinstance(error, Problem | RunError):
        _refuse(engine, task, error)


def _refuse(engine: Engine, task: Task, refusal: Problem | RunError) -> None:
    """Finish a task whose run could not start, with the reason as its error."""
    error = storable_parts(refusal)
    # An earlier attempt may have acted. Only a refused first attempt proves an untouched host.
    failure = Failure("start the run", error, dict(NOTHING_DONE), known=task.attempt <= 1)
    state = TaskState.CANCELED if refusal.code == "canceled" else TaskState.FAILED
    with transaction(engine) as conn, locked_subject(conn, task):
        task_failures.record(conn, task, failure)
        act = act_of(task).because(refusal.code)
        queue.finish(conn, task.id, task.lease_token, state, act, error=error)


def _site(engine: Engine, settings: Settings, deadline_s: int) -> Site:
    if settings.launcher == "awx":
        return Site(settings.state_dir, settings.collections_path, None, awx=awx_access(settings))
    access = _access(engine, settings, deadline_s + 600)
    return Site(settings.state_dir, settings.collections_path, access)


def _access(
    engine: Engine,
    settings: Settings,
    valid_s: int,
    login: Callable[[Trust, int], Identity] = operator_identity,
) -> SshAccess:
    trust = open_trust(settings.state_dir)
    # Other services enrol hosts too, so the revoked host keys come from the records.
    with reading(engine) as conn:
        revoked = tokens.revoked_host_keys(conn)
    revoke_host(trust, *revoked)
    identity = login(trust, valid_s)
    return SshAccess(identity.key, identity.certificate, identity.known_hosts)

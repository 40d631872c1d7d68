"""Loops of the leader: deadlines, recovery, drift, certificates, applications, retention.

They run only in the process that holds the leader's term. A loop gets an engine whose writes fail
as soon as this process is no longer the leader (`db.leader`), so it need not check that itself.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import sqlalchemy as sa
from sqlalchemy import Connection, Engine

from reconciler.db import clock, journal
from reconciler.db.engine import reading, retrying, transaction
from reconciler.db.journal import Overdue
from reconciler.db.leader import Deposed, Term, led_by, require
from reconciler.db.schema import projects
from reconciler.lifecycle import (
    app_operations,
    drift,
    host,
    ingress,
    recovery,
    recovery_cases,
    recovery_policy,
    retention,
    task_failures,
)
from reconciler.lifecycle.app_operations import FollowUp
from reconciler.model.act import Act
from reconciler.model.errors import Problem
from reconciler.model.jobs import Mode
from reconciler.model.recovery import Move
from reconciler.pools import control, counts, hints, jobs, leases, pools, remote
from reconciler.records import queue, ssh_sessions
from reconciler.runs import collect
from reconciler.runs.paths import runner_id, runs_directory
from reconciler.settings import Settings

log = logging.getLogger("gpuaas.loops")
_OVERDUE_LOG = logging.getLogger("gpuaas.overdue")
_DRIFT_LOG = logging.getLogger("gpuaas.drift")
_CERTIFICATES_LOG = logging.getLogger("gpuaas.certificates")
_APPS_LOG = logging.getLogger("gpuaas.apps")
_INGRESS_LOG = logging.getLogger("gpuaas.ingress")
_RECOVERY_LOG = logging.getLogger("gpuaas.recovery")
_MAINTENANCE_LOG = logging.getLogger("gpuaas.maintenance")
_POOLS_LOG = logging.getLogger("gpuaas.pools")
_JOBS_LOG = logging.getLogger("gpuaas.jobs")
_RETENTION_LOG = logging.getLogger("gpuaas.retention")
_DRIFT_ACT = Act("reconciler", "periodic comparison")
_FOLLOW_UP_ACT = Act("reconciler", "periodic follow-up")
_APP_STEPS: dict[str, FollowUp] = {
    "members whose allocation has ended left": app_operations.LET_GO,
    "operations whose task had ended were closed": app_operations.CLOSE,
    "keys are to be renewed": app_operations.RENEW_KEYS,
    "keys are to be removed": app_operations.REMOVE_KEYS,
}
DAY_S = 86_400.0
# The loops count as stuck when no transaction began for so long. A statement may take a minute.
STUCK_S = 90.0
# Interval at which a machine checks its run folders.
EVERY_S = 3600.0
# Transactions per pass and kind of row. The limit exists because other loops wait meanwhile.
_TRANSACTIONS = 20
# The name of a run folder begins with the task id.
_TASK_ID = len("00000000-0000-0000-0000-000000000000")
_AT_ONCE = 200


@contextmanager
def isolated(log: logging.Logger, message: str, *arguments: str) -> Iterator[None]:
    """Log the failure of a record, which must not block the others. A lost term ends the loop."""
    try:
        yield
    except Deposed:
        raise
    except Exception:
        log.exception(message, *arguments)


def end_overdue(engine: Engine, settings: Settings) -> None:
    """Loop for deadlines of unstable states; a failure is tried again at the next pass.

    A running task is given up in two steps. First its run is canceled: by the holder of the lease
    and, if the run's folder is on this machine, also directly. If the task still does not end and
    its lease has expired, the task is lost. The effect of its run on the host is then unknown: its
    slots are blocked and fenced off, and no later report of that run counts (I13).
    """
    with reading(engine) as conn:
        # Warnings have no event and change nothing; they are only shown on request.
        late = [item for item in journal.overdue(conn) if item.event]
    for item in late:
        act = Act("reconciler", f"still {item.state} past its deadline")
        with isolated(_OVERDUE_LOG, "overdue %s %s is left as it is", item.entity, item.id):
            try:
                if item.entity == "task" and item.event == "lose":
                    _end_task(engine, settings, item, act)
                elif item.entity == "task" and item.event == "cancel":
                    _cancel_task(engine, item)
                elif item.entity == "pool":
                    with transaction(engine) as conn:
                        pools.expire(conn, item, act)
                else:
                    case = item.entity == "recovery_case"
                    with transaction(engine) as conn:
                        (recovery_cases if case else recovery).expire(conn, item, act)
            except Problem as problem:
                _OVERDUE_LOG.info("overdue %s %s moved on: %s", item.entity, item.id, problem.code)


def _end_task(engine: Engine, settings: Settings, item: Overdue, act: Act) -> None:
    error = recovery.deadline_error(item)
    with transaction(engine) as conn:
        task = queue.get(conn, item.id)
        if task.deadline_at != item.deadline_at:
            return  # Another worker, or the end of the task, was quicker.
        if task.error.get("code") == queue.DEADLINE_PASSED:
            # The lease ends soon after the deadline, because no heartbeat extends it then.
            if (task.lease_expires_at or 0.0) < clock.read(conn):
                late = act.because(f"{act.reason}: no end of its run")
                task_failures.lose(conn, task, late)
            return
        canceled = queue.expire(conn, item.id, item.deadline_at, act, error)
    if canceled and canceled.run_directory and canceled.runner == runner_id(settings.state_dir):
        # Works for unattended runs too, because the run itself checks for its cancellation.
        collect.cancel(Path(canceled.run_directory))


def _cancel_task(engine: Engine, item: Overdue) -> None:
    """Cancel a task that no worker leased in time, so that its subject stops waiting for it."""
    with transaction(engine) as conn:
        if queue.get(conn, item.id).deadline_at != item.deadline_at:
            return
        error = recovery.deadline_error(item)
        act = Act("reconciler", f"deadline passed in {item.state}", evidence={"deadline": error})
        task_failures.cancel(conn, item.id, act, error=error)


def compare_hosts(engine: Engine, settings: Settings) -> None:
    """Loop for drift: queue comparisons of the hosts that are due. A host that its task cannot
    reach counts as lost, and its comparison waits until it answers.
    """
    if not settings.drift_interval_s:
        return
    every_s, at_once = settings.drift_interval_s, settings.drift_at_once
    with reading(engine) as conn:
        node_ids = drift.due(conn, every_s=every_s, at_once=at_once)
    for node_id in node_ids:
        task = retrying(engine, partial(drift.queue_comparison, node_id=node_id, act=_DRIFT_ACT))
        _DRIFT_LOG.info("task %s compares host %s with the records", task.id, node_id)
    act = Act(_DRIFT_ACT.actor, f"it has run for {drift.SLOW_S:.0f} s, and other hosts wait")
    for task_id in retrying(engine, partial(drift.end_hanging, act=act, every_s=every_s)):
        _DRIFT_LOG.warning("task %s hangs and is ended: other hosts wait to be compared", task_id)


def renew_certificates(engine: Engine, settings: Settings) -> None:
    """Loop for host certificates: renew those with at most a third of their validity left."""
    with reading(engine) as conn:
        node_ids = host.certificates_ending(conn, host.RENEW_S)
    act = Act("reconciler", "a third of the certificate's time is left")
    renew = partial(host.queue_renewal, settings=settings, act=act)
    message = "certificate of node %s is not renewed; it is tried again"
    for node_id in node_ids:
        with isolated(_CERTIFICATES_LOG, message, node_id):
            retrying(engine, partial(renew, node_id=node_id))


def tend_apps(engine: Engine, _settings: Settings) -> None:
    """Loop for applications: follow up ended allocations, ended tasks and due keys."""

    def follow(conn: Connection, step: FollowUp, id: str) -> int:
        return step(conn, _FOLLOW_UP_ACT, step.id == id)

    for message, step in _APP_STEPS.items():
        with reading(engine) as conn:
            ids = step.due(conn)
        count = 0
        for id in ids:
            with isolated(_APPS_LOG, "apps: %s of %s is left as it is", id, step.id.table.name):
                count += retrying(engine, partial(follow, step=step, id=id))
        if count:
            _APPS_LOG.info("apps: %d %s", count, message)


def tend_ingress(engine: Engine, _settings: Settings) -> None:
    """Loop for public ingress: end rules that have expired, try failed removals again."""
    with reading(engine) as conn:
        rule_ids = ingress.due(conn)
    for rule_id in rule_ids:
        with isolated(_INGRESS_LOG, "ingress rule %s is left as it is", rule_id):
            follow = partial(ingress.follow_up, rule_id=rule_id, act=_FOLLOW_UP_ACT)
            retrying(engine, follow)
            _INGRESS_LOG.info("ingress rule %s is removed", rule_id)


def follow_drain(engine: Engine, _settings: Settings) -> None:
    """Loop for maintenance of jobs: from the deadline of a drain to its end."""
    with reading(engine) as conn:
        if control.read(conn).mode != Mode.DRAIN:
            return
    if line := retrying(engine, control.follow):
        _MAINTENANCE_LOG.info("%s", line)


def recover_blocked(engine: Engine, _settings: Settings) -> None:
    """Loop for recovery: open a recovery case where the policy of the site allows it."""
    with reading(engine) as conn:
        enabled = recovery_policy.read(conn).enabled
        candidates = recovery_policy.blocked_allocations(conn)
    for candidate in candidates:
        if candidate.move == Move.WAIT or not (enabled or candidate.by_tenant):
            continue
        key = candidate.allocation_id
        with isolated(_RECOVERY_LOG, "recovery of allocation %s is left as it is", key):
            done = retrying(engine, partial(recovery_cases.open_by_policy, allocation_id=key))
            if done is not None:
                message = "recovery policy, allocation %s: %s, %s"
                _RECOVERY_LOG.info(message, key, done.move, done.why)


def play_recovery_cases(engine: Engine, _settings: Settings) -> None:
    """Loop for recovery: do the next move of every recovery case that is due."""
    with reading(engine) as conn:
        case_ids = recovery_cases.due(conn)
    for case_id in case_ids:
        with isolated(_RECOVERY_LOG, "recovery case %s is left as it is", case_id):
            case = retrying(engine, partial(recovery_cases.play, case_id=case_id))
            if case is not None:
                _RECOVERY_LOG.info(
                    "recovery case %s of allocation %s: %s, %s",
                    case_id,
                    case.allocation_id,
                    case.state,
                    case.state_reason,
                )


def forget(engine: Engine, settings: Settings) -> dict[str, int]:
    """Loop for retention: delete rows past their age; returns the count of each kind."""
    works: dict[str, Callable[[Connection], int]] = {
        "events": partial(
            retention.events,
            sent_s=settings.keep_events_days * DAY_S,
            unsent_s=settings.keep_unsent_events_days * DAY_S,
        ),
        "answers": partial(retention.answers, age_s=settings.keep_answers_days * DAY_S),
        "progress": partial(retention.progress, age_s=settings.keep_progress_days * DAY_S),
        "telemetry": retention.telemetry,
        "reports": retention.reports,
        "evidence": retention.evidence,
        "tokens": retention.tokens,
        "jobs": partial(
            jobs.forget, age_s=settings.keep_jobs_days * DAY_S, limit=retention.AT_ONCE
        ),
    }
    gone = dict.fromkeys(works, 0)
    for name, work in works.items():
        for _ in range(_TRANSACTIONS):
            count = retrying(engine, work)
            gone[name] += count
            if count < (retention.EVIDENCE_AT_ONCE if name == "evidence" else retention.AT_ONCE):
                break
    if any(gone.values()):
        text = ", ".join(f"{count} {name}" for name, count in gone.items())
        _RETENTION_LOG.info("forgotten: %s", text)
    return gone


def mend_job_counts(engine: Engine, _settings: Settings) -> None:
    """Loop for the counts of jobs: those of some projects are compared with their jobs."""
    with reading(engine) as conn:
        ids = conn.execute(sa.select(projects.c.id)).scalars().all()
    # Any of them, so that each has its turn on a site with many, and none takes long.
    for id in random.sample(ids, min(len(ids), _TRANSACTIONS)):
        with reading(engine) as conn:
            right = not counts.missing(conn, id)
        if not right and (lack := retrying(engine, partial(counts.mend, project_id=id))):
            _JOBS_LOG.warning("job counts of project %s lacked %s and are mended", id, lack)


def tend_sessions(engine: Engine, settings: Settings) -> None:
    """Loop that deletes recordings of terminals that are old, or too many of a person, and closes
    sessions of processes that have ended.
    """
    recordings = partial(retention.recordings, age_s=settings.keep_recordings_days * DAY_S)
    for work, at_once in (
        (recordings, retention.AT_ONCE),
        (ssh_sessions.close_silent, ssh_sessions.SILENT_AT_ONCE),
    ):
        for _ in range(_TRANSACTIONS):
            if retrying(engine, work) < at_once:
                break


def tidy(engine: Engine, settings: Settings, stopping: threading.Event) -> list[str]:
    """Delete run folders of this machine whose tasks ended long ago; returns their names.

    Folders of unknown tasks stay, because the records may be restored from an old copy.
    """
    root = runs_directory(settings.state_dir)
    folders = [entry for entry in root.iterdir() if entry.is_dir()] if root.is_dir() else []
    gone: list[str] = []
    for start in range(0, len(folders), _AT_ONCE):
        some = folders[start : start + _AT_ONCE]
        ids = {folder.name[:_TASK_ID] for folder in some}
        with reading(engine) as conn:
            done = retention.done(conn, ids, age_s=settings.keep_runs_days * DAY_S)
        for folder in some:
            if stopping.is_set():
                return gone
            if folder.name[:_TASK_ID] not in done:
                continue
            # The run of a task that was given up may go on, for example in AWX.
            with isolated(_RETENTION_LOG, "the files of run %s are kept", folder.name):
                collect.discard(folder)
                gone.append(folder.name)
    if gone:
        _RETENTION_LOG.info("deleted the files of %d runs", len(gone))
    return gone


def tidy_on(engine: Engine, settings: Settings, stopping: threading.Event) -> None:
    """Delete old run folders at intervals, until `stopping` is set."""
    while not stopping.is_set():
        try:
            tidy(engine, settings, stopping)
        except Exception:
            _RETENTION_LOG.exception("deleting old runs failed; trying again")
        stopping.wait(EVERY_S)


def tend_leases(engine: Engine, settings: Settings) -> None:
    """Loop for the queue of jobs: delays that are over and leases that have expired.

    Workers with the database do it too, and sooner. This is for the jobs of the last of them, which
    would stay `running` for ever, and for sites whose workers have no database.
    """
    with reading(engine) as conn:
        if not leases.any_to_tend(conn):
            return
    swept = retrying(engine, leases.tend)
    hints.bury(settings.redis_url, swept.dead)


def tend_remote_workers(engine: Engine, _settings: Settings) -> None:
    """Loop for workers without the database: record the ends of silent workers and of pools."""
    with reading(engine) as conn:
        if not remote.any_pool(conn):
            return
    for pool in retrying(engine, remote.tend):
        _POOLS_LOG.info("pool %s is %s", pool.name, pool.state)


@dataclass(frozen=True)
class Loop:
    """Periodic work without input. every_s is the time from an end to the next start."""

    name: str
    every_s: float
    act: Callable[[Engine, Settings], object]


LOOPS: tuple[Loop, ...] = (
    Loop("overdue", 10.0, end_overdue),
    Loop("recovery", 10.0, recover_blocked),
    # Commands follow each move of a case.
    Loop("recovery_cases", 1.0, play_recovery_cases),
    Loop("drift", 10.0, compare_hosts),
    Loop("certificates", 600.0, renew_certificates),
    Loop("apps", 30.0, tend_apps),
    Loop("ingress", 10.0, tend_ingress),
    # Before maintenance, whose drain waits for the jobs of dead workers.
    Loop("leases", 1.0, tend_leases),
    Loop("maintenance", 1.0, follow_drain),
    Loop("remote_workers", 1.0, tend_remote_workers),
    Loop("retention", 600.0, forget),
    Loop("job_counts", 3600.0, mend_job_counts),
    # Sooner: while a person has too many, its next terminal is refused.
    Loop("sessions", 30.0, tend_sessions),
)


class Loops:
    """Runs the loops that are due while this process leads. term: its current term, if any."""

    def __init__(
        self,
        settings: Settings,
        engine: Engine,
        term: Callable[[], Term | None],
        loops: Sequence[Loop] = LOOPS,
    ) -> None:
        self._settings = settings
        self._engine = engine
        self._term = term
        self._loops = loops
        self._due = {loop.name: 0.0 for loop in loops}
        self._moved_at = time.monotonic()
        self._stopping = threading.Event()
        # A daemon thread, because its work can be interrupted anywhere.
        self._thread = threading.Thread(target=self._run, name="loops", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join(timeout=10)

    def turning(self) -> bool:
        """Whether the loops make progress. While they hang, another process must lead."""
        return time.monotonic() - self._moved_at < STUCK_S

    def _run(self) -> None:
        while not self._stopping.wait(self._settings.poll_s):
            self.run_due()

    def _begin(self, conn: Connection, term: Term) -> None:
        self._moved_at = time.monotonic()
        require(conn, term)

    def run_due(self) -> list[str]:
        """Run the loops that are due, if this process leads, and return their names."""
        done = []
        for loop in self._loops:
            self._moved_at = time.monotonic()
            term = self._term()
            if term is None or self._due[loop.name] > time.monotonic():
                continue
            try:
                loop.act(led_by(self._engine, term, self._begin), self._settings)
                done.append(loop.name)
            except Deposed as deposed:
                log.warning("%s stopped: %s", loop.name, deposed)
            except Exception:
                # The failure of a loop must not stop the others.
                log.exception("%s failed; it runs again later", loop.name)
            self._due[loop.name] = time.monotonic() + loop.every_s
        return done

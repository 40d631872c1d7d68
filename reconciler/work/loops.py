"""Loops of the leader: drift, certificates, applications, recovery, retention."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

from sqlalchemy import Connection, Engine

from reconciler.db.engine import reading, retrying
from reconciler.db.leader import Deposed
from reconciler.lifecycle import (
    app_operations,
    drift,
    host,
    recovery_cases,
    recovery_policy,
    retention,
)
from reconciler.lifecycle.app_operations import Look
from reconciler.model.act import Act
from reconciler.model.recovery import Move
from reconciler.runs import collect
from reconciler.runs.paths import runs_directory
from reconciler.runs.spec import RunError
from reconciler.settings import Settings

_DRIFT_LOG = logging.getLogger("gpuaas.drift")
_DRIFT_ACT = Act("reconciler", "compared every so often")


def compare_hosts(engine: Engine, settings: Settings) -> None:
    """Loop for drift: queue comparisons of the hosts that are due. A host that its task cannot
    reach counts as lost, and its comparison waits until it answers.
    """
    if not settings.drift_interval_s:
        return
    every_s, at_once = settings.drift_interval_s, settings.drift_at_once
    with reading(engine) as conn:
        found = drift.due(conn, every_s=every_s, at_once=at_once)
    for node_id in found:
        task = retrying(engine, partial(drift.queue_comparison, node_id=node_id, act=_DRIFT_ACT))
        _DRIFT_LOG.info("task %s compares host %s with the records", task.id, node_id)


_CERTIFICATES_LOG = logging.getLogger("gpuaas.certificates")


def renew_certificates(engine: Engine, settings: Settings) -> None:
    """Loop for host certificates: renew those with at most a third of their validity left."""
    with reading(engine) as conn:
        found = host.certificates_ending(conn, host.RENEW_S)
    for node_id in found:
        act = Act("reconciler", "a third of the certificate's time is left")
        try:
            retrying(
                engine, partial(host.queue_renewal, settings=settings, node_id=node_id, act=act)
            )
        except Deposed:
            raise
        except Exception:
            # A node that cannot be certified must not block the other nodes.
            _CERTIFICATES_LOG.exception(
                "certificate of node %s is not renewed; it is tried again", node_id
            )


_APPS_LOG = logging.getLogger("gpuaas.apps")
_APPS_ACT = Act("reconciler", "looked at every so often")
_APP_LOOKS: dict[str, Look] = {
    "members whose allocation has ended left": app_operations.LET_GO,
    "operations whose task had ended were closed": app_operations.CLOSE,
    "keys are to be renewed": app_operations.RENEW_KEYS,
    "keys are to be removed": app_operations.REMOVE_KEYS,
}


def tend_apps(engine: Engine, _settings: Settings) -> None:
    """Loop for applications: follow up ended allocations, ended tasks and due keys."""
    for what, look in _APP_LOOKS.items():
        with reading(engine) as conn:
            found = look.due(conn)
        count = 0
        for id in found:
            try:
                count += retrying(engine, partial(_follow_app, look, id))
            except Deposed:
                raise
            except Exception:
                # A failing application must not block the others.
                _APPS_LOG.exception("apps: %s of %s is left as it is", id, look.id.table.name)
        if count:
            _APPS_LOG.info("apps: %d %s", count, what)


def _follow_app(look: Look, id: str, conn: Connection) -> int:
    return look(conn, _APPS_ACT, look.id == id)


_RECOVERY_LOG = logging.getLogger("gpuaas.recovery")


def recover_blocked(engine: Engine, _settings: Settings) -> None:
    """Loop for recovery: open a recovery case where the policy of the site allows it."""
    with reading(engine) as conn:
        enabled = recovery_policy.read(conn).enabled
        candidates = recovery_policy.blocked_allocations(conn) if enabled else []
    for candidate in candidates:
        if candidate.move == Move.WAIT:
            continue
        key = candidate.allocation_id
        try:
            done = retrying(engine, partial(recovery_cases.open_by_policy, allocation_id=key))
        except Deposed:
            raise
        except Exception:
            # A failing allocation must not block the others.
            _RECOVERY_LOG.exception("recovery of allocation %s is left as it is", key)
            continue
        if done is not None:
            _RECOVERY_LOG.info("recovery policy, allocation %s: %s, %s", key, done.move, done.why)


def play_recovery_cases(engine: Engine, _settings: Settings) -> None:
    """Loop for recovery: do the next move of every recovery case that is due."""
    with reading(engine) as conn:
        case_ids = recovery_cases.due(conn)
    for case_id in case_ids:
        try:
            case = retrying(engine, partial(recovery_cases.play, case_id=case_id))
        except Deposed:
            raise
        except Exception:
            # A failing case must not block the others.
            _RECOVERY_LOG.exception("recovery case %s is left as it is", case_id)
            continue
        if case is not None:
            _RECOVERY_LOG.info(
                "recovery case %s of allocation %s: %s, %s",
                case_id,
                case.allocation_id,
                case.state,
                case.state_reason,
            )


_RETENTION_LOG = logging.getLogger("gpuaas.retention")
DAY_S = 86_400.0
# Interval at which a machine checks its run folders.
EVERY_S = 3600.0
# Transactions per pass and kind of row. The limit exists because other loops wait meanwhile.
_TRANSACTIONS = 20
# The name of a run folder begins with the task id.
_TASK_ID = len("00000000-0000-0000-0000-000000000000")
_AT_ONCE = 200


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
    }
    gone = {name: _some(engine, work) for name, work in works.items()}
    if any(gone.values()):
        _RETENTION_LOG.info(
            "forgotten: %s", ", ".join(f"{many} {name}" for name, many in gone.items())
        )
    return gone


def _some(engine: Engine, work: Callable[[Connection], int]) -> int:
    total = 0
    for _ in range(_TRANSACTIONS):
        found = retrying(engine, work)
        total += found
        if found < retention.AT_ONCE:
            break
    return total


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
            if folder.name[:_TASK_ID] in done and _discarded(folder):
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


def _discarded(folder: Path) -> bool:
    try:
        collect.discard(folder)
    except RunError as alive:
        # The task was given up, but its run still goes on, for example in AWX.
        _RETENTION_LOG.warning("run %s is kept: %s", folder.name, alive)
        return False
    return True

"""slice.drift_reconcile: what a host holds of slices, held against the records."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

from sqlalchemy import Engine

from reconciler.domain.act import Act
from reconciler.settings import Settings
from reconciler.store import drift, slots
from reconciler.store.engine import reading, retrying
from reconciler.tasks.handler import Handler, Work

log = logging.getLogger("gpuaas.drift")

ACT = Act("reconciler", "compared every so often")


def variables(work: Work) -> dict[str, Any]:
    return {"slice_slots": slots.bundles(work.conn, work.task["node_id"])}


def succeed(work: Work, evidence: dict[str, Any]) -> dict[str, Any]:
    # From when the task was taken on, not from when the host looked: of the two, the earlier.
    since = work.task["started_at"]
    return drift.reconcile(
        work.conn, work.task["node_id"], evidence, work.act.because("compared"), since=since
    )


def ask_hosts(engine: Engine, settings: Settings) -> None:
    """The loop: ask the hosts whose turn it is. One that says nothing is lost, like any other whose
    task cannot reach it, and its look waits until it answers.
    """
    if not settings.drift_interval_s:
        return
    every_s, at_once = settings.drift_interval_s, settings.drift_at_once
    with reading(engine) as conn:
        found = drift.due(conn, every_s=every_s, at_once=at_once)
    for node_id in found:
        task = retrying(engine, partial(drift.ask, node_id=node_id, act=ACT))
        log.info("task %s compares host %s with the records", task["id"], node_id)


# A look that fails changes nothing: what is on the host is as unknown as before (I13).
HANDLER = Handler("reconcile_drift", variables, succeed)

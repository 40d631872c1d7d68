"""allocation.reconcile_managed_authorized_key: an application's key on a member's host, or off it.

Whole machines only: in a slice the reconciler has no identity (`store.appwork` says so by name).
"""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

from sqlalchemy import Connection, Engine

from reconciler.domain.act import Act
from reconciler.domain.errors import Problem
from reconciler.settings import Settings
from reconciler.store import apptending, appwork
from reconciler.store.apptending import Look
from reconciler.store.engine import reading, retrying
from reconciler.store.leader import Deposed
from reconciler.tasks.handler import Failure, Handler, Work

log = logging.getLogger("gpuaas.apps")

ACT = Act("reconciler", "looked at every so often")
_LOOKS: dict[str, Look] = {
    "members whose allocation has ended left": apptending.let_go,
    "operations whose task had ended were closed": apptending.close,
    "keys are to be renewed": apptending.renew_keys,
    "keys are to be removed": apptending.remove_keys,
}


def tend(engine: Engine, _settings: Settings) -> None:
    """The loop: what follows for applications from what happened to their allocations and keys."""
    for what, look in _LOOKS.items():
        with reading(engine) as conn:
            found = look.due(conn)
        count = 0
        for id in found:
            try:
                count += retrying(engine, partial(_follow, look, id))
            except Deposed:
                raise
            except Exception:
                # One that cannot be looked after must not keep all others waiting.
                log.exception("apps: %s of %s is left as it is", id, look.id.table.name)
        if count:
            log.info("apps: %d %s", count, what)


def _follow(look: Look, id: str, conn: Connection) -> int:
    return look(conn, ACT, look.id == id)


def variables(work: Work) -> dict[str, Any]:
    return {
        "slice_allocation": work.parameters["allocation"],
        "slice_fence": work.parameters["fence"],
        "slice_managed_key": work.parameters["managed_key"],
    }


def start(work: Work) -> None:
    """Problem `canceled`, which starts no run, when nobody wants it any more."""
    own = work.act.because("its run begins")
    why = appwork.begun(work.conn, work.parameters["operation_id"], own)
    if why:
        raise Problem(
            "canceled",
            409,
            expected="an operation that is still wanted",
            found=why,
            remedy="nothing to do: no run was started",
        )


def succeed(work: Work, evidence: dict[str, Any]) -> dict[str, Any]:
    found = evidence["managed_key"]
    expires_at = float(found["expires_at"]) if found["present"] else None
    own = work.act.because("as the host says", {"present": found["present"]})
    appwork.done(work.conn, work.parameters["operation_id"], own, expires_at=expires_at)
    return evidence


def fail(work: Work, failure: Failure) -> None:
    own = work.act.because(failure.error["code"])
    appwork.failed(work.conn, work.parameters["operation_id"], own, failure.error)


HANDLER = Handler("managed_key", variables, succeed, fail, start)

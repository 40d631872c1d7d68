"""Task kind for managed keys: sets or removes an application's key on a member's host."""

from __future__ import annotations

from typing import Any

from reconciler.lifecycle import app_operations
from reconciler.model.errors import Problem
from reconciler.work.handler import Failure, Handler, Work


def managed_key_variables(work: Work) -> dict[str, Any]:
    return {
        "slice_allocation": work.parameters["allocation"],
        "slice_fence": work.parameters["fence"],
        "slice_managed_key": work.parameters["managed_key"],
    }


def managed_key_start(work: Work) -> None:
    """Problem `canceled`, which starts no run, if the operation is no longer wanted."""
    own = work.act.because("its run begins")
    why = app_operations.began(work.conn, work.parameters["operation_id"], own)
    if why:
        raise Problem(
            "canceled",
            409,
            expected="an operation that is still wanted",
            found=why,
            remedy="nothing to do: no run was started",
        )


def managed_key_succeeded(work: Work, evidence: dict[str, Any]) -> dict[str, Any]:
    found = evidence["managed_key"]
    expires_at = float(found["expires_at"]) if found["present"] else None
    own = work.act.because("as the host says", {"present": found["present"]})
    app_operations.succeeded(work.conn, work.parameters["operation_id"], own, expires_at=expires_at)
    return evidence


def managed_key_failed(work: Work, failure: Failure) -> None:
    own = work.act.because(failure.error["code"])
    app_operations.failed(work.conn, work.parameters["operation_id"], own, failure.error)


MANAGED_KEY = Handler(
    "managed_key",
    managed_key_variables,
    managed_key_succeeded,
    managed_key_failed,
    managed_key_start,
)

"""Settlement of a finished run: end of its task and state of its subject in one transaction."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from sqlalchemy import Connection, Engine, exc

from reconciler.db import clock
from reconciler.db.engine import reading, retrying, transaction
from reconciler.db.schema import Task
from reconciler.lifecycle import host
from reconciler.model.act import Act
from reconciler.model.errors import Problem
from reconciler.model.states import TaskState
from reconciler.records import certificates, claims, queue
from reconciler.records.queue import DEADLINE_PASSED
from reconciler.runs import contract
from reconciler.runs.collect import Outcome, is_untouched
from reconciler.settings import Settings
from reconciler.work import chaining as story
from reconciler.work import retry as again
from reconciler.work.handler import Failure, Handler, Work, failed_work, locked_subject, open_work

# Error code of an outcome that only the schema refuses. Such an outcome frees nothing.
REFUSED = "outcome_refused"
_STATES = {"canceled": TaskState.CANCELED, "lost": TaskState.LOST}
# Errors of a result that fits no record: the run contract allows it, the databases do not.
_MISFITS = (KeyError, TypeError, ValueError, OverflowError, exc.DataError)


def settle(
    engine: Engine, settings: Settings, handler: Handler, task: Task, outcome: Outcome
) -> None:
    """Finish `task` by `outcome`; Problem `stale_lease` when another worker holds the task.

    A run that never reached its host does not end the task, which waits until the host answers. A
    run of repeatable work that failed by a transient error does not end it either.
    """
    outcome = _legible(outcome)
    if is_untouched(outcome) and _wait_for_host(engine, task, outcome):
        return
    if outcome.ok:
        failure = _succeed(engine, settings, handler, task, outcome)
        if failure is None:
            return
    else:
        failure = _with_cause(engine, task, outcome, read_failure(outcome))

    def fail(conn: Connection, failure: Failure) -> None:
        with failed_work(conn, settings, task) as work:
            if not again.again(work, outcome, failure):
                _fail(work, handler, outcome, failure)

    try:
        retrying(engine, partial(fail, failure=failure))
    except (exc.IntegrityError, *_MISFITS) as untaken:
        # A failure that cannot be recorded as reported counts as unknown. The task keeps the
        # refused report; the handler does not get it.
        told = {**failure.error, "step": failure.step, "evidence": failure.evidence}
        unknown = Failure("record the failure", _untaken(untaken), {"failure": told}, known=False)
        retrying(engine, partial(fail, failure=unknown))


def _succeed(
    engine: Engine, settings: Settings, handler: Handler, task: Task, outcome: Outcome
) -> Failure | None:
    """Record a success: None, or the failure to record it."""
    evidence: dict[str, Any] = {}

    def record(conn: Connection) -> None:
        with locked_subject(conn, task):
            work = open_work(conn, settings, task)
            host.record_answer(conn, task.node_id, work.act.because("its run ended well"))
            evidence.update((outcome.result or {})["evidence"])
            result = story.go_on(work, handler.succeed(work, evidence))
            _finish(work.conn, task, TaskState.SUCCEEDED, work.act, result=result)

    try:
        # A constraint may refuse a change that another transaction made first. The repetition then
        # fails with a named problem.
        retrying(engine, record)
    except Problem as problem:
        if problem.code == "stale_lease":
            raise
        # The host did its part and the records refuse it: a known failure with a code.
        return Failure("record the outcome", problem.told(), evidence, known=True)
    except exc.IntegrityError as refused:
        return Failure("record the outcome", _untaken(refused), evidence, known=False)
    except _MISFITS as unreadable:
        # Without a failure here, the task would be leased and settled for ever.
        return Failure("record the outcome", _untaken(unreadable), {}, known=False)
    return None


def _fail(work: Work, handler: Handler, outcome: Outcome, failure: Failure) -> None:
    conn, task, code = work.conn, work.task, failure.error["code"]
    state = _STATES.get(outcome.status, TaskState.FAILED)
    handler.fail(work, failure)
    if outcome.unreachable and outcome.touched:
        host.record_silence(conn, task.node_id, work.act.because(failure.error["found"]))
    if state is TaskState.LOST:
        # The launcher lost the run too. Parts of it may still act under the fence of the task.
        claims.fence_off(conn, task.fences)
    error = {**failure.error, "step": failure.step, "evidence": failure.evidence}
    _finish(conn, task, state, work.act.because(code), error=error)


def _legible(outcome: Outcome) -> Outcome:
    """The outcome in storable form. With an unstorable result, the run counts as failed."""
    told = replace(outcome, problem=contract.storable_text(outcome.problem))
    where = contract.unstorable(outcome.result)
    if where is None:
        return told
    problem = f"{contract.UNREADABLE}: {where}: {contract.STORABLE}"
    return replace(told, status="failed", result=None, problem=problem)


def _wait_for_host(engine: Engine, task: Task, outcome: Outcome) -> bool:
    """Let the task wait for its host; False if the task is canceled, because then it ends."""
    act = Act(f"task:{task.id}", outcome.problem, task.correlation_id or "")
    with transaction(engine) as conn:
        if queue.get(conn, task.id).cancel_requested:
            return False
        host.record_silence(conn, task.node_id, act)
        queue.wait_for_host(conn, task.id, task.lease_token, outcome.problem, act=act)
    return True


def read_failure(outcome: Outcome) -> Failure:
    """Failure of a run: the error of its playbook, or else the end of its process."""
    result = outcome.result or {}
    error = result.get("error") or {}
    if outcome.status == "failed" and result and not outcome.unreachable:
        named = {
            "code": error.get("code", "step_failed"),
            "expected": error.get("expected", "the step to succeed"),
            "found": error.get("found", "it failed; see the output of the task"),
            "remedy": error.get("remedy", "read the task's output"),
        }
        return Failure(result.get("step", ""), named, result.get("evidence", {}), known=True)
    code = "host_unreachable" if outcome.unreachable else f"run_{outcome.status}"
    found = outcome.problem or f"the run ended as {outcome.status}"
    if found.partition(":")[0] == contract.UNREADABLE:
        code = contract.UNREADABLE
    ended = {
        "code": code,
        "expected": "a run that ends with a result",
        "found": found,
        "remedy": "the effect on the host is unknown: verify the host before anything is freed",
    }
    return Failure("", ended, result.get("evidence", {}), known=False)


def _with_cause(engine: Engine, task: Task, outcome: Outcome, failure: Failure) -> Failure:
    """The failure with its real cause, for runs that ended by a deadline or a certificate.

    A run canceled because of its deadline reports the deadline, not the cancellation. A run whose
    host was refused because of an expired certificate reports the certificate.
    """
    if outcome.status != "canceled":
        return _with_certificate(engine, task, failure) if outcome.unreachable else failure
    with reading(engine) as conn:
        asked = queue.get(conn, task.id).error
    return replace(failure, error=asked) if asked.get("code") == DEADLINE_PASSED else failure


def _with_certificate(engine: Engine, task: Task, failure: Failure) -> Failure:
    with reading(engine) as conn:
        until = certificates.ends(conn, [task.node_id]).get(task.node_id)
        if until is None or until > clock.read(conn):
            return failure
    problem = certificates.expired(task.node_id, until, failure.error["found"])
    return replace(failure, error=problem.told())


def _untaken(cause: Exception) -> dict[str, str]:
    """Error for a refused record: a constraint of the schema, or a value that cannot be stored."""
    refused = isinstance(cause, exc.IntegrityError)
    return {
        "code": REFUSED if refused else contract.UNREADABLE,
        "expected": "an end that the rules of the schema allow"
        if refused
        else "a result that this version of the reconciler can record",
        "found": _said(cause) if refused else f"{type(cause).__name__}: {_said(cause)}",
        "remedy": "the effect on the host is unknown: verify the host before anything is freed",
    }


def _said(cause: Exception) -> str:
    """The text of the cause; for the database its message only, without values of the host."""
    told = cause.orig if isinstance(cause, exc.DBAPIError) else cause
    own = getattr(getattr(told, "diag", None), "message_primary", None)
    return contract.storable_text(str(own or told))[:300]


def _finish(conn: Connection, task: Task, state: TaskState, act: Act, **columns: Any) -> None:
    queue.finish(conn, task.id, task.lease_token, state, act, **columns)

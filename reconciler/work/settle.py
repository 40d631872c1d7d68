"""Settlement of a finished run: end of its task and state of its subject in one transaction.

A success queues the next step of its request, if any. The remaining steps are stored in the task's
parameters (`then`), so that the chain is visible and survives a restart. A failed step ends the
chain; each step can also be requested separately, so that a person can continue from there.

Transient failures of repeatable work are retried. Tasks that build, remove or wipe for a tenant are
never retried automatically: their outcome decides the next state, and a person or the recovery
policy requests the work again.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

from sqlalchemy import Connection, Engine, exc

from reconciler.db import clock, locks
from reconciler.db.engine import reading, retrying, transaction
from reconciler.db.schema import Task
from reconciler.lifecycle import gate as slot_gate
from reconciler.lifecycle import host, power, retention, task_failures
from reconciler.lifecycle.task_failures import Failure, act_of, locked_subject
from reconciler.model import gate, host_faults
from reconciler.model.errors import Problem
from reconciler.model.proof import NOTHING_DONE
from reconciler.model.recovery import UNKNOWN_EFFECT
from reconciler.model.states import TaskKind, TaskState
from reconciler.model.storable import STORABLE, storable_text, unstorable
from reconciler.records import certificates, claims, nodes, queue, slots
from reconciler.records.queue import DEADLINE_PASSED
from reconciler.runs import contract, events, ssh
from reconciler.runs.collect import FOLDER_GONE, Outcome, is_untouched
from reconciler.runs.spec import NodeAccess
from reconciler.settings import Settings
from reconciler.trust.ca import clock_identity, open_trust
from reconciler.trust.keygen import TrustError
from reconciler.work.handler import Handler, Work, open_work

# A smaller difference of a host's clock makes no certificate invalid.
_LEAST_S = 60.0
# Error code of an outcome that only the schema refuses. Such an outcome frees nothing.
REFUSED = "outcome_refused"
_STATES = {"canceled": TaskState.CANCELED, "lost": TaskState.LOST}
# Errors of the code that reads a hardware profile or a host's result of an unexpected form. They
# must fail the task, or it would be leased for ever.
MISFITS = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError)
# Of a result also those of the database.
_MISFITS = (*MISFITS, exc.DataError, exc.ProgrammingError)
_NO_EFFECT = "repair what is named, then ask again; nothing was done on the host"
_NOT_STARTED = "run_not_started"
# The pauses give a busy host or source some time. The last attempt starts two and a half minutes
# after the first.
_FIRST_PAUSE_S = 30.0
_PAUSE_FACTOR = 4
# Transient error codes of playbooks. All other codes are refusals, which hold until a person acts.
_TRANSIENT = frozenset({"command_timeout", "image_unreachable"})
# Codes of a run without a reported end: its process or the connection to its host was lost.
_BROKEN = frozenset({"run_failed", "run_lost", FOLDER_GONE})
# Tasks of a node whose success may change the power of its slices.
_OF_SLICES = frozenset({TaskKind.SLICE_DRIFT_RECONCILE, TaskKind.NODE_PARITY, TaskKind.NODE_REBOOT})
# Codes of failures that only Ansible or the system has put in words.
_UNNAMED = frozenset({"task_failed", "system_error", "command_failed"})


def settle(
    engine: Engine, settings: Settings, handler: Handler, task: Task, outcome: Outcome
) -> None:
    """Finish `task` by `outcome`; Problem `stale_lease` when another worker holds the task.

    A run that never reached its host does not end the task, which waits until the host answers. A
    run of repeatable work that failed by a transient error does not end it either.
    """
    outcome = _storable(outcome)
    if is_untouched(outcome) and _wait_for_host(engine, task, outcome):
        return
    if outcome.ok:
        failure = _succeed(engine, settings, handler, task, outcome)
        if failure is None:
            return
    else:
        failure = _with_cause(engine, settings, task, outcome, read_failure(outcome))
        if not outcome.begun and task.attempt <= 1:
            # Only an earlier attempt could have acted.
            nothing = dict(NOTHING_DONE)
            failure = replace(failure, step="start the run", evidence=nothing, known=True)

    def fail(conn: Connection, failure: Failure) -> None:
        with locked_subject(conn, task):
            if not _retry(conn, task, outcome, failure):
                _fail(conn, task, outcome, failure)

    try:
        retrying(engine, partial(fail, failure=failure))
    except (exc.IntegrityError, *_MISFITS) as refusal:
        # A failure that cannot be recorded as reported counts as unknown. The task keeps the
        # refused report; its subject does not get it.
        evidence = {"failure": _task_error(failure)}
        unknown = Failure("record the failure", _record_error(refusal), evidence, known=False)
        retrying(engine, partial(fail, failure=unknown))


def queue_next_step(work: Work, result: dict[str, Any]) -> dict[str, Any]:
    """Queue the next step, if any; returns the task's result, which names the next task."""
    rest = [TaskKind(kind) for kind in work.parameters.get("then", ())]
    if not rest:
        return result
    node_id = work.task.node_id
    if not slots.bundles(work.conn, node_id):
        return {**result, "story": "ends here: the node has no approved slots"}
    item = queue.Enqueue(rest[0], node_id, parameters=queue.then(rest[1:]))
    act = work.act.because(f"follows {work.task.kind} {work.task.id}")
    return {**result, "next_task_id": queue.add(work.conn, item, act).id}


def read_failure(outcome: Outcome) -> Failure:
    """Failure of a run: the error of its playbook, or else the end of its process."""
    result = outcome.result or {}
    if outcome.status == "failed" and result and not outcome.unreachable:
        default = {
            "code": "step_failed",
            "expected": "the step to succeed",
            "found": "it failed; see the output of the task",
            "remedy": "read the task's output",
        }
        reported = result.get("error") or {}
        error = {part: reported.get(part, text) for part, text in default.items()}
        if gate.fails_elsewhere(error["code"]):
            error["code"] = default["code"]
        if error["code"] in _UNNAMED:
            error = host_faults.unwritable(error["found"]) or error
        return Failure(result.get("step", ""), error, result.get("evidence", {}), known=True)
    code = "host_unreachable" if outcome.unreachable else f"run_{outcome.status}"
    code = code if outcome.begun else _NOT_STARTED
    problem = outcome.problem or f"the run ended as {outcome.status}"
    if problem.partition(":")[0] in (contract.UNREADABLE, contract.INVALID, FOLDER_GONE):
        code = problem.partition(":")[0]
    ended = {
        "code": code,
        "expected": "a run that ends with a result",
        "found": problem,
        "remedy": UNKNOWN_EFFECT if outcome.begun else _NO_EFFECT,
    }
    # No module starts on a full or read-only disk of the host, so the playbook can give no result.
    # Other problems may come from the disks of this machine or of AWX.
    if outcome.unreachable or problem.startswith(f"{events.MODULE_FAILED}: "):
        ended = host_faults.unwritable(problem) or ended
    evidence, may_go_on = result.get("evidence", {}), outcome.may_go_on
    return Failure("", ended, evidence, known=False, may_go_on=may_go_on)


def _succeed(
    engine: Engine, settings: Settings, handler: Handler, task: Task, outcome: Outcome
) -> Failure | None:
    """Record a success: None, or the failure to record it."""
    evidence: dict[str, Any] = {}

    def record(conn: Connection) -> None:
        if task.kind in _OF_SLICES:
            power.lock_slices(conn, task.node_id)
        with locked_subject(conn, task):
            work = open_work(conn, settings, task)
            host.record_answer(conn, task.node_id, work.act.because("its run ended well"))
            unwritable = queue.latest_error(conn, task.node_id, host_faults.UNWRITABLE)
            evidence.update((outcome.result or {})["evidence"])
            result = queue_next_step(work, handler.succeed(work, evidence))
            if task.kind in retention.REPORT_KINDS:
                # This task is one more.
                queue.shorten_result(conn, task.kind, task.node_id, newest=retention.REPORTS - 1)
            elif task.kind != TaskKind.NODE_FIRMWARE:  # Its approval reads the whole plan.
                result = queue.shortened(result)
            state = TaskState.SUCCEEDED
            queue.finish(conn, task.id, task.lease_token, state, work.act, result=result)
            if unwritable:
                slot_gate.open_gate(conn, task.node_id, work.act.because("runs can write again"))

    try:
        # A constraint may refuse a change that another transaction made first. The repetition then
        # fails with a named problem.
        retrying(engine, record)
    except Problem as problem:
        if problem.code == "stale_lease":
            raise
        # The host did its part and the records refuse it: a known failure with a code.
        return Failure("record the outcome", problem.to_dict(), evidence, known=True)
    except exc.IntegrityError as refusal:
        return Failure("record the outcome", _record_error(refusal), evidence, known=False)
    except _MISFITS as unreadable:
        return Failure("record the outcome", _record_error(unreadable), {}, known=False)
    return None


def _retry(conn: Connection, task: Task, outcome: Outcome, failure: Failure) -> bool:
    """Queue another attempt; False if no attempt follows."""
    if task.attempt >= task.max_attempts or not _is_transient(outcome, failure):
        return False
    if queue.get(conn, task.id).cancel_requested:
        return False
    act = act_of(task).because(f"attempt {task.attempt} failed: {failure.error['code']}")
    if outcome.unreachable:
        host.record_silence(conn, task.node_id, act.because(failure.error["found"]))
    queue.retry(
        conn,
        task.id,
        task.lease_token,
        act.reason,
        seconds=_FIRST_PAUSE_S * _PAUSE_FACTOR ** (task.attempt - 1),
        act=act,
        error=_task_error(failure),
    )
    if task.kind == TaskKind.SLICE_TOPOLOGY_DISCOVER:
        # Parity compares against this discovery, so it must run after it.
        queue.postpone_behind(conn, task, TaskKind.NODE_PARITY)
    return True


def _is_transient(outcome: Outcome, failure: Failure) -> bool:
    """Whether another run may succeed."""
    code = failure.error["code"]
    if not outcome.begun:
        return outcome.status == "failed"
    if failure.known:
        return code in _TRANSIENT
    # A host that refused the first connection will refuse again. A host lost later may answer.
    lost_host = code == "host_unreachable" and outcome.touched
    return lost_host or (code in _BROKEN and not outcome.may_go_on)


def _fail(conn: Connection, task: Task, outcome: Outcome, failure: Failure) -> None:
    act, state = act_of(task), _STATES.get(outcome.status, TaskState.FAILED)
    task_failures.record(conn, task, failure)
    if outcome.unreachable and outcome.touched:
        host.record_silence(conn, task.node_id, act.because(failure.error["found"]))
    if state is TaskState.LOST:
        # The launcher lost the run too. Parts of it may still act under the fence of the task.
        claims.fence_off(conn, task.fences)
    act, error = act.because(failure.error["code"]), _task_error(failure)
    unwritable = error["code"] in host_faults.UNWRITABLE
    with locks.node(conn, task.node_id) if unwritable else nullcontext():
        queue.finish(conn, task.id, task.lease_token, state, act, error=error)
        if unwritable:
            # Each further launch would fail there and block another slot.
            slot_gate.review(conn, task.node_id, act)


def _task_error(failure: Failure) -> dict[str, Any]:
    """The error that the task keeps."""
    return {**failure.error, "step": failure.step, "evidence": failure.kept}


def _storable(outcome: Outcome) -> Outcome:
    """The outcome in storable form. With an unstorable result, the run counts as failed."""
    outcome = replace(outcome, problem=storable_text(outcome.problem))
    path = unstorable(outcome.result)
    if path is None:
        return outcome
    problem = f"{contract.UNREADABLE}: {path}: {STORABLE}"
    return replace(outcome, status="failed", result=None, problem=problem)


def _wait_for_host(engine: Engine, task: Task, outcome: Outcome) -> bool:
    """Let the task wait for its host; False if the task is canceled, because then it ends."""
    act = act_of(task).because(outcome.problem)
    with transaction(engine) as conn:
        if queue.get(conn, task.id).cancel_requested:
            return False
        host.record_silence(conn, task.node_id, act)
        queue.wait_for_host(conn, task.id, task.lease_token, outcome.problem, act=act)
    return True


def _with_cause(
    engine: Engine, settings: Settings, task: Task, outcome: Outcome, failure: Failure
) -> Failure:
    """The failure with its real cause, for runs that ended by a deadline, a certificate or a clock.

    A run canceled because of its deadline reports the deadline, not the cancellation. A run whose
    host was refused because of an expired certificate reports the certificate. A run whose login
    the host refused reports the host's clock, if that is wrong.
    """
    if outcome.status == "canceled":
        with reading(engine) as conn:
            error = queue.get(conn, task.id).error
        return replace(failure, error=error) if error.get("code") == DEADLINE_PASSED else failure
    if not outcome.unreachable:
        return failure
    with reading(engine) as conn:
        until = certificates.ends(conn, [task.node_id]).get(task.node_id)
        valid = until is None or until > clock.read(conn)
    if valid or until is None:
        fault = clock_fault(engine, settings, task.node_id, outcome)
        return replace(failure, error=fault) if fault else failure
    problem = certificates.expired(task.node_id, until, failure.error["found"])
    return replace(failure, error=problem.to_dict())


def _record_error(cause: Exception) -> dict[str, str]:
    """Error for a refused record: a constraint of the schema, or a value that cannot be stored."""
    # Of the database only its own message, without values of the host.
    source = cause.orig if isinstance(cause, exc.DBAPIError) else cause
    message = getattr(getattr(source, "diag", None), "message_primary", None)
    text = storable_text(str(message or source))[:300]
    if isinstance(cause, exc.IntegrityError):
        code, expected = REFUSED, "an end that the rules of the schema allow"
    else:
        code = contract.UNREADABLE
        expected = "a result that this version of the reconciler can record"
        text = f"{type(cause).__name__}: {text}"
    return {"code": code, "expected": expected, "found": text, "remedy": UNKNOWN_EFFECT}


def clock_fault(
    engine: Engine, settings: Settings, node_id: str, outcome: Outcome
) -> dict[str, str] | None:
    """The fault of the clock of a host that refuses our login; None if its clock is right or cannot
    be read. A wrong clock makes our certificate invalid. Where only AWX has a way to the host, the
    refusal itself has a name.
    """
    if not ssh.is_refused(outcome.problem):
        return None
    with reading(engine) as conn:
        node = nodes.get(conn, node_id)
    try:
        identity = clock_identity(open_trust(settings.state_dir))
    except (TrustError, OSError):
        return None
    access = ssh.SshAccess(identity.key, identity.certificate, identity.known_hosts)
    # Meanwhile no heartbeat extends the lease of the task.
    limit_s = settings.task_lease_s / 3
    there = NodeAccess(node.id, node.address, node.port, node.ssh_user)
    at = ssh.read_clock(access, there, limit_s)
    with reading(engine) as conn:
        now = clock.read(conn)
    if at is None and settings.launcher == "awx":
        return host_faults.refused_login(now, outcome.problem)
    if at is None or abs(at - now) < _LEAST_S:
        return None
    return host_faults.wrong_clock(at, now, outcome.problem)

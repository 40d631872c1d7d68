"""Retry policy for tasks: automatic attempts after transient failures of repeatable work.

Tasks that build, remove or wipe for a tenant are never retried automatically. Their outcome decides
the next state, and a person or the recovery policy requests the work again.
"""

from __future__ import annotations

from reconciler.lifecycle import host
from reconciler.model.states import TaskKind
from reconciler.records import queue
from reconciler.runs.collect import Outcome
from reconciler.work.handler import Failure, Work

# The pauses give a busy host or source some time. The last attempt starts two and a half minutes
# after the first.
_FIRST_PAUSE_S = 30.0
_GROWS = 4
# Transient error codes of playbooks. All other codes are refusals, which hold until a person acts.
_PASSING = frozenset({"command_timeout", "image_unreachable"})
# Codes of a run without a reported end: its process or the connection to its host was lost.
_BROKEN = frozenset({"run_failed", "run_lost"})


def may_pass(outcome: Outcome, failure: Failure) -> bool:
    """Whether the failure is transient, so that another run may succeed."""
    code = failure.error["code"]
    if failure.known:
        return code in _PASSING
    # A host that refused the first connection will refuse again. A host lost later may answer.
    lost = code == "host_unreachable" and outcome.touched
    return lost or code in _BROKEN


def again(work: Work, outcome: Outcome, failure: Failure) -> bool:
    """Queue another attempt in the transaction of `work`; False if no attempt follows."""
    conn, task = work.conn, work.task
    if task.attempt >= task.max_attempts or not may_pass(outcome, failure):
        return False
    if queue.get(conn, task.id).cancel_requested:
        return False
    act = work.act.because(f"attempt {task.attempt} failed: {failure.error['code']}")
    if outcome.unreachable:
        host.record_silence(conn, task.node_id, act.because(failure.error["found"]))
    queue.retry(
        conn,
        task.id,
        task.lease_token,
        act.reason,
        seconds=_FIRST_PAUSE_S * _GROWS ** (task.attempt - 1),
        act=act,
        error={**failure.error, "step": failure.step, "evidence": failure.evidence},
    )
    if task.kind == TaskKind.SLICE_TOPOLOGY_DISCOVER:
        # Parity compares against this discovery, so it must run after it.
        queue.postpone_behind(conn, task, TaskKind.NODE_PARITY)
    return True

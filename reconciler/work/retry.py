"""Which failures are tried again by themselves: of work that may be done twice, what may pass.

Nothing that builds, removes or wipes for a tenant: what its failure means is decided by its outcome
(decisions 12 to 15), and a person or the recovery policy asks for it anew.
"""

from __future__ import annotations

from reconciler.lifecycle import host
from reconciler.model.states import TaskKind
from reconciler.records import queue
from reconciler.runs.collect import Outcome
from reconciler.work.handler import Failure, Work

# A busy host or source gets some time; the last attempt comes two and a half minutes after the
# first.
_FIRST_PAUSE_S = 30.0
_GROWS = 4
# What a playbook itself says that may be otherwise next time. Whatever else it says is a refusal,
# which holds until somebody acts.
_PASSING = frozenset({"command_timeout", "image_unreachable"})
# Of a run that could not say how it ended: its process, or the way to its host, was gone.
_BROKEN = frozenset({"run_failed", "run_lost"})


def may_pass(outcome: Outcome, failure: Failure) -> bool:
    """Whether the same run may end otherwise next time."""
    code = failure.error["code"]
    if failure.known:
        return code in _PASSING
    # A host that refuses us before anything began will do so again; one that was lost may answer.
    lost = code == "host_unreachable" and outcome.touched
    return lost or code in _BROKEN


def again(work: Work, outcome: Outcome, failure: Failure) -> bool:
    """Queue another attempt, in the transaction of `work`; False when this was the last."""
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
        # What parity compares with is this discovery.
        queue.postpone_behind(conn, task, TaskKind.NODE_PARITY)
    return True

"""Chaining of tasks: the next step of a request after a task has succeeded.

The remaining steps are stored in the task's parameters (`then`), so that the chain is visible and
survives a restart. The next task is queued in the transaction that ends its predecessor, under the
same correlation id. A failed step ends the chain. Each step can also be requested separately, so
that a person can continue from there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from reconciler.model.states import TaskKind
from reconciler.records import queue, slots
from reconciler.work.handler import Work

# Steps after the bootstrap of a node whose slots were approved when it was a slice host before.
TO_SLICE = (TaskKind.NODE_BIND_TOPOLOGY, TaskKind.SLICE_TOPOLOGY_DISCOVER, TaskKind.NODE_PARITY)


def then(kinds: Sequence[TaskKind]) -> dict[str, Any]:
    """Task parameters that name the following steps."""
    return {"then": [kind.value for kind in kinds]}


def go_on(work: Work, result: dict[str, Any]) -> dict[str, Any]:
    """Queue the next step, if any; returns the task's result, which names the next task."""
    rest = [TaskKind(kind) for kind in work.parameters.get("then", ())]
    if not rest:
        return result
    node_id = work.task.node_id
    if not slots.bundles(work.conn, node_id):
        return {**result, "story": "ends here: the node has no approved slots"}
    item = queue.Enqueue(
        kind=rest[0],
        node_id=node_id,
        subject_kind="node",
        subject_id=node_id,
        parameters=then(rest[1:]),
    )
    act = work.act.because(f"follows {work.task.kind} {work.task.id}")
    return {**result, "next_task_id": queue.add(work.conn, item, act).id}

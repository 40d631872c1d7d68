"""What follows when a task has ended well: the next step of what was asked for in one call.

The rest of the story stands in the task's parameters (`then`): everybody sees what is to come, and
nobody must remember it. The next task is queued in the transaction that ends the one before it,
under the same correlation id. A step that fails ends the story; each step can also be asked for by
itself, so a person goes on from there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from reconciler.model.states import TaskKind
from reconciler.records import queue, slots
from reconciler.work.handler import Work

# After the bootstrap of a node whose slots were approved in an earlier life as a slice host.
TO_SLICE = (TaskKind.NODE_BIND_TOPOLOGY, TaskKind.SLICE_TOPOLOGY_DISCOVER, TaskKind.NODE_PARITY)


def then(kinds: Sequence[TaskKind]) -> dict[str, Any]:
    """The part of a task's parameters that names what follows it."""
    return {"then": [kind.value for kind in kinds]}


def go_on(work: Work, result: dict[str, Any]) -> dict[str, Any]:
    """Queue the next step, if there is one; the task's result, which names it."""
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

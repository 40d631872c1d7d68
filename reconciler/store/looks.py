"""Having a host looked at again, because of what has just happened on it."""

from __future__ import annotations

import sqlalchemy as sa

from reconciler.domain.act import Act
from reconciler.domain.states import TaskKind
from reconciler.store import rows, tasks
from reconciler.store.tables import allocations

# In this order: what parity compares with is the discovery, and its pass opens the gate.
_LOOKS = (TaskKind.SLICE_TOPOLOGY_DISCOVER, TaskKind.NODE_PARITY)


def again(conn: sa.Connection, allocation_id: str, act: Act) -> None:
    """Discover the allocation's host and run its parity, from the beginning."""
    node_id = str(rows.get(conn, allocations, allocation_id, "allocation")["node_id"])
    for kind in _LOOKS:
        item = tasks.Enqueue(kind=kind, node_id=node_id, subject_kind="node", subject_id=node_id)
        tasks.enqueue(conn, item, act)

"""Having a host looked at again, because of what has just happened on it."""

from __future__ import annotations

import sqlalchemy as sa

from reconciler.domain.act import Act
from reconciler.domain.states import NodeMode, TaskKind
from reconciler.store import rows, tasks
from reconciler.store.rows import Record
from reconciler.store.tables import allocations, nodes

# In this order: what parity compares with is the discovery, and its pass opens the gate.
_LOOKS = (TaskKind.SLICE_TOPOLOGY_DISCOVER, TaskKind.NODE_PARITY)


def again(conn: sa.Connection, allocation_id: str, act: Act) -> None:
    """Discover the allocation's host and run its parity, from the beginning."""
    allocation = rows.get(conn, allocations, allocation_id, "allocation")
    at(conn, rows.get(conn, nodes, allocation["node_id"], "node"), act)


def at(conn: sa.Connection, node: Record, act: Act) -> None:
    """The same for a host; of one that is no slice host parity opens nothing."""
    node_id, sliced = node["id"], NodeMode(node["mode"]).purpose == "slice"
    for kind in _LOOKS if sliced else _LOOKS[:1]:
        item = tasks.Enqueue(kind=kind, node_id=node_id, subject_kind="node", subject_id=node_id)
        tasks.enqueue(conn, item, act)

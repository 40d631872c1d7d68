"""Whether a node's host answers, and what follows from it. Silence frees nothing (I13)."""

from __future__ import annotations

import sqlalchemy as sa

from reconciler.domain import transitions
from reconciler.domain.act import Act
from reconciler.domain.states import NodeState
from reconciler.store import contact, gates, nodes, rows, tasks
from reconciler.store.rows import Record
from reconciler.store.tables import nodes as node_table


def silent(conn: sa.Connection, node_id: str, act: Act) -> bool:
    """The host did not answer: from now on its tasks wait. False when that is not news.

    A node that has not been enrolled yet, or is retired, has no contact to lose.
    """
    node = rows.get(conn, node_table, node_id, "node", lock=True)
    if transitions.target("node", node["state"], "lose") is None:
        return False
    nodes.lost(conn, node_id, act)
    return True


def answered(conn: sa.Connection, node_id: str, act: Act) -> bool:
    """The host has answered. If it was lost, its tasks go on and what is proven is sold again."""
    node = rows.get(conn, node_table, node_id, "node", lock=True)
    contact.contacted(conn, node_id)
    if node["state"] != NodeState.UNREACHABLE:
        return False
    nodes.regained(conn, node_id, act)
    tasks.resume(conn, node_id)
    # A slot that came back clean meanwhile was parked, because nothing is sold on a lost node.
    gates.open_gate(conn, node_id, act)
    return True


def lost(conn: sa.Connection) -> list[Record]:
    """The nodes of which nothing has been heard since contact was lost."""
    query = sa.select(node_table).where(node_table.c.state == NodeState.UNREACHABLE)
    return rows.every(conn, query.order_by(node_table.c.id))

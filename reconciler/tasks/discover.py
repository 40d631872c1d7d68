"""slice.topology_discover: what the host has, as a candidate topology that nobody may schedule."""

from __future__ import annotations

from typing import Any

from reconciler.domain.states import NodeMode, NodeState
from reconciler.store import discoveries, gates, nodes
from reconciler.tasks.handler import Handler, Work


def variables(_work: Work) -> dict[str, Any]:
    return {}


def succeed(work: Work, evidence: dict[str, Any]) -> dict[str, Any]:
    document = evidence["discovery"]
    discoveries.record(
        work.conn,
        work.task["node_id"],
        document,
        work.act.because("topology discovered"),
        task_id=work.task["id"],
        observed_at=work.task["started_at"],
    )
    if (work.node["mode"], work.node["state"]) == (NodeMode.BAREMETAL, NodeState.BOOTSTRAPPING):
        # An ordinary machine needs no preparation: it is certified, it answers, it has been seen.
        act = work.act.because("an ordinary machine, discovered")
        identity, began = document["identity"], work.task["started_at"]
        nodes.bootstrapped(work.conn, work.node["id"], act, identity=identity, began=began)
    # What an earlier discovery took off sale, and this one shows well.
    gates.open_gate(work.conn, work.task["node_id"], work.act.because("seen without blockers"))
    return {"candidate_summary": document["candidate_summary"]}


HANDLER = Handler("discover", variables, succeed)

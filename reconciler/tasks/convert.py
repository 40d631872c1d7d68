"""node.convert: a slice host becomes an ordinary machine again.

The way there is node.bootstrap: what a slice host needs is the same for a new machine.
"""

from __future__ import annotations

from typing import Any

from reconciler.domain.states import NodeMode
from reconciler.store import drift, nodes
from reconciler.tasks.handler import Handler, Work


def variables(work: Work) -> dict[str, Any]:
    return {
        "slice_allow_reboot": bool(work.parameters.get("allow_reboot", False)),
        "slice_written_off": work.parameters.get("written_off", []),
    }


def succeed(work: Work, evidence: dict[str, Any]) -> dict[str, Any]:
    """The host was compared item by item with what an ordinary machine has."""
    act = work.act.because("the host is bare metal again", evidence)
    nodes.observed(
        work.conn,
        work.task["node_id"],
        act,
        identity=evidence["identity"],
        began=work.task["started_at"],
    )
    if work.node["mode"] == NodeMode.CONVERTING_TO_BAREMETAL:
        nodes.converted(work.conn, work.task["node_id"], act)
        drift.forget(work.conn, work.task["node_id"], act)
    return evidence


# A failure leaves the node in conversion, where nothing is sold; asking again goes on from there.
HANDLER = Handler("restore_baremetal", variables, succeed, deadlines=("reboot",))

"""node.bootstrap: a deployed machine gets what a slice host needs."""

from __future__ import annotations

from typing import Any

from reconciler.store import nodes
from reconciler.tasks.handler import Handler, Work


def variables(work: Work) -> dict[str, Any]:
    return {
        "slice_allow_reboot": bool(work.parameters.get("allow_reboot", False)),
        "slice_api_names": work.settings.api_names,
    }


def start(work: Work) -> None:
    """Nobody is let in while this runs; whoever came since it was asked for is not restarted."""
    if work.parameters.get("allow_reboot", False):
        nodes.refuse_in_use(work.conn, work.task["node_id"], nodes.AT_WORK)


def succeed(work: Work, evidence: dict[str, Any]) -> dict[str, Any]:
    act = work.act.because("bootstrap finished", evidence)
    nodes.bootstrapped(
        work.conn,
        work.task["node_id"],
        act,
        identity=evidence["identity"],
        began=work.task["started_at"],
    )
    return evidence


HANDLER = Handler("bootstrap", variables, succeed, start=start, deadlines=("reboot",))

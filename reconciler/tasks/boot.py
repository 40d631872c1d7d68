"""The boot under which a node was proven: a restarted host must be proven again (I16)."""

from __future__ import annotations

from reconciler.domain.errors import Problem
from reconciler.store import contact
from reconciler.tasks.handler import Failure, Work

# The code with which a host refuses that has been restarted since it was proven.
BOOT_CHANGED = "boot_changed"


def require_proven(work: Work) -> None:
    """The host checks this too; here no run is started for what is known already."""
    # A task from before there was such a parameter has proven nothing.
    proven, found = work.parameters.get("boot_id", ""), work.node["boot_id"]
    if not proven or found != proven:
        raise Problem(
            BOOT_CHANGED,
            expected=f"node {work.node['id']} under boot {proven}, for which its gate was proven",
            found=f"boot {found or 'unknown'}",
            remedy="discover the node and run its parity, then launch again",
        )


def heed(work: Work, failure: Failure) -> None:
    """Close the node's gate when the host says that it was restarted."""
    if failure.error["code"] == BOOT_CHANGED:
        act = work.act.because(failure.error["found"])
        contact.restarted(work.conn, work.node["id"], act, since=work.parameters["boot_id"])

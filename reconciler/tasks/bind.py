"""node.bind_topology: the approved GPUs and virtual functions go to vfio-pci, and stay there."""

from __future__ import annotations

from typing import Any

from reconciler.store import slots
from reconciler.tasks.handler import Handler, Work


def variables(work: Work) -> dict[str, Any]:
    return {"slice_slots": slots.bundles(work.conn, work.task["node_id"])}


def succeed(_work: Work, evidence: dict[str, Any]) -> dict[str, Any]:
    return evidence


HANDLER = Handler("bind_topology", variables, succeed)

"""Registry of task handlers by kind."""

from __future__ import annotations

from reconciler.work.handler import Handler
from reconciler.work.kinds import baremetal, node, slices

HANDLERS: dict[str, Handler] = {
    **node.HANDLERS,
    **slices.HANDLERS,
    **baremetal.HANDLERS,
}

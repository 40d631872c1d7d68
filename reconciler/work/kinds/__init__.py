"""Registry of task handlers by kind."""

from __future__ import annotations

from reconciler.model.states import TaskKind
from reconciler.work.handler import Handler
from reconciler.work.kinds import baremetal, node
from reconciler.work.kinds import slices as slice_kinds

HANDLERS: dict[str, Handler] = {
    TaskKind.NODE_ENROL: node.ENROL,
    TaskKind.NODE_BOOTSTRAP: node.BOOTSTRAP,
    TaskKind.SLICE_TOPOLOGY_DISCOVER: node.DISCOVER,
    TaskKind.NODE_STORAGE_TRANSITION: node.TAKEOVER,
    TaskKind.NODE_CONVERT: node.CONVERT,
    TaskKind.NODE_BIND_TOPOLOGY: node.BIND,
    TaskKind.NODE_PARITY: node.PARITY,
    TaskKind.NODE_IMAGE_CACHE: node.CACHE_IMAGE,
    TaskKind.SLICE_VM_PROVISION: slice_kinds.PROVISION,
    TaskKind.SLICE_VM_RELEASE: slice_kinds.RELEASE,
    TaskKind.SLICE_WIPE: slice_kinds.WIPE,
    TaskKind.SLICE_ABSENCE_VERIFY: slice_kinds.ABSENCE,
    TaskKind.SLICE_DRIFT_RECONCILE: slice_kinds.DRIFT,
    TaskKind.BAREMETAL_PROVISION: baremetal.PROVISION,
    TaskKind.BAREMETAL_RELEASE: baremetal.RELEASE,
    TaskKind.ALLOCATION_RECONCILE_MANAGED_AUTHORIZED_KEY: slice_kinds.MANAGED_KEY,
}

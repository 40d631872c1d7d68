"""Every kind of task that runs a playbook."""

from __future__ import annotations

from reconciler.domain.states import TaskKind
from reconciler.tasks import (
    absence,
    baremetal_provision,
    baremetal_release,
    bind,
    bootstrap,
    cache,
    convert,
    discover,
    drift,
    enrol,
    managed_key,
    parity,
    provision,
    release,
    transition,
    wipe,
)
from reconciler.tasks.handler import Handler

HANDLERS: dict[str, Handler] = {
    TaskKind.NODE_ENROL: enrol.HANDLER,
    TaskKind.NODE_BOOTSTRAP: bootstrap.HANDLER,
    TaskKind.SLICE_TOPOLOGY_DISCOVER: discover.HANDLER,
    TaskKind.NODE_STORAGE_TRANSITION: transition.HANDLER,
    TaskKind.NODE_CONVERT: convert.HANDLER,
    TaskKind.NODE_BIND_TOPOLOGY: bind.HANDLER,
    TaskKind.NODE_PARITY: parity.HANDLER,
    TaskKind.NODE_IMAGE_CACHE: cache.HANDLER,
    TaskKind.SLICE_VM_PROVISION: provision.HANDLER,
    TaskKind.SLICE_VM_RELEASE: release.HANDLER,
    TaskKind.SLICE_WIPE: wipe.HANDLER,
    TaskKind.SLICE_ABSENCE_VERIFY: absence.HANDLER,
    TaskKind.SLICE_DRIFT_RECONCILE: drift.HANDLER,
    TaskKind.BAREMETAL_PROVISION: baremetal_provision.HANDLER,
    TaskKind.BAREMETAL_RELEASE: baremetal_release.HANDLER,
    TaskKind.ALLOCATION_RECONCILE_MANAGED_AUTHORIZED_KEY: managed_key.HANDLER,
}

"""What must follow in the records from how a run was said to end: the model's own account of it."""

from __future__ import annotations

from collections.abc import Collection

from reconciler.model.states import TaskKind
from tests.unit.reconciler.faults.truth import BLOCKED, BUILDING, IDLE, MACHINE, Run, Truth


def begun(truth: Truth, run: Run) -> None:
    """A worker has started it."""
    tenant = truth.tenants.get(run.key)
    if run.kind in BUILDING and tenant is not None and tenant.state == "requested":
        tenant.state = "provisioning"
        _slots(truth, tenant.slots, "provisioning", of=("reserved",))


def ended(truth: Truth, run: Run, told: str, ours: Collection[str]) -> None:
    """Its end is recorded. ours: of its fences, those that nobody has raised since."""
    host = truth.hosts[run.node]
    if told == "before" and run.refused == "boot_changed" and host.known == run.boot:
        host.known = ""
    if run.kind in (TaskKind.SLICE_TOPOLOGY_DISCOVER, TaskKind.NODE_PARITY):
        if told == "ok":
            _looked(truth, run)
    elif run.kind in BUILDING:
        built(truth, run.key, told)
    elif run.kind == TaskKind.SLICE_VM_RELEASE:
        _released(truth, run, told)
    elif run.kind == TaskKind.SLICE_WIPE and told == "ok":
        _slots(truth, ours, IDLE, of=("cleanup", BLOCKED))
    elif run.kind == TaskKind.SLICE_WIPE:
        _slots(truth, ours, BLOCKED, of=("cleanup",))
    elif MACHINE in ours:
        _machine_released(truth, run, told)


def built(truth: Truth, key: str, told: str) -> None:
    """A provision has come to its end; one that nobody waits for any more decides nothing."""
    tenant = truth.tenants[key]
    if tenant.state not in ("requested", "provisioning"):
        return
    if told == "ok":
        tenant.state = "active"
        _slots(truth, tenant.slots, "active")
        return
    truth.end(key, "failed")
    where = IDLE if told == "before" else BLOCKED
    _slots(truth, tenant.slots, where, of=("reserved", "provisioning"))
    if told != "before" and not tenant.slots:
        truth.hosts[tenant.node].unclean = key


def _looked(truth: Truth, run: Run) -> None:
    host = truth.hosts[run.node]
    evidence = run.result.get("discovery") or run.result["parity"]
    host.known = evidence["identity"]["boot_id"]
    if run.kind == TaskKind.SLICE_TOPOLOGY_DISCOVER:
        host.seen = host.known
        there = {disk["identity"] for disk in evidence["nvme"]}
        host.missing = {slot.disk for slot in truth.slots.values()} - there
    elif evidence["intent"] == "slice":
        host.passed = "" if evidence["failures"] else host.known


def _released(truth: Truth, run: Run, told: str) -> None:
    tenant = truth.tenants[run.key]
    if tenant.state != "releasing":
        return
    if told == "ok":
        truth.end(run.key, "released")
        _slots(truth, tenant.slots, IDLE, of=("releasing", BLOCKED))
    else:
        _slots(truth, tenant.slots, BLOCKED, of=("releasing",))


def _machine_released(truth: Truth, run: Run, told: str) -> None:
    tenant, host = truth.tenants[run.key], truth.hosts[run.node]
    if tenant.state != "releasing" and host.unclean != run.key:
        return
    if told == "ok":
        if tenant.state == "releasing":
            truth.end(run.key, "released")
        host.unclean = ""
    else:
        host.unclean = run.key


def _slots(truth: Truth, names: Collection[str], where: str, of: Collection[str] = ()) -> None:
    for name in names:
        slot = truth.slots.get(name)
        if slot is not None and (not of or slot.where in of):
            slot.where = where

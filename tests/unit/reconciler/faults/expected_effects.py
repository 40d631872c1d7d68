"""Effects that the end of a run must have on the records, computed on the model alone."""

from __future__ import annotations

from collections.abc import Collection

from reconciler.model.states import TaskKind
from tests.unit.reconciler.faults.site_model import BLOCKED, BUILDING, IDLE, MACHINE, Run, SiteModel


def begun(model: SiteModel, run: Run) -> None:
    """A worker has started the run."""
    tenant = model.tenants.get(run.key)
    if run.kind in BUILDING and tenant is not None and tenant.state == "requested":
        tenant.state = "provisioning"
        _slots(model, tenant.slots, "provisioning", of=("reserved",))


def ended(model: SiteModel, run: Run, reported: str, ours: Collection[str]) -> None:
    """The end of the run is recorded. ours: its fences that were not raised since."""
    host = model.hosts[run.node]
    if reported == "before" and run.refused == "boot_changed" and host.recorded == run.boot:
        host.recorded = ""
    if run.kind in (TaskKind.SLICE_TOPOLOGY_DISCOVER, TaskKind.NODE_PARITY):
        if reported == "ok":
            _looked(model, run)
    elif run.kind in BUILDING:
        built(model, run.key, reported)
    elif run.kind == TaskKind.SLICE_VM_RELEASE:
        _released(model, run, reported)
    elif run.kind == TaskKind.SLICE_WIPE and reported == "ok":
        _slots(model, ours, IDLE, of=("cleanup", BLOCKED))
    elif run.kind == TaskKind.SLICE_WIPE:
        _slots(model, ours, BLOCKED, of=("cleanup",))
    elif MACHINE in ours:
        _machine_released(model, run, reported)


def built(model: SiteModel, key: str, reported: str) -> None:
    """A provision has ended. For an allocation that is over, its end decides nothing."""
    tenant = model.tenants[key]
    if tenant.state not in ("requested", "provisioning"):
        return
    if reported == "ok":
        tenant.state = "active"
        _slots(model, tenant.slots, "active")
        return
    model.end(key, "failed")
    where = IDLE if reported == "before" else BLOCKED
    _slots(model, tenant.slots, where, of=("reserved", "provisioning"))
    if reported != "before" and not tenant.slots:
        model.hosts[tenant.node].unclean = key


def _looked(model: SiteModel, run: Run) -> None:
    host = model.hosts[run.node]
    evidence = run.result.get("discovery") or run.result["parity"]
    host.recorded = evidence["identity"]["boot_id"]
    if run.kind == TaskKind.SLICE_TOPOLOGY_DISCOVER:
        host.seen = host.recorded
        there = {disk["identity"] for disk in evidence["nvme"]}
        host.missing = {slot.disk for slot in model.slots.values()} - there
    elif evidence["intent"] == "slice":
        host.passed = "" if evidence["failures"] else host.recorded


def _released(model: SiteModel, run: Run, reported: str) -> None:
    tenant = model.tenants[run.key]
    if tenant.state != "releasing":
        return
    if reported == "ok":
        model.end(run.key, "released")
        _slots(model, tenant.slots, IDLE, of=("releasing", BLOCKED))
    else:
        _slots(model, tenant.slots, BLOCKED, of=("releasing",))


def _machine_released(model: SiteModel, run: Run, reported: str) -> None:
    tenant, host = model.tenants[run.key], model.hosts[run.node]
    if tenant.state != "releasing" and host.unclean != run.key:
        return
    if reported == "ok":
        if tenant.state == "releasing":
            model.end(run.key, "released")
        host.unclean = ""
    else:
        host.unclean = run.key


def _slots(model: SiteModel, names: Collection[str], where: str, of: Collection[str] = ()) -> None:
    for name in names:
        slot = model.slots.get(name)
        if slot is not None and (not of or slot.where in of):
            slot.where = where

"""Subjects of the fault programme, slice and whole machine, and the starts of its scenarios."""

from __future__ import annotations

from collections.abc import Callable

import sqlalchemy as sa

from reconciler.db.engine import reading, transaction
from reconciler.lifecycle import baremetal, recovery
from reconciler.lifecycle import launch as launching
from reconciler.model.states import AllocationState, SlotState, TaskKind
from reconciler.records import allocations, nodes, slots
from reconciler.work.kinds import HANDLERS
from tests.unit.reconciler.conftest import ADMIN
from tests.unit.reconciler.faults.playing import How, Step
from tests.unit.reconciler.faults.scripted_site import Run, ScriptedSite
from tests.unit.reconciler.whole_machines import Machines

OPEN = (AllocationState.REQUESTED, AllocationState.PROVISIONING, AllocationState.FAILED)


class Slice(ScriptedSite):
    """Two slots of node n1; a tenant gets one."""

    def launch(self, *, everything: bool = False) -> str:
        with transaction(self.engine) as conn:
            return self.site.allocate(conn, 2 if everything else 1)

    def release(self, allocation_id: str) -> None:
        with transaction(self.engine) as conn:
            launching.release(conn, allocation_id, ADMIN)

    def recover(self) -> bool:
        with transaction(self.engine) as conn:
            owners = {slot.health_detail["allocation_id"] for slot in recovery.blocked(conn)}
            for key in sorted(owners):
                recovery.force_cleanup(conn, key, ADMIN, runtime_verified_absent=True)
        self.work()
        return bool(owners)

    def lies(self, conn: sa.Connection) -> list[str]:
        problems = []
        ledger = {entry.slot_id: entry for entry in self.host.ledger()}
        live = {row.id: row for row in allocations.every(conn)}
        used = {disk for disks in self.host.running.values() for disk in disks}
        for slot in slots.of_node(conn, "n1"):
            entry, disk = ledger.get(slot.id), slot.nvme_identity
            if slot.status == SlotState.AVAILABLE and (
                self.host.disks.get(disk) or disk in used or (entry and entry.dirty)
            ):
                problems.append(f"slot {slot.slot_index} is sold with somebody's bytes on it")
            if slot.status == SlotState.AVAILABLE and entry and entry.allocation_id:
                problems.append(f"slot {slot.slot_index} is sold and leased on the host")
        for key, allocation in live.items():
            if allocation.state == AllocationState.ACTIVE:
                theirs = self.host.running.get(key, ())
                there = theirs or key in self.host.off
                if not there or any(self.host.disks[disk] != key for disk in theirs):
                    problems.append(f"the machine of {key} is not what its tenant had")
        return problems

    def pristine(self, where: str) -> None:
        super().pristine(where)
        with reading(self.engine) as conn:
            assert self.site.statuses(conn) == ["available", "available"], where


class Whole(ScriptedSite):
    """Node m1; a tenant gets all of it."""

    def launch(self, *, everything: bool = False) -> str:
        with transaction(self.engine) as conn:
            return str(Machines(self.site).launch(conn).id)

    def reinstall(self) -> None:
        with transaction(self.engine) as conn:
            if nodes.get(conn, "m1").tenant_machine_ids:
                Machines(self.site).reinstall(conn)

    def release(self, allocation_id: str) -> None:
        with transaction(self.engine) as conn:
            launching.release(conn, allocation_id, ADMIN)

    def recover(self) -> bool:
        with transaction(self.engine) as conn:
            owed = bool(nodes.get(conn, "m1").unclean_allocation_id)
            if owed:
                baremetal.clean(conn, "m1", ADMIN)
        self.work()
        with transaction(self.engine) as conn:
            if nodes.get(conn, "m1").health_detail.get("code") == nodes.DRIFT:
                baremetal.accept_drift(conn, "m1", ADMIN)
        return owed

    def lies(self, conn: sa.Connection) -> list[str]:
        problems = []
        node = nodes.get(conn, "m1")
        busy = [a for a in allocations.every(conn) if a.state not in ("failed", "released")]
        free = not node.unclean_allocation_id and not busy
        if free and (self.host.accounts or any(self.host.disks.values())):
            problems.append("the machine is sold with a tenant in it")
        for allocation in busy:
            if allocation.state == AllocationState.ACTIVE and not self.host.accounts:
                problems.append(f"the tenant of {allocation.id} cannot enter")
        return problems


Prepare = Callable[[ScriptedSite], None]


def _launched(scripted: ScriptedSite) -> None:
    scripted.launch()


def _releasing(scripted: ScriptedSite) -> None:
    key = scripted.launch()
    scripted.work()
    scripted.release(key)


def _serving(scripted: ScriptedSite) -> None:
    """The tenant's machine has public ingress."""
    key = scripted.launch()
    scripted.work()
    scripted.host.forwards["7d9f2a52-6c54-4f8e-9f0a-3f4b5c6d7e8f"] = key
    scripted.release(key)


def _cleaning(scripted: ScriptedSite) -> None:
    """The tenant's machine ran and never became ready."""

    def at_the_end(_run: Run, _index: int, step: Step) -> How | None:
        return fail_before if step.module == "slice_ready" else None

    scripted.runner.faults[TaskKind.SLICE_VM_PROVISION] = at_the_end
    key = scripted.launch()
    scripted.work()
    with transaction(scripted.engine) as conn:
        recovery.force_cleanup(conn, key, ADMIN, runtime_verified_absent=True)


def fail_before(_do: object) -> dict[str, object]:
    """The step fails and has done nothing."""
    error = {"code": "planted", "expected": "a", "found": "b", "remedy": "c"}
    return {"failed": True, "msg": "planted", "error": error}


# Everything in the registry that provisions or releases must be here: a test compares.
MOMENTS: dict[str, tuple[type[ScriptedSite], Prepare]] = {
    TaskKind.SLICE_VM_PROVISION: (Slice, _launched),
    TaskKind.SLICE_VM_RELEASE: (Slice, _serving),
    TaskKind.SLICE_WIPE: (Slice, _cleaning),
    TaskKind.BAREMETAL_PROVISION: (Whole, _launched),
    TaskKind.BAREMETAL_RELEASE: (Whole, _releasing),
}
REGISTERED = {
    kind
    for kind, handler in HANDLERS.items()
    if handler.playbook.startswith(("provision_", "release_"))
}

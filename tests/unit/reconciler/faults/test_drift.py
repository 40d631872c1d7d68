"""Drift reconciliation beside provision and release, at every step of theirs (I14).

The host is looked at before or after a step, and the look is reported at once or at the end.
Whatever it shows, resources of running work are not freed, blocked or found wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from ansible_collections.gpuaas.slice.plugins.module_utils.core import _ledger

from reconciler.db.engine import reading, transaction
from reconciler.lifecycle import drift, recovery
from reconciler.model.states import SlotState, TaskKind
from reconciler.records import leasing, queue, slots
from reconciler.runs import contract
from reconciler.runs.collect import Outcome
from reconciler.work.kinds import HANDLERS
from reconciler.work.settle import settle
from tests.unit.reconciler.conftest import ADMIN
from tests.unit.reconciler.faults.conftest import Healthy, Open
from tests.unit.reconciler.faults.kinds import MOMENTS, Slice
from tests.unit.reconciler.faults.playing import How, Step, play
from tests.unit.reconciler.faults.scripted_site import Run, ScriptedSite

pytestmark = pytest.mark.covers("CTRL-9", "I14")

KINDS = (TaskKind.SLICE_VM_PROVISION, TaskKind.SLICE_VM_RELEASE, TaskKind.SLICE_WIPE)
DONE = ("blocked", "shut", "healed", "opened")
Record = dict[str, Any]


class Look:
    """A look at the host: its task is taken, its playbook is played, its result may wait."""

    def __init__(self, scripted: ScriptedSite) -> None:
        self._scripted = scripted
        with transaction(scripted.engine) as conn:
            drift.queue_comparison(conn, "n1", ADMIN)
            kinds = [TaskKind.SLICE_DRIFT_RECONCILE]
            (self.task,) = leasing.lease(conn, "looker", kinds=kinds)
            bundles = slots.bundles(conn, "n1")
        profile = {"network": {"bridge": "ovsbr0"}}
        authority = {"slice_gateway_authority": "ssh-ed25519 AAAA"}
        self._given = {"slice_slots": bundles, "slice_profile": profile, **authority}
        self.result: Record = {}

    def take(self) -> None:
        playing = play("reconcile_drift", self._given, self._scripted.host.act)
        try:
            while True:
                next(playing)
        except StopIteration as end:
            self.result = contract.check_result(end.value["result"])

    def report(self) -> Record:
        """Report the look; returns the result of its task."""
        outcome = Outcome("successful", self.result)
        scripted = self._scripted
        settle(scripted.engine, scripted.settings, HANDLERS[self.task.kind], self.task, outcome)
        with reading(scripted.engine) as conn:
            task = queue.get(conn, self.task.id)
        assert task.state == "succeeded", task.error
        result: Record = task.result
        return result


def statuses(scripted: ScriptedSite) -> list[str]:
    with reading(scripted.engine) as conn:
        return scripted.site.statuses(conn)


def nothing_came_of_it(result: Record, where: str) -> None:
    assert result["differences"] == [], f"{where}: {result['differences']}"
    assert not any(result[name] for name in DONE), f"{where}: {result}"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("reported", ["at once", "at the end"])
def test_a_look_at_any_step_changes_nothing(
    at: Open, healthy: dict[str, Healthy], kind: str, moment: str, reported: str
) -> None:
    for index, step in enumerate(healthy[kind].steps):
        where = f"{kind}: {step.name}, looked {moment}, reported {reported}"
        scripted = at(kind)
        records: list[Record] = []
        looks: list[Look] = []

        def look(scripted: ScriptedSite = scripted, looks: list[Look] = looks) -> None:
            looks.append(Look(scripted))
            looks[0].take()

        def report(looks: list[Look] = looks, records: list[Record] = records) -> None:
            records.append(looks[0].report())

        scripted.runner.faults[kind] = beside(index, look, report, moment, reported)
        scripted.work()
        if reported == "at the end":
            report()
        nothing_came_of_it(records[0], where)
        scripted.sound(where)
        assert scripted.host.seen() == healthy[kind].host, where


def beside(
    index: int, look: Callable[[], None], report: Callable[[], None], moment: str, reported: str
) -> Callable[[Run, int, Step], How | None]:
    """At the step with this number: look before or after it, and report at once or later."""

    def how(do: Callable[[], Record]) -> Record:
        if moment == "before":
            look()
        done = do()
        if moment == "after":
            look()
        if reported == "at once":
            report()
        return done

    return lambda _run, now, _step: how if now == index else None


def test_what_a_lost_run_goes_on_to_do_is_found_and_cleaned(at: Open) -> None:
    """The host's own word after all: a machine of which the records think that it is gone."""
    scripted = at(TaskKind.SLICE_VM_RELEASE)
    (key,) = scripted.host.running
    seen = scripted.host.copied()
    scripted.work()
    assert statuses(scripted) == ["available", "available"]
    # As if the slice had been started again by a step that writes the ledger before the disk.
    scripted.host.running, scripted.host.disks = seen.running, seen.disks
    entries = {entry.disk_identity: entry for entry in seen.ledger()}
    with scripted.host.at():
        for disk in seen.running[key]:
            slot_id, fence = entries[disk].slot_id, _ledger.load(entries[disk].slot_id).fence
            _ledger.mark_dirty(slot_id, fence=fence, disk_identity=disk)
    look = Look(scripted)
    look.take()
    result = look.report()
    assert {(row["code"], row["allocation_id"]) for row in result["differences"]} >= {
        ("orphan_domain", key),
        ("orphan_port", key),
    }
    assert len(result["blocked"]) == 1
    assert sorted(statuses(scripted)) == ["available", "cleanup_blocked"]
    assert scripted.host.running == seen.running, "a comparison touches nothing on the host"
    with transaction(scripted.engine) as conn:
        (slot,) = [s for s in slots.of_node(conn, "n1") if s.status != SlotState.AVAILABLE]
        assert (slot.health_detail["step"], slot.health_detail["allocation_id"]) == ("drift", key)
        recovery.repair(conn, slot.id, ADMIN)
    scripted.work()
    scripted.pristine("after the repair")


def test_every_slice_kind_is_here() -> None:
    assert set(KINDS) == {kind for kind, (scripted, _) in MOMENTS.items() if scripted is Slice}

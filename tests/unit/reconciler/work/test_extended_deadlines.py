"""Deadlines of runs with several wipes, and of the slots that wait for them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import sqlalchemy as sa

from reconciler.db import clock
from reconciler.db.engine import reading, transaction
from reconciler.db.journal import Overdue
from reconciler.db.schema import Allocation, Claim, Slot
from reconciler.lifecycle import launch, recovery
from reconciler.model.states import SlotState, TaskKind
from reconciler.model.transitions import DEADLINES
from reconciler.profiles import hardware_profile
from reconciler.records import allocations, claims, leasing, nodes, queue, slots
from reconciler.runs.spec import LONGEST_S, RunSpec
from reconciler.settings import Settings
from reconciler.work import worker
from reconciler.work.handler import Work
from reconciler.work.kinds import HANDLERS
from tests.unit.reconciler.conftest import ADMIN, Site

PROFILES = Path(__file__).resolve().parents[4] / "profiles"
KEYS = {
    TaskKind.SLICE_VM_RELEASE: "slice_slots",
    TaskKind.SLICE_WIPE: "slice_slots",
    TaskKind.NODE_STORAGE_TRANSITION: "slice_devices",
    TaskKind.BAREMETAL_PROVISION: "slice_disks",
    TaskKind.BAREMETAL_RELEASE: "slice_disks",
}


@pytest.mark.covers("CTRL-8", "HOST-9")
@pytest.mark.parametrize("kind", KEYS)
def test_every_disk_of_a_run_has_the_time_of_one(sold: Site, kind: TaskKind) -> None:
    profile = hardware_profile(PROFILES, "xe9680l-h200")
    task: Any = SimpleNamespace(deadline_s=60)
    with reading(sold.engine) as conn:
        work = Work(conn, task, nodes.get(conn, "n1"), profile, Settings())
        single, four, many = (
            HANDLERS[kind].deadline_s(work, {KEYS[kind]: [{}] * disks}) for disks in (1, 4, 64)
        )
    assert single > profile["deadlines"]["wipe"]
    assert four - single == 3 * profile["deadlines"]["wipe"]
    assert many == LONGEST_S


@pytest.mark.covers("HOST-1")
@pytest.mark.parametrize(("given", "limit_s"), [({}, 3600), ({"firmware": 9000}, 9000)])
def test_a_run_that_changes_firmware_has_the_time_of_its_bios_job(
    sold: Site, given: dict[str, int], limit_s: int
) -> None:
    """The playbook waits that long for the host, and then for the job."""
    profile = hardware_profile(PROFILES, "xe9680l-h200")
    profile = profile | {"deadlines": {"reboot": 60, **given}}
    task: Any = SimpleNamespace(deadline_s=60)
    with reading(sold.engine) as conn:
        work = Work(conn, task, nodes.get(conn, "n1"), profile, Settings())
        assert HANDLERS[TaskKind.NODE_FIRMWARE].deadline_s(work, {}) >= 2 * limit_s
    playbook = (PROFILES.parent / "playbooks" / "firmware.yml").read_text()
    assert "slice_profile.deadlines.firmware | default(3600)" in playbook


@pytest.mark.covers("CTRL-8", "I12")
def test_a_slot_waits_for_a_run_that_may_take_longer_than_its_state(
    sold: Site, tmp_path: Path
) -> None:
    settings = Settings(state_dir=tmp_path, profiles_dir=PROFILES)
    with transaction(sold.engine) as conn:
        allocation_id = sold.active(conn, 2)
        nodes.change(conn, "n1", ADMIN, profile="xe9680l-h200")
        launch.release(conn, allocation_id, ADMIN)
        (task,) = leasing.lease(conn, "w", kinds=[TaskKind.SLICE_VM_RELEASE])
    spec: RunSpec = worker.prepare(
        sold.engine, settings, HANDLERS[TaskKind.SLICE_VM_RELEASE], task, "run-1"
    )
    with transaction(sold.engine) as conn:
        before = {row.id: row.deadline_at for row in _held(conn, allocation_id)}
        # Nothing has begun: a run that cannot be launched is given up as if it had not been tried.
        limit = DEADLINES["slot", SlotState.RELEASING].seconds
        now = clock.read(conn)
        assert all(at - now <= limit for at in before.values())
        late = Overdue("slot", claim_slot(conn, allocation_id), SlotState.RELEASING, 1.0, "block")
        queue.extend_deadlines(conn, queue.get(conn, task.id))
        held = _held(conn, allocation_id)
        assert spec.deadline_s > limit
        assert len(held) == 5
        assert all(row.deadline_at - now > spec.deadline_s for row in held)
        queue.extend_deadlines(conn, queue.get(conn, task.id))
        assert _held(conn, allocation_id) == held
        # A loop that saw the old deadline pass does not act on the new deadline.
        assert not recovery.expire(conn, late, ADMIN)


def claim_slot(conn: sa.Connection, allocation_id: str) -> str:
    return str(claims.of_allocation(conn, allocation_id)[0].slot_id)


def _held(conn: sa.Connection, allocation_id: str) -> list[Allocation | Claim | Slot]:
    allocation = allocations.get(conn, allocation_id)
    return [allocation, *allocation.claims, *slots.of_node(conn, "n1")]

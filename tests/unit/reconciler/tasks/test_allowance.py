"""How long a run may take: as many wipes as it has disks, and its slots wait for all of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from reconciler.domain.states import SlotState, TaskKind
from reconciler.domain.transitions import DEADLINES
from reconciler.runs.spec import LONGEST_S, RunSpec
from reconciler.settings import Settings, hardware_profile
from reconciler.store import allocations, clock, nodes, slots, tasks
from reconciler.store.engine import reading, transaction
from reconciler.tasks import worker
from reconciler.tasks.handler import Work
from reconciler.tasks.registry import HANDLERS
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
    with reading(sold.engine) as conn:
        work = Work(conn, {"deadline_s": 60}, nodes.get(conn, "n1"), profile, Settings())
        one, four, many = (
            HANDLERS[kind].deadline_s(work, {KEYS[kind]: [{}] * disks}) for disks in (1, 4, 64)
        )
    assert one > profile["deadlines"]["wipe"]
    assert four - one == 3 * profile["deadlines"]["wipe"]
    assert many == LONGEST_S


@pytest.mark.covers("CTRL-8", "I12")
def test_a_slot_waits_for_a_run_that_may_take_longer_than_its_state(
    sold: Site, tmp_path: Path
) -> None:
    settings = Settings(state_dir=tmp_path, profiles_dir=PROFILES)
    with transaction(sold.engine) as conn:
        allocation_id = sold.active(conn, 2)
        nodes.change(conn, "n1", ADMIN, profile="xe9680l-h200")
        allocations.release(conn, allocation_id, ADMIN)
        (task,) = tasks.lease(conn, "w", kinds=[TaskKind.SLICE_VM_RELEASE])
    spec: RunSpec = worker.prepare(
        sold.engine, settings, HANDLERS[TaskKind.SLICE_VM_RELEASE], task, "run-1"
    )
    with reading(sold.engine) as conn:
        now = clock.read(conn)
        own = allocations.get(conn, allocation_id)
        held = [*own["claims"], *slots.of_node(conn, "n1")]
    assert spec.deadline_s > DEADLINES["slot", SlotState.RELEASING].seconds
    assert len(held) == 4
    assert all(one["deadline_at"] - now > spec.deadline_s for one in [own, *held])

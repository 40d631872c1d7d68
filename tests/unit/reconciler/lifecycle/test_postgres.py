"""Whole machines, drift and recovery on PostgreSQL: the same as on SQLite, and many at once."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import sqlalchemy as sa

from reconciler.db.engine import reading, transaction
from reconciler.lifecycle import invariants, launch
from reconciler.records import allocations
from tests.unit.reconciler.conftest import Site
from tests.unit.reconciler.db import test_postgres
from tests.unit.reconciler.lifecycle import test_host as test_nodes
from tests.unit.reconciler.lifecycle import test_launch as test_allocations
from tests.unit.reconciler.lifecycle import test_recovery_cases as test_cases
from tests.unit.reconciler.lifecycle import test_recovery_orphans as test_orphans
from tests.unit.reconciler.lifecycle import test_slots
from tests.unit.reconciler.lifecycle import test_slots_write_off as test_writeoff
from tests.unit.reconciler.lifecycle.test_drift import (
    TestDue,
    active,
    compare,
    test_a_disk_that_somebody_used_is_not_clean_in_its_next_slot,
    test_a_guest_that_shuts_itself_down_keeps_its_claim,
    test_a_task_that_ended_since_makes_a_look_too_old,
    test_an_old_look_opens_nothing,
    test_launches_and_comparisons_at_once,
    test_what_nobody_knows_takes_its_slot_off_sale_until_it_is_gone_and_the_disk_is_proven,
    test_what_the_last_tenant_left_goes_through_the_ordinary_clean_up,
)
from tests.unit.reconciler.whole_machines import Machines, exclusion_holds

__all__ = [
    "TestDue",
    "active",
    "compare",
    "test_a_disk_that_somebody_used_is_not_clean_in_its_next_slot",
    "test_a_guest_that_shuts_itself_down_keeps_its_claim",
    "test_a_task_that_ended_since_makes_a_look_too_old",
    "test_an_old_look_opens_nothing",
    "test_launches_and_comparisons_at_once",
    "test_what_nobody_knows_takes_its_slot_off_sale_until_it_is_gone_and_the_disk_is_proven",
    "test_what_the_last_tenant_left_goes_through_the_ordinary_clean_up",
]
pytestmark = pytest.mark.postgres
engine, sold = test_postgres.engine, test_postgres.sold


@pytest.mark.covers("CTRL-4", "I1", "I2")
def test_whole_machines_slices_and_conversions_exclude_each_other(
    engine: sa.Engine, site: Site
) -> None:
    exclusion_holds(Machines(site))


def test_the_life_of_a_whole_machine(engine: sa.Engine, site: Site) -> None:
    machines = Machines(site)
    machines.machine()
    with transaction(engine) as conn:
        allocation_id = machines.active(conn)
        launch.release(conn, allocation_id, machines.act)
        assert machines.released(conn, allocation_id)
        assert allocations.get(conn, allocation_id).state == "released"
        machines.discover(conn, "m1", 1)
        assert machines.reasons(conn) == {"m1": "reinstall_required"}
        machines.reinstall(conn)
        assert machines.reasons(conn) == {"m1": ""}


STORIES: dict[str, Callable[[Any], None]] = {
    "discovery": partial(
        test_slots.test_a_later_discovery_takes_off_sale_what_it_speaks_against,
        change="gpu",
        code="discovery:gpu_not_found",
    ),
    "host": test_allocations.test_a_slot_that_its_host_fails_is_not_sold_again_and_again,
    "disk": partial(
        test_writeoff.test_a_blocked_slot_whose_device_died_is_written_off, dead="disk"
    ),
    "node": test_nodes.test_a_node_that_never_answers_again_is_retired_and_its_devices_are_free,
    "restore": test_orphans.test_after_a_restore_no_proof_of_before_stands,
    "evidence": test_orphans.test_evidence_from_before_a_restore_frees_no_blocked_slot,
}


@pytest.mark.covers("CTRL-2", "CTRL-7", "I4", "I12", "I16")
@pytest.mark.parametrize("story", STORIES)
def test_the_same_of_blocked_slots(sold: Site, story: str) -> None:
    STORIES[story](sold)


CASES: dict[str, Callable[[Any], None]] = {
    "two": test_cases.two_at_once,
    "policy": test_cases.policy_and_person_at_once,
    "schema": test_cases.refused_by_the_schema,
    "killed": partial(
        test_cases.test_a_leader_that_is_killed_in_any_move_does_nothing_twice, absent=False
    ),
    "silent": test_cases.test_a_silent_host_is_waited_for_until_a_deadline,
    "kept": test_cases.test_a_word_that_keeps_the_slots_is_kept,
}


@pytest.mark.covers("CTRL-7", "I12", "I13")
@pytest.mark.parametrize("name", CASES)
def test_the_same_of_recovery_cases(sold: Any, name: str) -> None:
    CASES[name](test_cases.Story(sold))
    with reading(sold.engine) as conn:
        assert invariants.check(conn) == []

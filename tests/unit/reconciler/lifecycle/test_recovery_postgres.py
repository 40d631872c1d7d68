"""What goes off sale, is given up, or is doubted, on PostgreSQL: the same as on SQLite."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from reconciler.db.engine import reading
from reconciler.lifecycle import invariants
from tests.unit.reconciler.conftest import Site
from tests.unit.reconciler.db import test_postgres
from tests.unit.reconciler.lifecycle import test_host as test_nodes
from tests.unit.reconciler.lifecycle import test_launch as test_allocations
from tests.unit.reconciler.lifecycle import test_recovery_cases as test_cases
from tests.unit.reconciler.lifecycle import test_recovery_orphans as test_orphans
from tests.unit.reconciler.lifecycle import test_slots
from tests.unit.reconciler.lifecycle import test_slots_write_off as test_writeoff

pytestmark = pytest.mark.postgres
engine, sold = test_postgres.engine, test_postgres.sold

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
def test_the_same(sold: Site, story: str) -> None:
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

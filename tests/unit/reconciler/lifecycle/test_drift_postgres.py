"""Comparisons on PostgreSQL: the same, with many at once that really are at once."""

from __future__ import annotations

import pytest

from tests.unit.reconciler.db import test_postgres
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

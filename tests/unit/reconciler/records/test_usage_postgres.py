"""Usage on PostgreSQL: the same sums and the same refusals."""

from __future__ import annotations

import pytest

from tests.unit.reconciler.conftest import Site
from tests.unit.reconciler.db import test_postgres
from tests.unit.reconciler.records import test_usage

pytestmark = pytest.mark.postgres
engine, sold = test_postgres.engine, test_postgres.sold


def test_the_same_sums_and_refusals(sold: Site) -> None:
    test_usage.test_nobody_changes_what_was_sold(sold)


def test_adjacent_periods(sold: Site) -> None:
    test_usage.test_adjacent_periods_add_up_exactly(sold)

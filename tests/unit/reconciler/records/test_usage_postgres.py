"""Usage on PostgreSQL: the same sums and the same refusals."""

from __future__ import annotations

from typing import Any

import pytest
import sqlalchemy as sa

from tests.unit.reconciler.conftest import Site
from tests.unit.reconciler.db import test_postgres
from tests.unit.reconciler.records import test_usage

pytestmark = pytest.mark.postgres
engine = test_postgres.engine


@pytest.fixture
def sold(engine: sa.Engine, site: Site) -> Any:
    """Two slots on sale."""
    site.node()
    return site


def test_the_same_sums_and_refusals(sold: Site) -> None:
    test_usage.test_nobody_changes_what_was_sold(sold)


def test_adjacent_periods(sold: Site) -> None:
    test_usage.test_adjacent_periods_add_up_exactly(sold)

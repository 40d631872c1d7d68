"""Usage on PostgreSQL: the same sums, the same refusals, the same records for what was before."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import sqlalchemy as sa

from reconciler.db.engine import transaction
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


@pytest.fixture
def old(engine: sa.Engine) -> Iterator[sa.Engine]:
    """A second schema of the same server."""
    with transaction(engine) as conn:
        conn.exec_driver_sql("DROP SCHEMA IF EXISTS before CASCADE")
        conn.exec_driver_sql("CREATE SCHEMA before")
    other = sa.create_engine(engine.url, connect_args={"options": "-csearch_path=before"})
    yield other
    other.dispose()
    with transaction(engine) as conn:
        conn.exec_driver_sql("DROP SCHEMA before CASCADE")


def test_what_was_active_before(sold: Site, old: sa.Engine) -> None:
    test_usage.backfill(sold, old)

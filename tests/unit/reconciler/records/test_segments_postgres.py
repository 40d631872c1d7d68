"""Numbers on the fabric for launches of several processes, on PostgreSQL."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest
import sqlalchemy as sa

from reconciler.db.engine import transaction
from reconciler.model.errors import Problem
from reconciler.records import projects
from tests.unit.reconciler.conftest import ADMIN, Site
from tests.unit.reconciler.lifecycle import test_races_postgres
from tests.unit.reconciler.records.test_segments import launches_at_once, number

pytestmark = [pytest.mark.postgres, pytest.mark.covers("SLICE-9")]
engine = test_races_postgres.engine
beside = test_races_postgres.beside


def test_launches_at_once_share_no_number(engine: sa.Engine) -> None:
    launches_at_once(engine)


def test_a_number_is_not_taken_from_a_launch_that_begins(
    engine: sa.Engine, beside: Callable[[Callable[[], Any]], Future[Any]]
) -> None:
    """The owner's launch is not committed yet, so nothing of it is live for others."""
    site, only = Site(engine), range(3001, 3002)
    site.node(indexes=(0,))
    with transaction(engine) as conn:
        projects.create(conn, "next", ADMIN, id="next")
        number(conn, site.project, only)

    def take() -> int:
        with transaction(engine) as conn:
            return number(conn, "next", only)

    with transaction(engine) as conn:
        number(conn, site.project, only)
        site.allocate(conn)
        with pytest.raises(Problem, match="fabric_numbers_used_up"):
            beside(take).result(20)

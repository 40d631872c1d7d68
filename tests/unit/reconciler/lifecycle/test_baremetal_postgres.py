"""Whole machines on PostgreSQL: many at once, and the life of one."""

from __future__ import annotations

import pytest
import sqlalchemy as sa

from reconciler.db.engine import transaction
from reconciler.lifecycle import launch
from reconciler.records import allocations
from tests.unit.reconciler.conftest import Site
from tests.unit.reconciler.db import test_postgres
from tests.unit.reconciler.whole_machines import Machines, exclusion_holds

pytestmark = pytest.mark.postgres
engine = test_postgres.engine


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

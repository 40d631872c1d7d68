"""Sixteen clients at once on either database; I1 to I3 hold at every moment."""

from __future__ import annotations

import pytest
import sqlalchemy as sa

from reconciler.db import schema as tables
from reconciler.db.engine import transaction
from tests.unit.reconciler.conftest import Site
from tests.unit.reconciler.lifecycle import test_retention
from tests.unit.reconciler.lifecycle.concurrent_clients import (
    Crowd,
    holds,
    never_held_twice,
    written_together,
)

pytestmark = pytest.mark.covers("CTRL-4", "I1", "I2", "I3")
engine = test_retention.engine
# Each of these has happened, or the run has shown nothing.
ACTS = {"launched", "gave back", "worked", "recovered", "no_capacity", "whole", "converted"}


def test_sixteen_clients_for_a_moment(engine: sa.Engine, site: Site) -> None:
    crowd = Crowd(site, hosts=2, machines=2, often={"whole", "converted", "reinstalled"})
    crowd.run(3, ACTS)
    crowd.sound()
    assert set(crowd.answers) >= ACTS, crowd.answers


@pytest.mark.long
def test_sixteen_clients_for_a_minute(engine: sa.Engine, site: Site) -> None:
    """66 slots, and machines that are given away as a whole."""
    crowd = Crowd(site, hosts=22, machines=4)
    required = ACTS | {"cleaned"}
    crowd.run(60, required)
    crowd.sound()
    assert set(crowd.answers) >= required, crowd.answers


@pytest.mark.parametrize("engine", ["sqlite"], indirect=True)
def test_what_was_given_twice_would_be_seen(site: Site) -> None:
    """The tests above could not fail otherwise."""
    crowd = Crowd(site, hosts=1, machines=0)
    with transaction(site.engine) as conn:
        site.allocate(conn)
        for judge in (holds, never_held_twice, written_together):
            judge(conn)
        (claim,) = conn.execute(sa.select(tables.claims)).mappings()
        (line,) = conn.execute(
            sa.select(tables.history).where(tables.history.c.entity_id == claim["id"])
        ).mappings()
        for index in tables.claims.indexes:
            conn.exec_driver_sql(f"DROP INDEX {index.name}")
        made = [column.name for column in tables.claims.columns if column.computed is not None]
        copy = {name: value for name, value in claim.items() if name not in made}
        conn.execute(sa.insert(tables.claims).values({**copy, "id": "another"}))
        planted = {"entity_id": "another", "id": line["id"] + 1_000_000}
        conn.execute(sa.insert(tables.history).values({**line, **planted}))
        for judge in (holds, never_held_twice, written_together):
            with pytest.raises(AssertionError):
                judge(conn)
    with pytest.raises(AssertionError):
        crowd.sound()

"""A number on the fabric belongs to one project as long as anything of it is live."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import sqlalchemy as sa

from reconciler.db.engine import retrying, transaction
from reconciler.db.schema import segments, slots
from reconciler.model import fabric
from reconciler.model.errors import Problem
from reconciler.model.fabric import Isolation
from reconciler.model.states import SlotState
from reconciler.records import claims, projects
from reconciler.records.segments import assign
from tests.unit.reconciler.conftest import ADMIN, Site

pytestmark = pytest.mark.covers("SLICE-9")

NUMBERS = range(3001, 3004)


def number(conn: sa.Connection, project: str, numbers: range = NUMBERS) -> int:
    return assign(conn, project, Isolation.VLAN, numbers)


def test_each_project_keeps_a_number_of_its_own(site: Site) -> None:
    with transaction(site.engine) as conn:
        for name in ("a", "b", "c", "d"):
            projects.create(conn, name, ADMIN, id=name)
        assert [number(conn, name) for name in ("a", "b", "a", "c")] == [3001, 3002, 3001, 3003]
        # Of another range, and another kind, the same project has another number.
        assert number(conn, "a", range(3100, 3102)) == 3100
        assert assign(conn, "a", Isolation.PARTITION, range(3001, 3003)) == 3001
        # Nothing of these projects is live: the number that was unused for longest is free.
        conn.execute(sa.update(segments).where(segments.c.project_id == "b").values(used_at=1))
        assert number(conn, "d") == 3002
        conn.execute(sa.update(segments).where(segments.c.number == 3003).values(used_at=1))
        assert number(conn, "b") == 3003


@pytest.mark.parametrize("story", ["requested", "active", "failed"])
def test_a_number_stays_while_anything_of_its_project_is_live(sold: Site, story: str) -> None:
    """A request, a running machine, and a failure whose traces are not proven away."""
    only = range(3001, 3002)
    begin = {"requested": sold.allocate, "active": sold.active, "failed": sold.failed}[story]
    with transaction(sold.engine) as conn:
        projects.create(conn, "next", ADMIN, id="next")
        key = begin(conn)
        assert number(conn, sold.project, only) == 3001
        with pytest.raises(Problem, match="fabric_numbers_used_up"):
            number(conn, "next", only)
        if story == "failed":
            assert SlotState.CLEANUP_BLOCKED in sold.statuses(conn)
            held = claims.held_slots(conn, key)[0].id
            clean = {"status": SlotState.DISABLED.value, "status_since": 0}
            conn.execute(sa.update(slots).where(slots.c.id == held).values(**clean))
            assert number(conn, "next", only) == 3001
            assert number(conn, sold.project, range(3001, 3003)) == 3002


def test_launches_at_once_share_no_number(site: Site) -> None:
    launches_at_once(site.engine)


def launches_at_once(engine: sa.Engine) -> None:
    """Two launches of each of several projects."""
    names = [f"project-{index}" for index in range(6)]
    with transaction(engine) as conn:
        for name in names:
            projects.create(conn, name, ADMIN, id=name)

    def launch(name: str) -> tuple[str, int]:
        return name, retrying(engine, lambda conn: number(conn, name, range(3001, 3100)))

    with ThreadPoolExecutor(8) as pool:
        assigned = set(pool.map(launch, names * 2))
    assert len(assigned) == len(names) and len({vlan for _name, vlan in assigned}) == len(names)


@pytest.mark.parametrize(
    ("given", "kind", "tenants"),
    [
        ({"link": "ethernet", "vlans": [3000, 3002]}, "vlan", [3001, 3002]),
        ({"link": "infiniband", "partitions": [16, 17]}, "partition", [16, 17]),
        ({"link": "ethernet", "isolation": "single_tenant"}, "single_tenant", []),
        ({"link": "infiniband", "isolation": "single_tenant"}, "single_tenant", []),
        ({"link": "ethernet"}, "vlan", None),
        ({"link": "infiniband"}, "partition", None),
        ({"link": "ethernet", "vlans": [3002, 3000]}, "vlan", None),
        ({"link": "ethernet", "vlans": [3000, 3000]}, "vlan", None),
        ({}, "partition", None),
    ],
)
def test_the_link_says_how_tenants_are_kept_apart(
    given: dict[str, Any], kind: str, tenants: list[int] | None
) -> None:
    profile = {"fabric": given}
    assert fabric.isolation(profile) == kind
    if tenants is None:
        with pytest.raises(Problem, match="fabric_numbers_missing"):
            fabric.numbers(profile)
    else:
        assert list(fabric.numbers(profile)) == tenants

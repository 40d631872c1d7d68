"""Quota of a project: capacity, rate of launches, and the cost of its failures."""

from __future__ import annotations

import pytest
import sqlalchemy as sa

from reconciler.db import clock, journal
from reconciler.db import schema as tables
from reconciler.db.engine import transaction
from reconciler.lifecycle import launch as launching
from reconciler.lifecycle import power, quota
from reconciler.model.act import Act
from reconciler.model.errors import Problem
from reconciler.model.states import PowerAction, Role, TaskKind, TaskState
from reconciler.records import allocations, nodes, projects
from tests.unit.reconciler.conftest import ADMIN, Site
from tests.unit.reconciler.whole_machines import Machines


def limit(conn: sa.Connection, site: Site, **limits: int) -> None:
    quota.change(conn, site.project, limits, ADMIN)


def refused(conn: sa.Connection, site: Site, gpus: int = 1) -> Problem:
    with pytest.raises(Problem) as caught:
        site.allocate(conn, gpus)
    assert caught.value.expected and caught.value.found and caught.value.remedy
    return caught.value


@pytest.mark.parametrize(
    ("limits", "gpus", "detail"),
    [
        ({"gpus": 1}, 2, {"limit": "gpus", "used": 0, "allowed": 1}),
        ({"machines": 0}, 1, {"limit": "machines", "used": 0, "allowed": 0}),
    ],
)
def test_a_launch_beyond_a_limit_takes_nothing(
    sold: Site, limits: dict[str, int], gpus: int, detail: dict[str, object]
) -> None:
    with transaction(sold.engine) as conn:
        limit(conn, sold, **limits)
        problem = refused(conn, sold, gpus)
        assert (problem.code, problem.status, problem.detail) == ("quota_exceeded", 409, detail)
        assert sold.statuses(conn) == ["available", "available"]


def test_use_ends_with_the_allocation(sold: Site) -> None:
    with transaction(sold.engine) as conn:
        limit(conn, sold, gpus=1, machines=5)
        key = sold.active(conn)
        assert quota.used(conn, sold.project)["gpus"] == 1
        assert refused(conn, sold).detail["limit"] == "gpus"
        launching.release(conn, key, ADMIN)
        assert refused(conn, sold).detail["used"] == 1, "its disk is still being wiped"
        stranded = sa.update(tables.allocations).where(tables.allocations.c.id == key)
        conn.execute(stranded.values(error={"code": "disk_locked"}))
        assert refused(conn, sold).detail["used"] == 1, "its tenant has locked the disk"
        conn.execute(stranded.values(error={"code": "identity_mismatch"}))
        sold.allocate(conn)  # a clean-up that waits for an operator is no use of the tenant


def test_a_whole_machine_whose_release_fails_is_still_used(site: Site) -> None:
    """Its tenant is root there, and can make any release fail: with `chattr +i`, for example."""
    machines = Machines(site)
    machines.machine()
    with transaction(site.engine) as conn:
        key = machines.active(conn)
        launching.release(conn, key, ADMIN)
        failed = sa.update(tables.allocations).where(tables.allocations.c.id == key)
        conn.execute(failed.values(error={"code": "command_failed"}))
        use = quota.used(conn, site.project)
        assert (use["machines"], use["gpus"]) == (1, 4)


def test_requests_that_wait_are_limited(sold: Site) -> None:
    with transaction(sold.engine) as conn:
        limit(conn, sold, open_requests=1)
        key = sold.allocate(conn)
        assert refused(conn, sold).detail == {"limit": "open_requests", "used": 1, "allowed": 1}
        launching.release(conn, key, ADMIN)
        sold.allocate(conn)


def test_power_actions_count_as_open_requests(sold: Site) -> None:
    """Each keeps a worker until its guest answers. An operator is not held up, and starts after a
    host's boot, which the project did not ask for, do not count.
    """
    member = Act("member:mia#1", role=Role.PROJECT_MEMBER)
    with transaction(sold.engine) as conn:
        first, second = sold.active(conn), sold.active(conn)
        limit(conn, sold, open_requests=1)
        booted = sa.update(tables.allocations).where(tables.allocations.c.id == first)
        conn.execute(booted.values(started_boot_id="an earlier boot"))
        conn.execute(
            sa.update(tables.allocations)
            .where(tables.allocations.c.id == second)
            .values(started_boot_id=nodes.get(conn, "n1").boot_id)
        )
        assert power.start_after_boot(conn, "n1", Act("task:1")) == [first]
        assert power.request(conn, second, PowerAction.RESTART, member).power_action == "restart"
        power.request(conn, second, PowerAction.RESTART, member)
        start = sold.finish(conn, TaskKind.SLICE_VM_POWER, TaskState.CANCELED)
        power.failed(conn, start, {"code": "canceled"})
        with pytest.raises(Problem) as caught:
            power.request(conn, first, PowerAction.STOP, member)
        assert (caught.value.code, caught.value.status) == ("quota_exceeded", 409)
        assert caught.value.detail == {"limit": "open_requests", "used": 1, "allowed": 1}
        assert not allocations.get(conn, first).stopped, "a refusal changes nothing"
        power.request(conn, first, PowerAction.STOP, ADMIN)


def test_the_rate_of_launches_counts_all_of_the_last_hour(sold: Site) -> None:
    with transaction(sold.engine) as conn:
        limit(conn, sold, launches_per_hour=2)
        first, second = sold.allocate(conn), sold.allocate(conn)
        for key in (first, second):
            launching.release(conn, key, ADMIN)
        problem = refused(conn, sold)
        assert (problem.code, problem.status) == ("rate_exceeded", 429)
        assert 3500 < int(str(problem.detail["retry_after_s"])) <= 3601
        earlier = sa.update(tables.allocations).where(tables.allocations.c.id == first)
        conn.execute(earlier.values(created_at=clock.now() - quota.HOUR_S))
        sold.allocate(conn)


@pytest.mark.parametrize("name", quota.HOURLY)
def test_an_hourly_limit_of_0_is_not_lifted_by_time(sold: Site, name: str) -> None:
    """So it is no rate, for which clients wait and ask again."""
    with transaction(sold.engine) as conn:
        limit(conn, sold, **{name: 0})
        problem = refused(conn, sold)
        assert (problem.code, problem.status) == ("quota_exceeded", 409)
        assert problem.detail == {"limit": name, "used": 0, "allowed": 0}


def test_failures_of_the_tenants_own_doing_end_its_launches(sold: Site) -> None:
    """Each of them blocks a slot until it is recovered, so others would find none free."""
    with transaction(sold.engine) as conn:
        limit(conn, sold, failures_per_hour=1)
        sold.failed(conn)
        assert refused(conn, sold).detail["limit"] == "failures_per_hour"
        # A failure of the host is not counted.
        conn.execute(sa.update(tables.allocations).values(error={"code": "boot_changed"}))
        sold.allocate(conn)


def test_the_sites_limits_hold_where_a_project_has_none_of_its_own(sold: Site) -> None:
    with transaction(sold.engine) as conn:
        none: dict[str, int | None] = dict.fromkeys(quota.SHIPPED)
        quota.change_defaults(conn, {**none, "machines": 0, "gpus": 9}, ADMIN)
        assert refused(conn, sold).detail["limit"] == "machines"
        limit(conn, sold, gpus=0)
        assert refused(conn, sold).detail["limit"] == "gpus"
        limit(conn, sold, machines=1)
        sold.allocate(conn)
        quota.change_defaults(conn, none, ADMIN)
        assert quota.limits(conn, projects.get(conn, sold.project)) == {"machines": 1}


def test_the_shipped_limits_hold_until_they_are_taken_away_by_name(sold: Site) -> None:
    """Otherwise a limit on GPUs would lift the rate at which a member takes slots off sale."""
    with transaction(sold.engine) as conn:
        quota.change_defaults(conn, {"gpus": 9}, ADMIN)
        assert quota.defaults(conn) == {**quota.SHIPPED, "gpus": 9}
        quota.change_defaults(conn, {"launches_per_hour": None, "failures_per_hour": 5}, ADMIN)
        assert quota.defaults(conn) == {"open_requests": 4, "failures_per_hour": 5}
        quota.amend_defaults(conn, {"gpus": 8}, ADMIN)
        assert quota.defaults(conn) == {"open_requests": 4, "failures_per_hour": 5, "gpus": 8}
        quota.amend_defaults(conn, dict.fromkeys(quota.SHIPPED), ADMIN)
        assert quota.defaults(conn) == {"gpus": 8}


def test_a_project_without_limits_has_none_and_a_change_is_audited(sold: Site) -> None:
    with transaction(sold.engine) as conn:
        limit(conn, sold, machines=0)
        limit(conn, sold)
        assert projects.get(conn, sold.project).quota == {}
        sold.allocate(conn, 2)
        audit = journal.audit_rows(conn, action="admin.project.quota")
        assert [row.detail for row in audit][-1] == {"from": {}, "to": {"machines": 0}}
        with pytest.raises(Problem, match="project_not_found"):
            launching.allocate(
                conn, launching.Launch(**vars(sold.launch()) | {"project_id": "x"}), ADMIN
            )

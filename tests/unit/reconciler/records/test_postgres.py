"""Records on PostgreSQL: transactions at the same time, and the same answers as on SQLite."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Barrier
from typing import Any

import pytest
import sqlalchemy as sa

from reconciler.db import clock
from reconciler.db.engine import transaction
from reconciler.lifecycle import host
from reconciler.model.errors import Problem
from reconciler.model.states import TaskKind
from reconciler.records import certificates, images, nodes, projects, queue, tokens
from tests.unit.reconciler.conftest import ADMIN, Site
from tests.unit.reconciler.db import test_postgres
from tests.unit.reconciler.lifecycle import test_races_postgres
from tests.unit.reconciler.records import test_usage
from tests.unit.reconciler.records.test_segments import launches_at_once, number

pytestmark = pytest.mark.postgres
engine, sold = test_postgres.engine, test_postgres.sold
beside = test_races_postgres.beside
DAY = 86_400.0


@pytest.mark.covers("HOST-13")
def test_whose_certificate_is_ending(engine: sa.Engine, site: Site) -> None:
    with transaction(engine) as conn:
        for node_id in ("n1", "n2", "n3"):
            nodes.create(conn, site.act, id=node_id, address="10.0.2.15")
        for node_id in ("n1", "n2"):
            host.enrolled(conn, node_id, site.act, machine_id=node_id, host_key=node_id)
        for node_id, days in (("n1", 20), ("n1", 25), ("n2", 10), ("n3", 10)):
            tokens.record_certificate(
                conn,
                node_id,
                site.act,
                serial=str(days),
                public_key=node_id,
                certificate="as signed",
                principals=[node_id],
                valid_until=clock.read(conn) + days * DAY,
            )
    with transaction(engine) as conn:
        # n3 has not enrolled as far as its state says.
        assert host.certificates_ending(conn, 30 * DAY) == ["n2", "n1"]
        assert host.certificates_ending(conn, 15 * DAY) == ["n2"]
        queue.add(conn, queue.Enqueue(TaskKind.NODE_ENROL, "n2", "node", "n2"), site.act)
        assert host.certificates_ending(conn, 30 * DAY) == ["n1"]
        assert certificates.ends(conn, ["n1"])["n1"] > clock.read(conn) + 24 * DAY
        assert certificates.current(conn, "n1").serial == "25"


def test_two_first_links_have_one_key(engine: sa.Engine) -> None:
    together = Barrier(4)

    def link_key(_number: int) -> bytes:
        with transaction(engine) as conn:
            conn.execute(sa.select(1))
            together.wait(30)
            return images.link_key(conn)

    with ThreadPoolExecutor(4) as pool:
        keys = set(pool.map(link_key, range(4)))
    assert len(keys) == 1
    with transaction(engine) as conn:
        assert {images.link_key(conn)} == keys
    assert len(keys.pop()) == 32


@pytest.mark.covers("SLICE-9")
def test_launches_at_once_share_no_number(engine: sa.Engine) -> None:
    launches_at_once(engine)


@pytest.mark.covers("SLICE-9")
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


def test_usage_has_the_same_sums_and_refusals(sold: Site) -> None:
    test_usage.test_nobody_changes_what_was_sold(sold)


def test_adjacent_periods_of_usage(sold: Site) -> None:
    test_usage.test_adjacent_periods_add_up_exactly(sold)

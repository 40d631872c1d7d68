"""Boot id of a host, when its reports end in another order than they began (I16)."""

from __future__ import annotations

from typing import Any

import pytest
import sqlalchemy as sa

from reconciler.db import clock
from reconciler.db.engine import transaction
from reconciler.lifecycle import gate, host
from reconciler.model.states import TaskKind
from reconciler.records import nodes, queue
from tests.unit.reconciler.conftest import ADMIN, Site

# The database's clock has whole milliseconds in SQLite: without this, a run and a restart may have
# the same time.
TICK_S = 0.001
SECOND = "00000000-0000-4000-8000-000000000002"


def see(site: Site, conn: sa.Connection, boot: str, began: float) -> list[str]:
    """A discovery and a parity run that began then end now; the states of the slots."""
    discovery, report = site.document(0), site.parity()
    if boot:
        discovery["identity"]["boot_id"] = report["identity"]["boot_id"] = boot
    host.record_discovery(conn, "n1", discovery, ADMIN, observed_at=began)
    host.record_parity(conn, "n1", report, ADMIN, observed_at=began)
    gate.open_gate(conn, "n1", ADMIN)
    return site.statuses(conn)


def queued(conn: sa.Connection) -> list[str]:
    return sorted(task.kind for task in queue.every(conn, node_id="n1"))


LOOKS = [TaskKind.NODE_PARITY, TaskKind.SLICE_TOPOLOGY_DISCOVER]


@pytest.mark.covers("CTRL-6", "I16", "I22")
def test_what_was_seen_before_a_restart_is_not_known_again(sold: Site) -> None:
    with transaction(sold.engine) as conn:
        began, first = clock.read(conn) - TICK_S, nodes.get(conn, "n1").boot_id
    with transaction(sold.engine) as conn:
        assert host.restarted(conn, "n1", ADMIN, since=first)
        assert see(sold, conn, first, began) == ["disabled", "disabled"]
        assert nodes.get(conn, "n1").boot_id == ""
        # Only the next look can tell which boot it is.
        assert queued(conn) == LOOKS
    with transaction(sold.engine) as conn:
        assert see(sold, conn, SECOND, clock.read(conn)) == ["available", "available"]
        assert nodes.get(conn, "n1").boot_id == SECOND


@pytest.mark.covers("CTRL-6", "I13", "I16", "I22")
def test_of_two_looks_at_a_time_that_differ_none_is_believed(sold: Site) -> None:
    with transaction(sold.engine) as conn:
        began, first = clock.read(conn) - TICK_S, nodes.get(conn, "n1").boot_id
    with transaction(sold.engine) as conn:
        assert see(sold, conn, SECOND, began) == ["available", "available"]
        assert queued(conn) == [], "the first to see it"
        late: dict[str, Any] = {**sold.document(0)["identity"], "machine_id": "another"}
        assert host.observed(conn, "n1", ADMIN, identity=late, began=began)
        node = nodes.get(conn, "n1")
        assert (node.boot_id, node.machine_id == "another") == ("", False)
        assert sold.statuses(conn) == ["disabled", "disabled"]
        assert see(sold, conn, first, began) == ["disabled", "disabled"]
        assert queued(conn) == LOOKS
    with transaction(sold.engine) as conn:
        assert see(sold, conn, SECOND, clock.read(conn)) == ["available", "available"]


@pytest.mark.covers("CTRL-6", "I16")
def test_a_look_that_ends_late_and_says_the_same_is_believed(sold: Site) -> None:
    with transaction(sold.engine) as conn:
        began = clock.read(conn)
    with transaction(sold.engine) as conn:
        see(sold, conn, SECOND, clock.read(conn))
    with transaction(sold.engine) as conn:
        assert see(sold, conn, SECOND, began) == ["available", "available"]
        assert queued(conn) == []

"""Service killed under load: no promise is lost, nothing is done twice (CTRL-9, I12)."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter

import pytest
import sqlalchemy as sa

from reconciler.db import leader
from reconciler.db import schema as tables
from reconciler.db.engine import reading
from reconciler.model.states import TaskState
from tests.unit.reconciler.api.stack import Stack
from tests.unit.reconciler.service.service import Service, alive, pauses, serving, until
from tests.unit.reconciler.service.tenants import Tenants


@pytest.mark.covers("CTRL-9", "I12", "I3", "I21")
@pytest.mark.parametrize(
    "kills", [50, pytest.param(1000, marks=pytest.mark.long)], ids=["some", "many"]
)
def test_killed_under_load_it_loses_and_repeats_nothing(selling: Stack, kills: int) -> None:
    with serving(selling.settings.state_dir) as service:
        service.start()
        until(service.ready)
        with Tenants(service.url, selling.secrets["member"]) as tenants:
            # From the first line of its start on to full work.
            for pause in pauses(kills, 0.02, 0.6):
                time.sleep(pause)
                service.kill()
                service.start()
            # On a busy machine the kills may be over before anybody was served.
            until(lambda: len(tenants.launched) > 3)
        _comes_to_rest(selling, service)
    assert tenants.cut_off > kills / 2, "the load was there when it was killed"
    _kept(selling, service, tenants)


@pytest.mark.covers("CTRL-9")
def test_told_to_end_it_leaves_nothing_behind(selling: Stack) -> None:
    with serving(selling.settings.state_dir) as service:
        pid = service.start()
        until(service.ready)
        os.kill(pid, signal.SIGTERM)
        until(lambda: not alive(pid))
        with reading(selling.engine) as conn:
            assert leader.processes(conn) == []
            leads = leader.read(conn, leader.LOOPS)
        # The next leader need not wait for the end of a lease.
        assert leads is not None and not leads["live"]
        service.start("worker")
        until(lambda: _lives(selling, "worker"))
        assert "Traceback" not in service.log()


def _lives(stack: Stack, role: str) -> bool:
    with reading(stack.engine) as conn:
        return role in leader.live_roles(conn)


def _comes_to_rest(stack: Stack, service: Service) -> None:
    """Every task ends by itself, without SQL by an operator."""
    open_states = [TaskState.QUEUED, TaskState.WAITING, TaskState.RUNNING]
    query = sa.select(sa.func.count()).select_from(tables.tasks)

    def at_rest() -> bool:
        with reading(stack.engine) as conn:
            return not conn.execute(query.where(tables.tasks.c.state.in_(open_states))).scalar()

    until(at_rest)
    until(service.ready)


def _kept(stack: Stack, service: Service, tenants: Tenants) -> None:
    service.check()
    with reading(stack.engine) as conn:
        ids = set(conn.execute(sa.select(tables.allocations.c.id)).scalars())
        ends = Counter(conn.execute(sa.select(tables.tasks.c.state)).scalars())
        runs = set(conn.execute(sa.select(tables.tasks.c.run_id)).scalars()) - {""}
        slots = Counter(conn.execute(sa.select(tables.slots.c.status)).scalars())
    # Every promised allocation exists, and no other.
    assert ids == set(tenants.launched.values())
    assert len(ids) > 3
    # A run outlives the service and is found again: none is lost, none began twice.
    assert set(ends) == {TaskState.SUCCEEDED}, service.log()[-3000:]
    assert set(service.began()) == runs
    assert set(service.began().values()) == {1}
    assert set(slots) <= {"available", "active"}
    assert 500 not in tenants.answers

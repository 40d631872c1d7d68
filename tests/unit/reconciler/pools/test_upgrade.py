"""Workers are replaced under load, by way of a drain: no job fails, is lost or runs twice."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter

import pytest

from reconciler.db.engine import transaction
from reconciler.model.errors import Problem
from reconciler.pools import control
from reconciler.settings import Settings
from reconciler.work.loops import follow_drain
from tests.unit.reconciler.conftest import ADMIN
from tests.unit.reconciler.pools.conftest import Workers
from tests.unit.reconciler.pools.load import Load
from tests.unit.reconciler.service.service import until


@pytest.mark.covers("ORCH-5")
@pytest.mark.parametrize("rounds", [1, pytest.param(20, marks=pytest.mark.long)])
def test_a_rolling_upgrade_under_load_fails_no_job(workers: Workers, rounds: int) -> None:
    engine = workers.queue.engine
    running = [workers.start() for _ in range(2)]
    refusals: list[Problem] = []

    def send(number: int) -> list[str]:
        """A project that sends a job whenever it may."""
        call = {"file": str(workers.note), "number": number, "seconds": 0.01}
        try:
            return list(workers.queue.submit([call]))
        except Problem as refused:
            assert (refused.code, refused.status) == ("maintenance", 503)
            refusals.append(refused)
            return []

    load = Load(send, 0.01)
    for _ in range(rounds):
        ran = len(workers.ran())
        until(lambda ran=ran: len(workers.ran()) > ran + 10)
        with transaction(engine) as conn:
            control.drain(conn, ADMIN, 600)
        refused = len(refusals)
        until(lambda: drained(workers))
        until(lambda refused=refused: len(refusals) > refused)
        ran = len(workers.ran())
        for pid in running:
            os.kill(pid, signal.SIGTERM)
        for pid in running:
            workers.ended(pid)
        running = [workers.start() for _ in range(2)]
        time.sleep(0.2)  # New workers look for jobs, and get none.
        assert len(workers.ran()) == ran
        with transaction(engine) as conn:
            control.resume(conn, ADMIN)
    load.stop()
    for id in load.sent:
        workers.wait(id, "done", "dead_letter", "canceled")
    ended = [workers.queue.read(id) for id in load.sent]
    assert {(job.status, job.attempts, job.lost) for job in ended} == {("done", 1, 0)}
    assert Counter(workers.ran()) == Counter(range(len(load.sent)))


def drained(workers: Workers) -> bool:
    follow_drain(workers.queue.engine, Settings())
    with transaction(workers.queue.engine) as conn:
        return control.read(conn).mode == "drained"

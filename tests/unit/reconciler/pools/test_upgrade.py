"""Workers are replaced under load, by way of a drain: no job fails, is lost or runs twice."""

from __future__ import annotations

import os
import signal
import threading
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
from tests.unit.reconciler.service.service import until


class Load:
    """A project that sends a job whenever it may, until it is stopped."""

    def __init__(self, workers: Workers) -> None:
        self.sent: list[str] = []
        self.refused = 0
        self._workers = workers
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(0.01):
            call = {"file": str(self._workers.note), "number": len(self.sent), "seconds": 0.01}
            try:
                self.sent += self._workers.queue.submit([call])
            except Problem as refused:
                assert (refused.code, refused.status) == ("maintenance", 503)
                self.refused += 1


@pytest.mark.covers("ORCH-5")
@pytest.mark.parametrize("rounds", [2, pytest.param(20, marks=pytest.mark.long)])
def test_a_rolling_upgrade_under_load_fails_no_job(workers: Workers, rounds: int) -> None:
    engine = workers.queue.engine
    running = [workers.start() for _ in range(2)]
    load = Load(workers)
    for _ in range(rounds):
        ran = len(workers.ran())
        until(lambda ran=ran: len(workers.ran()) > ran + 10)
        with transaction(engine) as conn:
            control.drain(conn, ADMIN, 600)
        refused = load.refused
        until(lambda: drained(workers))
        until(lambda refused=refused: load.refused > refused)
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

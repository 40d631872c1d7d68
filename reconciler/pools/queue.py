"""The queue as a worker uses it: claims, outcomes and leases, here in the database itself."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import NamedTuple, Protocol, TypeVar

from sqlalchemy import Connection, Engine, exc

from reconciler.db import rows
from reconciler.db.engine import reading, retrying
from reconciler.db.migrations import program_version
from reconciler.db.schema import PoolWorker
from reconciler.model.jobs import Call, JobStatus, Outcome
from reconciler.pools import leases
from reconciler.pools.hints import STALE, Hints
from reconciler.runs import lock

log = logging.getLogger("gpuaas.jobs")
T = TypeVar("T")

TEND_S = 1.0
# Pauses of an idle worker: the first after a job, and the longest. Each is twice as long as the one
# before.
_FIRST_S, _LONGEST_S = 0.002, 0.1
Ended = Sequence[tuple[Call, Outcome]]


class Away(Exception):
    """The queue cannot be reached at present."""


class Dismissed(Exception):
    """The worker has no right to the queue any more."""


class Turn(NamedTuple):
    """counted: how many outcomes counted. calls: jobs that were claimed."""

    counted: int
    calls: list[Call]


class JobQueue(Protocol):
    """Every function raises `Away` or `Dismissed`. Only `renew` is called by another thread."""

    # Jobs that a worker can hold at a time.
    most: int
    lease_s: float
    beat_s: float
    # Up to so many outcomes, a claim goes first and alone, which is quicker. More outcomes share a
    # turn with the claim, because each turn has a cost of its own.
    apart: int

    def enter(self) -> bool:
        """Begin, before the models are loaded; False if nothing waits for the worker."""

    def serve(self, digests: Mapping[str, str]) -> str:
        """Register the worker with its models; returns its id. digests: of their files, by name."""

    def turn(
        self,
        ended: Ended,
        returned: Sequence[Call],
        limit: int,
        alone: bool = True,
        behind: Collection[str] = (),
    ) -> Turn:
        """Record outcomes, give jobs back and claim others, together. alone: the worker then holds
        no others. behind: projects that get nothing while others wait.
        """

    def is_idle(self) -> bool:
        """Whether nothing is due. Quicker than a claim, and disturbs no writer."""

    def wait(self, stopping: threading.Event) -> None:
        """Wait for a job to be due, for a bounded time."""

    def renew(self, tokens: Sequence[str]) -> set[str]:
        """Renew leases; returns the ids of the jobs that are still held."""

    def tend(self) -> None:
        """Queue delayed jobs that are due, and jobs whose lease has expired."""

    def leave(self) -> None:
        """End in order."""


class DatabaseQueue:
    """pool_worker: the id of the worker's row, if a pool has started it."""

    most = 256
    # A claim alone does not wait for the disk.
    apart = 16
    lease_s = leases.LEASE_S
    beat_s = leases.BEAT_S

    def __init__(
        self,
        engine: Engine,
        models: Sequence[str],
        *,
        hints: Hints | None = None,
        pool_worker: str = "",
        poll_s: float = 0.5,
    ) -> None:
        self._engine = engine
        self._models = models
        self._hints = hints
        self._id = pool_worker
        self._poll_s = poll_s
        self._pause_s = 0.0
        # Token of a claim without an answer yet, as when the connection dies at the commit. A
        # repetition gets the same jobs, which otherwise would wait for the end of their lease.
        self._claim = ""
        # Jobs are probably due: the last claim has brought some, or a hint has come since.
        self._likely = False
        # The last hint has brought no job: it was of a job that is done, or of another model.
        self._vain = False
        # Such hints were dropped since the last job.
        self._dropped = False
        # Failures to reclaim jobs that are not counted in the database yet.
        self._errors = 0

    def enter(self) -> bool:
        if not self._id:
            return True
        ticks = lock.start_ticks()
        enter = partial(
            leases.enter,
            worker_id=self._id,
            pid=os.getpid(),
            start_ticks=ticks,
            version=program_version(),
        )
        if self._write(enter) is not None:
            return True
        log.warning("worker %s ends: its pool does not wait for it any more", self._id)
        return False

    def serve(self, digests: Mapping[str, str]) -> str:
        serve: Callable[[Connection], PoolWorker] = partial(
            leases.register,
            host=socket.gethostname(),
            pid=os.getpid(),
            models=self._models,
            version=program_version(),
        )
        if self._id:
            serve = partial(leases.serve, worker_id=self._id, models=self._models, digests=digests)
        self._me = self._write(serve)
        return self._me.id

    def turn(
        self,
        ended: Ended,
        returned: Sequence[Call],
        limit: int,
        alone: bool = True,
        behind: Collection[str] = (),
    ) -> Turn:
        again = self._claim
        if limit:
            self._claim = again or rows.new_id()

        def turn(conn: Connection) -> tuple[dict[str, JobStatus], list[Call]]:
            calls: list[Call] = []
            if again:
                calls = leases.claimed(conn, self._me, again)
            if limit and not calls:
                calls = leases.claim(
                    *(conn, self._me),
                    limit=limit,
                    token=self._claim,
                    alone=alone,
                    behind=behind,
                )
            leases.give_back(conn, returned if limit else [*returned, *calls])
            return leases.finish(conn, ended), calls if limit else []

        counted, calls = self._write(turn, durable=bool(ended))
        self._claim = ""
        if limit:
            self._likely = bool(calls)
        if calls:
            self._vain, self._dropped, self._pause_s = False, False, 0.0
        self._bury(leases.buried(ended, counted))
        return Turn(len(counted), calls)

    def is_idle(self) -> bool:
        # A look before each claim would take longer than a claim that gets nothing.
        if self._claim or self._likely:
            return False
        try:
            with reading(self._engine) as conn:
                return leases.is_idle(conn, self._me)
        except exc.SQLAlchemyError as failure:
            raise _away(failure) from failure

    def wait(self, stopping: threading.Event) -> None:
        # Hints name no model, and another worker may have taken the hint about a job of this
        # worker. So it polls as often as without hints.
        poll_s = min(self._poll_s, TEND_S)
        self._pause_s = min(max(self._pause_s * 2, _FIRST_S), poll_s, _LONGEST_S)
        if self._hints is None:
            stopping.wait(self._pause_s)
        elif self._vain:
            # Jobs of a turn come without their hints, so these are dropped at once. A stream that
            # has such an entry each time must not make the worker ask without a pause.
            if self._dropped:
                stopping.wait(self._pause_s)
            self._hints.wait(0, STALE)
            self._vain, self._dropped = False, True
        else:
            began = time.monotonic()
            if self._hints.wait(poll_s):
                self._likely = True
                self._vain = time.monotonic() - began < poll_s / 2
            else:
                stopping.wait(self._pause_s)

    def renew(self, tokens: Sequence[str]) -> set[str]:
        return self._write(partial(leases.renew, worker=self._me, tokens=tokens))

    def tend(self) -> None:
        try:
            swept = self._write(partial(leases.tend, errors=self._errors))
        except Away:
            self._errors += 1
            raise
        self._errors = 0
        self._bury(swept.dead)

    def leave(self) -> None:
        if self._claim:
            self.turn((), (), 0)
        # The end of a pool's worker is recorded once none of its processes is left.
        if not self._id:
            self._write(partial(leases.sign_off, worker_id=self._me.id))

    def _bury(self, codes: dict[str, str]) -> None:
        if self._hints is not None:
            self._hints.bury(codes)

    def _write(self, work: Callable[[Connection], T], *, durable: bool = True) -> T:
        try:
            return retrying(self._engine, work, durable=durable)
        except exc.SQLAlchemyError as failure:
            raise _away(failure) from failure


def _away(failure: exc.SQLAlchemyError) -> Away:
    return Away(f"the database does not answer: {failure}")

"""Workers that run jobs without the database. The token of their pool is their only credential."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, TypeVar
from uuid import UUID

from fastapi import APIRouter, Depends, Request
from fastapi.concurrency import run_in_threadpool
from pydantic import Field, StringConstraints
from sqlalchemy import Connection

from reconciler.api.models import Answer, Body, Document, Integer, Label, Name, StrictFlag
from reconciler.api.security import bearer, of_pool, take_place
from reconciler.db.engine import reading, retrying
from reconciler.db.schema import Pool
from reconciler.model.errors import Problem
from reconciler.model.jobs import Call, Outcome
from reconciler.model.pools import SERVING_POOLS
from reconciler.model.storable import storable_text
from reconciler.pools import hints, leases, remote
from reconciler.pools.runner import checked

router = APIRouter(prefix="/worker", tags=["worker"])
T = TypeVar("T")

# Rate of the registrations, heartbeats and ends of a worker, sustained and at once. Each writes to
# the disk. A worker that works as intended sends a tenth of it.
_ACTS_PER_S, _ACTS_BURST = 1.0, 60
# The longest wait for a job to be due.
_WAIT_S = 20
# First pause of a wait for a job. Each further one is twice as long, up to the service's poll.
_FIRST_S = 0.02
# A worker names its version in this header. Older services refuse fields that they do not know.
_PROGRAM = re.compile(r"gpuaas-worker/([A-Za-z0-9.+-]{1,64})")
Key = Annotated[str, StringConstraints(max_length=64, pattern=r"^[A-Za-z0-9-]+$")]
Line = Annotated[str, StringConstraints(max_length=2_000)]


class WaitingRequest:
    """A request that waits for a job of its pool.

    models: those of its worker; until they are read, those of the pool. woken: whether it is about
    to look for a job.
    """

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.models = pool.models
        self.woken = False
        self._loop = asyncio.get_running_loop()
        self._wake = asyncio.Event()

    def wake(self) -> None:
        """Called by any thread."""
        self.woken = True
        # The loop is closed when the process ends.
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._wake.set)

    async def pause(self, seconds: float) -> None:
        """Wait for so long, or until a job has come."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._wake.wait(), seconds)
        self._wake.clear()
        self.woken = False


class Waits:
    """Requests that wait for jobs, in this process."""

    def __init__(self) -> None:
        self._waits: dict[WaitingRequest, None] = {}

    @contextmanager
    def waiting(self, pool: Pool) -> Iterator[WaitingRequest | None]:
        """Add a request of the pool; None if one for each of its workers waits already."""
        wait = WaitingRequest(pool)
        self._waits[wait] = None
        try:
            of_pool = sum(each.pool.id == pool.id for each in self._waits)
            yield wait if of_pool <= pool.replicas else None
        finally:
            del self._waits[wait]

    def wake(self, project_id: str, models: Iterable[str]) -> None:
        """Wake a waiting request for each of a project's new jobs, by their models.

        The other requests see a job at their next look, as they see jobs of other processes.
        """
        waits = [wait for wait in list(self._waits) if wait.pool.project_id == project_id]
        for model in models:
            for wait in waits:
                if model in wait.models and not wait.woken:
                    wait.wake()
                    break


@dataclass(frozen=True)
class Credential:
    """A request with the token of a pool."""

    request: Request
    pool: Pool

    def act(self, work: Callable[..., T], **given: Any) -> T:
        """As `write`, for rare requests of a worker, whose rate is limited."""
        key, workers = f"acts of pool {self.pool.id}", self.pool.replicas
        rates = self.request.app.state.rates
        rates.take_at(key, workers * _ACTS_PER_S, workers * _ACTS_BURST)
        return self.write(work, **given)

    def write(self, work: Callable[..., T], **given: Any) -> T:
        """Do the work in a transaction, unless the token is no longer valid in it."""

        def done(conn: Connection) -> T:
            return work(conn, _authenticate(conn, self.request), **given)

        return retrying(self.request.app.state.engine, done)

    def read(self, work: Callable[[Connection, Pool], T]) -> T:
        with reading(self.request.app.state.engine) as conn:
            return work(conn, _authenticate(conn, self.request))


def _authenticate(conn: Connection, request: Request) -> Pool:
    pool = remote.authenticate(conn, bearer(request))
    if pool is None:
        raise Problem(
            "unauthenticated",
            401,
            expected="Authorization: Bearer with the token of a pool that serves",
            found="no token, or one that is unknown, expired or replaced",
            remedy="get one with `gpuaas pools token POOL`",
        )
    return pool


def _credential(request: Request) -> Credential:
    with reading(request.app.state.engine) as conn:
        pool = _authenticate(conn, request)
    key, _ = of_pool(pool)
    request.app.state.rates.take(key, pool.replicas)
    return Credential(request, pool)


# Credential of a request that waits without a thread. `Waits` limits such requests.
Waiter = Annotated[Credential, Depends(_credential)]


async def _placed(request: Request, waiter: Waiter) -> Credential:
    """Small requests take a place too: the answer to a repeated claim of 150 bytes has 4 MiB."""
    await take_place(request, *of_pool(waiter.pool))
    return waiter


Worker = Annotated[Credential, Depends(_placed)]


class Registration(Body):
    """A worker process with the models that it has loaded."""

    host: Label
    pid: Annotated[Integer, Field(ge=1, le=1 << 22)]
    models: Annotated[list[Name], Field(min_length=1, max_length=32)]


class Registered(Answer):
    """lease_s: jobs that are not renewed for so long go to others. beat_s: when to renew."""

    worker_id: str
    lease_s: float
    beat_s: float


class Held(Body):
    """A job that the worker has. token: of the claim."""

    id: Key
    token: Key

    def call(self) -> Call:
        return Call(self.id, self.token, "", {}, 0)


class Failure(Body):
    """Why a call failed. detail: for operators."""

    code: Annotated[str, StringConstraints(max_length=64, pattern=r"^[a-z][a-z0-9_]*$")]
    expected: Line
    found: Line
    remedy: Line
    detail: Line = ""


class Ended(Held):
    """How a call ended. permanent: another attempt would fail, too."""

    result: Document | None = None
    error: Failure | None = None
    permanent: StrictFlag = False

    def end(self) -> tuple[Call, Outcome]:
        """The outcome for the records. Without an error, a result that cannot be stored is one."""
        if self.error is None:
            answer = checked(self.result)
        else:
            texts = {name: storable_text(text) for name, text in self.error.model_dump().items()}
            answer = {"error": texts, "permanent": self.permanent}
        return self.call(), Outcome(**answer)


class Claim(Body):
    """A claim. Repeated with the same token after a lost answer, it gets the same jobs."""

    token: Annotated[UUID, Field(strict=False)]
    limit: Annotated[Integer, Field(ge=1, le=remote.HELD)]


class Turn(Body):
    """Outcomes, jobs that were not begun, and a claim of others."""

    worker_id: Key
    ended: Annotated[list[Ended], Field(max_length=remote.HELD, default_factory=list)]
    returned: Annotated[list[Held], Field(max_length=remote.HELD, default_factory=list)]
    claim: Claim | None = None


class ClaimedJob(Answer):
    """A job for the worker to run. lost: workers that lost it; unless it is 0, it runs alone."""

    id: str
    token: str
    model: str
    input: Document
    timeout_s: int
    lost: int


class Turned(Answer):
    """counted: how many outcomes counted. serving: whether the pool gives out jobs."""

    counted: int
    jobs: list[ClaimedJob]
    serving: bool


class Renewal(Body):
    """Leases to renew, by the tokens of their claims."""

    worker_id: Key
    tokens: Annotated[list[Key], Field(max_length=remote.HELD)]


class Renewed(Answer):
    """held: ids of the jobs that the worker still has."""

    held: list[str]
    serving: bool


class Wait(Body):
    """How long to wait for a job to be due."""

    worker_id: Key
    wait_s: Annotated[Integer, Field(ge=0, le=_WAIT_S)] = 0


class Due(Answer):
    """due: whether a claim would get jobs."""

    due: bool
    serving: bool


class Leaving(Body):
    """The worker that ends."""

    worker_id: Key


class Left(Answer):
    """The end is recorded."""


@router.post("/register")
def register(body: Registration, worker: Worker) -> Registered:
    """Called by a worker that has loaded its models."""
    program = _PROGRAM.match(worker.request.headers.get("user-agent", ""))
    version = program[1] if program else ""
    row = worker.act(remote.register, **body.model_dump(), version=version)
    return Registered(worker_id=row.id, lease_s=leases.LEASE_S, beat_s=leases.BEAT_S)


@router.post("/turn")
def turn(body: Turn, worker: Worker) -> Turned:
    """Record outcomes, give jobs back and claim others, together. An outcome counts only under the
    token that its job has, and for the worker that holds it.
    """
    claim = body.claim and remote.Claim(str(body.claim.token), body.claim.limit)
    done = worker.write(
        remote.turn,
        worker_id=body.worker_id,
        ended=[each.end() for each in body.ended],
        returned=[each.call() for each in body.returned],
        claim=claim,
    )
    hints.bury(worker.request.app.state.settings.redis_url, done.dead)
    return Turned.of(done)


@router.post("/renew")
def renew(body: Renewal, worker: Worker) -> Renewed:
    """The worker's heartbeat. A job that is not `held` has gone to another worker."""
    held = worker.act(remote.renew, worker_id=body.worker_id, tokens=body.tokens)
    return Renewed(held=sorted(held), serving=worker.pool.state in SERVING_POOLS)


@router.post("/due")
async def due(body: Wait, worker: Waiter) -> Due:
    """Answers as soon as a job is due, or when the time is over."""
    end = time.monotonic() + body.wait_s
    state = worker.request.app.state
    pause_s = _FIRST_S

    def look(conn: Connection, pool: Pool) -> tuple[Due, list[str]]:
        due, models = remote.look(conn, pool, body.worker_id)
        return Due(due=due, serving=pool.state in SERVING_POOLS), models

    with state.waits.waiting(worker.pool) as wait:
        while True:
            answer, models = await run_in_threadpool(partial(worker.read, look))
            left_s = end - time.monotonic()
            ends = answer.due or not answer.serving or left_s <= 0
            if wait is None or ends or await worker.request.is_disconnected():
                return answer
            wait.models = models
            await wait.pause(min(pause_s, state.settings.poll_s, left_s))
            pause_s *= 2


@router.post("/leave")
def leave(body: Leaving, worker: Worker) -> Left:
    """Called by a worker that ends. Jobs that it holds are queued again."""
    worker.act(remote.leave, worker_id=body.worker_id)
    return Left()

"""Open sessions of tenants: recorded, authorised again every two seconds, and cut when they end."""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from ipaddress import ip_network
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from sqlalchemy import Connection, Engine

from reconciler.db import journal
from reconciler.db.engine import reading, retrying
from reconciler.lifecycle.ssh_access import Grant
from reconciler.model.act import Act
from reconciler.model.client_limits import Buckets, client_network, oldest_of_most
from reconciler.model.errors import Problem
from reconciler.records import ssh_sessions
from reconciler.trust.ca import Trust

if TYPE_CHECKING:
    from reconciler.gateway.machine import Machine
    from reconciler.gateway.terminal import Recording

log = logging.getLogger("gpuaas.gateway")
T = TypeVar("T")
Claim: TypeAlias = tuple[str, ...]
# Threads that authorise open sessions. All but one may be held up by a session each.
_JUDGES = 4
# Columns or rows of a terminal.
LARGEST = 1000


@dataclass(frozen=True)
class Limits:
    """Limits of the gateway; times are in seconds.

    connections: at once, of all clients; of_address: of one network; of_member, of_allocation: of
    these. strangers: connections without a login, which count apart; strangers_of_address: of one
    network. channels, keys: of one connection. unknown_s: how long open sessions outlast a silent
    database. refusals: audit rows in `report_s`, of strangers and of members each; refusals_of_one:
    of one member or network. begun, begun_per_s: sessions that one member begins, at once and over
    time, because each leaves rows. terminals: of one member; typed_s: life of a terminal without
    input; terminal_s: life of a terminal. unread: bytes that a client of SSH, or a host, leaves
    unread.

    of_allocation and terminals count the sessions of all gateways, and terminals also the shells of
    each; terminals in browsers count apart.
    """

    connections: int = 1000
    of_address: int = 200
    of_member: int = 200
    of_allocation: int = 64
    strangers: int = 300
    strangers_of_address: int = 60
    channels: int = 16
    keys: int = 10
    login_s: float = 20.0
    idle_s: float = 60.0
    machine_s: float = 30.0
    check_s: float = 2.0
    unknown_s: float = 30.0
    report_s: float = 30.0
    refusals: int = 60
    refusals_of_one: int = 10
    begun: int = 300
    begun_per_s: float = 1.0
    terminals: int = 32
    typed_s: float = 1800.0
    terminal_s: float = 12 * 3600.0
    unread: int = 1 << 20


@dataclass(eq=False)
class Sessions:
    """The sessions of a process. `name`: the host name by which tenants know the gateway."""

    engine: Engine
    trust: Trust
    name: str
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        self.clients: set[Session] = set()
        self._begun = Buckets()
        self._refusals: set[tuple[bool, str, str, str]] = set()
        self._refused_at = self._reported_at = 0.0
        self._reporting: asyncio.Task[None] | None = None
        # Of its own: the usual threads may all wait for the database's writers.
        self._judges = ThreadPoolExecutor(_JUDGES, "gpuaas-sessions")
        # Each answer with the time of the round that asked.
        self._judged: dict[Claim, tuple[str, float]] = {}
        self._judging: set[Claim] = set()
        self._watching: asyncio.Task[None] | None = None

    def ensure_watch(self) -> None:
        """Watch the open sessions until none is left. A single watch serves all sessions."""
        if self._watching is None or self._watching.done():
            self._watching = keep(self.watch(while_open=True))

    async def watch(self, *, while_open: bool = False) -> None:
        """Authorise the open sessions again and again, and report them. while_open: until none is
        left.
        """
        loop = asyncio.get_running_loop()
        self._reported_at = loop.time()
        while self.clients or not while_open:
            began = loop.time()
            await self._check(began)
            reported = self._reporting is None or self._reporting.done()
            if reported and began - self._reported_at >= self.limits.report_s:
                self._reporting, self._reported_at = keep(self._report()), began
            await asyncio.sleep(max(0.0, self.limits.check_s - (loop.time() - began)))

    async def stop(self) -> None:
        """End every session with a record."""
        for client in tuple(self.clients):
            client.cut("gateway_stopped")
        await asyncio.gather(*(client.ended.wait() for client in tuple(self.clients)))
        loop = asyncio.get_running_loop()
        # Those that end may leave others, such as the record of a refusal.
        while tasks := [task for task in _tasks if task.get_loop() is loop]:
            await asyncio.gather(*tasks, return_exceptions=True)
        self._judges.shutdown(wait=False)

    def require_room(self, session: Session) -> None:
        """Problem `too_many_connections` unless the session may be let in to this process."""
        others = [other for other in self.clients if other.since and other is not session]
        limits = self.limits
        near = sum(other.network == session.network for other in others)
        # A member with many machines may come from many networks.
        mine = sum(bool(other.owner) and other.owner == session.owner for other in others)
        for count, limit, kind in (
            (len(others), limits.connections, "in all"),
            (near, limits.of_address, "from one address"),
            (mine, limits.of_member, "of one member"),
        ):
            if count >= limit:
                raise too_many(f"fewer than {limit} connections {kind}", f"{count}")

    def crowded_out(self, newcomer: Session) -> Session | None:
        """The connection without a login that must be dropped for this newcomer, which counts
        already.

        Beyond the limit it is the oldest connection of the network with most of them.
        """
        strangers = [client for client in self.clients if client.stranger]
        near = sum(client.network == newcomer.network for client in strangers)
        if near > self.limits.strangers_of_address:
            return newcomer
        if len(strangers) <= self.limits.strangers:
            return None
        strangers.sort(key=lambda client: client.came)
        return oldest_of_most({client: client.network for client in strangers})

    def require_rate(self, owner: str) -> None:
        """Problem `too_many_connections` for a member who begins sessions faster than people do."""
        limits = self.limits
        wait_s = self._begun.wait_s(owner, limits.begun_per_s, limits.begun)
        if wait_s > 0:
            raise too_many(
                f"at most {limits.begun} sessions of a member at once, and"
                f" {limits.begun_per_s:g} a second",
                "more",
                f"wait {math.ceil(wait_s)} s; many commands can share a connection"
                " (ControlMaster of ssh)",
            )

    def count(self, owner: str) -> None:
        """Count a session that has begun."""
        self._begun.count(owner, self.limits.begun_per_s)

    async def _check(self, now: float) -> None:
        # A claim changes while the database answers, when a terminal is opened or ends.
        granted = {client: client.claim for client in self.clients if client.since}
        for client in granted:
            client.judged_at = client.judged_at or now
        # Several connections of a person have the same answer. A round may not come to its end: who
        # waits longest is the next.
        order = sorted(granted, key=lambda client: client.judged_at)
        claims = {granted[client]: client for client in order}
        waiting = deque(item for item in claims.items() if item[0] not in self._judging)
        late = threading.Event()
        loop = asyncio.get_running_loop()
        work = loop.run_in_executor(self._judges, self._judge, waiting, late, now)
        await asyncio.wait({work}, timeout=self.limits.check_s)
        late.set()
        answers = {claim: self._judged[claim] for claim in claims if claim in self._judged}
        self._judged.clear()
        for client, claim in granted.items():
            # A late answer says nothing of the time since.
            reason, requested_at = answers.get(claim, ("", 0.0))
            client.judged_at = max(client.judged_at, requested_at)
            lost = now - client.judged_at > self.limits.unknown_s
            reason = reason or ("authorisation_unavailable" if lost else "")
            # The others are watched on, if one session cannot be ended.
            try:
                if reason := reason or client.idle(now):
                    client.cut(reason)
                elif client.machine is not None:
                    client.machine.drop_deaf_host(self.limits.unread)
            except Exception as failure:
                log.error("cannot end session %s: %s", client.session, failure)

    def _judge(
        self, waiting: deque[tuple[Claim, Session]], late: threading.Event, now: float
    ) -> None:
        """Answer claims until it is late. A claim that fails or hangs concerns its session only."""
        failures: list[Exception] = []
        while waiting and not late.is_set():
            left = len(waiting)
            try:
                # After a failure another transaction: it may be of no more use.
                with reading(self.engine) as conn:
                    while waiting and not late.is_set():
                        claim, client = waiting.popleft()
                        self._judging.add(claim)
                        try:
                            self._judged[claim] = (client.reason(conn, claim), now)
                        finally:
                            self._judging.discard(claim)
            except Exception as failure:
                failures.append(failure)
                if left == len(waiting):
                    break
        if failures:
            log.error("cannot authorise %s open sessions: %s", len(failures), failures[0])

    async def _report(self) -> None:
        traffic = {client.session: client.traffic() for client in self.clients if client.session}
        try:
            await self.write(lambda conn: ssh_sessions.report(conn, traffic))
        except Exception as failure:
            log.error("cannot report open sessions: %s", failure)

    async def ask(self, work: Callable[[Connection], T]) -> T:
        """Read the database without holding up the sessions."""

        def read() -> T:
            with reading(self.engine) as conn:
                return work(conn)

        return await asyncio.to_thread(read)

    async def write(self, work: Callable[[Connection], T]) -> T:
        """Write to the database without holding up the sessions."""
        return await asyncio.to_thread(retrying, self.engine, work)

    async def refuse(self, problem: Problem, session: Session, user: str) -> None:
        """Record a refusal: once in half a minute for each member or network, and not for ever
        more.
        """
        log.info("refused %s from %s: %s", user, session.address, problem)
        if not self._is_new(problem.code, session, user):
            return
        grant = session.grant
        act = Act(session.person or "gateway", problem.code)
        detail = {"address": session.address, "code": problem.code, "found": problem.found}
        project = grant.project_id if grant else ""

        def write(conn: Connection) -> None:
            journal.audit(
                *(conn, act, "gateway.refused", "allocation", user),
                detail=detail,
                project_id=project,
            )

        try:
            await self.write(write)
        except Exception as failure:
            log.error("cannot record a refusal: %s", failure)

    def _is_new(self, code: str, session: Session, user: str) -> bool:
        now = asyncio.get_running_loop().time()
        if now - self._refused_at >= self.limits.report_s:
            self._refusals, self._refused_at = set(), now
        by_name = bool(session.person)
        source = session.owner if by_name else session.neighbourhood
        # A stranger may invent as many names as it likes.
        refusal = (by_name, source, "" if code == "access_unknown" else user, code)
        of_kind = [other[1] for other in self._refusals if other[0] == by_name]
        if (
            refusal in self._refusals
            or len(of_kind) >= self.limits.refusals
            or of_kind.count(source) >= self.limits.refusals_of_one
        ):
            return False
        self._refusals.add(refusal)
        return True


class Session(ABC):
    """One connection of a tenant. address: its client's. person: the actor who has proven to be its
    client, "" before. came, since: when it began, and when it was let in, 0 before. judged_at: when
    it was last authorised.
    session: the id of its record, "" before its first use of the machine. recording: of all its
    terminals.
    """

    def __init__(self, gateway: Sessions) -> None:
        self.gateway = gateway
        self.grant: Grant | None = None
        self.session = ""
        self.recording: Recording | None = None
        self.machine: Machine | None = None
        self.came = time.monotonic()
        self.since = self.judged_at = 0.0
        self.address = self.person = ""
        self.ended = asyncio.Event()
        self._why = "closed"
        self._record = asyncio.Lock()

    @property
    @abstractmethod
    def claim(self) -> Claim:
        """The identity on which the answer of `reason` depends. It may change at any time."""

    @abstractmethod
    def reason(self, conn: Connection, claim: Claim) -> str:
        """Why a session with this claim may not go on; "" if it may. Its own may differ by now."""

    @abstractmethod
    def idle(self, now: float) -> str:
        """Why the session ends, although it may go on; "" if it does not."""

    @abstractmethod
    def cut(self, reason: str) -> None:
        """End the session at once, with everything that runs through it."""

    @abstractmethod
    def traffic(self) -> ssh_sessions.Traffic:
        """Bytes from and to the client."""

    @property
    def stranger(self) -> bool:
        """Whether it may still log in."""
        return not self.since and self._why == "closed"

    @cached_property
    def neighbourhood(self) -> str:
        """The network of 24 bits (of IPv6, 64), whose addresses often have one owner."""
        try:
            return str(ip_network((self.network, 24), strict=False))
        except ValueError:
            return self.network

    @cached_property
    def network(self) -> str:
        """The client's network, by which it is counted."""
        return client_network(self.address)

    @property
    def grant_id(self) -> str:
        return self.grant.allocation_id if self.grant else ""

    @property
    def owner(self) -> str:
        """The member by whom the session is counted; "" before its grant."""
        return self.grant.owner if self.grant else ""

    async def begin(self, grant: Grant, way: str) -> None:
        """Record the session with its first use of the machine."""
        # The record is written for the session, even if the caller is cut meanwhile.
        await asyncio.shield(keep(self._begin(grant, way)))

    async def _begin(self, grant: Grant, way: str) -> None:
        async with self._record:
            if self.ended.is_set():
                raise ConnectionError("the client has gone")
            if self.session:
                return
            self.gateway.require_rate(grant.owner)
            act = Act(grant.actor, "connected through the gateway")

            def work(conn: Connection) -> str:
                ssh_sessions.take_turn(conn, grant.project_id)
                self.require_room(conn, grant, way)
                return ssh_sessions.open_session(
                    conn,
                    act,
                    allocation_id=grant.allocation_id,
                    project_id=grant.project_id,
                    owner=grant.owner,
                    fingerprint=grant.fingerprint,
                    address=self.address,
                    way=way,
                )

            self.session = await self.gateway.write(work)
            self.gateway.count(grant.owner)

    def require_room(self, conn: Connection, grant: Grant, way: str) -> None:
        """Problem `too_many_connections` beyond the limits of the allocation and of its member."""
        limits = self.gateway.limits
        of_allocation, terminals = ssh_sessions.count_open(
            conn, grant.allocation_id, grant.owner, way, beside=self.session
        )
        if of_allocation < limits.of_allocation and (way == "jump" or terminals < limits.terminals):
            return
        raise too_many(
            f"fewer than {limits.of_allocation} sessions of a machine and"
            f" {limits.terminals} terminals of a member",
            f"{of_allocation} and {terminals}",
        )

    async def finish(self) -> None:
        """Record the end of the session."""
        # The record of the beginning may still be on its way.
        async with self._record:
            try:
                if self.session:
                    end = (self.session, self._why, self.traffic())
                    await self.gateway.write(lambda conn: ssh_sessions.close(conn, *end))
            except Exception as failure:
                log.error("cannot record the end of session %s: %s", self.session, failure)
            finally:
                self.gateway.clients.discard(self)
                self.ended.set()


def too_many(expected: str, found: str, remedy: str = "close some") -> Problem:
    return Problem("too_many_connections", 429, expected=expected, found=found, remedy=remedy)


_tasks: set[asyncio.Task[Any]] = set()


def keep(work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """Run a coroutine to its end, although nothing waits for it."""
    task = asyncio.get_running_loop().create_task(work)
    _tasks.add(task)
    task.add_done_callback(_tasks.discard)
    return task

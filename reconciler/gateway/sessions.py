"""Open sessions of tenants: recorded, authorised again every two seconds, and cut when they end."""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Coroutine, Hashable
from dataclasses import dataclass, field
from functools import cached_property
from ipaddress import IPv6Address, ip_address, ip_network
from typing import Any, TypeVar

from sqlalchemy import Connection, Engine

from reconciler.db import journal, rows
from reconciler.db.engine import reading, retrying
from reconciler.db.schema import Project
from reconciler.lifecycle.ssh_access import Grant
from reconciler.model.act import Act
from reconciler.model.errors import Problem
from reconciler.records import ssh_sessions
from reconciler.trust.ca import Trust

log = logging.getLogger("gpuaas.gateway")
T = TypeVar("T")


@dataclass(frozen=True)
class Limits:
    """connections: at once, of all clients, of one network, and of one allocation. channels and
    keys: of one connection. Times are in seconds; unknown_s: how long open sessions outlast a
    database that does not answer. refusals: audit rows of refusals in a minute. terminals: of one
    member; typed_s: how long a terminal lives without input, terminal_s: how long at all.

    of_allocation and terminals count the sessions of all processes.
    """

    connections: int = 1000
    of_address: int = 200
    of_allocation: int = 64
    channels: int = 16
    keys: int = 10
    login_s: float = 20.0
    idle_s: float = 60.0
    machine_s: float = 30.0
    check_s: float = 2.0
    unknown_s: float = 30.0
    report_s: float = 30.0
    refusals: int = 60
    terminals: int = 32
    typed_s: float = 1800.0
    terminal_s: float = 12 * 3600.0


@dataclass(eq=False)
class Sessions:
    """The sessions of a process. `name`: the host name by which tenants know the gateway."""

    engine: Engine
    trust: Trust
    name: str
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        self.clients: set[Session] = set()
        self._refusals: Counter[tuple[str, ...]] = Counter()
        self._checked_at = self._reported_at = 0.0

    async def watch(self, *, while_open: bool = False) -> None:
        """Authorise the open sessions again and again, and report them. while_open: until none is
        left.
        """
        loop = asyncio.get_running_loop()
        self._checked_at = self._reported_at = loop.time()
        while self.clients or not while_open:
            began = loop.time()
            await self._check(began)
            if began - self._reported_at >= self.limits.report_s:
                await self._report()
                self._reported_at = began
            await asyncio.sleep(max(0.0, self.limits.check_s - (loop.time() - began)))

    async def stop(self) -> None:
        """End every session with a record."""
        for client in tuple(self.clients):
            client.cut("gateway_stopped")
        await asyncio.gather(*(client.ended.wait() for client in tuple(self.clients)))
        await asyncio.gather(*_tasks, return_exceptions=True)

    def full(self, session: Session) -> bool:
        """Whether a session, which is among the clients, is beyond the limits of its process."""
        alike = sum(other.network == session.network for other in self.clients)
        return len(self.clients) > self.limits.connections or alike > self.limits.of_address

    async def _check(self, now: float) -> None:
        # A claim changes while the database answers, when a terminal is opened or ends.
        granted = {client: client.claim for client in self.clients if client.since}
        # Several connections of a person have the same answer.
        asked = {claim: client for client, claim in granted.items()}
        try:
            reasons = await self.ask(
                lambda conn: {claim: client.reason(conn) for claim, client in asked.items()}
            )
            self._checked_at = now
        except Exception as failure:
            log.error("cannot authorise open sessions: %s", failure)
            lost = now - self._checked_at > self.limits.unknown_s
            reasons = dict.fromkeys(asked, "authorisation_unavailable" if lost else "")
        for client, claim in granted.items():
            # The others are watched on, if one session cannot be ended.
            try:
                if reason := reasons[claim] or client.idle(now):
                    client.cut(reason)
            except Exception as failure:
                log.error("cannot end session %s: %s", client.session, failure)

    async def _report(self) -> None:
        self._refusals.clear()
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

    async def refuse(self, problem: Problem, address: str, user: str, grant: Grant | None) -> None:
        """Record a refusal: once in half a minute for each address, and not for ever more."""
        log.info("refused %s from %s: %s", user, address, problem)
        what = (address, user, problem.code)
        self._refusals[what] += 1
        if self._refusals[what] > 1 or len(self._refusals) > self.limits.refusals:
            return
        act = Act(grant.actor if grant else "gateway", problem.code)
        detail = {"address": address, "code": problem.code, "found": problem.found}
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


class Session(ABC):
    """One connection of a tenant. address: its client's. person: who is known from its beginning.
    since: when it was let in, 0 before.
    session: the id of its record, "" before its first use of the machine.
    """

    def __init__(self, gateway: Sessions) -> None:
        self.gateway = gateway
        self.grant: Grant | None = None
        self.session = ""
        self.since = 0.0
        self.address = self.person = ""
        self.ended = asyncio.Event()
        self._why = "closed"
        self._record = asyncio.Lock()

    @property
    @abstractmethod
    def claim(self) -> Hashable:
        """The identity on which the answer of `reason` depends."""

    @abstractmethod
    def reason(self, conn: Connection) -> str:
        """Why the session may not go on; "" if it may."""

    @abstractmethod
    def idle(self, now: float) -> str:
        """Why the session ends, although it may go on; "" if it does not."""

    @abstractmethod
    def cut(self, reason: str) -> None:
        """End the session at once, with everything that runs through it."""

    @abstractmethod
    def traffic(self) -> ssh_sessions.Traffic:
        """Bytes from and to the client."""

    @cached_property
    def network(self) -> str:
        """The client's address, or its network of 64 bits, all of which one machine may have."""
        try:
            address = ip_address(self.address.partition("%")[0])
        except ValueError:
            return self.address
        if not isinstance(address, IPv6Address):
            return str(address)
        return str(address.ipv4_mapped or ip_network((address, 64), strict=False))

    @property
    def grant_id(self) -> str:
        return self.grant.allocation_id if self.grant else ""

    async def begin(self, grant: Grant, way: str) -> None:
        """Record the session with its first use of the machine."""
        # The record has its session, although whoever waits for it is cut.
        await asyncio.shield(keep(self._begin(grant, way)))

    async def _begin(self, grant: Grant, way: str) -> None:
        async with self._record:
            if self.ended.is_set():
                raise ConnectionError("the client has gone")
            if self.session:
                return
            act = Act(grant.actor, "connected through the gateway")

            def work(conn: Connection) -> str:
                # Sessions of a project that begin at once wait for each other.
                rows.get(conn, Project, grant.project_id, lock=True)
                self.require_room(conn, grant, way)
                return ssh_sessions.open_session(
                    conn,
                    act,
                    allocation_id=grant.allocation_id,
                    project_id=grant.project_id,
                    fingerprint=grant.fingerprint,
                    address=self.address,
                    way=way,
                )

            self.session = await self.gateway.write(work)

    def require_room(self, conn: Connection, grant: Grant, way: str) -> None:
        """Problem `too_many_connections` beyond the limits of the allocation and of its member."""
        limits = self.gateway.limits
        of_allocation, terminals = ssh_sessions.count_open(
            conn, grant.allocation_id, grant.actor, beside=self.session
        )
        if of_allocation < limits.of_allocation and (way == "jump" or terminals < limits.terminals):
            return
        raise Problem(
            "too_many_connections",
            429,
            expected=f"fewer than {limits.of_allocation} sessions of a machine and"
            f" {limits.terminals} terminals of a member",
            found=f"{of_allocation} and {terminals}",
            remedy="close some",
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


_tasks: set[asyncio.Task[Any]] = set()


def keep(work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """Run a coroutine to its end, although nothing waits for it."""
    task = asyncio.get_running_loop().create_task(work)
    _tasks.add(task)
    task.add_done_callback(_tasks.discard)
    return task

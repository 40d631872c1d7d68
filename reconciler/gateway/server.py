"""SSH server of the gateway: it authorises, forwards to one machine, and cuts what has ended.

A client opens connections to `slice`, port 22, which stands for the machine of the allocation that
is its user name: its SSH with that machine passes through unread. Or it asks the gateway itself for
a shell there, if the machine was launched with a terminal.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import uuid
from collections.abc import Awaitable, Callable
from typing import NoReturn

import asyncssh
from sqlalchemy import Connection, Engine

from reconciler.db import settings as site
from reconciler.gateway.machine import PLAIN, Machine
from reconciler.gateway.pipe import End, heed, lean, pair, unread
from reconciler.gateway.sessions import Claim, Session, Sessions, keep, too_many
from reconciler.gateway.shell import Shell
from reconciler.gateway.terminal import WINDOW
from reconciler.lifecycle import ssh_access
from reconciler.lifecycle.ssh_access import Grant
from reconciler.model.errors import Problem
from reconciler.records import ssh_keys, ssh_sessions, tokens
from reconciler.settings import Settings
from reconciler.trust.ca import GATEWAY, Trust, gateway_ca, gateway_host_key, revoke_host

log = logging.getLogger("gpuaas.gateway")
DESTINATION, PORT = "slice", 22
# The client knows the key of the machine by the allocation's id, not by this name.
COMMAND = f"ssh -o HostKeyAlias=ALLOCATION -J ALLOCATION@GATEWAY USER@{DESTINATION}"
_SIGNATURES = (
    "ssh-ed25519",
    "sk-ssh-ed25519@openssh.com",
    "ecdsa-sha2-nistp256",
    "ecdsa-sha2-nistp384",
    "ecdsa-sha2-nistp521",
    "sk-ecdsa-sha2-nistp256@openssh.com",
    "rsa-sha2-256",
    "rsa-sha2-512",
)
_RENEW_S = 86_400.0
_PROHIBITED = asyncssh.OPEN_ADMINISTRATIVELY_PROHIBITED


async def serve(
    settings: Settings, engine: Engine, trust: Trust, ready: Callable[[], None]
) -> None:
    """Run the gateway of this machine until SIGINT or SIGTERM, and call `ready` once it listens."""
    if not settings.member_address:
        raise Problem(
            "gateway_nameless",
            400,
            expected="GPUAAS_MEMBER_ADDRESS, the name by which tenants reach this gateway",
            found="none",
            remedy="set it for the whole site, such as ssh.gpuaas.example:2222",
        )
    name, _ = settings.gateway
    gateway = Gateway(engine, trust, name)
    host, _, port = settings.gateway_listen.rpartition(":")
    acceptor = await gateway.listen(host.strip("[]"), int(port))
    log.info("gateway %s on %s", settings.member_address, settings.gateway_listen)
    ready()
    running = asyncio.create_task(gateway.run(acceptor))
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, running.cancel)
    try:
        with contextlib.suppress(asyncio.CancelledError):
            await running
    finally:
        acceptor.close()
        await gateway.stop()


class Gateway(Sessions):
    """One process of the gateway."""

    async def listen(self, host: str, port: int) -> asyncssh.SSHAcceptor:
        """Listen for clients. `run` must run too, because it ends what may not go on."""
        return await asyncssh.create_server(
            lambda: Client(self),
            host,
            port,
            server_host_keys=[self._host_key()],
            signature_algs=_SIGNATURES,
            public_key_auth=True,
            login_timeout=self.limits.login_s,
            keepalive_interval=15,
            keepalive_count_max=4,
            agent_forwarding=False,
            x11_forwarding=False,
            # Whether there is a terminal, the machine's launch decides.
            allow_pty=True,
            encoding=None,
            window=WINDOW,
            line_editor=False,
            allow_scp=False,
            server_version="gpuaas",
            **PLAIN,
        )

    async def run(self, acceptor: asyncssh.SSHAcceptor) -> None:
        """Authorise the open sessions again and again, report them, and keep the keys current.
        Problem `authorities_differ` once the site has replaced the gateway's authority.
        """
        tasks = [asyncio.create_task(work) for work in (self._renew(acceptor), self.watch())]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    async def _renew(self, acceptor: asyncssh.SSHAcceptor) -> None:
        loop = asyncio.get_running_loop()
        renewed_at = loop.time()
        while True:
            await asyncio.sleep(self.limits.report_s)
            try:
                recorded = await self.ask(lambda conn: site.read(conn, site.AUTHORITIES, {}))
                if recorded.get(GATEWAY) != gateway_ca(self.trust):
                    raise _replaced()
                # Hosts may have enrolled with other keys since.
                revoked = await self.ask(tokens.revoked_host_keys)
                await asyncio.to_thread(revoke_host, self.trust, *revoked)
                if loop.time() - renewed_at > _RENEW_S:
                    acceptor.update(server_host_keys=[self._host_key()])
                    renewed_at = loop.time()
            except Problem:
                raise
            except Exception as failure:
                log.error("cannot renew the gateway's keys: %s", failure)

    def _host_key(self) -> tuple[str, asyncssh.SSHCertificate]:
        path, line = gateway_host_key(self.trust, self.name)
        return str(path), asyncssh.import_certificate(line)


class Client(Session, asyncssh.SSHServer):
    """One connection of an SSH client."""

    def __init__(self, gateway: Gateway) -> None:
        super().__init__(gateway)
        self._key = ""
        self._keys = 0
        self._connection: asyncssh.SSHServerConnection | None = None
        self._ends: list[tuple[End, End]] = []
        self._terminals: list[Shell] = []
        self._opening = 0
        self._spent = (0, 0)
        self._user = ""

    def connection_made(self, conn: asyncssh.SSHServerConnection) -> None:
        self._connection = conn
        lean(conn)
        heed(conn, lambda: [*(far for _, far in self._ends), *self._terminals], "client")
        self.address = str((conn.get_extra_info("peername") or ("",))[0])
        self.gateway.clients.add(self)
        if leaving := self.gateway.crowded_out(self):
            # A client hears the reason after the versions only.
            asyncio.get_running_loop().call_soon(leaving.cut, "too_many_connections")
            limits = self.gateway.limits
            problem = too_many(
                f"at most {limits.strangers} connections that log in, and"
                f" {limits.strangers_of_address} from one address",
                "more",
            )
            keep(self.gateway.refuse(problem, leaving, "-"))

    def connection_lost(self, _exc: Exception | None) -> None:
        if self.machine is not None:
            self.machine.close()
        keep(self.finish())

    def begin_auth(self, username: str) -> bool:
        self._user = username
        return True

    def public_key_auth_supported(self) -> bool:
        return True

    async def validate_public_key(self, username: str, key: asyncssh.SSHKey) -> bool:
        self.grant = None
        self._keys += 1
        if self._keys > 2 * self.gateway.limits.keys:
            self.cut("too_many_keys")
            return False
        line = ssh_keys.bare(key.export_public_key("openssh").decode())
        try:
            if not _is_id(username):
                raise Problem(
                    "access_unknown",
                    403,
                    expected="an allocation's id as user name",
                    found="another name",
                    remedy=f"use `gpuaas ssh`, or {COMMAND}",
                )
            grant = await self.gateway.ask(lambda conn: ssh_access.authorise(conn, username, line))
        except Problem as problem:
            await self._refused(problem)
            return False
        except Exception as failure:
            log.error("cannot authorise a connection: %s", failure)
            self._banner("The gateway cannot ask its records. Try again in a minute.")
            return False
        # The client may offer several keys. Its signature decides later which of them it has.
        self.grant, self._key = grant, line
        return True

    async def _refused(self, problem: Problem) -> None:
        user = self._user if _is_id(self._user) else "-"
        if problem.code != "access_unknown":
            self._banner(f"{problem.found}. {problem.remedy[:1].upper()}{problem.remedy[1:]}.")
        await self.gateway.refuse(problem, self, user)

    def _banner(self, text: str) -> None:
        if self._connection is not None:
            self._connection.send_auth_banner(f"gpuaas: {text}\n")

    def auth_completed(self) -> None:
        grant, limits = self.grant, self.gateway.limits
        others = [c for c in self.gateway.clients if c.since and c.grant_id == self.grant_id]
        if grant is None:
            self.cut("access_unknown")
            return
        self.person = grant.actor
        try:
            self.gateway.require_room(self)
            if len(others) >= limits.of_allocation:
                raise too_many(f"fewer than {limits.of_allocation} of a machine", f"{len(others)}")
        except Problem as problem:
            self.cut(problem.code)
            self._later(problem)
            return
        self.since = asyncio.get_running_loop().time()
        self.machine = Machine(self.gateway.trust, grant, limits.machine_s)

    def session_requested(self) -> asyncssh.SSHServerSession[bytes]:
        """A shell or command of the machine, in a terminal or without a terminal."""
        self._require_room()
        self._require_terminals()
        shell = Shell(self._run)
        self._terminals = [*self._held(), shell]
        return shell

    async def _run(self, shell: Shell) -> None:
        try:
            grant = await self._authorised()
            ssh_access.require_terminal(grant)
            if self.machine is None:
                raise ConnectionError("the client has gone")
            await shell.run(self, self.machine, grant)
        except Problem as problem:
            shell.refuse(f"{problem.code}: {problem.found}. {problem.remedy}")
            self._later(problem)
        except Exception as failure:
            shell.refuse("the gateway cannot do it now; try again in a minute")
            if not self.ended.is_set():
                log.error("cannot open a terminal: %s: %s", type(failure).__name__, failure)
        finally:
            shell.over = True
            self._spent = tuple(map(sum, zip(self._spent, shell.traffic(), strict=True)))  # type: ignore[assignment]

    async def _authorised(self) -> Grant:
        """Not by the answer at login: much may have happened since."""
        return await self.gateway.ask(
            lambda conn: ssh_access.authorise(conn, self.grant_id, self._key)
        )

    def _require_room(self) -> None:
        # A channel that its client never closes stays in memory, as does a channel whose machine
        # reads nothing.
        live = sum(not (near.lost and far.lost) for near, far in self._ends) + self._opening
        live += len(self._held())
        live += self.machine.forsaken if self.machine else 0
        limit = self.gateway.limits.channels
        if live >= limit:
            problem = Problem(
                "too_many_channels",
                429,
                expected=f"fewer than {limit} channels of a connection",
                found=f"{live}",
                remedy="close some, or connect again",
            )
            self._later(problem)
            raise asyncssh.ChannelOpenError(asyncssh.OPEN_RESOURCE_SHORTAGE, "too many channels")

    def _held(self) -> list[Shell]:
        """Without those that have ended on both sides: one whose client has gone may still open."""
        return [shell for shell in self._terminals if not (shell.gone and shell.over)]

    def _require_terminals(self) -> None:
        # A connection has many, and one record: that of a jump, if it began with one.
        clients = (each for each in self.gateway.clients if isinstance(each, Client))
        mine = (each._terminals for each in clients if each.owner == self.owner)
        running = sum(not shell.over for shells in mine for shell in shells)
        limit = self.gateway.limits.terminals
        if running >= limit:
            self._later(too_many(f"fewer than {limit} terminals of a member", f"{running}"))
            raise asyncssh.ChannelOpenError(asyncssh.OPEN_RESOURCE_SHORTAGE, "too many terminals")

    def connection_requested(
        self, dest_host: str, dest_port: int, _orig_host: str, _orig_port: int
    ) -> Awaitable[asyncssh.SSHTCPSession[bytes]]:
        if (dest_host, dest_port) != (DESTINATION, PORT):
            self._elsewhere(f"{dest_host[:100]!r} port {dest_port}")
        self._require_room()
        self._opening += 1
        return self._open()

    def unix_connection_requested(self, _dest_path: str) -> NoReturn:
        self._elsewhere("a socket")

    def tun_requested(self, _unit: int | None) -> NoReturn:
        self._elsewhere("a tunnel")

    def tap_requested(self, _unit: int | None) -> NoReturn:
        self._elsewhere("a tunnel")

    def server_requested(self, _listen_host: str, _listen_port: int) -> bool:
        self._later(_not_there("a port of the gateway"))
        return False

    def unix_server_requested(self, _listen_path: str) -> bool:
        self._later(_not_there("a socket of the gateway"))
        return False

    def _elsewhere(self, found: str) -> NoReturn:
        self._later(_not_there(found))
        raise asyncssh.ChannelOpenError(
            _PROHIBITED, f"this gateway leads to {DESTINATION}:{PORT} only"
        )

    async def _open(self) -> asyncssh.SSHTCPSession[bytes]:
        near, far = pair()
        try:
            grant = await self._authorised()
            if self.machine is None:
                raise ConnectionError("the client has gone")
            await self.machine.connect(far)
            await self.begin(grant, "jump")
        except Problem as problem:
            far.close()
            self._later(problem)
            raise asyncssh.ChannelOpenError(
                asyncssh.OPEN_CONNECT_FAILED, f"{problem.code}: {problem.found}. {problem.remedy}"
            ) from None
        except Exception as failure:
            far.close()
            log.error("cannot open a connection: %s: %s", type(failure).__name__, failure)
            raise asyncssh.ChannelOpenError(
                asyncssh.OPEN_CONNECT_FAILED, "the gateway cannot do it now; try again in a minute"
            ) from None
        finally:
            self._opening -= 1
        self._ends = [ends for ends in self._ends if not self._counted(*ends)]
        self._ends.append((near, far))
        return near

    @property
    def claim(self) -> Claim:
        in_terminal = any(not shell.over for shell in self._terminals)
        return self.grant_id, self._key, "terminal" if in_terminal else ""

    def reason(self, conn: Connection, claim: Claim) -> str:
        id, key, terminal = claim
        try:
            grant = ssh_access.authorise(conn, id, key)
            if terminal:
                ssh_access.require_terminal(grant)
        except Problem as problem:
            return problem.code
        return ""

    def idle(self, now: float) -> str:
        limits = self.gateway.limits
        if unread(self._connection) > limits.unread:
            return "answers_not_read"
        shells = [shell for shell in self._terminals if not shell.over]
        ends = {shell: shell.ends(now, limits) for shell in shells}
        if self._opening or any(not near.lost for near, _ in self._ends) or "" in ends.values():
            self.since = now
            for shell, reason in ends.items():
                if reason:
                    shell.end(reason)
        elif ends:
            return next(iter(ends.values()))
        return "idle" if self.since and now - self.since > limits.idle_s else ""

    def cut(self, reason: str) -> None:
        self._why = reason
        if self.machine is not None:
            self.machine.close()
        if self._connection is not None:
            # Nothing is waited for after the reason. disconnect() would close the channels before
            # it, and a client that has read that far ends without a word.
            why = f"gpuaas: {reason}"
            try:
                self._connection._send_disconnect(asyncssh.DISC_BY_APPLICATION, why, "")
            finally:
                self._connection.abort()

    def traffic(self) -> ssh_sessions.Traffic:
        shells = [shell.traffic() for shell in self._terminals if not shell.over]
        near = sum(near.received for near, _ in self._ends) + self._spent[0]
        far = sum(far.received for _, far in self._ends) + self._spent[1]
        return near + sum(bytes_in for bytes_in, _ in shells), far + sum(out for _, out in shells)

    def _counted(self, near: End, far: End) -> bool:
        """Take the bytes of ends that are closed into the sum."""
        closed = near.lost and far.lost
        if closed:
            self._spent = (self._spent[0] + near.received, self._spent[1] + far.received)
        return closed

    def _later(self, problem: Problem) -> None:
        keep(self.gateway.refuse(problem, self, self.grant_id))


def _replaced() -> Problem:
    return Problem(
        "authorities_differ",
        expected="the site's authority of gateways",
        found="one that was replaced, which no host accepts any more",
        remedy="on a machine of its own, copy what `gpuaas gateway-trust FOLDER` writes now, as"
        " `gateway` in its state folder; then start the gateway",
    )


def _is_id(text: str) -> bool:
    try:
        return str(uuid.UUID(text)) == text
    except ValueError:
        return False


def _not_there(found: str) -> Problem:
    return Problem(
        "destination_refused",
        403,
        expected=f"{DESTINATION} port {PORT}",
        found=found,
        remedy=COMMAND,
    )

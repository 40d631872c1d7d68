"""Connections from the gateway to a machine: through the host's relay account, or directly.

For terminals, the gateway logs in to the machine itself.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any
from weakref import WeakValueDictionary

import asyncssh

from reconciler.gateway.pipe import End, heed, lean, unread
from reconciler.lifecycle.ssh_access import Grant
from reconciler.model.errors import Problem
from reconciler.trust.ca import (
    Trust,
    gateway_hosts,
    known_hosts,
    relay_certificate,
    terminal_certificate,
)

Certify = Callable[[Trust, str, str], str]

# Account on slice hosts (`plugins/module_utils/slice/_relay.py`).
ACCOUNT = "gpuaas-relay"
SSH_PORT = 22
# In the order of their cost: one call for a packet, and with ChaCha20 five. A client's order counts
# before this order. None chains its blocks (CBC), on which `lean` relies.
CIPHERS = (
    "aes128-gcm@openssh.com",
    "aes256-gcm@openssh.com",
    "aes128-ctr",
    "aes192-ctr",
    "aes256-ctr",
    "chacha20-poly1305@openssh.com",
)
# Logins of this process at once. From ten on, sshd drops logins at random (MaxStartups), also those
# of the service and of other tenants. Those of one allocation leave room for others of its host.
LOGINS_AT_HOST, LOGINS_OF_ALLOCATION = 4, 2
_turns: WeakValueDictionary[tuple[asyncio.AbstractEventLoop, str], asyncio.Semaphore] = (
    WeakValueDictionary()
)
# Options of every SSH connection, to which a key or a certificate is the only way in.
PLAIN = {
    "config": None,
    "password_auth": False,
    "kbdint_auth": False,
    "gss_kex": False,
    "gss_auth": False,
    "host_based_auth": False,
    "compression_algs": None,
    "encryption_algs": CIPHERS,
    # All sessions share a processor, and the other side chooses: 100 ms for RSA's pair of keys,
    # 30 ms for a group of 8192 bits, 4 ms for a curve.
    "kex_algs": "-diffie-hellman-*,rsa*",
}
# Of those that the gateway makes: also no agent of this user.
_CLIENT = {**PLAIN, "agent_path": None}
_LOGIN = {**_CLIENT, "preferred_auth": "publickey", "disable_trivial_auth": True}


class Machine:
    """Connections of one session to its machine. The first connection logs in at the host.
    forsaken: connections that were given up, and that the host may still open.
    """

    def __init__(self, trust: Trust, grant: Grant, timeout_s: float) -> None:
        self._trust = trust
        self._grant = grant
        self._timeout_s = timeout_s
        self._host: asyncssh.SSHClientConnection | None = None
        self._guests: list[asyncssh.SSHClientConnection] = []
        self._lock = asyncio.Lock()
        self._ends: list[End] = []
        self.forsaken = self._openings = 0
        self._closed = False

    async def connect(self, end: End) -> None:
        """Connect an end to the machine's SSH server, or raise a Problem."""
        async with self._refusals():
            grant = self._grant
            if grant.whole:
                loop = asyncio.get_running_loop()
                await loop.create_connection(lambda: end, grant.host, grant.port)
            else:
                host = await self._logged_in()
                with self._opening():
                    await host.create_connection(lambda: end, grant.address, SSH_PORT)
            end.hold("opening")
            self._ends = [*(other for other in self._ends if not other.lost), end]
            self._require_open()

    async def log_in(self) -> asyncssh.SSHClientConnection:
        """Log in to the machine itself with a certificate of the gateway, or raise a Problem."""
        async with self._refusals():
            host = await self._logged_in()
            try:
                guest = await self._met(host, [await self._certified(terminal_certificate)])
            except asyncssh.PermissionDenied:
                raise Problem(
                    "terminal_refused_by_guest",
                    502,
                    expected="a machine that accepts the gateway's certificates",
                    found="it refuses them: its certificate authority for terminals was removed, or"
                    " is that of an earlier version",
                    remedy="use `gpuaas ssh`, or write the files again: `gpuaas ssh-terminal`",
                ) from None
            self._guests = [*(other for other in self._guests if not other.is_closed()), guest]
            self._require_open()
            return guest

    async def greet(self) -> None:
        """Let the machine itself prove its host key, and log in to nothing; or raise a Problem."""
        try:
            async with self._refusals():
                host = await self._logged_in()
                with contextlib.suppress(asyncssh.PermissionDenied):
                    guest = await self._met(host, None)
                    guest.abort()
        finally:
            self.close()

    @contextlib.asynccontextmanager
    async def in_time(self) -> AsyncIterator[None]:
        """Problem `machine_silent` when it takes longer."""
        try:
            async with asyncio.timeout(self._timeout_s):
                yield
        except TimeoutError:
            raise _problem("machine_silent", f"no answer in {self._timeout_s:g} s") from None

    @contextlib.asynccontextmanager
    async def _refusals(self) -> AsyncIterator[None]:
        """Whatever keeps the gateway from the machine, as a Problem."""
        try:
            async with self.in_time():
                yield
        except (asyncssh.HostKeyNotVerifiable, asyncssh.KeyExchangeFailed):
            raise Problem(
                "host_not_proven",
                502,
                expected="a host with a certificate of this site",
                found="a host with another key",
                remedy="tell the operators; nothing of yours was sent to it",
            ) from None
        except asyncssh.PermissionDenied:
            raise Problem(
                "relay_refused",
                502,
                expected="a host that leads the gateway to this machine",
                found="it does not (any more)",
                remedy="try again in a minute; a host of an earlier version accepts the gateway"
                " after its next comparison, for which operators use `gpuaas nodes drift NODE`",
            ) from None
        except asyncssh.ChannelOpenError as refused:
            closed = refused.code != asyncssh.OPEN_ADMINISTRATIVELY_PROHIBITED
            actual = "no SSH server on the machine" if closed else "the host does not lead there"
            raise _problem("machine_refused" if closed else "relay_refused", actual) from None
        except (OSError, asyncssh.Error):
            raise _problem("host_unreachable", "the connection failed") from None

    @contextlib.contextmanager
    def _opening(self) -> Iterator[None]:
        """Count a connection that is being opened. A connection that was given up may still be
        opened and then fills a window, so it counts until nothing else uses the host's connection,
        which then ends.
        """
        self._openings += 1
        try:
            yield
        except asyncio.CancelledError:
            self.forsaken += 1
            raise
        finally:
            self._openings -= 1
            used = self._openings or not all(end.lost for end in self._ends)
            used = used or not all(guest.is_closed() for guest in self._guests)
            if self.forsaken and not used and self._host is not None:
                self._host.abort()
                self._host, self.forsaken = None, 0

    async def _logged_in(self) -> asyncssh.SSHClientConnection:
        async with self._lock:
            self._require_open()
            if self._host is None or self._host.is_closed():
                grant = self._grant
                async with (
                    _turn(grant.allocation_id, LOGINS_OF_ALLOCATION),
                    _turn(grant.node_id, LOGINS_AT_HOST),
                ):
                    self._require_open()
                    self._host, self.forsaken = await self._login(), 0
                self._require_open()
        return self._host

    def _require_open(self) -> None:
        """Close a connection whose client has gone while it was being opened."""
        if self._closed:
            self.close()
            raise ConnectionError("the client has gone")

    async def _login(self) -> asyncssh.SSHClientConnection:
        grant = self._grant
        host = await asyncssh.connect(
            grant.host,
            grant.port,
            username=ACCOUNT,
            client_keys=[await self._certified(relay_certificate)],
            known_hosts=str(known_hosts(self._trust)),
            host_key_alias=grant.node_id,
            keepalive_interval=15,
            **_LOGIN,
        )
        lean(host)
        heed(host, lambda: [end.peer for end in self._ends], "host")
        return host

    async def _met(
        self, host: asyncssh.SSHClientConnection, login: list[Any] | None
    ) -> asyncssh.SSHClientConnection:
        grant = self._grant
        try:
            with self._opening():
                return await asyncssh.connect(
                    grant.address,
                    SSH_PORT,
                    tunnel=host,
                    username=grant.username,
                    client_keys=login,
                    # Those that its host read at its start, and no authority.
                    known_hosts=(_host_keys(grant), [], []),
                    **_LOGIN,
                )
        except (asyncssh.HostKeyNotVerifiable, asyncssh.KeyExchangeFailed):
            raise Problem(
                "guest_not_proven",
                502,
                expected="a machine with the host key that it had at its start",
                found="another key",
                remedy="if you have not changed it yourself, tell the operators",
            ) from None

    async def _certified(self, certify: Certify) -> tuple[asyncssh.SSHKey, asyncssh.SSHCertificate]:
        """A new key with a certificate for this allocation."""
        key = asyncssh.generate_private_key("ssh-ed25519")
        public = key.export_public_key("openssh").decode()
        line = await asyncio.to_thread(certify, self._trust, public, self._grant.allocation_id)
        return key, asyncssh.import_certificate(line)

    def drop_deaf_host(self, limit: int) -> None:
        """Give up the host's connection when it leaves more bytes unread than the limit."""
        if self._host and unread(self._host) > limit:
            self._host.abort()

    def close(self) -> None:
        self._closed = True
        for guest in self._guests:
            guest.abort()
        # A whole machine has no host's connection, and need not read what is left for it.
        for end in self._ends:
            end.abort()
        if self._host is not None:
            self._host.abort()


def _host_keys(grant: Grant) -> list[asyncssh.SSHKey]:
    """The keys of a machine, without those that are none: they are what its host has answered."""
    keys = []
    for line in grant.host_keys:
        with contextlib.suppress(asyncssh.KeyImportError):
            keys.append(asyncssh.import_public_key(line))
    return keys


def _turn(name: str, count: int) -> asyncio.Semaphore:
    """The turns of logins of an allocation, or at a host."""
    return _turns.setdefault((asyncio.get_running_loop(), name), asyncio.Semaphore(count))


def _problem(code: str, found: str) -> Problem:
    return Problem(
        code,
        502,
        expected="the machine's SSH server",
        found=found,
        remedy="try again in a minute; `gpuaas allocations` shows whether the machine runs",
    )


async def probe(trust: Trust, name: str, port: int) -> None:
    """Connect to a gateway without a key. Raises unless it proves itself and asks for one."""
    host_keys = asyncssh.import_known_hosts(gateway_hosts(trust, name, port))
    with contextlib.suppress(asyncssh.PermissionDenied):
        async with asyncio.timeout(10):
            connection = await asyncssh.connect(
                name, port, username="doctor", client_keys=None, known_hosts=host_keys, **_CLIENT
            )
        connection.abort()
        raise ConnectionError("it lets a client in that has no key")

"""A gateway before two real SSH servers: the host of a slice, and its guest."""

from __future__ import annotations

import asyncio
import subprocess
import threading
from collections.abc import Awaitable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import asyncssh
import pytest
import sqlalchemy as sa
from ansible_collections.gpuaas.slice.plugins.module_utils.core import _accounts
from ansible_collections.gpuaas.slice.plugins.module_utils.slice import _relay

from reconciler.cli import ssh as command
from reconciler.db.engine import transaction
from reconciler.db.schema import nodes, slots
from reconciler.gateway import machine
from reconciler.gateway.server import Gateway
from reconciler.gateway.sessions import Limits
from reconciler.lifecycle import guest_terminal, slices
from reconciler.model.states import TaskState
from reconciler.records import queue
from reconciler.service.process import adopt
from reconciler.trust import ca
from tests.unit.reconciler.api.conftest import databases, selling
from tests.unit.reconciler.api.stack import ACT, NODE, Stack
from tests.unit.reconciler.api.test_launches import launch
from tests.unit.reconciler.benchmark.sshd import USER, Boot, Machine, boot, new_key
from tests.unit.reconciler.service.service import until

__all__ = ["boot", "databases", "selling"]
T = TypeVar("T")
NAME = "127.0.0.1"
# A server that 200 clients reach at once.
MANY = "MaxStartups 300"
# A busy machine has needed more than two seconds for a login at its own sshd.
QUICK = Limits(check_s=0.2, login_s=30, machine_s=60, report_s=0.2)
# Only for machines that never answer.
IMPATIENT = replace(QUICK, machine_s=2)


@dataclass
class World:
    """A site with an active slice, its host and guest, and the gateway, in a thread of its own."""

    stack: Stack
    boot: Boot
    tree: Path
    key: Path
    host: Machine
    guest: Machine
    gateway: Gateway
    loop: asyncio.AbstractEventLoop
    allocation: str = ""
    port: int = 0
    seed: dict[str, Path] = field(default_factory=dict)
    running: Future[None] = field(default_factory=Future)

    @property
    def sudo(self) -> Path:
        """Where the guest looks for it first."""
        return self.key.with_name("bin") / "sudo"

    @property
    def login(self) -> dict[str, Any]:
        """Arguments for the tenant's client in Python."""
        return {
            "host": "127.0.0.1",
            "port": self.port,
            "username": self.allocation,
            "client_keys": [str(self.key)],
            "known_hosts": None,
            "config": None,
        }

    def launch(self, who: str = "member", **body: Any) -> str:
        """Activate another slice with this world's host and guest."""
        public = self.key.with_name(f"{self.key.name}.pub").read_text().strip()
        mine = str(launch(self.stack, by=who, **{"ssh_keys": [public], **body}).json()["id"])
        task = self.stack.lease()
        connection = {"username": USER, "port": 22, "host_keys": [self.guest.key.strip()]}
        with transaction(self.stack.engine) as conn:
            slices.provision_started(conn, mine, ACT)
            slices.provision_succeeded(conn, mine, ACT, connection=connection)
            queue.finish(conn, task.id, task.lease_token, TaskState.SUCCEEDED, ACT)
        # Files that cloud-init writes into a guest with a terminal.
        for each in seed(self.gateway.trust, mine):
            self.seed[each["path"]].write_text(each["content"])
        return mine

    def dial(self, node_port: int) -> None:
        with transaction(self.stack.engine) as conn:
            change = sa.update(nodes).where(nodes.c.id == NODE)
            conn.execute(change.values(address="127.0.0.1", port=node_port))
            # The first slot is placed first; its guest runs here.
            first = sa.select(sa.func.min(slots.c.slot_index)).scalar_subquery()
            change = sa.update(slots).where(slots.c.slot_index == first)
            conn.execute(change.values(private_ip="127.0.0.1"))

    def config(self, allocation: str = "", key: Path | None = None) -> Path:
        """OpenSSH's settings as `gpuaas ssh-config` writes them."""
        who = self.stack.client("admin")
        answer = who.get(f"projects/demo/allocations/{allocation or self.allocation}")
        file = self.tree / "ssh_config"
        hosts = self.tree / "known_hosts"
        file.write_text(command.config(answer.json(), hosts, key or self.key))
        hosts.write_text(answer.json()["connection"]["known_hosts"])
        return file

    def ssh(self, *words: str, config: Path | None = None, host: str = "") -> list[str]:
        """A command of a real client that runs in the guest."""
        file = config or self.config()
        options = ["-o", "BatchMode=yes", "-o", "LogLevel=ERROR"]
        return ["ssh", "-F", str(file), *options, host or self.allocation, *words]

    def run(self, *words: str, **options: Any) -> subprocess.CompletedProcess[str]:
        line = self.ssh(*words, **options)
        return subprocess.run(line, capture_output=True, text=True, timeout=60, check=False)

    def sessions(self) -> list[dict[str, Any]]:
        # A member's token may have ended.
        answer = self.stack.client("admin").get("projects/demo/ssh-sessions")
        return list(answer.json()["items"])

    def audit(self, action: str) -> list[dict[str, Any]]:
        rows = self.stack.client("admin").get("admin/audit", params={"action": action})
        return list(rows.json()["items"])

    def refused(self, *codes: str) -> None:
        """Wait until refusals with these codes are recorded, and no others."""

        def recorded() -> set[str]:
            return {row["detail"]["code"] for row in self.audit("gateway.refused")}

        until(lambda: recorded() >= set(codes))
        assert recorded() == set(codes)

    def on_loop(self, work: Awaitable[T]) -> T:
        async def awaited() -> T:
            return await work

        return asyncio.run_coroutine_threadsafe(awaited(), self.loop).result(120)


def seed(trust: ca.Trust, allocation: str) -> list[dict[str, str]]:
    """The guest's files for terminals."""
    return guest_terminal.files(allocation, USER, ca.gateway_ca(trust), f"{NAME}/8")


@pytest.fixture
def limits() -> Limits:
    return QUICK


@pytest.fixture
def terminal() -> bool:
    """Whether the slice is launched with a terminal."""
    return False


@pytest.fixture
def records(selling: Stack) -> Iterator[sa.Engine]:
    """The gateway's way to the database."""
    yield selling.engine


@pytest.fixture
def world(
    selling: Stack,
    records: sa.Engine,
    boot: Boot,
    tree: Path,
    tmp_path: Path,
    limits: Limits,
    terminal: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[World]:
    monkeypatch.setenv("SSH_AUTH_SOCK", "")
    selling.settings = selling.settings.model_copy(update={"member_address": f"{NAME}:1"})
    adopt(selling.settings, selling.engine)
    trust = ca.open_trust(selling.settings.state_dir)
    key = tmp_path / "tenant"
    public = new_key(key)
    names = [each["path"] for each in seed(trust, "")]
    files = {name: tmp_path / Path(name).name for name in names}
    sshd = seed(trust, "")[-1]["content"]
    for name, file in files.items():
        sshd = sshd.replace(name, str(file))
    sshd += f"\nSetEnv HOME={tmp_path}/guest PATH={tmp_path}/bin:/usr/bin:/bin"
    guest = boot("guest", login=public, settings=f"Subsystem sftp internal-sftp\n{MANY}\n{sshd}")
    monkeypatch.setattr(machine, "ACCOUNT", USER)
    monkeypatch.setattr(machine, "SSH_PORT", guest.port)
    monkeypatch.setattr(_relay, "PORT", guest.port)
    monkeypatch.setattr(_relay, "ACCOUNT", USER)
    monkeypatch.setattr(_relay, "PRINCIPALS", _accounts.principals(USER))
    settings = _relay.settings().replace(_relay.PRINCIPALS, f"{tree}{_relay.PRINCIPALS}")
    settings = settings.replace(_relay.AUTHORITY, f"{tmp_path}/gateway_ca.pub")
    (tmp_path / "relay.conf").write_text(settings)
    (tmp_path / "gateway_ca.pub").write_text(ca.gateway_ca(trust) + "\n")
    (tmp_path / "user_ca.pub").write_text(ca.user_ca(trust) + "\n")
    host = boot(
        "host",
        login=public,
        settings=f"{MANY}\nTrustedUserCAKeys {tmp_path}/user_ca.pub\nInclude {tmp_path}/relay.conf",
        certify=lambda line: ca.certify_host(trust, line, NODE),
    )
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    # From a folder of its own, which is all that a gateway on another machine has.
    folder = ca.open_gateway(selling.settings.state_dir)
    gateway = Gateway(records, folder, NAME, limits)
    world = World(selling, boot, tree, key, host, guest, gateway, loop, seed=files)
    world.dial(host.port)
    world.allocation = world.launch(terminal=terminal)
    open_way(world, world.allocation)
    acceptor = world.on_loop(gateway.listen(NAME, 0))
    world.port = acceptor.get_port()
    address = {"member_address": f"{NAME}:{world.port}"}
    selling.settings = selling.settings.model_copy(update=address)
    world.running = asyncio.run_coroutine_threadsafe(gateway.run(acceptor), loop)
    yield world
    world.running.cancel()
    # On its own loop, which may just be ending the last connection.
    loop.call_soon_threadsafe(acceptor.close)
    world.on_loop(gateway.stop())
    world.on_loop(_ended())
    # A query still under way would return its connection to an engine that is gone.
    gateway._judges.shutdown()
    loop.call_soon_threadsafe(loop.stop)
    thread.join(60)
    loop.close()


async def _ended() -> None:
    """End leftover tasks of the loop and its threads, as `asyncio.run` does: a connection that is
    just being given up closes its socket in a later turn of the loop.
    """
    left = asyncio.all_tasks() - {asyncio.current_task()}
    for task in left:
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)
    for _ in range(3):
        await asyncio.sleep(0)
    await asyncio.get_running_loop().shutdown_default_executor()


class Mute:
    """SSH servers that let the gateway in, and then answer nothing. requested: a request came that
    they do not answer. connections: the open ones.
    """

    def __init__(self, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
        self.requested = threading.Event()
        self.connections: set[asyncssh.SSHServerConnection] = set()
        self.unanswered: list[asyncio.Future[Any]] = []
        self._acceptor: asyncssh.SSHAcceptor | None = None
        self._world = world
        self._monkeypatch = monkeypatch

    def guest(self, stage: str) -> None:
        """Put a mute server in place of the guest: it opens no channel, or no terminal in it."""
        world = self._world
        key = str(world.guest.folder / "host_key")
        number = self._listen(key, ca.terminal_principal(world.allocation), stage)
        self._monkeypatch.setattr(machine, "SSH_PORT", number)
        self._monkeypatch.setattr(_relay, "PORT", number)
        open_way(world, world.allocation)

    def host(self) -> None:
        """Put a mute server in the place of the host."""
        key = self._world.host.folder / "host_key"
        principal = f"slice:{self._world.allocation}"
        self._world.dial(self._listen(str(key), principal, "channel"))

    def _listen(self, key: str, principal: str, stage: str) -> int:
        authority = ca.gateway_ca(self._world.gateway.trust)
        line = f'cert-authority,principals="{principal}" {authority}'
        listening = asyncssh.create_server(
            lambda: _MuteServer(self, stage), NAME, 0,
            server_host_keys=[key], authorized_client_keys=asyncssh.import_authorized_keys(line),
        )  # fmt: skip
        self._acceptor = self._world.on_loop(listening)
        return self._acceptor.get_port()

    def close(self) -> None:
        """End the servers, with their unanswered requests."""
        if self._acceptor is not None:
            self._world.loop.call_soon_threadsafe(self._acceptor.close)
        ends = [each.cancel for each in self.unanswered]
        for end in (*ends, *(each.abort for each in tuple(self.connections))):
            self._world.loop.call_soon_threadsafe(end)


class _MuteServer(asyncssh.SSHServer):
    def __init__(self, mute: Mute, stage: str) -> None:
        self._mute = mute
        self._stage = stage

    def connection_made(self, conn: asyncssh.SSHServerConnection) -> None:
        self._connection = conn
        self._mute.connections.add(conn)

    def connection_lost(self, exc: Exception | None) -> None:
        self._mute.connections.discard(self._connection)

    def session_requested(self) -> Any:
        return self._never() if self._stage == "channel" else _MuteSession(self._mute)

    def connection_requested(self, *_: object) -> Any:
        return self._never()

    async def _never(self) -> Any:
        self._mute.requested.set()
        self._mute.unanswered.append(asyncio.get_running_loop().create_future())
        return await self._mute.unanswered[-1]


class _MuteSession(asyncssh.SSHServerSession[bytes]):
    def __init__(self, mute: Mute) -> None:
        self._mute = mute

    def pty_requested(self, *_: object) -> Any:
        # The library answers true and false only.
        self._mute.requested.set()


@pytest.fixture
def mute(world: World, monkeypatch: pytest.MonkeyPatch) -> Iterator[Mute]:
    mute = Mute(world, monkeypatch)
    yield mute
    mute.close()


def open_way(world: World, *allocations: str) -> None:
    """Write the lines of these slices, as the host's module does."""
    _relay.write([_relay.line(allocation, "127.0.0.1") for allocation in allocations])

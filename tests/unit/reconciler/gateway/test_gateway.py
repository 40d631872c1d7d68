"""SSH gateway with a real client, and real SSH servers as host and guest.

The client is set up by `gpuaas ssh-config` alone: it knows every key before it connects.
"""

from __future__ import annotations

import ast
import asyncio
import html
import itertools
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import threading
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import asyncssh
import pytest
import sqlalchemy as sa
from ansible_collections.gpuaas.slice.plugins.module_utils.slice import _relay
from asyncssh.constants import MSG_CHANNEL_DATA, MSG_GLOBAL_REQUEST, MSG_IGNORE
from asyncssh.packet import Boolean, String, UInt32

from reconciler.api.app import create_app
from reconciler.console.app import mount
from reconciler.db import rows
from reconciler.db.engine import reading, transaction
from reconciler.db.schema import Node, allocations, api_tokens, nodes
from reconciler.doctor import Finding, services
from reconciler.gateway import machine, role, server, sessions
from reconciler.gateway.machine import probe
from reconciler.gateway.server import Client, Gateway
from reconciler.gateway.sessions import Claim, Limits
from reconciler.lifecycle import ssh_access
from reconciler.model.errors import Problem
from reconciler.model.states import TaskKind
from reconciler.records import ssh_keys, terminals, tokens
from reconciler.service import process
from reconciler.trust import ca
from reconciler.trust.certificates import Signature, certify
from reconciler.work.handler import Work
from reconciler.work.kinds import slices
from tests.unit.reconciler.api.stack import ACT, NODE
from tests.unit.reconciler.benchmark.sshd import SSHD, USER, new_key
from tests.unit.reconciler.console.browser import Browser
from tests.unit.reconciler.gateway.conftest import (
    IMPATIENT,
    NAME,
    QUICK,
    Mute,
    World,
    open_way,
)
from tests.unit.reconciler.service.service import until

AMOUNT = 128 << 20
LOST = "authorisation_unavailable"
ROOMY = replace(
    replace(QUICK, machine_s=120, login_s=120, unknown_s=120),
    **dict.fromkeys(("of_allocation", "of_address", "of_member", "strangers_of_address"), 300),
)
pytestmark = pytest.mark.covers("SLICE-10")


def test_open_sessions_are_authorised_every_two_seconds() -> None:
    """A release cuts within three, so a round has one second for its answers."""
    assert Limits().check_s <= 2


def test_every_refusal_and_every_end_is_played() -> None:
    """Each code that the gateway gives is named by a test of this folder."""
    files = (*Path(server.__file__).parent.glob("*.py"), Path(ssh_access.__file__))
    codes = {code for file in files for code in _codes(ast.parse(file.read_text()))}
    assert len(codes) > 30
    tests = [ast.parse(file.read_text()) for file in Path(__file__).parent.glob("*.py")]
    played = {word for test in tests for text in _texts(test) for word in re.split(r"\W+", text)}
    assert codes - played == set()


def _codes(source: ast.AST) -> Iterator[str]:
    """Codes of refusals, reasons of ends, and returns of the functions that decide about them."""
    for node in ast.walk(source):
        givers: list[ast.AST] = []
        match node:
            case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name), args=[first, *_]):
                if name in {"Problem", "_problem", "_ended", "_End", "_refusal", "cut", "end"}:
                    givers = [first]
            case ast.Assign(targets=[ast.Attribute(attr="_why"), *_], value=value):
                givers = [value]
            case ast.FunctionDef(name="reason" | "idle" | "ends" | "over"):
                givers = [each for each in ast.walk(node) if isinstance(each, ast.Return)]
            case ast.AnnAssign(target=ast.Name(id="ENDS"), value=ast.Dict(keys=keys)):
                givers = [key for key in keys if key]
        for giver in givers:
            yield from (text for text in _texts(giver) if re.fullmatch("[a-z]+(_[a-z]+)*", text))


def _texts(source: ast.AST) -> Iterator[str]:
    for node in ast.walk(source):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def test_a_tenant_reaches_the_slice(world: World) -> None:
    done = world.run("id -un; exit 7")
    assert (done.stdout.strip(), done.returncode) == (USER, 7), done.stderr
    (session,) = until(lambda: [s for s in world.sessions() if s["closed_at"]])
    assert session["allocation_id"] == world.allocation
    assert session["actor"].startswith("member:member#")
    assert (session["address"], session["reason"]) == ("127.0.0.1", "closed")
    assert session["bytes_in"] > 1000 and session["bytes_out"] > 1000
    assert [row["project_id"] for row in world.audit("gateway.opened")] == ["demo"]
    assert len(world.audit("gateway.closed")) == 1


def test_the_command_on_a_machines_page_works_with_the_lines_beside_it(world: World) -> None:
    """Of a slice and of a whole machine, by a client that trusts no other key."""
    site = world.stack
    member = Browser(mount(create_app(site.settings, site.engine)))
    assert member.log_in(site.secrets["member"]).status_code == 303
    hosts, config = world.tree / "known_hosts", world.tree / "ssh_config"
    config.write_text(
        f"IdentityFile {world.key}\nUserKnownHostsFile {hosts}\nGlobalKnownHostsFile /dev/null\n"
        "StrictHostKeyChecking yes\nUpdateHostKeys no\nBatchMode yes\n"
    )
    for shape in ("slice", "whole"):
        if shape == "whole":
            _make_whole(world, world.guest.port)
        text = member.get(f"/console/projects/demo/allocations/{world.allocation}").text
        shown = [html.unescape(each) for each in re.findall("<pre[^>]*>(.*?)</pre>", text, re.S)]
        (line,) = (each for each in shown if each.startswith("ssh "))
        (lines,) = (each for each in shown if each.startswith("@cert-authority"))
        hosts.write_text(lines)
        words = ["ssh", "-F", str(config), *shlex.split(line)[1:], "id -un"]
        done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
        assert (done.stdout.strip(), done.returncode) == (USER, 0), (shape, done.stderr)
        assert f"gpuaas ssh {world.allocation}" in text


def test_strangers_ask_for_no_key_exchange_that_takes_long(world: World) -> None:
    """Each of them would hold up the sessions of all tenants."""

    async def meet(exchange: str, compression: str = "none") -> None:
        await asyncssh.connect(
            NAME, world.port, username=world.allocation, kex_algs=[exchange], known_hosts=None,
            client_keys=None, agent_path=None, config=None, compression_algs=[compression],
        )  # fmt: skip

    for exchange in ("rsa2048-sha256", "diffie-hellman-group18-sha512"):
        with pytest.raises(asyncssh.KeyExchangeFailed):
            world.on_loop(meet(exchange))
    # A packet of zeros is a thousand times as large when it is read.
    for compression in ("zlib", "zlib@openssh.com"):
        with pytest.raises(asyncssh.KeyExchangeFailed):
            world.on_loop(meet("curve25519-sha256", compression))
    for exchange in ("curve25519-sha256", "ecdh-sha2-nistp256", "mlkem768x25519-sha256"):
        with pytest.raises(asyncssh.PermissionDenied):
            world.on_loop(meet(exchange))


@pytest.mark.parametrize("only", ["", "chacha20-poly1305@openssh.com"])
def test_data_goes_in_few_packets_of_a_cheap_cipher(
    world: World, monkeypatch: pytest.MonkeyPatch, only: str
) -> None:
    """By the settings of `gpuaas ssh-config`, or as a client insists."""
    sent: Counter[int] = Counter()
    ciphers: dict[bool, str] = {}
    whole = asyncssh.SSHServerConnection.send_packet

    def send_packet(self: Any, kind: int, *parts: bytes, **options: Any) -> None:
        sent[kind] += 1
        if kind == MSG_CHANNEL_DATA:
            ciphers[self.is_server()] = self.get_extra_info("send_cipher")
        whole(self, kind, *parts, **options)

    monkeypatch.setattr(asyncssh.connection.SSHConnection, "send_packet", send_packet)
    config = world.config()
    if only:
        config.write_text(re.sub("(?<=Ciphers ).*", only, config.read_text()))
    done = world.run("head -c 1000000 /dev/zero", config=config)
    assert len(done.stdout) == 1_000_000, done.stderr
    cheap = "aes128-gcm@openssh.com"
    assert ciphers == {True: only or cheap, False: cheap}
    # A login has a few.
    assert sent[MSG_IGNORE] < 10 < sent[MSG_CHANNEL_DATA]


def test_files_and_ports_go_through_it(world: World) -> None:
    content = bytes(range(256)) * 8192
    (world.tree / "sent").write_bytes(content)
    config = str(world.config())
    words = ["scp", "-F", config, f"{world.tree}/sent", f"{world.allocation}:{world.tree}/got"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert (world.tree / "got").read_bytes() == content
    # A port of the guest: here its own SSH server's, which the client's -W asks of the guest.
    inner = world.run("-W", f"127.0.0.1:{world.guest.port}")
    assert inner.stdout.startswith("SSH-2.0-OpenSSH")


@pytest.mark.skipif(shutil.which("rsync") is None, reason="no rsync here")
def test_folders_go_through_it(world: World) -> None:
    sent, got = world.tree / "sent", world.tree / "got"
    sent.mkdir()
    (sent / "large").write_bytes(bytes(range(256)) * 4096)
    shell = shlex.join(["ssh", "-F", str(world.config()), "-o", "BatchMode=yes"])
    words = ["rsync", "-a", "--delete", "-e", shell, f"{sent}/", f"{world.allocation}:{got}/"]
    for text in ("first", "second"):
        (sent / "small").write_text(text)
        done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr
        assert (got / "small").read_text() == text
    assert (got / "large").read_bytes() == (sent / "large").read_bytes()


def _connects(tunnel: socket.socket, path: Path) -> bool:
    return tunnel.connect_ex(str(path)) == 0


def test_ports_of_the_guest(world: World) -> None:
    """As an editor uses them: one session, several connections at once, each way at its pace."""
    content, here = bytes(range(256)) * 4096, world.tree / "here"
    with socket.create_server(("127.0.0.1", 0)) as there, ExitStack() as opened:
        threading.Thread(target=_echo, args=(there,), daemon=True).start()
        port = there.getsockname()[1]
        forward = ["-N", "-o", "ExitOnForwardFailure=yes", "-L", f"{here}:127.0.0.1:{port}"]
        line = world.ssh()
        client = opened.enter_context(subprocess.Popen([*line[:-1], *forward, line[-1]]))
        opened.callback(client.kill)
        tunnels = [opened.enter_context(socket.socket(socket.AF_UNIX)) for _ in range(3)]
        for tunnel in tunnels:
            tunnel.settimeout(60)
            # The client makes the socket's file a moment before it listens.
            until(partial(_connects, tunnel, here), 60)
        for tunnel in tunnels:
            tunnel.sendall(content)
            tunnel.shutdown(socket.SHUT_WR)
        for tunnel in reversed(tunnels):
            with tunnel.makefile("rb") as file:
                assert file.read() == content
        assert len(world.sessions()) == 1


def _echo(there: socket.socket) -> None:
    """Echo the input of each connection once it is complete."""
    while True:
        try:
            connection, _ = there.accept()
        except OSError:
            return
        threading.Thread(target=_echo_one, args=(connection,), daemon=True).start()


def _echo_one(connection: socket.socket) -> None:
    with connection, connection.makefile("rb") as file:
        connection.sendall(file.read())


def test_the_doctor_asks_the_gateway(world: World) -> None:
    def ask(port: int) -> Finding:
        address = {"member_address": f"{NAME}:{port}"}
        settings = world.stack.settings.model_copy(update=address)
        with transaction(world.stack.engine) as conn:
            (finding,) = services.member_address(settings, conn)
        return finding

    finding = ask(world.port)
    assert (finding.status, "proves itself" in finding.found) == ("ok", True)
    # Another server, and none.
    for port in (world.guest.port, 1):
        finding = ask(port)
        assert finding.status == "warn" and f":{port}: " in finding.found
        assert "gpuaas-gateway.service" in finding.remedy


def test_the_doctor_says_where_the_way_to_a_slice_breaks(world: World) -> None:
    """At the records, at the host, at its line, at the guest; without a login in the guest."""
    site = world.stack

    def ask() -> Finding:
        with transaction(site.engine) as conn:
            (finding,) = services.way(world.allocation, site.settings, conn)
            # PostgreSQL ends a transaction that waits for a guest which hangs.
            assert not (finding.status == "ok" and conn.in_transaction())
        return finding

    assert (ask().status, world.sessions()) == ("ok", [])
    port, connection = world.host.port, {"username": USER, "host_keys": [world.host.key]}
    _set(world, allocations, connection=connection)
    assert ask().found.startswith("guest_not_proven")
    open_way(world)
    assert ask().found.startswith("relay_refused")
    world.dial(world.guest.port)
    # A server without a certificate may end the connection first.
    assert ask().found.startswith("host_")
    world.dial(1)
    assert ask().found.startswith("host_unreachable")
    world.dial(port)
    _set(world, allocations, connection={})
    assert ask().found.startswith("host_keys_unknown")


def test_the_doctor_tries_the_way_to_a_slice_that_runs(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ask(**settings: str) -> list[tuple[str, str]]:
        site = world.stack.settings.model_copy(update=settings)
        with transaction(world.stack.engine) as conn:
            return [(each.status, each.found) for each in services.any_way(site, conn)]

    ((status, text),) = ask()
    assert (status, world.allocation in text, world.sessions()) == ("ok", True, [])
    assert ask(member_address="") == []
    # It may be its tenant's doing, so the service itself has not failed.
    monkeypatch.setattr(services, "_SAMPLE_S", 0.5)
    with socket.create_server((NAME, 0)) as silent:
        world.dial(silent.getsockname()[1])
        ((status, text),) = ask()
    assert status == "warn" and f"{world.allocation}: machine_silent" in text
    _set(world, allocations, stopped=True)
    assert ask() == [("ok", "no slice runs, so there is no way to try")]


def test_a_whole_machine_has_the_same_door(world: World) -> None:
    """Its server is the tenant's own; the host's relay account is not asked."""
    _make_whole(world, world.guest.port)
    world.dial(1)
    answer = world.stack.client("member").get(f"projects/demo/allocations/{world.allocation}")
    connection = answer.json()["connection"]
    assert (connection["host"], connection["port"]) == ("127.0.0.1", world.port)
    done = world.run("id -un")
    assert (done.stdout.strip(), done.returncode) == (USER, 0), done.stderr
    assert "terminal_off" in world.run(host=f"gateway-{world.allocation}").stderr


@pytest.mark.parametrize(
    "words",
    [
        ["-W", "slice:23"],
        ["-W", "127.0.0.1:22"],
        ["-N", "-o", "ExitOnForwardFailure=yes", "-R", "0:127.0.0.1:22"],
        ["-T", "id"],
        ["-tt"],
        ["-s", "sftp"],
    ],
    ids=["port", "address", "listen", "command", "terminal", "subsystem"],
)
def test_the_gateway_itself_offers_nothing_else(world: World, words: list[str]) -> None:
    gateway = f"gateway-{world.allocation}"
    line = [*world.ssh(host=gateway)[:-1], *words, gateway]
    if words[0] in ("-T",):
        line = [*world.ssh(host=gateway), words[1]]
    done = subprocess.run(
        line, capture_output=True, text=True, timeout=30, check=False, stdin=subprocess.DEVNULL
    )
    assert done.returncode != 0 and "uid=" not in done.stdout, done.stderr
    assert world.sessions() == []
    if words[0] in ("-W", "-N"):
        world.refused("destination_refused")
    elif words[0] != "-s":
        world.refused("terminal_off")


@pytest.mark.parametrize("terminal", [True])
def test_sockets_tunnels_agents_and_x11_are_refused(
    world: World, terminal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A row for each, although they are alike and quick.
    monkeypatch.setattr(sessions.Sessions, "_is_new", lambda *_: True)

    async def ask() -> list[bool | None]:
        client = await asyncssh.connect(**world.login)
        for opening in (
            client.open_unix_connection("/run/docker.sock"),
            client.create_tun(asyncssh.SSHTunTapSession, 0),
            client.create_tap(asyncssh.SSHTunTapSession, 0),
        ):
            with pytest.raises(asyncssh.ChannelOpenError, match="leads to slice:22 only"):
                await opening
        with pytest.raises(asyncssh.ChannelListenError):
            await client.start_unix_server(lambda: None, "/run/mine.sock")
        process = await client.create_process("echo in; exec cat")
        assert await process.stdout.readline() == "in\n"
        ask = process.channel._make_request
        cookie = (String("MIT-MAGIC-COOKIE-1"), String("00" * 16), UInt32(0))
        answers = [
            await ask(b"auth-agent-req@openssh.com"),
            await ask(b"x11-req", Boolean(False), *cookie),
        ]
        client.abort()
        return answers

    assert terminal
    assert world.on_loop(ask()) == [False, False]
    rows = until(lambda: world.audit("gateway.refused")[3:] and world.audit("gateway.refused"))
    texts = sorted(row["detail"]["found"] for row in rows)
    assert texts == ["a socket", "a socket of the gateway", "a tunnel", "a tunnel"]
    assert {row["detail"]["code"] for row in rows} == {"destination_refused"}


def test_a_gateway_without_a_name_or_a_role_to_make_says_so(world: World) -> None:
    site = world.stack
    settings = site.settings.model_copy(update={"member_address": ""})
    with pytest.raises(Problem, match="gateway_nameless"):
        asyncio.run(server.serve(settings, site.engine, world.gateway.trust, lambda: None))
    with transaction(site.engine) as conn, pytest.raises(Problem, match="gateway_role_needless"):
        role.sql(conn, 51)


def test_the_host_admits_the_gateway_to_this_guest_only(world: World) -> None:
    """A thief of all keys of the gateway reaches only the addresses in the host's lines.

    Its database is not looked at here.
    """
    trust = world.gateway.trust
    names = {path.name for path in trust.directory.iterdir() if not path.name.endswith(".pub")}
    assert names == {"gateway", "gateway_ca", "known_hosts", "lock"}
    ask = partial(dial, world, trust)
    guest = f"127.0.0.1:{world.guest.port}"
    assert ask("-W", guest).startswith("SSH-2.0-")
    for other in (f"127.0.0.1:{world.host.port}", f"127.0.0.2:{world.guest.port}"):
        assert "administratively prohibited" in ask("-W", other)
    assert "uid=" not in ask()
    assert "forwarding failed" in ask("-N", "-o", "ExitOnForwardFailure=yes", "-R", "0:[::1]:22")
    another = "23bd713b-6073-4ef7-8a51-2897e902365d"
    assert "Permission denied" in ask("-W", guest, certificate=another)
    open_way(world)
    assert "Permission denied" in ask("-W", guest)


def dial(world: World, trust: ca.Trust, *words: str, certificate: str = "") -> str:
    """Answer of the host to a client with the gateway's keys in this folder."""
    key = world.tree / "relay"
    public = key.with_name("relay.pub").read_text() if key.exists() else new_key(key)
    line = ca.relay_certificate(trust, public, certificate or world.allocation)
    key.with_name("relay-cert.pub").write_text(line)
    relay = ["ssh", "-F", "/dev/null", "-i", str(key), "-o", "BatchMode=yes"]
    relay += ["-o", f"UserKnownHostsFile={ca.known_hosts(trust)}", "-o", f"HostKeyAlias={NODE}"]
    relay += ["-p", str(world.host.port), *words, f"{USER}@127.0.0.1", *([] if words else ["id"])]
    done = subprocess.run(
        relay, capture_output=True, text=True, timeout=30, check=False, stdin=subprocess.DEVNULL
    )
    return done.stdout + done.stderr


def test_a_stolen_authority_is_replaced(world: World, tmp_path: Path) -> None:
    """The host's comparison brings the new authority; the gateway with the old authority ends."""
    site = world.stack.settings
    shutil.copytree(world.gateway.trust.directory, tmp_path / "stolen")
    stolen, folder = ca.Trust(tmp_path / "stolen"), ca.Trust(ca.gateway_folder(site.state_dir))
    guest = ["-W", f"127.0.0.1:{world.guest.port}"]
    assert dial(world, stolen, *guest).startswith("SSH-2.0-")
    # Another machine of the service knows the earlier authority until it starts again.
    other = site.model_copy(update={"state_dir": tmp_path / "other"})
    shutil.copytree(site.state_dir / "trust", other.state_dir / "trust")
    # As a gateway on another machine, which keeps its folder.
    world.gateway.trust = stolen
    line = world.ssh("sleep 60")
    with subprocess.Popen(line, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as client:
        until(world.sessions)
        assert process.replace_gateway(site, world.stack.engine, ACT) == 1
        with pytest.raises(Problem, match="authorities_differ"):
            world.running.result(60)
        world.on_loop(world.gateway.stop())
        assert client.wait(30) == 255
    assert world.sessions()[0]["reason"] == "gateway_stopped"
    task = world.stack.lease()
    assert task.kind == TaskKind.SLICE_DRIFT_RECONCILE
    with transaction(world.stack.engine) as conn:
        work = Work(conn, task, rows.get(conn, Node, NODE), {}, other)
        variables = slices.drift_variables(work)
    authority = variables["slice_gateway_authority"]
    (world.host.folder.parent / "gateway_ca.pub").write_text(f"{authority}\n")
    assert "Permission denied" in dial(world, stolen, *guest)
    assert dial(world, folder, *guest).startswith("SSH-2.0-")
    row = world.audit("admin.setting.changed")[0]
    assert (row["subject_id"], row["detail"]["value"][ca.GATEWAY]) == ("ssh_authorities", authority)


def test_the_gateways_authority_opens_no_other_account_and_no_other_opens_the_gateways(
    world: World,
) -> None:
    """By sshd itself, with the settings as hosts have them: the global settings and the relay's."""
    site = ca.open_trust(world.stack.settings.state_dir)
    key, folder = world.tree / "any", world.tree
    public = new_key(key)
    (folder / "operators").write_text(f"{ca.OPERATOR}\n")
    (folder / "relay.conf").write_text(
        _relay.settings().replace(f"Match User {USER}\n", "Match User gpuaas-relay\n")
    )
    root = world.boot(
        "another",
        login="none",
        settings=f"TrustedUserCAKeys {world.host.folder.parent}/user_ca.pub\n"
        f"AuthorizedPrincipalsFile {folder}/operators\nInclude {folder}/relay.conf",
        certify=lambda line: ca.certify_host(site, line, NODE),
    )
    shown = {
        user: subprocess.run(
            [str(SSHD), "-T", "-f", str(root.folder / "sshd_config"),
             "-C", f"user={user},host=h,addr=192.0.2.1"],
            capture_output=True, text=True, timeout=30, check=True,
        ).stdout
        for user in ("gpuaas-relay", "root")
    }  # fmt: skip
    assert f"trustedusercakeys {_relay.AUTHORITY}\n" in shown["gpuaas-relay"]
    assert f"trustedusercakeys {world.host.folder.parent}/user_ca.pub\n" in shown["root"]

    def ask(port: int, authority: Path, principal: str, *words: str) -> str:
        now = datetime.now(UTC)
        span = {"valid_after": now - timedelta(hours=1), "valid_before": now + timedelta(hours=1)}
        wish = Signature(key_id="x", principals=(principal,), serial=1, host=False, **span)
        key.with_name("any-cert.pub").write_text(certify(authority, public, wish))
        done = subprocess.run(
            ["ssh", "-F", "/dev/null", "-i", str(key), "-o", "BatchMode=yes", "-p", str(port),
             "-o", f"UserKnownHostsFile={ca.known_hosts(site)}", "-o", f"HostKeyAlias={NODE}",
             *words, f"{USER}@127.0.0.1", *([] if words else ["id"])],
            capture_output=True, text=True, timeout=30, check=False, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        return done.stdout + done.stderr

    theirs, ours = site.gateway_authority, site.user_authority
    line, guest = f"slice:{world.allocation}", ["-W", f"127.0.0.1:{world.guest.port}"]
    assert "uid=" in ask(root.port, ours, ca.OPERATOR)
    assert "Permission denied" in ask(root.port, theirs, ca.OPERATOR)
    assert ask(world.host.port, theirs, line, *guest).startswith("SSH-2.0-")
    assert "Permission denied" in ask(world.host.port, ours, line, *guest)


def test_a_host_key_that_is_revoked_later_is_refused(world: World) -> None:
    """A host that has enrolled with another key since; the gateway hears of it by the records."""
    assert world.run("id").returncode == 0
    with transaction(world.stack.engine) as conn:
        tokens.record_certificate(
            conn, NODE, ACT, certificate="x", public_key=world.host.key, principals=[NODE],
            serial="1", valid_until=4e9,
        )  # fmt: skip
        tokens.replace_certificates(conn, NODE, "", ACT)
    hosts = ca.known_hosts(world.gateway.trust)
    until(lambda: f"@revoked * {world.host.key}" in hosts.read_text())
    refused = world.run("id")
    assert refused.returncode == 255 and "host_not_proven" in refused.stderr


def test_unknown_names_and_keys_are_refused_alike(world: World) -> None:
    world.gateway.limits = replace(world.gateway.limits, report_s=600)
    stranger = world.tree / "stranger"
    new_key(stranger)
    answers = {
        world.run("id", config=world.config(key=stranger)).stderr.replace(world.allocation, "")
    }
    other = "23bd713b-6073-4ef7-8a51-2897e902365d"
    for name in (other, "root", "../../etc"):
        config = world.config()
        config.write_text(config.read_text().replace(f"User {world.allocation}", f"User {name}"))
        answers.add(world.run("id", config=config).stderr.replace(name, ""))
    assert len(answers) == 1 and "Permission denied" in answers.pop()
    # One row, however many names are tried.
    (row,) = world.audit("gateway.refused")
    assert (row["detail"]["code"], row["subject_id"]) == ("access_unknown", world.allocation)
    assert world.sessions() == []


def test_strangers_keep_nobody_out_of_the_audit_log(world: World) -> None:
    limits = replace(QUICK, refusals=6, refusals_of_one=2, report_s=3600)
    gateway = Gateway(world.gateway.engine, world.gateway.trust, "x", limits)
    with transaction(world.stack.engine) as conn:
        public = world.key.with_name("tenant.pub").read_text()
        grant = ssh_access.authorise(conn, world.allocation, ssh_keys.bare(public))

    def refuse(code: str, address: str, user: str = "-", person: str = "") -> int:
        """The rows of audit that there are now."""
        client = Client(gateway)
        client.address, client.person = address, person.partition(":")[0]
        client.grant = replace(grant, owner=person) if person else None
        problem = Problem(code, expected="", found="", remedy="")
        world.on_loop(gateway.refuse(problem, client, user))
        return len(world.audit("gateway.refused"))

    names = [str(uuid.uuid4()) for _ in range(8)]
    assert {refuse("access_unknown", f"192.0.2.{n}", id) for n, id in enumerate(names)} == {1}
    assert {refuse("access_unknown", f"2001:db8::{n}", id) for n, id in enumerate(names)} == {2}
    assert {refuse("token_ended", "192.0.2.1", id) for id in names} == {3}
    assert max(refuse("access_unknown", f"10.0.{n}.1") for n in range(9)) == 6
    assert {refuse("terminal_off", "192.0.2.1", id, "member:a") for id in names[:2]} == {7, 8}
    assert refuse("terminal_off", "192.0.2.1", names[2], "member:a") == 8
    assert refuse("terminal_off", "192.0.2.1", names[2], "member:b") == 9
    # No open session is needed for a new beginning.
    gateway.limits = replace(limits, report_s=0)
    assert refuse("access_unknown", "192.0.2.1") == 10


def test_strangers_close_the_door_for_nobody(world: World) -> None:
    """Connections before login are counted apart; if full, the busiest network loses its first."""
    limits = {"connections": 1, "of_address": 1, "strangers": 4, "strangers_of_address": 3}
    world.gateway.limits = replace(world.gateway.limits, login_s=600, **limits)

    def silent(address: str) -> socket.socket:
        before = len(world.gateway.clients)
        there = ("127.0.0.1", world.port)
        stranger = opened.enter_context(socket.create_connection(there, 20, (address, 0)))
        until(lambda: len(world.gateway.clients) != before)
        return stranger

    def heard(stranger: socket.socket) -> bytes:
        with stranger.makefile("rb") as file:
            return file.read()

    with ExitStack() as opened:
        mine = [silent("127.0.0.2") for _ in range(3)]
        others = [silent("127.0.0.3")]
        fourth = socket.create_connection(("127.0.0.1", world.port), 20, ("127.0.0.2", 0))
        assert b"too_many_connections" in heard(opened.enter_context(fourth))
        assert world.run("id").returncode == 0
        assert b"too_many_connections" in heard(mine[0])
        others[0].settimeout(0.1)
        assert others[0].recv(6) == b"SSH-2."
    # One row or two: how many, a slow machine decides.
    rows = {(row["detail"]["code"], row["actor"]) for row in world.audit("gateway.refused")}
    assert rows == {("too_many_connections", "gateway")}


def test_a_client_that_does_not_log_in_is_cut(world: World) -> None:
    world.gateway.limits = replace(world.gateway.limits, login_s=0.5)
    acceptor = world.on_loop(world.gateway.listen(NAME, 0))
    with socket.create_connection((NAME, acceptor.get_port()), 30) as silent:
        while silent.recv(1 << 10):
            pass
    world.loop.call_soon_threadsafe(acceptor.close)


@pytest.mark.parametrize("terminal", [True])
@pytest.mark.parametrize("how", ["fails", "hangs", "waits"])
def test_no_session_keeps_the_others_from_being_cut(
    world: World, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Neither a session that cannot be judged, nor other work of the process."""
    released, reason = threading.Event(), Client.reason

    def judge(client: Client, conn: sa.Connection, claim: Claim) -> str:
        in_terminal = claim[2]
        if in_terminal and how == "fails":
            raise ValueError("no answer")
        if in_terminal and how == "hangs":
            released.wait(60)
        return reason(client, conn, claim)

    monkeypatch.setattr(Client, "reason", judge)
    words = "echo in; exec sleep 600"
    try:
        with ExitStack() as opened:
            for host in (f"gateway-{world.allocation}", world.allocation):
                line = world.ssh(words, host=host)
                client = opened.enter_context(subprocess.Popen(line, stdout=subprocess.PIPE))
                opened.callback(client.kill)
                assert client.stdout.readline() == b"in\n"
            if how == "waits":
                wait = partial(world.loop.run_in_executor, None, released.wait, 60)
                for _ in range(100):
                    world.loop.call_soon_threadsafe(wait)
            end_allocation(world)
            assert client.wait(20) == 255
    finally:
        released.set()


def test_an_answer_belongs_to_the_claim_that_was_asked(world: World) -> None:
    """A terminal may begin meanwhile; other sessions of the person without a terminal go on."""
    line = world.ssh("echo in; cat")
    with subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as session:
        assert session.stdout.readline() == b"in\n"
        (client,) = world.gateway.clients
        *who, terminal = client.claim
        assert terminal == ""
        with reading(world.stack.engine) as conn:
            assert client.reason(conn, (*who, "")) == ""
            assert client.reason(conn, (*who, "terminal")) == "terminal_off"
        session.communicate(b"")


def end_allocation(world: World) -> str:
    body = {"reason": "no more"}
    path = f"projects/demo/allocations/{world.allocation}/release"
    assert world.stack.client("member").post(path, json=body).status_code == 200
    return "allocation_not_active"


def end_key(world: World) -> str:
    body = {"public_key": world.key.with_name("tenant.pub").read_text(), "reason": "lost"}
    answer = world.stack.client("member").post("projects/demo/ssh-keys/revoke", json=body)
    assert answer.status_code == 200, answer.text
    again = {"public_key": body["public_key"]}
    refused = world.stack.client("member").post("projects/demo/ssh-keys", json=again)
    assert refused.json()["code"] == "ssh_key_revoked"
    return "ssh_key_revoked"


def end_token(world: World) -> str:
    tokens = world.stack.client("admin").get("admin/tokens").json()["items"]
    (mine,) = [token["id"] for token in tokens if token["name"] == "member"]
    assert world.stack.client("admin").delete(f"admin/tokens/{mine}").status_code == 200
    return "token_ended"


@pytest.mark.parametrize("end", [end_allocation, end_key, end_token])
def test_what_ends_cuts_the_session_and_admits_no_other(world: World, end: Any) -> None:
    with subprocess.Popen(
        world.ssh("echo in; exec sleep 60"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as client:
        assert client.stdout.readline() == "in\n"
        config = world.config()
        code = end(world)
        assert client.wait(30) == 255, "not at the end of its sleep"
    (session,) = until(lambda: [s for s in world.sessions() if s["closed_at"] is not None])
    assert session["reason"] == code
    done = world.run("id", config=config)
    assert done.returncode == 255 and "Permission denied" in done.stderr
    world.refused(code)
    row = world.audit("gateway.refused")[0]
    assert (row["subject_id"], row["detail"]["address"]) == (world.allocation, "127.0.0.1")


@pytest.mark.parametrize("limits", [replace(QUICK, check_s=600)])
def test_a_channel_is_authorised_by_itself(world: World) -> None:
    """Its connection may have logged in before the allocation ended, and is not yet cut."""

    async def ask() -> None:
        async with asyncssh.connect(**world.login) as client:
            code = await asyncio.to_thread(end_allocation, world)
            with pytest.raises(asyncssh.ChannelOpenError, match=code):
                await client.open_connection("slice", 22)
            async with client.create_process("id") as process:
                assert code in await process.stderr.read()

    world.on_loop(ask())
    assert world.sessions() == []


def test_a_member_registers_a_key_of_its_own(world: World) -> None:
    mine = world.tree / "mine"
    public = new_key(mine)
    with (world.guest.folder / "authorized_keys").open("a") as file:
        file.write(f"{public}\n")
    config = world.config(key=mine)
    assert world.run("id", config=config).returncode == 255
    stranger = world.stack.client("stranger")
    elsewhere = stranger.post("projects/other/ssh-keys", json={"public_key": public})
    assert elsewhere.status_code == 201
    assert stranger.post("projects/demo/ssh-keys", json={"public_key": public}).status_code == 404
    assert world.run("id", config=config).returncode == 255
    answer = world.stack.client("member").post(
        "projects/demo/ssh-keys", json={"public_key": public}
    )
    assert answer.status_code == 201 and answer.json()["fingerprint"].startswith("SHA256:")
    assert world.run("id", config=config).returncode == 0
    _set(world, api_tokens, expires_at=1.0)
    assert world.run("id", config=config).returncode == 255


def test_a_user_of_the_provider_has_half_a_day(world: World) -> None:
    _set(world, allocations, requested_by="member:oidc:alice")
    assert world.run("id").returncode == 0
    _set(world, allocations, created_at=time.time() - 13 * 3600)
    assert world.run("id").returncode == 255
    world.refused("ssh_key_expired")


def test_hosts_that_hang_and_hosts_with_another_key_are_named(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_way(world)
    withheld = world.run("id")
    # The host leads there, and no server listens.
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(machine, "SSH_PORT", 1)
        elsewhere.setattr(_relay, "PORT", 1)
        open_way(world, world.allocation)
        closed = world.run("id")
    open_way(world, world.allocation)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        world.dial(silent.getsockname()[1])
        patient, world.gateway.limits = world.gateway.limits, IMPATIENT
        hanging = world.run("id")
        world.gateway.limits = patient
    other = world.boot("other", login=world.key.with_name("tenant.pub").read_text())
    world.dial(other.port)
    foreign = world.run("id")
    authority = ca.open_trust(world.tree / "another-site")
    false = world.boot(
        "false", login="none", certify=lambda line: ca.certify_host(authority, line, NODE)
    )
    world.dial(false.port)
    forged = world.run("id")
    world.dial(1)
    away = world.run("id")
    for done, code in (
        (withheld, "relay_refused"),
        (closed, "machine_refused"),
        (hanging, "machine_silent"),
        # A server without a certificate may end the connection first.
        (foreign, "host_"),
        (forged, "host_not_proven"),
        (away, "host_unreachable"),
    ):
        assert done.returncode == 255 and code in done.stderr, done.stderr
    assert "publickey" not in other.log + false.log, "nothing was offered to them"
    ways = ("relay_refused", "machine_refused", "machine_silent")
    world.refused(*ways, "host_not_proven", "host_unreachable")
    assert world.sessions() == []


def test_a_slice_without_an_address_is_no_whole_machine(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its tenant would reach the SSH server of its host."""
    authorise = ssh_access.authorise
    lost = {"address": ""}
    monkeypatch.setattr(ssh_access, "authorise", lambda *given: replace(authorise(*given), **lost))
    done = world.run("id")
    assert done.returncode == 255 and "relay_refused" in done.stderr, done.stderr
    world.refused("relay_refused")
    assert world.sessions() == []


def test_another_guest_and_another_gateway_are_not_believed(world: World) -> None:
    config = world.config()
    hosts = world.tree / "known_hosts"
    right = hosts.read_text()
    mine = new_key(world.tree / "false")
    hosts.write_text(right.replace(world.guest.key, mine))
    assert "Host key verification failed" in world.run("id", config=config).stderr
    authority = right.splitlines()[0].split(" ", 2)[2]
    hosts.write_text(right.replace(authority, mine))
    assert "Host key verification failed" in world.run("id", config=config).stderr
    trust = world.gateway.trust
    world.on_loop(probe(trust, "127.0.0.1", world.port))
    # The server may have closed the connection before the client has sent why it does not go on.
    with pytest.raises((asyncssh.Error, ConnectionError)):
        world.on_loop(probe(trust, "127.0.0.1", world.guest.port))


def test_a_client_that_tries_many_keys_is_cut(world: World) -> None:
    world.gateway.limits = replace(world.gateway.limits, keys=2)
    names = [str(world.tree / f"key{number}") for number in range(3)]
    for name in names:
        new_key(Path(name))

    async def connect(*keys: str) -> None:
        async with asyncssh.connect(
            *("127.0.0.1", world.port),
            username=world.allocation, client_keys=[*keys], known_hosts=None, config=None,
        ):  # fmt: skip
            pass

    world.on_loop(connect(names[0], str(world.key)))
    with pytest.raises(asyncssh.DisconnectError, match="too_many_keys"):
        world.on_loop(connect(*names, str(world.key)))


def test_a_client_that_reads_nothing_does_not_fill_the_gateway(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library heeds the window that a client grants, and this client grants far too much."""
    flood = socket.create_server(("127.0.0.1", 0))
    monkeypatch.setattr(machine, "SSH_PORT", flood.getsockname()[1])
    monkeypatch.setattr(_relay, "PORT", flood.getsockname()[1])
    open_way(world, world.allocation)
    threading.Thread(target=_send, args=(flood, AMOUNT), daemon=True).start()

    async def read_nothing() -> tuple[int, int]:
        client = await asyncssh.connect(**world.login)
        reader, _ = await client.open_connection("slice", 22, window=1 << 30)
        await reader.readexactly(1)
        client._transport.pause_reading()  # type: ignore[union-attr]
        (session,) = world.gateway.clients
        taken = -1
        while taken != session.traffic()[1]:
            taken = session.traffic()[1]
            await asyncio.sleep(0.5)
        client._transport.resume_reading()  # type: ignore[union-attr]
        rest = 0
        while part := await reader.read(1 << 20):
            rest += len(part)
        client.abort()
        return taken, rest + 1

    taken, whole = world.on_loop(read_nothing())
    assert taken < AMOUNT / 4 and whole == AMOUNT
    flood.close()


@pytest.mark.parametrize("limits", [replace(QUICK, unread=100_000, idle_s=300)])
def test_a_client_that_reads_no_answers_is_cut(world: World) -> None:
    """Each request of a client has an answer, which stays in memory until it is read."""

    async def ask() -> str:
        client = await asyncssh.connect(**world.login)
        (session,) = world.gateway.clients
        assert isinstance(session, Client) and session._connection is not None
        near: Any = client._transport
        far: Any = session._connection._transport
        line = far.get_extra_info("socket")
        line.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16_384)
        # A packet for each answer fills the memory of the client's socket before its window is
        # shut. The kernel then drops acknowledgements, and requests with them, for a minute.
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 0)
        near.pause_reading()
        while not session.ended.is_set():
            for _ in range(200):
                client.send_packet(MSG_GLOBAL_REQUEST, String(b"nothing"), Boolean(True))
            await asyncio.sleep(0.01)
        client.abort()
        return session._why

    assert world.on_loop(ask()) == "answers_not_read"


def test_a_gateway_that_stops_waits_for_its_work_and_what_that_leaves(world: World) -> None:
    ended: list[str] = []

    async def leave() -> None:
        await asyncio.sleep(0.05)
        ended.append("left")

    async def work() -> None:
        await asyncio.sleep(0)
        sessions.keep(leave())

    async def stop() -> None:
        sessions.keep(work())
        await world.gateway.stop()

    # Of a loop that ended first, as a test's or a command's.
    other = asyncio.new_event_loop()
    forsaken = other.create_task(asyncio.sleep(60))
    sessions._tasks.add(forsaken)
    world.on_loop(stop())
    assert ended == ["left"]
    forsaken.cancel()
    other.run_until_complete(asyncio.wait([forsaken]))
    sessions._tasks.discard(forsaken)
    other.close()


def test_one_tenant_does_not_take_all_logins_at_a_host(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host's sshd drops those of the service and of other tenants when too many are begun."""
    monkeypatch.setattr(machine, "LOGINS_AT_HOST", machine.LOGINS_OF_ALLOCATION + 1)
    other = world.launch(key="other")
    silent = socket.create_server(("127.0.0.1", 0))
    world.dial(silent.getsockname()[1])
    begun: list[socket.socket] = []

    def accept() -> None:
        with suppress(OSError):
            while True:
                begun.append(silent.accept()[0])

    threading.Thread(target=accept, daemon=True).start()

    async def ask(allocation: str, count: int) -> list[asyncssh.SSHClientConnection]:
        made = []
        for _ in range(count):
            client = await asyncssh.connect(
                *("127.0.0.1", world.port),
                username=allocation, client_keys=[str(world.key)], known_hosts=None, config=None,
            )  # fmt: skip
            made.append(client)
            asking = client.open_connection("slice", 22)
            asyncio.create_task(asking).add_done_callback(asyncio.Task.exception)
        return made

    clients = world.on_loop(ask(world.allocation, 6))
    until(lambda: len(begun) >= machine.LOGINS_OF_ALLOCATION)
    time.sleep(0.5)
    assert len(begun) == machine.LOGINS_OF_ALLOCATION
    clients += world.on_loop(ask(other, machine.LOGINS_OF_ALLOCATION))
    until(lambda: len(begun) > machine.LOGINS_OF_ALLOCATION)
    time.sleep(0.5)
    # All at once, or a freed turn would go to another of these clients.
    world.loop.call_soon_threadsafe(lambda: [client.abort() for client in clients])
    until(lambda: not world.gateway.clients)
    silent.close()
    for connection in begun:
        connection.close()
    assert len(begun) == machine.LOGINS_AT_HOST, "who has hung up logs in no more"


@pytest.mark.parametrize("terminal", [False, True])
def test_a_client_that_hangs_up_leaves_no_login_at_the_host(
    world: World, terminal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No limit counts leftover logins."""
    real, begun, going = machine.Machine._login, threading.Event(), threading.Event()
    logins: list[asyncssh.SSHClientConnection] = []

    async def log_in(self: machine.Machine) -> asyncssh.SSHClientConnection:
        begun.set()
        await asyncio.to_thread(going.wait, 60)
        logins.append(await real(self))
        return logins[-1]

    monkeypatch.setattr(machine.Machine, "_login", log_in)
    host = f"gateway-{world.allocation}" if terminal else ""
    line = world.ssh("sleep 60", host=host)
    with subprocess.Popen(line, start_new_session=True) as client:
        assert begun.wait(20)
        # With the client of the jump.
        os.killpg(client.pid, signal.SIGKILL)
    until(lambda: not world.gateway.clients)
    going.set()
    until(lambda: logins and logins[0].is_closed())


class Deaf(asyncssh.SSHClientSession[str]):
    """It never closes its channel, which the server has closed."""

    def connection_made(self, chan: Any) -> None:
        closed = asyncssh.constants.MSG_CHANNEL_CLOSE
        chan._packet_handlers = {**chan._packet_handlers, closed: lambda *_: None}


@pytest.mark.parametrize("terminal", [True])
def test_channels_that_their_client_never_closes_are_bounded(world: World, terminal: bool) -> None:
    """So are the variables that it sends: the gateway keeps none."""

    async def fill() -> tuple[int, int]:
        client = await asyncssh.connect(**world.login)
        (session,) = world.gateway.clients
        assert isinstance(session, Client)
        opened, variables = 0, {f"name{number}": "x" * 10_000 for number in range(50)}
        with pytest.raises(asyncssh.ChannelOpenError, match="too many channels"):
            while opened < 2 * world.gateway.limits.channels:
                await client.create_session(Deaf, "true", env=variables)
                opened += 1
        kept = [shell.channel.get_environment() for shell in session._terminals]
        client.abort()
        return opened, sum(map(len, kept))

    assert terminal
    assert world.on_loop(fill()) == (world.gateway.limits.channels, 0)
    # The client aborts shells that are being opened, which leaves refusals of other kinds.
    codes = {"too_many_channels"}
    until(lambda: codes <= {row["detail"]["code"] for row in world.audit("gateway.refused")})


@pytest.mark.parametrize("limits", [replace(QUICK, channels=3, machine_s=300)])
def test_channels_that_are_being_opened_are_bounded(world: World, mute: Mute) -> None:
    mute.host()

    async def ask() -> list[str]:
        client = await asyncssh.connect(**world.login)
        tasks = [asyncio.create_task(client.open_connection("slice", 22)) for _ in range(5)]
        async with asyncio.timeout(60):
            while sum(each.done() for each in tasks) < 2:
                await asyncio.sleep(0.02)
        refused = [str(each.exception()) for each in tasks if each.done()]
        client.abort()
        await asyncio.gather(*tasks, return_exceptions=True)
        return refused

    assert world.on_loop(ask()) == ["too many channels"] * 2


@pytest.mark.parametrize("limits", [replace(QUICK, channels=3)])
@pytest.mark.parametrize("whole", [False, True])
def test_a_machine_that_reads_nothing_holds_no_connection_of_a_closed_channel(
    world: World, whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its client closes each channel once the gateway waits for the machine, and opens another."""
    deaf = socket.create_server(("127.0.0.1", 0))
    port = deaf.getsockname()[1]
    monkeypatch.setattr(machine, "SSH_PORT", port)
    monkeypatch.setattr(_relay, "PORT", port)
    open_way(world, world.allocation)
    if whole:
        _make_whole(world, port)
    most, far_ends = world.gateway.limits.channels, []

    async def fill() -> int:
        client = await asyncssh.connect(**world.login)
        (session,) = world.gateway.clients
        assert isinstance(session, Client)
        opened, part = 0, bytes(32 << 10)
        with suppress(asyncssh.ChannelOpenError):
            while opened < 2 * most:
                _, writer = await client.open_connection("slice", 22)
                opened += 1
                near, far = session._ends[-1]
                far_ends.append(far)
                while not far._channel.get_write_buffer_size():
                    before = near.received
                    writer.write(part)
                    while near.received < before + len(part):
                        await asyncio.sleep(0.001)
                writer.channel.abort()
                while not near.lost:
                    await asyncio.sleep(0.001)
        client.abort()
        return opened

    assert world.on_loop(fill()) == most
    until(lambda: all(far.lost for far in far_ends))
    deaf.close()


@pytest.mark.parametrize("limits", [replace(QUICK, channels=3, machine_s=300)])
def test_connections_that_were_given_up_are_bounded(world: World, mute: Mute) -> None:
    """The host may still open them, as long as another keeps its connection."""
    mute.host()

    async def ask() -> None:
        async with asyncssh.connect(**world.login) as client:
            first = asyncio.create_task(client.open_connection("slice", 22))
            while not mute.requested.is_set():
                await asyncio.sleep(0.02)
            (session,) = world.gateway.clients
            assert isinstance(session, Client) and session.machine is not None
            session.machine._timeout_s = 0.2
            for words in ("machine_silent", "machine_silent", "too many channels"):
                with pytest.raises(asyncssh.ChannelOpenError, match=words):
                    await client.open_connection("slice", 22)
            client.abort()
            await asyncio.gather(first, return_exceptions=True)

    world.on_loop(ask())


def test_a_refused_session_leaves_no_connection_in_the_machine(world: World) -> None:
    """Its record is refused after the machine's answer; no limit counts leftover connections."""
    world.gateway.limits = replace(QUICK, begun=0, begun_per_s=0.001)

    async def ask() -> None:
        async with asyncssh.connect(**world.login) as client:
            with pytest.raises(asyncssh.ChannelOpenError, match="too_many_connections"):
                await client.open_connection("slice", 22)
            (session,) = world.gateway.clients
            assert isinstance(session, Client) and session.machine is not None
            (far,) = session.machine._ends
            async with asyncio.timeout(20):
                while not far.lost:
                    await asyncio.sleep(0.02)

    world.on_loop(ask())


@pytest.mark.parametrize("limits", [replace(QUICK, machine_s=300)])
def test_a_machine_that_speaks_before_its_session_is_recorded_fills_no_memory(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    flood = socket.create_server(("127.0.0.1", 0))
    monkeypatch.setattr(machine, "SSH_PORT", flood.getsockname()[1])
    monkeypatch.setattr(_relay, "PORT", flood.getsockname()[1])
    open_way(world, world.allocation)
    threading.Thread(target=_send, args=(flood, AMOUNT // 4), daemon=True).start()
    begin, recording = Client.begin, asyncio.Event()

    async def slowly(self: Client, *given: Any) -> None:
        await recording.wait()
        await begin(self, *given)

    monkeypatch.setattr(Client, "begin", slowly)

    async def read() -> tuple[int, int]:
        async with asyncssh.connect(**world.login) as client:
            task = asyncio.create_task(client.open_connection("slice", 22))
            (session,) = world.gateway.clients
            assert isinstance(session, Client) and session.machine is not None
            while not session.machine._ends:
                await asyncio.sleep(0.02)
            (far,), taken = session.machine._ends, -1
            while taken != far.received:
                taken = far.received
                await asyncio.sleep(0.5)
            recording.set()
            reader, _ = await task
            whole = 0
            while part := await reader.read(1 << 20):
                whole += len(part)
            return taken, whole

    taken, whole = world.on_loop(read())
    assert taken < AMOUNT / 16 and whole == AMOUNT // 4
    flood.close()


@pytest.mark.parametrize("first", ["client", "machine"])
def test_a_connection_that_both_sides_have_ended_is_closed(world: World, first: str) -> None:
    """That of a whole machine is of TCP, and an end of each direction alone leaves it open."""
    server = socket.create_server(("127.0.0.1", 0))
    _make_whole(world, server.getsockname()[1])

    async def end() -> None:
        async with asyncssh.connect(**world.login) as client:
            reader, writer = await client.open_connection("slice", 22)
            (session,) = world.gateway.clients
            assert isinstance(session, Client)
            ((near, far),) = session._ends
            connection, _ = await asyncio.to_thread(server.accept)
            with connection:
                if first == "machine":
                    connection.shutdown(socket.SHUT_WR)
                    assert await reader.read() == b""
                writer.write_eof()
                assert await asyncio.to_thread(connection.recv, 1) == b""
                assert first == "machine" or not far.lost
                if first == "client":
                    connection.shutdown(socket.SHUT_WR)
                async with asyncio.timeout(20):
                    while not (near.lost and far.lost):
                        await asyncio.sleep(0.02)

    world.on_loop(end())
    server.close()


@pytest.mark.parametrize("limits", [replace(QUICK, unread=100_000, machine_s=300)])
def test_a_host_that_reads_no_answers_is_given_up(world: World, mute: Mute) -> None:
    """Its requests keep the connection from being found dead, and each answer waits in memory."""
    mute.host()

    async def ask() -> None:
        async with asyncssh.connect(**world.login) as client:
            asking = asyncio.create_task(client.open_connection("slice", 22))
            while not mute.requested.is_set():
                await asyncio.sleep(0.02)
            (session,), (host,) = world.gateway.clients, mute.connections
            assert isinstance(session, Client) and session.machine is not None
            far: Any = session.machine._host._transport  # type: ignore[union-attr]
            far.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16_384)
            host._transport.pause_reading()  # type: ignore[union-attr]
            async with asyncio.timeout(60):
                while not asking.done():
                    for _ in range(200):
                        host.send_packet(MSG_GLOBAL_REQUEST, String(b"nothing"), Boolean(True))
                    await asyncio.sleep(0.01)
            with pytest.raises(asyncssh.ChannelOpenError, match="machine_refused"):
                await asking
            assert not session.ended.is_set()
            client.abort()

    world.on_loop(ask())


def _quicken(monkeypatch: pytest.MonkeyPatch, *, clients: bool) -> None:
    """Ask clients, or else hosts, thirty times as often whether they are still there."""
    usual = asyncssh.connection.SSHConnection._set_keepalive_timer

    def set_timer(self: Any) -> None:
        usual(self)
        if self._keepalive_timer and self.is_server() == clients:
            self._keepalive_timer.cancel()
            self._keepalive_timer = self._loop.call_later(
                self._keepalive_interval / 30, self._keepalive_timer_callback
            )

    monkeypatch.setattr(asyncssh.connection.SSHConnection, "_set_keepalive_timer", set_timer)


@pytest.mark.parametrize("terminal", [True])
def test_a_client_that_vanishes_leaves_its_place(
    world: World, terminal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its machine was switched off, and says nothing any more; its recording is completed."""
    assert terminal
    _quicken(monkeypatch, clients=True)
    with transaction(world.stack.engine) as conn:
        terminals.record_terminals(conn, "demo", ACT, enabled=True)

    async def vanish() -> None:
        client = await asyncssh.connect(**world.login)
        process = await client.create_process("echo in; cat")
        assert await process.stdout.readline() == "in\n"
        client._transport.pause_reading()  # type: ignore[union-attr]
        async with asyncio.timeout(60):
            while world.gateway.clients:
                await asyncio.sleep(0.1)
        client.abort()

    world.on_loop(vanish())
    until(lambda: all(row["closed_at"] and row["recording_digest"] for row in world.sessions()))


@pytest.mark.parametrize("limits", [replace(QUICK, machine_s=300)])
def test_a_host_that_vanishes_is_given_up(
    world: World, mute: Mute, monkeypatch: pytest.MonkeyPatch
) -> None:
    _quicken(monkeypatch, clients=False)
    mute.host()

    async def ask() -> None:
        async with asyncssh.connect(**world.login) as client:
            task = asyncio.create_task(client.open_connection("slice", 22))
            while not mute.requested.is_set():
                await asyncio.sleep(0.02)
            (host,) = mute.connections
            host._transport.pause_reading()  # type: ignore[union-attr]
            async with asyncio.timeout(60):
                with pytest.raises(asyncssh.ChannelOpenError):
                    await task

    world.on_loop(ask())


def test_the_certificate_of_a_gateway_that_runs_is_renewed(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert server._RENEW_S < ca.HOST_DAYS * 86_400 / 2
    monkeypatch.setattr(server, "_RENEW_S", 0.0)

    def shown() -> str:
        line = ["ssh-keyscan", "-c", "-t", "ed25519", "-p", str(world.port), NAME]
        done = subprocess.run(line, capture_output=True, text=True, timeout=60, check=True)
        assert "-cert-v01@" in done.stdout, done.stderr
        return done.stdout

    before = shown()
    until(lambda: shown() != before)
    assert world.run("id").returncode == 0


def _make_whole(world: World, port: int) -> None:
    """Turn the slice into a whole machine, whose SSH server has this port."""
    _set(world, nodes, tenant_address="127.0.0.1", tenant_port=port)
    _set(world, allocations, capacity_shape="baremetal", gpu_count=0)


def _send(flood: socket.socket, amount: int) -> None:
    connection, _ = flood.accept()
    with connection:
        connection.sendall(bytes(amount))


def test_a_database_that_is_away_admits_nobody_and_ends_what_it_cannot_judge(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    with subprocess.Popen(
        world.ssh("echo in; exec sleep 60"), stdout=subprocess.PIPE, text=True
    ) as client:
        assert client.stdout.readline() == "in\n"
        config = world.config()

        def away(_engine: object) -> None:
            raise ConnectionError("the database is away")

        monkeypatch.setattr(sessions, "reading", away)
        assert "Try again in a minute" in world.run("id", config=config).stderr
        assert client.poll() is None
        world.gateway.limits = replace(world.gateway.limits, unknown_s=0)
        assert client.wait(30) == 255
    monkeypatch.undo()
    (session,) = until(lambda: [s for s in world.sessions() if s["closed_at"]])
    assert session["reason"] == "authorisation_unavailable"


def test_a_terminal_that_opens_while_sessions_are_authorised_ends_no_watch(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The terminal is part of the claim, so the claim differs after the answer."""
    gateway = Gateway(world.gateway.engine, world.gateway.trust, "x", QUICK)
    client = Client(gateway)
    client.since = 1.0
    gateway.clients.add(client)
    claims = itertools.count()
    monkeypatch.setattr(Client, "claim", property(lambda _: ("grant", "key", next(claims))))
    monkeypatch.setattr(Client, "reason", lambda *_: "allocation_ended")
    asyncio.run(gateway._check(2.0))
    assert client._why == "allocation_ended"


def test_a_silence_of_the_database_is_counted_from_the_last_answer(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long a session has been open by then."""
    gateway = Gateway(world.gateway.engine, world.gateway.trust, "x", QUICK)
    client = Client(gateway)
    client.since = 1.0
    gateway.clients.add(client)
    monkeypatch.setattr(Client, "reason", lambda *_: "")
    monkeypatch.setattr(Client, "idle", lambda *_: "")
    ends = []
    for now in (2.0, 1_000.0):
        asyncio.run(gateway._check(now))
    monkeypatch.setattr(gateway, "_judge", lambda *_: None)
    for now in (1_000.0 + QUICK.unknown_s, 1_001.0 + QUICK.unknown_s):
        asyncio.run(gateway._check(now))
        ends.append(client._why)
    assert ends == ["closed", "authorisation_unavailable"]


def test_an_answer_counts_from_the_round_that_asked(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The database may hold it up, and nothing is known of the time since."""
    gateway = Gateway(world.gateway.engine, world.gateway.trust, "x", QUICK)
    client = Client(gateway)
    client.since = 1.0
    gateway.clients.add(client)
    answering = threading.Event()

    def hang(*_: object) -> str:
        answering.wait(60)
        return ""

    monkeypatch.setattr(Client, "reason", hang)
    monkeypatch.setattr(Client, "idle", lambda *_: "")
    asyncio.run(gateway._check(2.0))
    answering.set()
    until(lambda: gateway._judged)
    monkeypatch.setattr(gateway, "_judge", lambda *_: None)
    for now, why in ((1.0 + QUICK.unknown_s, "closed"), (3.0 + QUICK.unknown_s, LOST)):
        asyncio.run(gateway._check(now))
        assert client._why == why


def test_a_session_that_waits_longest_is_authorised_first(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A round may have no time for all."""
    gateway = Gateway(world.gateway.engine, world.gateway.trust, "x", QUICK)
    waiting = [5.0, 3.0, 8.0, 1.0, 9.0, 2.0, 7.0, 4.0, 6.0]
    for since in waiting:
        client = Client(gateway)
        client.since = client.judged_at = since
        gateway.clients.add(client)
    monkeypatch.setattr(Client, "claim", property(lambda self: ("grant", "key", self.since)))
    monkeypatch.setattr(Client, "idle", lambda *_: "")
    order: list[float] = []
    monkeypatch.setattr(Client, "reason", lambda self, *_: order.append(self.since) or "")
    asyncio.run(gateway._check(9.0))
    assert order == sorted(waiting)


def test_a_client_that_has_gone_leaves_no_open_session(world: World) -> None:
    """Its machine may answer when the end is recorded already."""
    client = Client(world.gateway)
    with transaction(world.stack.engine) as conn:
        public = world.key.with_name("tenant.pub").read_text()
        grant = ssh_access.authorise(conn, world.allocation, ssh_keys.bare(public))

    async def late() -> None:
        await client.finish()
        with pytest.raises(ConnectionError):
            await client.begin(grant, "jump")

    world.on_loop(late())
    assert world.sessions() == []


@pytest.mark.parametrize("limit", ["of_address", "of_member", "of_allocation", "connections"])
def test_limits_of_connections(world: World, limit: str) -> None:
    world.gateway.limits = replace(world.gateway.limits, **{limit: 1})
    with subprocess.Popen(
        world.ssh("echo in; cat"), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as client:
        assert client.stdout.readline() == "in\n"
        assert world.run("id").returncode == 255
        client.communicate("")
    until(lambda: not world.gateway.clients)
    assert world.run("id").returncode == 0
    (row,) = until(lambda: world.audit("gateway.refused"))
    assert row["detail"]["code"] == "too_many_connections"
    assert row["actor"].startswith("member:member#")


def test_two_gateways_share_the_limit_of_a_machine_and_its_release(world: World) -> None:
    """Each is a process of its own, which knows of the other by the records only."""
    other = Gateway(world.gateway.engine, world.gateway.trust, NAME, QUICK)
    acceptor = world.on_loop(other.listen(NAME, 0))
    running = asyncio.run_coroutine_threadsafe(other.run(acceptor), world.loop)
    config, there = world.config(), world.tree / "other_config"
    with (world.tree / "known_hosts").open("a+") as file:
        file.seek(0)
        port = str(acceptor.get_port())
        file.write(file.read().replace(str(world.port), port))
    there.write_text(config.read_text().replace(f"Port {world.port}", f"Port {port}"))
    words = "echo in; exec sleep 60"

    def connect(config: Path) -> subprocess.Popen[str]:
        line = world.ssh(words, config=config)
        client = opened.enter_context(subprocess.Popen(line, stdout=subprocess.PIPE, text=True))
        opened.callback(client.kill)
        assert client.stdout.readline() == "in\n"
        return client

    try:
        with ExitStack() as opened:
            other.limits = replace(QUICK, of_allocation=1)
            clients = [connect(config)]
            refused = world.run("id", config=there)
            assert "too_many_connections" in refused.stderr, refused.stderr
            other.limits = QUICK
            clients.append(connect(there))
            assert [len(each.clients) for each in (world.gateway, other)] == [1, 1]
            end_allocation(world)
            assert [client.wait(20) for client in clients] == [255, 255]
        until(lambda: all(session["closed_at"] for session in world.sessions()))
        reasons = [session["reason"] for session in world.sessions()]
        assert reasons == ["allocation_not_active"] * 2
    finally:
        running.cancel()
        world.loop.call_soon_threadsafe(acceptor.close)
        world.on_loop(other.stop())


def test_a_member_begins_sessions_at_a_rate(world: World) -> None:
    """Each leaves a row of its own and two of the audit log."""
    world.gateway.limits = replace(QUICK, begun=2, begun_per_s=0.001)
    answers = [world.run("true") for _ in range(3)]
    assert [each.returncode for each in answers] == [0, 0, 255]
    assert "too_many_connections" in answers[-1].stderr
    assert len(world.sessions()) == 2


def test_a_network_of_ipv6_counts_as_one_client(world: World) -> None:
    """Each machine there may have as many addresses as it likes."""
    gateway = Gateway(world.gateway.engine, world.gateway.trust, "x", replace(QUICK, of_address=2))

    def connect(address: str) -> bool:
        client = Client(gateway)
        client.address, client.since = address, 1.0
        try:
            gateway.require_room(client)
        except Problem as problem:
            assert problem.code == "too_many_connections"
            return False
        gateway.clients.add(client)
        return True

    near = [f"2001:db8:0:1::{number:x}" for number in (1, 2)]
    assert [connect(name) for name in near] == [True, True]
    assert not connect("2001:db8:0:1:ffff::9")
    assert connect("2001:db8:0:2::1") and connect("fe80::1%eth0")
    assert [connect(f"192.0.2.{number}") for number in (1, 2, 3)] == [True] * 3
    assert [connect(name) for name in ("::ffff:192.0.2.1", "192.0.2.1")] == [True, False]


def test_a_member_with_many_machines_and_networks_leaves_room_for_others(world: World) -> None:
    limits = replace(QUICK, connections=4, of_member=2)
    gateway = Gateway(world.gateway.engine, world.gateway.trust, "x", limits)
    with transaction(world.stack.engine) as conn:
        public = world.key.with_name("tenant.pub").read_text()
        grant = ssh_access.authorise(conn, world.allocation, ssh_keys.bare(public))
    networks = itertools.count(1)

    def connect(owner: str) -> bool:
        client = Client(gateway)
        client.address, client.since = f"192.0.2.{next(networks)}", 1.0
        client.grant = replace(grant, owner=owner, allocation_id=client.address)
        try:
            gateway.require_room(client)
        except Problem as problem:
            assert problem.code == "too_many_connections"
            assert "2 connections of one member" in problem.expected
            return False
        gateway.clients.add(client)
        return True

    assert [connect(grant.owner) for _ in range(4)] == [True, True, False, False]
    assert connect("another")


def test_an_idle_login_and_a_flood_of_refusals_leave_little(world: World) -> None:
    patient = replace(world.gateway.limits, refusals=2, report_s=3600)
    world.gateway.limits = replace(patient, idle_s=0.5)
    idle = [*world.ssh(host=f"gateway-{world.allocation}")[:-1], "-N"]
    done = subprocess.run(
        [*idle, f"gateway-{world.allocation}"],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 255 and done.stderr.rstrip().endswith("gpuaas: idle"), done.stderr
    world.gateway.limits = patient
    for port in range(30, 36):
        gateway = f"gateway-{world.allocation}"
        words = [*world.ssh(host=gateway)[:-1], "-W", f"slice:{port}", gateway]
        subprocess.run(words, capture_output=True, timeout=60, check=False)
    assert len(until(lambda: world.audit("gateway.refused"))) == 1


@pytest.mark.parametrize("limits", [ROOMY])
def test_two_hundred_sessions_at_once_are_served_and_cut(world: World) -> None:
    line = world.ssh("echo in; exec sleep 600")
    many = [subprocess.Popen(line, stdout=subprocess.PIPE) for _ in range(200)]
    try:
        assert all(client.stdout and client.stdout.readline() == b"in\n" for client in many)
        end_key(world)
        until(lambda: not world.gateway.clients, 60)
        assert {client.wait(60) for client in many} == {255}
    finally:
        for client in many:
            client.kill()
            client.communicate()


def _set(world: World, table: sa.Table, **values: Any) -> None:
    with transaction(world.stack.engine) as conn:
        update = sa.update(table)
        if table is api_tokens:
            update = update.where(api_tokens.c.name == "member")
        conn.execute(update.values(**values))

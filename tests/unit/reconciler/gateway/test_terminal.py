"""Terminals in a real guest: by SSH through the gateway, and by WebSocket from the console."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
import logging
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import asyncssh
import httpx
import hypothesis
import pytest
import sqlalchemy as sa
from asyncssh.constants import MSG_CHANNEL_CLOSE
from hypothesis import strategies as st
from websockets.asyncio.client import connect as connect_async
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect
from websockets.typing import Origin, Subprotocol

from reconciler import logs
from reconciler.api.app import create_app
from reconciler.api.security import BURST
from reconciler.console.app import mount
from reconciler.console.session import of_socket
from reconciler.db.engine import transaction
from reconciler.db.schema import allocations, terminal_recordings, terminal_tickets
from reconciler.gateway import sessions, web
from reconciler.gateway.machine import Machine
from reconciler.gateway.server import Client
from reconciler.gateway.sessions import Limits, Sessions
from reconciler.gateway.terminal import Recording
from reconciler.records import terminals
from reconciler.settings import Settings
from reconciler.work import loops
from tests.unit.reconciler.api.provider import AUDIENCE, running
from tests.unit.reconciler.api.stack import ACT, NODE, listening
from tests.unit.reconciler.api.test_canaries import ERROR, canaries
from tests.unit.reconciler.benchmark.sshd import USER
from tests.unit.reconciler.gateway.conftest import (
    IMPATIENT,
    NAME,
    QUICK,
    Mute,
    World,
    open_way,
    seed,
)
from tests.unit.reconciler.gateway.test_gateway import end_allocation, end_token
from tests.unit.reconciler.service.service import until

pytestmark = pytest.mark.covers("SLICE-10", "P8")
READY = "session_ready"


@pytest.fixture
def terminal() -> bool:
    return True


@dataclass
class Site:
    """The service of this world on a free port, with the console and its terminals."""

    world: World
    port: int
    app: Any

    @property
    def base(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def token(self, who: str = "member") -> dict[str, str]:
        return {"Authorization": f"Bearer {self.world.stack.secrets[who]}"}

    def cookie(self, who: str = "member") -> dict[str, str]:
        data = {"token": self.world.stack.secrets[who]}
        answer = httpx.post(
            f"{self.base}/console/login", data=data, headers={"Origin": self.base}, timeout=60
        )
        assert answer.status_code == 303
        return {"Cookie": f"gpuaas={answer.cookies['gpuaas']}"}

    def ticket(self, headers: dict[str, str] | None = None) -> dict[str, Any]:
        path = f"projects/demo/allocations/{self.world.allocation}/terminal"
        url = f"{self.base}/api/v1/{path}"
        answer = httpx.post(url, headers=headers or self.token(), timeout=60)
        assert answer.status_code == 201, answer.text
        return dict(answer.json())

    def dial(self, headers: dict[str, str] | None = None, **options: Any) -> ClientConnection:
        """A socket that has sent nothing yet."""
        return connect(
            f"ws://127.0.0.1:{self.port}/terminal",
            additional_headers=headers or self.token(),
            subprotocols=options.pop("subprotocols", [Subprotocol(web.PROTOCOL)]),
            compression=None,
            proxy=None,
            open_timeout=60,
            **options,
        )

    @contextmanager
    def open(self, ticket: str = "", **options: Any) -> Iterator[Web]:
        with self.dial(**options) as client:
            terminal = Web(client)
            given = ticket or self.ticket()["ticket"]
            terminal.send("open", ticket=given, columns=80, rows=24)
            yield terminal

    @property
    def live(self) -> list[Any]:
        return [each for hall in self.app.state.terminals for each in hall.clients]


@dataclass
class Web:
    """A terminal as the page sees it."""

    client: ClientConnection
    shown: bytes = b""

    def send(self, event: str, **fields: Any) -> None:
        self.client.send(json.dumps({"event": event, **fields}))

    def event(self) -> dict[str, Any]:
        """The next event."""
        while isinstance(frame := self.client.recv(20), bytes):
            self.shown += frame
            assert len(self.shown) < 4 << 20, "no event among much output"
        return dict(json.loads(frame))

    def ready(self) -> dict[str, Any]:
        event = self.event()
        assert event["event"] == READY, event
        return event

    def until(self, text: bytes) -> None:
        while text not in self.shown:
            frame = self.client.recv(20)
            assert isinstance(frame, bytes), frame
            self.shown += frame

    def end(self) -> tuple[str, int, str]:
        """The last event's code and words, and the code of the close frame."""
        event = self.event()
        assert event["event"] == "closed", event
        with pytest.raises(ConnectionClosed) as closed:
            self.client.recv(20)
        return event["code"], closed.value.rcvd.code, event["reason"]


@pytest.fixture
def site(world: World, limits: Limits) -> Iterator[Site]:
    with serving(world, limits) as site:
        yield site


@contextmanager
def serving(world: World, limits: Limits) -> Iterator[Site]:
    settings, engine = world.stack.settings, world.stack.engine
    app = web.mount(mount(create_app(settings, engine)), of_socket, limits)
    options = {"ws_max_size": web.FRAME, "ws_per_message_deflate": False}
    with (
        pytest.MonkeyPatch.context() as patch,
        listening(app, access_log=False, timeout_graceful_shutdown=None, **options) as url,
    ):
        patch.setattr(web, "_OPEN_S", 600.0)
        patch.setattr(web, "_CLOSE_S", 60.0)
        site = Site(world, int(url.rpartition(":")[2]), app)
        yield site
    assert not site.live


def shell(world: World, *words: str, typed: str | None = None) -> subprocess.CompletedProcess[str]:
    """`ssh ALLOCATION@GATEWAY`."""
    line = [*world.ssh(host=f"gateway-{world.allocation}")]
    line[1:1] = words[:1] if words[:1] == ("-tt",) else []
    rest = words[1:] if words[:1] == ("-tt",) else words
    return subprocess.run(
        [*line, *rest], capture_output=True, text=True, timeout=60, check=False, input=typed or ""
    )


def test_ssh_to_the_gateway_opens_a_shell_in_the_slice(world: World) -> None:
    done = shell(world, "-tt", typed="echo $((40 + 2))-$TERM; tty; exit 7\r")
    assert done.returncode == 7 and "42-" in done.stdout and "/dev/pts/" in done.stdout, done.stderr
    (session,) = until(lambda: [s for s in world.sessions() if s["closed_at"]])
    assert (session["way"], session["reason"]) == ("terminal", "closed")
    assert session["bytes_in"] > 10 and session["bytes_out"] > 40
    done = shell(world, "cat; echo out; echo err >&2; kill -TERM $$", typed="given\n")
    assert (done.stdout, done.stderr) == ("given\nout\n", "err\n") and done.returncode != 0


def gpuaas(world: World, site: Site, *words: str) -> subprocess.CompletedProcess[str]:
    """The installed program, as a member runs it."""
    token = world.key.with_name("token")
    token.write_text(world.stack.secrets["member"])
    token.chmod(0o600)
    environment = {"GPUAAS_API": site.base, "GPUAAS_TOKEN_FILE": str(token)}
    return subprocess.run(
        [sys.executable, "-m", "reconciler.cli.main", words[0], world.allocation,
         "--project", "demo", "--key", str(world.key), *words[1:]],
        env={**os.environ, **environment, "XDG_CONFIG_HOME": str(token.parent)},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


def test_the_command_reaches_the_guest(world: World, site: Site) -> None:
    done = gpuaas(world, site, "ssh", "--", "id", "-un")
    assert (done.stdout.strip(), done.returncode) == (USER, 0), done.stderr
    (session,) = until(lambda: [row for row in world.sessions() if row["closed_at"]])
    assert (session["way"], session["reason"]) == ("jump", "closed")


def test_the_log_holds_no_command_of_a_tenant(world: World, tmp_path: Path) -> None:
    """Nor a line for each thing that a client does. The SSH library logs both."""
    lines: list[tuple[str, str]] = []
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    root.handlers.clear()
    try:
        logs.configure(Settings(state_dir=tmp_path))
        root.handlers[0].emit = lambda line: lines.append((line.name, line.getMessage()))  # type: ignore[method-assign]
        logging.getLogger("gpuaas.gateway").info("ready")
        assert shell(world, "echo tok-$((40 + 2))").stdout == "tok-42\n"
        until(lambda: [s for s in world.sessions() if s["closed_at"]])
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
    assert lines[0] == ("gpuaas.gateway", "ready")
    assert not [line for line in lines if "tok-" in line[1] or line[0] == "asyncssh"]


def test_a_guest_without_the_authority_is_named(world: World, site: Site) -> None:
    world.seed["/etc/ssh/gpuaas-terminal-ca.pub"].unlink()
    done = shell(world, "-tt")
    assert "certificate authority for terminals was removed" in done.stderr, done.stderr
    with site.open() as terminal:
        code, number, words = terminal.end()
    assert (code, number) == ("terminal_refused_by_guest", 4010)
    assert "certificate authority" in words and "gpuaas ssh" in words
    assert world.sessions() == []
    until(lambda: len(world.audit("gateway.refused")) == 2)
    # The tenant's own way is as open as before.
    assert world.run("id").returncode == 0


def test_another_guest_and_another_slices_certificate_are_refused(world: World) -> None:
    principals = world.seed["/etc/ssh/gpuaas-terminal-principals"]
    right = principals.read_text()
    principals.write_text(right.replace(world.allocation, "23bd713b-6073-4ef7-8a51-2897e902365d"))
    assert "terminal_refused_by_guest" in shell(world, "id").stderr
    principals.write_text(right.replace("127.0.0.1", "127.0.0.2"))
    assert "terminal_refused_by_guest" in shell(world, "id").stderr
    principals.write_text(right)
    assert shell(world, "id").returncode == 0
    config, host = world.config(), f"gateway-{world.allocation}"
    for keys, code in (
        ([world.host.key], "guest_not_proven"),
        (["ssh-rsa AAAA"], "guest_not_proven"),  # In the form of a key, and none.
        ([], "host_keys_unknown"),
    ):
        with transaction(world.stack.engine) as conn:
            another = {"username": USER, "host_keys": keys}
            conn.execute(sa.update(allocations).values(connection=another))
        assert code in world.run("id", config=config, host=host).stderr
    world.refused("terminal_refused_by_guest", "guest_not_proven", "host_keys_unknown")


@pytest.mark.covers("CTRL-10")
def test_words_of_refusals_name_nothing_of_the_host(world: World, site: Site) -> None:
    """Those of the banner, of the jump and of the WebSocket, for every way that breaks."""
    # Here the host and its guest have the tenant's own address.
    planted = {text for text in canaries(world.stack) if NAME not in text}
    other = world.boot("other", login=world.key.with_name("tenant.pub").read_text())

    def no_way() -> None:
        open_way(world)

    def away() -> None:
        world.dial(1)

    def foreign() -> None:
        world.dial(other.port)

    def another_guest() -> None:
        world.dial(world.host.port)
        open_way(world, world.allocation)
        with transaction(world.stack.engine) as conn:
            another = {"username": USER, "host_keys": [world.host.key], "node": NODE}
            conn.execute(sa.update(allocations).values(connection=another))

    def failed() -> None:
        with transaction(world.stack.engine) as conn:
            conn.execute(sa.update(allocations).values(state="failed", error=ERROR))

    def words_of(host: str) -> str:
        # Clients show the banner from this level on.
        line = " ".join(world.ssh("id", config=config, host=host))
        words = line.replace("LogLevel=ERROR", "LogLevel=INFO").split()
        done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
        return done.stderr

    world.dial(world.host.port)
    config = world.config()
    for breaks, codes in (
        (no_way, {"relay_refused"}),
        (away, {"host_unreachable"}),
        # A server without a certificate may end the connection first.
        (foreign, {"host_not_proven", "host_unreachable"}),
        (another_guest, {"guest_not_proven"}),
        (failed, {"allocation_not_active"}),
    ):
        ticket = site.ticket()["ticket"]
        breaks()
        jump, shown = words_of(""), words_of(f"gateway-{world.allocation}")
        with site.open(ticket) as terminal:
            code, _, reason = terminal.end()
        assert code in codes and reason, breaks.__name__
        assert "gpuaas: " in shown, (breaks.__name__, shown)
        for words in (jump, shown, reason):
            leaked = [canary for canary in planted if canary in words.lower()]
            assert not leaked, (breaks.__name__, words)


@pytest.mark.parametrize("terminal", [False])
def test_a_running_machine_gets_a_terminal_and_loses_it(world: World, site: Site) -> None:
    """`gpuaas ssh-terminal` asks the service, and then root of the guest runs its script."""
    files = world.seed
    for file in files.values():
        file.unlink()
    assert "terminal_off" in shell(world, "id").stderr
    path = f"projects/demo/allocations/{world.allocation}/terminal"
    names = {"10.100.0.1": "127.0.0.1", **{name: str(file) for name, file in files.items()}}
    edits = " ".join(f"-e 's#{name}#{there}#g'" for name, there in names.items())
    stubs = "sshd() { true; }; systemctl() { echo reloaded; }"
    world.sudo.parent.mkdir()
    world.sudo.write_text(f"#!/bin/sh\n(echo '{stubs}'; sed {edits}) | \"$@\"\n")
    world.sudo.chmod(0o755)
    assert world.run("command -v sudo").stdout.strip() == str(world.sudo), "not that of the machine"

    def switch(*, on: bool) -> None:
        done = gpuaas(world, site, "ssh-terminal", *([] if on else ["--off"]))
        assert done.returncode == 0, done.stderr
        assert "reloaded" in done.stdout

    switch(on=True)
    expected = seed(world.gateway.trust, world.allocation)
    for each, file in zip(expected[:2], files.values(), strict=False):
        assert file.read_text() == each["content"]
    assert f"Match User {USER}\n" in [*files.values()][2].read_text()
    assert shell(world, "id").returncode == 0
    with site.open() as terminal:
        terminal.ready()
        switch(on=False)
        assert terminal.end()[:2] == ("terminal_off", 4014)
    assert not any(file.exists() for file in files.values())
    assert "terminal_off" in shell(world, "id").stderr
    assert world.run("id").returncode == 0
    assert [row["detail"]["enabled"] for row in world.audit("terminal.switched")] == [False, True]
    assert world.stack.client("stranger").put(path, json={"enabled": True}).status_code == 404
    end_allocation(world)
    admin = world.stack.client("admin")
    assert admin.put(path, json={"enabled": True}).json()["code"] == "allocation_not_active"


def test_type_see_resize_and_end(world: World, site: Site) -> None:
    with site.open() as terminal:
        event = terminal.ready()
        assert event["recorded"] is False
        first, second = b"stty size; echo $((40 + 2))\r", "stty size; echo ü-ü\r".encode()
        typed = len(first + second + b"exit\r")
        terminal.client.send(first)
        terminal.until(b"24 80\r\n42\r\n")
        terminal.send("resize", columns=132, rows=50)
        terminal.client.send(second)
        terminal.until("50 132\r\nü-ü\r\n".encode())
        terminal.client.send(b"exit\r")
        assert terminal.end()[:2] == ("shell_ended", 1000)
    (session,) = until(lambda: [s for s in world.sessions() if s["closed_at"]])
    assert (session["id"], session["way"]) == (event["session_id"], "web")
    assert session["reason"] == "shell_ended" and session["actor"].startswith("member:member#")
    assert session["bytes_in"] == typed and session["bytes_out"] > 60
    (row,) = world.audit("terminal.open")
    assert row["detail"] == {
        "capacity_shape": "gpu_slice",
        "target_host": "127.0.0.1",
        "target_port": 22,
        "session_id": session["id"],
    }


def end_session(world: World) -> str:
    world.stack.client("admin")
    with transaction(world.stack.engine) as conn:
        conn.execute(sa.text("DELETE FROM console_sessions"))
    return "session_ended"


@pytest.mark.parametrize("end", [end_allocation, end_token, end_session])
def test_what_ends_cuts_the_terminal(world: World, site: Site, end: Callable[[World], str]) -> None:
    cookie = site.cookie()
    headers = {**cookie, "Origin": site.base}
    page = f"/console/projects/demo/allocations/{world.allocation}/terminal"
    ticket = ticket_of_page(site, page, cookie)
    with site.open(ticket, headers=headers) as terminal:
        terminal.ready()
        code, since = end(world), time.monotonic()
        assert terminal.end()[0] == code
        assert time.monotonic() - since < 30
    (session,) = until(lambda: [s for s in world.sessions() if s["closed_at"]])
    assert session["reason"] == code


@pytest.mark.parametrize(
    ("groups", "code", "number"),
    [
        (("project-other",), "membership_ended", 4004),
        # The records would name a member for an operator's acts.
        (("project-demo", "admins"), "session_ended", 4002),
    ],
)
def test_a_person_of_other_groups_loses_the_terminal(
    world: World, limits: Limits, groups: tuple[str, ...], code: str, number: int
) -> None:
    """The console's session goes on: it asks the provider again."""
    with running() as provider:
        values = {"oidc_issuer": provider.url, "oidc_audience": AUDIENCE}
        values |= {"oidc_admin_group": "admins", "oidc_project_prefix": "project-"}
        world.stack.settings = world.stack.settings.model_copy(update=values)
        with serving(world, limits) as site, httpx.Client(base_url=site.base, timeout=60) as person:

            def log_in(*groups: str) -> str:
                provider.set(login=provider.order(groups=groups))
                target = person.get("/console/login/provider").headers["Location"]
                answer = person.get(httpx.get(target, timeout=60).headers["Location"])
                assert answer.status_code == 303, answer.text
                return person.cookies["gpuaas"]

            cookie = log_in("project-demo")
            headers = {"Cookie": f"gpuaas={cookie}", "Origin": site.base}
            page = f"/console/projects/demo/allocations/{world.allocation}/terminal"
            ticket = ticket_of_page(site, page, headers)
            with site.open(ticket, headers=headers) as terminal:
                terminal.ready()
                assert log_in(*groups) == cookie
                assert terminal.end()[:2] == (code, number)
    (session,) = until(lambda: [s for s in world.sessions() if s["closed_at"]])
    assert (session["reason"], session["actor"]) == (code, "member:oidc:u-1")


def test_a_machine_that_dies_and_a_database_that_is_away_are_named(
    world: World, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    with site.open() as terminal:
        terminal.ready()
        # The guest's side of the connection.
        terminal.client.send(b"kill -9 $PPID\r")
        assert terminal.end()[:2] == ("machine_closed", 4013)

    def away(_engine: object) -> None:
        raise ConnectionError("the database is away")

    with site.open() as terminal:
        terminal.ready()
        (hall,) = site.app.state.terminals
        hall.limits = replace(hall.limits, unknown_s=0)
        ticket = site.ticket()["ticket"]
        monkeypatch.setattr(sessions, "reading", away)
        assert terminal.end()[:2] == ("authorisation_unavailable", 4012)
        # No refusal, so it has no row: the service itself cannot.
        with site.open(ticket) as second:
            assert second.end() == ("internal_error", 4000, "The terminal cannot be opened now.")
        monkeypatch.undo()
    until(lambda: all(each["closed_at"] for each in world.sessions()))
    reasons = {each["reason"] for each in world.sessions()}
    assert reasons == {"machine_closed", "authorisation_unavailable"}


def ticket_of_page(site: Site, page: str, cookie: dict[str, str]) -> str:
    path = page.removeprefix("/console").removesuffix("/terminal")
    form = {"_call": f"POST {path}/terminal", "_key": "some-key"}
    headers = {**cookie, "Origin": site.base}
    answer = httpx.post(f"{site.base}{page}", data=form, headers=headers, timeout=60)
    return answer.text.partition('data-ticket="')[2].partition('"')[0]


def test_a_ticket_opens_one_terminal_of_its_holder(world: World, site: Site) -> None:
    first = site.ticket()
    assert first["path"] == "/terminal" and first["recorded"] is False
    # Neither another member nor another credential of the same member can use it, or use it up.
    for headers in (site.token("stranger"), site.token("admin")):
        with site.open(first["ticket"], headers=headers) as terminal:
            assert terminal.end()[:2] == ("ticket_refused", 4009)
    with site.open(first["ticket"]) as terminal:
        terminal.ready()
    with site.open(first["ticket"]) as terminal:
        assert terminal.end()[0] == "ticket_refused"
    old = site.ticket()["ticket"]
    with transaction(world.stack.engine) as conn:
        conn.execute(sa.update(terminal_tickets).values(expires_at=1))
    with site.open(old) as terminal:
        assert terminal.end()[0] == "ticket_refused"
    world.refused("ticket_refused")
    with transaction(world.stack.engine) as conn:
        assert first["ticket"] not in str(conn.execute(sa.select(terminal_tickets)).all())


def test_tickets_are_few_and_only_for_terminals_that_can_open(world: World, site: Site) -> None:
    member = world.stack.client("member")
    path = f"projects/demo/allocations/{world.allocation}/terminal"
    answers = [member.post(path).json() for _ in range(terminals.TICKETS + 1)]
    assert [each.get("code", "") for each in answers][-2:] == ["", "too_many_tickets"]
    # A member of another project names the allocation there.
    elsewhere = world.stack.client("stranger").post(path.replace("demo", "other"))
    assert elsewhere.json().get("code") == "allocation_not_found"
    world.stack.settings = world.stack.settings.model_copy(update={"member_address": ""})
    refused = world.stack.client("admin").post(path)
    assert (refused.status_code, refused.json()["code"]) == (409, "gateway_missing")
    end_allocation(world)
    assert world.stack.client("admin").post(path).json()["code"] == "allocation_not_active"


@pytest.mark.parametrize(
    "origin",
    ["https://evil.example", "null", "http://127.0.0.1:9", "https://SELF", None, "", "http://["],
)
def test_pages_of_other_origins_open_nothing(site: Site, origin: str | None) -> None:
    given = {"Origin": origin.replace("SELF", site.base[7:])} if origin is not None else {}
    with pytest.raises(InvalidStatus) as refused:
        site.dial(site.cookie() | given)
    assert refused.value.response.status_code == 403
    with site.dial(site.cookie() | {"Origin": site.base}) as client:
        assert client.subprotocol == web.PROTOCOL


def test_behind_the_documented_proxy_pages_are_of_https(site: Site) -> None:
    """It ends TLS, and passes on which scheme and name the browser used."""
    cookie = f"__Host-{site.cookie()['Cookie']}"
    given = {"Cookie": cookie, "X-Forwarded-Proto": "https"}
    with site.dial(given | {"Origin": site.base.replace("http:", "https:")}) as client:
        assert client.subprotocol == web.PROTOCOL
    with pytest.raises(InvalidStatus) as refused:
        site.dial(given | {"Origin": site.base})
    assert refused.value.response.status_code == 403


def test_without_a_session_or_the_protocol_nothing_opens(site: Site) -> None:
    stale = {"Cookie": "gpuaas=none", "Origin": site.base}
    for headers in (stale, {"Authorization": "Bearer gpuaas_none"}, site.token("node")):
        with pytest.raises(InvalidStatus):
            site.dial(headers)
    with pytest.raises(InvalidStatus):
        site.dial(subprotocols=[Subprotocol("other")])


OPEN = {"event": "open", "ticket": "t", "columns": 80, "rows": 24}
FIRST: list[str | bytes] = [
    "", "{", "[]", "null", "[" * 5000, '"open"', b"\xff\x00", json.dumps(OPEN | {"columns": 0}),
    json.dumps(OPEN | {"rows": "24"}), json.dumps(OPEN | {"rows": 10**9}),
    json.dumps(OPEN | {"event": "resize"}), json.dumps(OPEN | {"more": 1}),
    json.dumps(OPEN | {"ticket": "t" * 1000}), json.dumps({"event": "open"}),
]  # fmt: skip


def test_fuzzed_frames_end_the_terminal_only(world: World, site: Site) -> None:
    for frame in FIRST:
        with site.dial() as client:
            client.send(frame)
            assert Web(client).end()[:2] == ("frame_refused", 4007), frame
    for frame in FIRST:
        if isinstance(frame, bytes):
            continue
        with site.open() as terminal:
            terminal.ready()
            terminal.client.send(frame.replace("resize", "open"))
            assert terminal.end()[0] == "frame_refused", frame
            break
    with site.open() as terminal:
        terminal.ready()
        terminal.client.send(bytes(web.FRAME + 1))
        with pytest.raises(ConnectionClosed) as closed:
            while True:
                terminal.client.recv(20)
        assert closed.value.rcvd.code == 1009
    with site.open() as terminal:
        terminal.ready()
        terminal.client.send(b"echo still-$((1 + 1))\r")
        terminal.until(b"still-2")
    until(lambda: not site.live)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=4,
)
EVENTS = st.sampled_from(["open", "resize", "closed", "session_ready"])
SIZES = st.integers(-1, 1001) | JSON
# Nearly valid frames, and any text.
FRAMES = st.text(max_size=64) | st.builds(
    json.dumps,
    st.fixed_dictionaries(
        {"event": EVENTS | JSON, "columns": SIZES, "rows": SIZES},
        optional={"ticket": st.text(max_size=120) | JSON, "more": JSON},
    )
    | st.fixed_dictionaries({"event": EVENTS, "columns": st.just(80), "rows": st.just(24)})
    | JSON,
)
BOUNDED = hypothesis.settings(
    derandomize=True, deadline=None, database=None,
    suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture],
)  # fmt: skip


def valid(frame: str | bytes, event: str) -> bool:
    kind = "bytes" if isinstance(frame, bytes) else "text"
    try:
        parsed = web._frame({"type": "websocket.receive", kind: frame}, event)
    except web._End as end:
        assert str(end) == "frame_refused"
        return False
    if isinstance(parsed, bytes):
        assert parsed == frame
    else:
        assert parsed.event == event and len(parsed.ticket) <= 100
        assert {type(parsed.columns), type(parsed.rows)} == {int}
        assert 1 <= min(parsed.columns, parsed.rows) <= max(parsed.columns, parsed.rows) <= 1000
    return True


@hypothesis.settings(BOUNDED, max_examples=300)
@hypothesis.given(FRAMES | st.binary(max_size=64), EVENTS)
@hypothesis.example('{"event": "resize", "columns": 80, "rows": 24}', "resize")
def test_a_frame_is_valid_or_refused(frame: str | bytes, event: str) -> None:
    valid(frame, event)


def test_frames_from_nowhere_end_one_terminal_only(world: World, site: Site) -> None:
    """The first frame, and those after it. No bytes: they would be typed into a shell."""

    @hypothesis.settings(BOUNDED, max_examples=12)
    @hypothesis.given(FRAMES)
    def first(frame: str) -> None:
        with site.dial() as client:
            client.send(frame)
            code = "ticket_refused" if valid(frame, "open") else "frame_refused"
            assert Web(client).end()[0] == code

    @hypothesis.settings(BOUNDED, max_examples=8)
    @hypothesis.given(st.lists(FRAMES, min_size=1, max_size=3))
    @hypothesis.example([json.dumps({"event": "resize", "columns": 9, "rows": 9})] * 3)
    def later(frames: list[str]) -> None:
        with site.open() as terminal:
            terminal.ready()
            right = all(valid(frame, "resize") for frame in frames)
            with suppress(ConnectionClosed):
                for frame in frames:
                    terminal.client.send(frame)
            if right:
                terminal.client.send(b"exit\r")
            assert terminal.end()[0] == ("shell_ended" if right else "frame_refused")

    first()
    later()
    until(lambda: not site.live)


def test_output_that_is_not_read_stays_in_the_guest(world: World, site: Site) -> None:
    """And a cut does not wait for the page to read."""
    raw = socket.socket()
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    raw.connect(("127.0.0.1", site.port))
    with site.open(sock=raw, max_queue=1) as terminal:
        terminal.ready()
        terminal.client.send(b"exec cat /dev/zero\r")
        (session,) = site.live
        until(lambda: session.traffic()[1] > 1_000)
        taken = -1
        while taken != session.traffic()[1]:
            taken = session.traffic()[1]
            time.sleep(0.5)
        assert taken < 16 << 20
        end_allocation(world)
        until(lambda: [s for s in world.sessions() if s["closed_at"]])


@pytest.mark.parametrize("paused", ["window", "connection"])
def test_output_that_a_client_of_ssh_does_not_read_stays_in_the_guest(
    world: World, paused: str
) -> None:
    """The client fills its window, or has a large window and does not read from its connection."""

    async def read_nothing() -> tuple[int, int]:
        client = await asyncssh.connect(**world.login)
        window = 64 << 10 if paused == "window" else 1 << 30
        process = await client.create_process("yes", encoding=None, window=window)
        assert await process.stdout.readexactly(2) == b"y\n"
        stopped: Any = process.channel if paused == "window" else client._transport
        stopped.pause_reading()
        (session,) = world.gateway.clients
        assert isinstance(session, Client) and session._connection is not None
        taken = -1
        while taken != session.traffic()[1] and taken < 64 << 20:
            taken = session.traffic()[1]
            await asyncio.sleep(0.5)
        near: Any = session._connection._transport
        waiting = near.get_write_buffer_size()
        waiting += sum(shell.channel.get_write_buffer_size() for shell in session._terminals)
        stopped.resume_reading()
        for _ in range(64):
            assert await process.stdout.readexactly(1 << 16) == b"y\n" * (1 << 15)
        client.abort()
        return taken, waiting

    taken, waiting = world.on_loop(read_nothing())
    # Bytes in the kernel's buffers of the connection were taken, too.
    assert taken < 16 << 20 and waiting < 2 << 20


def test_input_that_the_guest_does_not_read_stays_with_the_client(world: World) -> None:
    async def type_on() -> int:
        client = await asyncssh.connect(**world.login)
        process = await client.create_process("exec sleep 600", encoding=None)
        process.stdin.write(bytes(32 << 20))
        (session,) = world.gateway.clients
        taken = 0
        while not taken or taken != session.traffic()[0]:
            taken = session.traffic()[0]
            await asyncio.sleep(0.5)
        client.abort()
        return taken

    # Bytes in the guest's server and the kernel's buffers were taken, too.
    assert world.on_loop(type_on()) < 16 << 20


@pytest.mark.parametrize("limits", [replace(QUICK, machine_s=300)])
@pytest.mark.parametrize("when", ["opening", "open"])
def test_a_channel_that_closes_ends_its_shell(
    world: World, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also before the guest opens it. Its connection goes on, and no limit counts the channel."""
    log_in, going = Machine.log_in, asyncio.Event()
    guests: list[asyncssh.SSHClientConnection] = []

    async def wait(self: Machine) -> asyncssh.SSHClientConnection:
        if when == "opening":
            await going.wait()
        guests.append(await log_in(self))
        return guests[-1]

    monkeypatch.setattr(Machine, "log_in", wait)

    async def leave() -> None:
        async with asyncssh.connect(**world.login) as client:
            process = await client.create_process("echo in; exec sleep 600")
            if when == "open":
                assert await process.stdout.readline() == "in\n"
            (session,) = world.gateway.clients
            assert isinstance(session, Client)
            (shell,) = session._terminals
            process.close()
            async with asyncio.timeout(60):
                while not shell.gone:
                    await asyncio.sleep(0.02)
                going.set()
                while not (shell.over and guests[0].is_closed()):
                    await asyncio.sleep(0.02)
            assert not session.ended.is_set()

    world.on_loop(leave())


def test_an_idle_terminal_ends(world: World, site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also for a client that has read the end of its channel, after which OpenSSH reads nothing."""
    whole = asyncssh.SSHServerConnection.send_packet

    def send_packet(self: Any, kind: int, *parts: bytes, **options: Any) -> None:
        whole(self, kind, *parts, **options)
        if kind == MSG_CHANNEL_CLOSE:
            time.sleep(0.2)

    monkeypatch.setattr(asyncssh.connection.SSHConnection, "send_packet", send_packet)
    with site.open() as terminal:
        terminal.ready()
        (hall,) = site.app.state.terminals
        hall.limits = world.gateway.limits = replace(QUICK, typed_s=0.5)
        assert terminal.end()[:2] == ("idle", 4005)
    done = subprocess.Popen(
        ["ssh", "-tt", *world.ssh(host=f"gateway-{world.allocation}")[1:]],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    with done:
        try:
            assert done.wait(60) == 255 and done.stdout
            assert b"gpuaas: idle" in done.stdout.read()
        finally:
            done.kill()
    until(lambda: all(each["closed_at"] for each in world.sessions()))
    assert [each["reason"] for each in world.sessions()] == ["idle", "idle"]


@pytest.mark.parametrize("limits", [replace(QUICK, terminals=1)])
def test_terminals_of_one_member_are_counted_over_all_processes(world: World, site: Site) -> None:
    """The terminals of browsers are the service's, those by SSH the gateway's."""
    with site.open() as terminal:
        terminal.ready()
        with site.dial() as second:
            assert Web(second).end()[:2] == ("too_many_connections", 4008)
        assert "too_many_connections" in shell(world, "id").stderr
        assert world.run("id").returncode == 0, "no terminal"
        terminal.client.send(b"exit\r")
        terminal.end()
    until(lambda: all(each["closed_at"] for each in world.sessions()))
    assert shell(world, "id").returncode == 0


@pytest.mark.parametrize("limits", [replace(QUICK, terminals=2)])
def test_terminals_of_one_connection_are_counted(world: World) -> None:
    """The connection has a single record, that of the jump if it began with a jump."""

    async def work() -> None:
        async with asyncssh.connect(**world.login) as client:
            await client.open_connection("slice", 22)
            first, another = [await client.create_process("echo in; cat") for _ in range(2)]
            for process in (first, another):
                assert await process.stdout.readline() == "in\n"
            with pytest.raises(asyncssh.ChannelOpenError, match="too many terminals"):
                await client.create_process("id")
            first.stdin.write_eof()
            await first.wait()
            assert "uid=" in str((await client.run("id")).stdout)

    world.on_loop(work())
    world.refused("too_many_connections")


@pytest.mark.parametrize("limits", [replace(QUICK, terminals=2, idle_s=2)])
def test_channels_that_run_nothing_leave_their_places(world: World) -> None:
    """The gateway has no subsystems. A connection with nothing but closed channels is idle."""

    async def connect() -> asyncssh.SSHClientConnection:
        return await asyncssh.connect(**world.login)

    async def work() -> str:
        client = await connect()
        (session,) = world.gateway.clients
        assert isinstance(session, Client)
        clients = [client.create_process(subsystem="sftp") for _ in range(2)]
        refused = await asyncio.gather(*clients, return_exceptions=True)
        assert [type(each) for each in refused] == [asyncssh.ChannelOpenError] * 2
        while not all(shell.gone for shell in session._terminals):
            await asyncio.sleep(0.02)
        async with await connect() as other:
            assert "uid=" in str((await other.run("id")).stdout)
        async with asyncio.timeout(60):
            await session.ended.wait()
        client.abort()
        return session._why

    assert world.on_loop(work()) == "idle"


@pytest.mark.parametrize("limits", [replace(QUICK, channels=2, machine_s=300)])
def test_shells_that_open_for_closed_channels_are_counted(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each logs in to the guest, and its client may ask for the next at once."""
    log_in, going = Machine.log_in, asyncio.Event()

    async def wait(self: Machine) -> asyncssh.SSHClientConnection:
        await going.wait()
        return await log_in(self)

    monkeypatch.setattr(Machine, "log_in", wait)

    async def work() -> None:
        async with asyncssh.connect(**world.login) as client:
            (session,) = world.gateway.clients
            assert isinstance(session, Client)
            for _ in range(2):
                process = await client.create_process("true")
                process.close()
                while not session._terminals[-1].gone:
                    await asyncio.sleep(0.02)
            with pytest.raises(asyncssh.ChannelOpenError, match="too many channels"):
                await client.create_process("true")
            going.set()
            while not all(shell.over for shell in session._terminals):
                await asyncio.sleep(0.02)
            assert (await client.run("echo in")).stdout == "in\n"

    world.on_loop(work())


@pytest.mark.parametrize("limits", [replace(QUICK, terminals=2)])
def test_sockets_that_say_nothing_hold_no_places_of_others(world: World, site: Site) -> None:
    """Each holds a place until its first frame, without a ticket."""
    with ExitStack() as opened:
        mine = [opened.enter_context(site.dial()) for _ in range(5)]
        for client in mine[2:]:
            assert Web(client).end()[:2] == ("too_many_connections", 4008)
        assert len(site.live) == 2
        other = opened.enter_context(site.dial(site.token("stranger")))
        other.send(json.dumps(OPEN))
        assert Web(other).end()[0] == "ticket_refused"
    world.refused("ticket_refused", "too_many_connections")


def test_a_socket_that_says_nothing_is_closed(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web, "_OPEN_S", 0.5)
    with site.dial() as client:
        assert Web(client).end()[:2] == ("frame_refused", 4007)


def test_sockets_count_as_requests_of_their_member(site: Site) -> None:
    with site.dial():
        until(lambda: site.live)
        (owner,) = {each.owner for each in site.live}
        site.app.state.rates.count(owner, 1.0, 10 * BURST)
        with pytest.raises(InvalidStatus):
            site.dial()
        with site.dial(site.token("stranger")):
            pass


def test_many_sockets_one_after_the_other_are_watched_once(
    world: World, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    checks: list[float] = []
    real = Sessions._check

    async def check(self: Sessions, now: float) -> None:
        # The gateway of this world has a watch of its own.
        if self in site.app.state.terminals:
            checks.append(now)
        await real(self, now)

    monkeypatch.setattr(Sessions, "_check", check)
    for _ in range(20):
        with site.dial():
            pass
    with site.dial():
        until(lambda: site.live)
        began = time.monotonic()
        checks.clear()
        time.sleep(1)
        assert len(checks) <= (time.monotonic() - began) / QUICK.check_s + 1


def test_a_token_that_ends_before_the_first_frame_opens_nothing(world: World, site: Site) -> None:
    ticket = site.ticket()["ticket"]
    with site.dial() as client:
        until(lambda: site.live)
        end_token(world)
        client.send(json.dumps({"event": "open", "ticket": ticket, "columns": 80, "rows": 24}))
        assert Web(client).end()[0] == "token_ended"
    sessions = world.stack.client("admin").get("projects/demo/ssh-sessions")
    assert sessions.json()["items"] == []


def test_a_recording_is_announced_and_replayed_by_operators(world: World, site: Site) -> None:
    member, admin = world.stack.client("member"), world.stack.client("admin")
    path = "projects/demo/terminal-recording"
    assert member.get(path).json()["enabled"] is False
    assert member.put(path, json={"enabled": True, "reason": "audit"}).json()["enabled"] is True
    notice = "records what this terminal shows"
    assert notice in shell(world, "-tt", typed="exit\r").stdout
    ticket = site.ticket()
    assert ticket["recorded"] is True
    with site.open(ticket["ticket"]) as terminal:
        event = terminal.ready()
        assert event["recorded"] is True
        terminal.until(notice.encode())
        assert terminal.shown.index(notice.encode()) < 60
        words = "stty -echo; echo in-$((1 + 1)); read secret; echo shown-$((40 + 2)) ü; stty echo\r"
        terminal.client.send(words.encode())
        terminal.until(b"in-2")
        terminal.client.send(b"hunter2\r")
        terminal.until(b"shown-42 \xc3\xbc")
        terminal.send("resize", columns=100, rows=30)
        terminal.client.send(b"exit\r")
        assert terminal.end()[0] == "shell_ended"
    # Its digest is written after its end. The session by SSH has a recording, too.
    until(lambda: all(s["recording_digest"] for s in world.sessions()))
    (session,) = [s for s in world.sessions() if s["id"] == event["session_id"]]
    replay = f"admin/ssh-sessions/{session['id']}/replay"
    assert member.post(replay, json={"reason": "curious"}).status_code == 403
    assert admin.post(replay, json={}).json()["code"] == "reason_required"
    answer = admin.post(replay, json={"reason": "incident 7"}).json()
    assert hashlib.sha256(answer["cast"].encode()).hexdigest() == answer["digest"]
    header, *lines = [json.loads(line) for line in answer["cast"].splitlines()]
    assert (header["version"], header["width"], header["height"]) == (2, 80, 24)
    screen = "".join(text for _, kind, text in lines if kind == "o")
    assert "shown-42 ü" in screen and "hunter2" not in screen
    assert [text for _, kind, text in lines if kind == "r"] == ["100x30"]
    assert [at for at, _, _ in lines] == sorted(at for at, _, _ in lines)
    (row,) = world.audit("terminal.replayed")
    assert (row["reason"], row["subject_id"]) == ("incident 7", session["id"])
    # After the days of the setting, all go.
    with transaction(world.stack.engine) as conn:
        day_old = time.time() - 1.5 * loops.DAY_S
        conn.execute(sa.update(terminal_recordings).values(at=day_old))
    for days, status in ((2, 200), (1, 404)):
        kept = world.stack.settings.model_copy(update={"keep_recordings_days": days})
        loops.tend_sessions(world.stack.engine, kept)
        assert admin.post(replay, json={"reason": "again"}).status_code == status


def test_terminals_of_one_connection_share_a_recording(world: World) -> None:
    """In parallel and in sequence: the recording can be replayed, and its digest covers all."""
    with transaction(world.stack.engine) as conn:
        terminals.record_terminals(conn, "demo", ACT, enabled=True)
    admin = world.stack.client("admin")

    def replay() -> dict[str, str]:
        row = world.sessions()[0]
        path = f"admin/ssh-sessions/{row['id']}/replay"
        return dict(admin.post(path, json={"reason": "incident 7"}).json())

    async def work() -> None:
        async with asyncssh.connect(**world.login) as client:
            async with client.create_process("echo first; cat") as first:
                assert await first.stdout.readline() == "first\n"
                assert (await client.run("echo second")).stdout == "second\n"
                assert (await asyncio.to_thread(replay))["digest"] == ""
                first.stdin.write_eof()
                await first.wait()
            assert (await client.run("echo third")).stdout == "third\n"

    world.on_loop(work())
    until(lambda: all(row["closed_at"] and row["recording_digest"] for row in world.sessions()))
    answer = replay()

    def complete() -> bool:
        answer.update(replay())
        return hashlib.sha256(answer["cast"].encode()).hexdigest() == answer["digest"]

    until(complete)
    header, *lines = [json.loads(line) for line in answer["cast"].splitlines()]
    assert header["version"] == 2
    assert {kind for _, kind, _ in lines} == {"o"}, "commands without a terminal have no size"
    shown = "".join(text for _, kind, text in lines if kind == "o")
    assert [word for word in ("first", "second", "third") if word in shown] == shown.split()


@pytest.mark.parametrize("words", ["", "yes"], ids=["silent", "busy"])
def test_a_service_that_stops_ends_its_terminals_with_a_record(
    world: World, limits: Limits, monkeypatch: pytest.MonkeyPatch, words: str
) -> None:
    """Their recordings are complete, and a client's own close frame is no stop."""
    append = terminals.append

    def slowly(*part: Any) -> None:
        time.sleep(0.5)
        append(*part)

    monkeypatch.setattr(terminals, "append", slowly)
    with transaction(world.stack.engine) as conn:
        terminals.record_terminals(conn, "demo", ACT, enabled=True)
    with ExitStack() as opened:
        with serving(world, limits) as site:
            with site.open() as first:
                first.ready()
                first.client.close(1012)
            until(lambda: not site.live)
            terminal = opened.enter_context(site.open())
            event = terminal.ready()
            terminal.client.send(f"echo shown-$((40 + 2)); {words}\r".encode())
            terminal.until(b"shown-42")
        with pytest.raises(ConnectionClosed) as closed:
            while True:
                terminal.client.recv(20)
        assert closed.value.rcvd.code == 1012
    rows = {row["id"]: row for row in world.sessions()}
    mine = rows.pop(event["session_id"])
    assert mine["reason"] == "gateway_stopped"
    assert [row["reason"] for row in rows.values()] == ["closed"]
    admin, path = world.stack.client("admin"), f"admin/ssh-sessions/{mine['id']}/replay"
    answer = admin.post(path, json={"reason": "incident 7"}).json()
    assert "shown-42" in answer["cast"]
    assert hashlib.sha256(answer["cast"].encode()).hexdigest() == answer["digest"]


def test_a_gateway_that_stops_completes_its_recordings(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the end of the session is written before the rest of its recording."""
    write = Recording._write

    async def slowly(*part: Any) -> None:
        await asyncio.sleep(1)
        await write(*part)

    monkeypatch.setattr(Recording, "_write", slowly)
    with transaction(world.stack.engine) as conn:
        terminals.record_terminals(conn, "demo", ACT, enabled=True)
    line = world.ssh("echo shown-$((40 + 2)); yes", host=f"gateway-{world.allocation}")
    with subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as client:
        assert client.stdout and client.stdout.readline() == b"shown-42\n"
        world.on_loop(world.gateway.stop())
        (row,) = world.sessions()
        client.communicate()
    path = f"admin/ssh-sessions/{row['id']}/replay"
    answer = world.stack.client("admin").post(path, json={"reason": "incident 7"}).json()
    assert "shown-42" in answer["cast"]
    assert hashlib.sha256(answer["cast"].encode()).hexdigest() == row["recording_digest"]


def test_recordings_are_bounded(world: World, site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Recording, "LIMIT", 20_000)
    with transaction(world.stack.engine) as conn:
        terminals.record_terminals(conn, "demo", ACT, enabled=True)
    for _ in range(3):
        with site.open() as terminal:
            terminal.ready()
            terminal.client.send(b"yes\r")
            assert terminal.end()[:2] == ("recording_full", 4011)
        until(lambda: not site.live)
    until(lambda: all(s["recording_digest"] for s in world.sessions()))
    # While a person has too many, the next terminal is refused; the service deletes the oldest.
    monkeypatch.setattr(terminals, "PERSON_LIMIT", 1)
    with site.open() as terminal:
        assert terminal.end()[0] == "recording_full"
    table = terminal_recordings.c
    kept = sa.select(table.session_id, sa.func.sum(table.size)).group_by(table.session_id)
    with transaction(world.stack.engine) as conn:
        newest, size = conn.execute(kept.order_by(sa.func.max(table.id).desc())).first() or ("", 0)
    monkeypatch.setattr(terminals, "PERSON_LIMIT", size)
    loops.tend_sessions(world.stack.engine, world.stack.settings)
    with transaction(world.stack.engine) as conn:
        assert conn.execute(kept).all() == [(newest, size)]
    with site.open() as terminal:
        terminal.ready()


def test_changes_of_size_do_not_fill_the_memory(
    world: World, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A recording has them, and its limit holds for them. Equal sizes are no change."""
    monkeypatch.setattr(Recording, "LIMIT", 10_000)
    with transaction(world.stack.engine) as conn:
        terminals.record_terminals(conn, "demo", ACT, enabled=True)
    with site.open() as terminal:
        terminal.ready()
        for _ in range(1_000):
            terminal.send("resize", columns=80, rows=24)
        terminal.client.send(b"echo still-$((1 + 1))\r")
        terminal.until(b"still-2")
        sizes = itertools.cycle((80, 81))
        with pytest.raises(ConnectionClosed) as closed:
            while True:
                terminal.send("resize", columns=next(sizes), rows=24)
                with suppress(TimeoutError):
                    terminal.client.recv(0)
        assert closed.value.rcvd.reason == "recording_full"

    async def resize() -> bytes:
        async with asyncssh.connect(**world.login) as client:
            process = await client.create_process(encoding=None, request_pty="force")
            while not process.is_closing():
                process.change_terminal_size(next(sizes), 24)
                await asyncio.sleep(0)
            return bytes(await process.stderr.read())

    assert b"recording_full" in world.on_loop(resize())


@pytest.mark.parametrize("stage", ["channel", "pty"])
def test_a_guest_that_is_silent_after_the_login_is_named(
    world: World, site: Site, mute: Mute, stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    log_in = Machine.log_in

    async def impatient(self: Machine) -> asyncssh.SSHClientConnection:
        guest = await log_in(self)
        self._timeout_s = 0.5
        return guest

    monkeypatch.setattr(Machine, "log_in", impatient)
    mute.guest(stage)
    with site.open() as terminal:
        assert terminal.end()[0] == "machine_silent"
    assert "machine_silent" in shell(world, "-tt").stderr
    until(lambda: len([each for each in world.sessions() if each["closed_at"]]) == 2)


@pytest.mark.parametrize("limits", [replace(QUICK, machine_s=300)])
def test_a_page_that_leaves_a_silent_guest_is_noticed(world: World, site: Site, mute: Mute) -> None:
    mute.guest("pty")
    with site.open() as terminal:
        terminal.send("resize", columns=100, rows=30)
        assert mute.requested.wait(20)
        assert site.live
    until(lambda: not site.live)
    until(lambda: [s["reason"] for s in world.sessions()] == ["closed"])


@pytest.mark.parametrize("limits", [replace(QUICK, machine_s=300, terminal_s=0.5)])
def test_terminals_live_no_longer_before_the_guest_opens_them(
    world: World, site: Site, mute: Mute
) -> None:
    mute.guest("channel")
    with site.open() as terminal:
        assert terminal.end()[:2] == ("time_is_over", 4006)
    done = shell(world, "-tt")
    assert done.returncode == 255 and "gpuaas: time_is_over" in done.stderr, done.stderr


@pytest.mark.parametrize("limits", [replace(QUICK, typed_s=0.5)])
def test_an_idle_terminal_ends_beside_a_jump(world: World) -> None:
    async def both() -> tuple[bytes, bytes]:
        async with asyncssh.connect(**world.login) as client:
            reader, _ = await client.open_connection("slice", 22)
            greeting = await reader.readline()
            async with client.create_process(encoding=None, request_pty="force") as process:
                words = await process.stderr.read()
            _, writer = await client.open_connection("slice", 22)
            writer.close()
            return greeting, words

    greeting, words = world.on_loop(both())
    assert greeting.startswith(b"SSH-2.0") and b"idle" in words


@pytest.mark.parametrize("limits", [IMPATIENT])
def test_a_host_that_opens_no_connection_is_given_up(world: World, mute: Mute) -> None:
    """It may open them later, and send output without a reader."""
    mute.host()

    async def ask() -> None:
        async with asyncssh.connect(**world.login) as client:
            with pytest.raises(asyncssh.ChannelOpenError, match="machine_silent"):
                await client.open_connection("slice", 22)
            async with asyncio.timeout(20):
                while mute.connections:
                    await asyncio.sleep(0.02)
            assert world.gateway.clients

    world.on_loop(ask())
    assert "machine_silent" in world.run("id").stderr


@pytest.mark.long
@pytest.mark.parametrize(
    "limits",
    [
        replace(
            QUICK, machine_s=120, of_allocation=300, of_address=300, of_member=300, terminals=300
        )
    ],
)
def test_60_terminals_at_once(world: World, site: Site) -> None:
    async def terminal(number: int) -> str:
        ticket = await asyncio.to_thread(site.ticket)
        url = f"ws://127.0.0.1:{site.port}/terminal"
        protocols = [Subprotocol(web.PROTOCOL)]
        async with connect_async(
            url, additional_headers=site.token(), subprotocols=protocols, proxy=None,
            origin=Origin(site.base),
        ) as client:  # fmt: skip
            await client.send(json.dumps(OPEN | {"ticket": ticket["ticket"]}))
            assert READY in str(await client.recv())
            await client.send(f"echo $(({number} + 1000))\r".encode())
            shown = b""
            while f"{number + 1000}\r\n".encode() not in shown:
                shown += bytes(await client.recv())  # type: ignore[arg-type]
            opened.append(number)
            while True:
                frame = await client.recv()
                if isinstance(frame, str):
                    return str(json.loads(frame)["code"])

    opened: list[int] = []

    async def every() -> list[str]:
        work = asyncio.gather(*(terminal(number) for number in range(60)))
        while len(opened) < 60 and not work.done():
            await asyncio.sleep(0.1)
        await asyncio.to_thread(end_allocation, world)
        async with asyncio.timeout(30):
            return list(await work)

    assert set(asyncio.run(every())) == {"allocation_not_active"}

"""Streams of live parts over a real connection: broken, resumed, revoked, and too many."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack
from types import SimpleNamespace
from typing import cast

import httpx
import pytest
import sqlalchemy as sa
from fastapi import FastAPI
from starlette.requests import ClientDisconnect

from reconciler.console import stream
from reconciler.console.app import OPERATORS, STREAMS
from reconciler.console.visit import Visit
from reconciler.db.engine import transaction
from reconciler.db.schema import console_sessions
from reconciler.model.states import TaskState
from reconciler.runs.paths import RunPaths
from tests.unit.reconciler.api.stack import Stack, listening
from tests.unit.reconciler.api.test_canaries import canaries
from tests.unit.reconciler.api.test_follow import end, folder, running, say
from tests.unit.reconciler.api.test_launches import activate, launch
from tests.unit.reconciler.console.browser import Browser
from tests.unit.reconciler.console.test_pages import address, names
from tests.unit.reconciler.service.service import until

pytestmark = pytest.mark.covers("CTRL-13", "CTRL-8")

Browse = Callable[[str], Browser]


@pytest.fixture
def site(console: FastAPI, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The console on a real socket, reading often."""
    monkeypatch.setattr(stream, "_EVERY_S", 0.05)
    with listening(console) as url:
        yield url
    assert not stream._open


class Reader:
    """A stream of a session, event by event."""

    def __init__(self, site: str, path: str, browser: Browser, place: str = "", **headers: str):
        self.place = place
        self._stack = ExitStack()
        sent = {"Last-Event-ID": place} if place else {}
        self.answer: httpx.Response = self._stack.enter_context(
            httpx.stream(
                "GET",
                f"{site}{path}/stream",
                headers={**sent, **headers},
                cookies=dict(browser.client.cookies),
                timeout=60,
                trust_env=False,
            )
        )
        self._lines = self.answer.iter_lines()

    def event(self) -> str:
        """The next event's data; "over" for the last event, "" at the end of the connection."""
        data = []
        for line in self._lines:
            name, _, value = line.partition(": ")
            if name == "event":
                data.append(value)
            elif name == "id":
                self.place = value
            elif name == "data":
                data.append(value)
            elif not line and data:
                return "\n".join(data)
        return ""

    def close(self) -> None:
        self._stack.close()


@pytest.fixture
def read(site: str) -> Iterator[Callable[..., Reader]]:
    readers: list[Reader] = []

    def opened(path: str, browser: Browser, place: str = "", **headers: str) -> Reader:
        readers.append(Reader(site, path, browser, place, **headers))
        return readers[-1]

    yield opened
    for reader in readers:
        reader.close()


Read = Callable[..., Reader]


def test_a_task_is_followed_broken_off_and_resumed(
    selling: Stack, browse: Browse, read: Read
) -> None:
    task, admin = running(selling), browse("admin")
    path = f"/console/tasks/{task.id}"
    first = read(path, admin)
    assert first.answer.headers["Content-Type"].startswith("text/event-stream")
    assert first.answer.headers["X-Accel-Buffering"] == "no"
    assert "look" in first.event()
    say(selling, task, "measure <b>")
    assert "measure &lt;b&gt;" in first.event()
    first.close()
    # Nothing is missed while the connection is broken, and nothing comes twice.
    say(selling, task, "report")
    resumed = read(path, admin, first.place)
    assert "report" in resumed.event()
    again = read(path, admin, resumed.place)
    end(selling, task, TaskState.SUCCEEDED)
    for reader in (resumed, again):
        last = reader.event()
        assert "succeeded" in last and "report" in last
        assert (reader.event(), reader.event()) == ("over", "")
    # A browser that comes back after the end is told so at once.
    assert read(path, admin, again.place).event() == "over"


def test_the_output_of_a_task_is_followed(selling: Stack, browse: Browse, read: Read) -> None:
    task = running(selling)
    reader = read(f"/console/tasks/{task.id}", browse("admin"))
    assert "None on this machine." in reader.event()
    output = RunPaths(folder(selling)).output
    output.parent.mkdir(parents=True)
    output.write_text("ok: [lab-host] <b>\n")
    assert "ok: [lab-host] &lt;b&gt;" in reader.event()
    with output.open("a") as file:
        file.write("changed: [lab-host]\nAuthorization: Bearer planted-secret-token\n")
    event = reader.event()
    assert "changed: [lab-host]" in event and "planted" not in event


@pytest.mark.parametrize("how", ["revoked", "logout", "expired"])
def test_a_stream_ends_with_its_session(
    selling: Stack, browse: Browse, read: Read, how: str
) -> None:
    mine = launch(selling).json()["id"]
    member = browse("member")
    path = f"/console/projects/demo/allocations/{mine}"
    reader = read(path, member)
    assert "requested" in reader.event()
    cookies = dict(member.client.cookies)
    if how == "revoked":
        rows = selling.client("admin").get("admin/tokens").json()["items"]
        (token,) = [row["id"] for row in rows if row["name"] == "member"]
        selling.client("admin").delete(f"admin/tokens/{token}")
    elif how == "logout":
        member.client.post("/console/logout", headers={"Sec-Fetch-Site": "same-origin"})
    else:
        with transaction(selling.engine) as conn:
            conn.execute(sa.update(console_sessions).values(expires_at=1))
    text = reader.event()
    assert "Your session has ended" in text
    assert f"/console/login?next={path}" in text
    assert (reader.event(), reader.event()) == ("over", "")
    later_visitor = browse("")
    later_visitor.client.cookies.update(cookies)
    later = read(path, later_visitor)
    activate(selling, mine)
    assert "Your session has ended" in later.event()
    assert (later.event(), later.event()) == ("over", "")


def test_a_tenant_follows_its_own_machines_only(selling: Stack, browse: Browse, read: Read) -> None:
    planted = canaries(selling)
    ids = names(selling)
    member, stranger = browse("member"), browse("stranger")
    for pattern in STREAMS:
        path = address(pattern, ids)
        assert stranger.get(f"{path}/stream").status_code == 404
        if pattern in OPERATORS:
            assert member.get(f"{path}/stream").status_code == 404
    followed = read(f"/console/projects/demo/allocations/{ids['allocation']}", member)
    texts = [followed.event()]
    activate(selling, ids["allocation"])
    while "gate.example" not in texts[-1]:
        texts.append(followed.event())
        assert texts[-1], "the stream ended"
    assert "Waits" in texts[0]
    assert "the service starts it as soon as a worker is free" in texts[0]
    assert not {canary for canary in planted for text in texts if canary in text.lower()}


def test_streams_of_a_person_are_bounded(selling: Stack, browse: Browse, read: Read) -> None:
    """In all sessions together, or many logins would take the places of all others."""
    mine = launch(selling).json()["id"]
    member, again_in, other = browse("member"), browse("member"), browse("admin")
    path = f"/console/projects/demo/allocations/{mine}"
    readers = [read(path, member) for _ in range(stream.PER_PERSON)]
    assert all("requested" in reader.event() for reader in readers)
    refused = read(path, again_in).answer
    assert refused.status_code == 429
    assert "rate_exceeded" in refused.read().decode()
    # The page itself, and another person, are as before.
    assert member.get(path).status_code == 200
    assert "requested" in read(path, other).event()
    readers[0].close()

    def admitted() -> Reader | None:
        """The service sees a little later that the other stream is closed."""
        reader = read(path, member)
        return reader if reader.answer.status_code == 200 else None

    again = until(admitted)
    assert again is not None and "requested" in again.event()


def test_another_page_cannot_open_a_stream(selling: Stack, browse: Browse, read: Read) -> None:
    mine = launch(selling).json()["id"]
    path = f"/console/projects/demo/allocations/{mine}"
    for site in ("cross-site", "same-site"):
        refused = read(path, browse("member"), **{"Sec-Fetch-Site": site})
        assert refused.answer.status_code == 403


def test_a_connection_that_breaks_at_once_gives_its_place_back() -> None:
    visit = cast("Visit", SimpleNamespace(caller=SimpleNamespace(owner="t")))

    async def nothing() -> AsyncIterator[str]:
        yield ""

    async def broken(_message: object) -> None:
        raise OSError("the browser has left")

    async def silent() -> dict[str, str]:
        await asyncio.sleep(60)
        return {}

    scope = {"type": "http", "asgi": {"spec_version": "2.4"}}
    with pytest.raises(ClientDisconnect):
        asyncio.run(stream.Stream(visit, nothing())(scope, silent, broken))
    assert not stream._open

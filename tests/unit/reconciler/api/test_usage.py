"""Usage as JSON by pages and as CSV, for the site and for one project."""

from __future__ import annotations

import asyncio
import csv
import io
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy.pool import QueuePool

from reconciler.api import usage as usage_routes
from reconciler.api.app import PREFIX
from reconciler.db.engine import transaction
from reconciler.lifecycle import host, recovery
from reconciler.records import allocations, tokens
from tests.unit.reconciler.api.stack import ACT, NODE, Stack
from tests.unit.reconciler.api.test_launches import activate, launch

SITE, OWN = "admin/usage", "projects/demo/usage"


@pytest.fixture
def used(selling: Stack) -> tuple[Stack, list[str]]:
    """One allocation that was forced to its end, one that runs, both of one GPU."""
    made = []
    for key in ("a", "b"):
        made.append(str(launch(selling, key=key).json()["id"]))
        activate(selling, made[-1])
    with transaction(selling.engine) as conn:
        host.lost(conn, NODE, ACT)
        recovery.force_release(conn, made[0], ACT)
        host.regained(conn, NODE, ACT)
    return selling, made


@pytest.mark.covers("CTRL-14")
def test_every_allocation_and_the_sums(used: tuple[Stack, list[str]]) -> None:
    stack, made = used
    admin = stack.client("admin")
    usage = admin.get(SITE).json()
    over, running = usage["items"]
    assert [over["allocation_id"], running["allocation_id"]] == made
    assert (over["end_state"], running["ended_at"]) == ("released", None)
    assert (over["node_id"], over["claims"][0]["kind"]) == (NODE, "slice")
    (total,) = usage["totals"]
    assert (total["project_id"], total["allocations"]) == ("demo", 2)
    assert total["gpu_seconds"] == pytest.approx(over["gpu_seconds"] + running["gpu_seconds"])
    assert admin.get(SITE, params={"project": "other"}).json()["items"] == []
    assert admin.get(SITE, params={"project": "none"}).json()["code"] == "project_not_found"


@pytest.mark.covers("CTRL-14")
def test_pages_show_all_and_the_sums_are_of_the_whole(used: tuple[Stack, list[str]]) -> None:
    stack, made = used
    admin = stack.client("admin")
    first = admin.get(SITE, params={"limit": 1}).json()
    rest = admin.get(SITE, params={"limit": 1, "cursor": first["next"]}).json()
    assert [page["items"][0]["allocation_id"] for page in (first, rest)] == made
    assert rest["next"] is None
    assert first["totals"][0]["allocations"] == 2


@pytest.mark.covers("CTRL-14")
def test_a_period_of_the_past_stays_as_it_is(used: tuple[Stack, list[str]]) -> None:
    stack, made = used
    admin = stack.client("admin")
    with transaction(stack.engine) as conn:
        since = allocations.get(conn, made[1]).activated_at
    end = datetime.fromtimestamp(since, UTC) + timedelta(milliseconds=1)
    query = {"from": "2020-01-01T00:00:00Z", "to": end.isoformat()}
    answers = [admin.get(SITE, params=query).json() for _ in range(2)]
    assert answers[0] == answers[1]
    assert answers[0]["items"][1]["counted_seconds"] in (0.0, 0.001, 0.002)
    before = {"from": "2020-01-01T00:00:00Z", "to": "2020-02-01T00:00:00Z"}
    assert admin.get(SITE, params=before).json()["items"] == []
    for wrong, code in (
        ({"from": before["to"], "to": before["from"]}, "period_invalid"),
        ({"from": "yesterday"}, "request_invalid"),
        ({"from": "2020-01-01T00:00:00"}, "request_invalid"),
        ({"format": "xml"}, "request_invalid"),
    ):
        assert admin.get(SITE, params=wrong).json()["code"] == code
    # Years that a timestamp can hardly hold are no error of ours.
    assert admin.get(SITE, params={"from": "0001-01-01T00:00:00Z"}).json()["items"]
    assert admin.get(SITE, params={"to": "9999-12-31T23:59:59Z"}).json()["items"]


@pytest.mark.covers("CTRL-14")
def test_csv_says_the_same(used: tuple[Stack, list[str]]) -> None:
    stack, made = used
    answer = stack.client("admin").get(SITE, params={"format": "csv"})
    assert answer.headers["content-type"] == "text/csv; charset=utf-8"
    over, running = _table(answer.text)
    assert [over["allocation_id"], running["allocation_id"]] == made
    assert (running["ended_at"], running["gpu_count"], running["node_id"]) == ("", "1", NODE)
    shown = stack.client("admin").get(SITE).json()["items"][0]
    assert float(over["gpu_seconds"]) == shown["gpu_seconds"]
    assert (over["started_at"], over["ended_at"]) == (shown["started_at"], shown["ended_at"])


@pytest.mark.covers("CTRL-14", "CTRL-10")
@pytest.mark.covers("CTRL-14")
def test_a_member_sees_its_own_and_not_where(used: tuple[Stack, list[str]]) -> None:
    stack, made = used
    member = stack.client("member")
    for text in (member.get(OWN).text, member.get(OWN, params={"format": "csv"}).text):
        assert all(allocation_id in text for allocation_id in made)
        assert NODE not in text
        assert "slot" not in text
    assert member.get(SITE).status_code == 403
    assert stack.client("stranger").get(OWN).status_code == 404
    assert stack.client("stranger").get("projects/other/usage").json()["items"] == []


@pytest.mark.covers("CTRL-14", "CTRL-10")
def test_a_reader_that_does_not_read_keeps_no_connection_from_others(
    used: tuple[Stack, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    stack, made = used
    monkeypatch.setattr(usage_routes, "_AT_ONCE", 1)
    answers: list[dict[str, Any]] = []

    def rests() -> None:
        """The reader has the heading and the first record, and takes no more for a while."""
        pool = stack.engine.pool
        assert isinstance(pool, QueuePool) and pool.checkedout() == 0
        # What ends now, and what begins, is of the time after the period that was asked for.
        answers.extend(stack.client("admin").get(SITE).json()["items"])
        with transaction(stack.engine) as conn:
            host.lost(conn, NODE, ACT)
            recovery.force_release(conn, made[1], ACT)
            host.regained(conn, NODE, ACT)

    over, running = _table(_read_slowly(stack, f"{PREFIX}/{SITE}", rests))
    assert [over["allocation_id"], running["allocation_id"]] == made
    assert float(over["gpu_seconds"]) == answers[0]["gpu_seconds"]
    # Counted to the moment of the question, which was before the other one.
    assert 0 <= float(running["gpu_seconds"]) <= answers[1]["gpu_seconds"]


@pytest.mark.covers("CTRL-10")
def test_a_download_breaks_off_with_its_token(
    used: tuple[Stack, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has no proper end, so that nobody takes the part for the whole."""
    stack, _made = used
    monkeypatch.setattr(usage_routes, "_AT_ONCE", 1)

    def revoke() -> None:
        with transaction(stack.engine) as conn:
            caller = tokens.authenticate(conn, stack.secrets["admin"])
            assert caller is not None
            tokens.revoke(conn, caller.id, ACT)

    with pytest.raises(ConnectionAbortedError):
        _read_slowly(stack, f"{PREFIX}/{SITE}", revoke)


def _read_slowly(stack: Stack, path: str, rests: Callable[[], None]) -> str:
    """The CSV as a connection takes it whose reader rests behind the second part."""
    application = stack.client("admin").app
    request: list[dict[str, Any]] = [{"type": "http.request", "body": b"", "more_body": False}]
    parts: list[bytes] = []

    async def receive() -> dict[str, Any]:
        if not request:
            await asyncio.Event().wait()
        return request.pop()

    async def send(message: Any) -> None:
        parts.append(message.get("body", b""))
        if sum(bool(part) for part in parts) == 2 and parts[-1]:
            await asyncio.to_thread(rests)

    scope: dict[str, Any] = {
        "type": "http",
        "method": "GET",
        "path": path,
        "query_string": b"format=csv",
        "headers": [(b"authorization", f"Bearer {stack.secrets['admin']}".encode())],
    }

    async def answer() -> None:
        await application(scope, receive, send)

    asyncio.run(answer())
    return b"".join(parts).decode()


def _table(text: str) -> list[dict[str, Any]]:
    return list(csv.DictReader(io.StringIO(text)))

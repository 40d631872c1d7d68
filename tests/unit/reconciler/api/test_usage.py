"""Usage as JSON by pages and as CSV, for the site and for a project."""

from __future__ import annotations

import asyncio
import csv
import io
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
import yaml
from sqlalchemy.exc import IntegrityError
from sqlalchemy.pool import QueuePool

from reconciler.api import usage as usage_routes
from reconciler.api.app import PREFIX
from reconciler.db.engine import transaction
from reconciler.db.schema import usage as usage_table
from reconciler.doctor import installation
from reconciler.lifecycle import host, recovery
from reconciler.records import allocations, queue, tokens, usage
from reconciler.settings import Settings
from reconciler.work.handler import open_work
from tests.unit.reconciler.api.stack import ACT, NODE, Stack
from tests.unit.reconciler.api.test_launches import activate, launch

SITE, OWN = "admin/usage", "projects/demo/usage"


@pytest.fixture
def used(selling: Stack) -> tuple[Stack, list[str]]:
    """A forcibly released allocation and a running allocation, each with one GPU."""
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


def lines(answer: dict[str, Any]) -> list[tuple[str | None, str, bool, int]]:
    names = ("price", "currency", "price_kept", "allocations")
    rows = [tuple(total[name] for name in names) for total in answer["totals"]]
    return sorted(rows, key=str)


@pytest.mark.covers("CTRL-14")
def test_a_bill_has_the_price_of_the_launch(selling: Stack, tmp_path: Path) -> None:
    """A later setting does not change it, nor the setting when the machine is ready."""
    member, made = selling.client("member"), []
    for number, price in enumerate((None, "360000.5", "7")):
        if price:
            changed = {"profiles_dir": priced(selling, tmp_path / price, price).profiles_dir}
            changed["currency"] = "CHF" if price != "7" else "USD"
            selling.settings = selling.settings.model_copy(update=changed)
            member = selling.client("member")
        if price != "7":
            made.append(str(launch(selling, key=str(number)).json()["id"]))
            (lab,) = [s for s in member.get("catalog").json()["skus"] if s["title"]][:1]
            assert lab["gpu_hour_price"] == price
    for allocation_id in made:
        activate(selling, allocation_id)
    answer = member.get(OWN).json()
    assert lines(answer) == [("360000.5", "CHF", True, 1), (None, "EUR", True, 1)]
    assert {row["allocation_id"]: row["price"] for row in answer["items"]} == {
        made[0]: None, made[1]: "360000.5",
    }  # fmt: skip
    for row in [*answer["items"], *answer["totals"]]:
        if row["price"] is None:
            assert row["cost"] is None
            continue
        exact = Decimal(str(row["gpu_seconds"])) * Decimal("360000.5") / 3600
        assert abs(Decimal(row["cost"]) - exact) <= Decimal("0.005")
    table = _table(member.get(OWN, params={"format": "csv"}).text)
    assert [(row["price"], row["currency"]) for row in table] == [
        (row["price"] or "", row["currency"]) for row in answer["items"]
    ]
    with (
        pytest.raises(IntegrityError, match="keeps what was sold"),
        transaction(selling.engine) as conn,
    ):
        conn.execute(sa.update(usage_table).values(price="1"))


@pytest.mark.covers("CTRL-14")
def test_what_is_older_than_its_price_has_the_present_one(
    used: tuple[Stack, list[str]], tmp_path: Path
) -> None:
    stack, _ = used
    with transaction(stack.engine) as conn:
        conn.exec_driver_sql("DROP TRIGGER usage_records_keep_update")
        conn.exec_driver_sql("DROP TRIGGER usage_records_keep_price")
        conn.execute(sa.update(usage_table).values(currency=None))
    assert lines(stack.client("member").get(OWN).json()) == [(None, "EUR", False, 2)]
    for price in ("1", "2.5"):
        stack.settings = priced(stack, tmp_path / price, price)
        answer = stack.client("member").get(OWN).json()
        assert lines(answer) == [(price, "EUR", False, 2)]
        assert all(row["cost"] for row in answer["items"])


@pytest.mark.parametrize(
    ("price", "hours", "cost"),
    [("0.1", "10000", "1000.00"), ("2.49", "8", "19.92"), ("0.01", "0.5", "0.01")],
)
def test_money_is_decimal(price: str, hours: str, cost: str) -> None:
    """Rounded once, and half a hundredth up."""
    prices = usage_routes.Prices({("gpu_slice", "sku"): Decimal(price)}, "EUR")
    gpu_ms = int(Decimal(hours) * 3_600_000)
    total = usage.Total("p1", "gpu_slice", "sku", "", None, 1, gpu_ms, gpu_ms)
    assert prices.charge(total, gpu_ms)["cost"] == cost


@pytest.mark.parametrize("price", [2.5, "2,50", "-1", "1e3", "NaN"])
def test_a_price_of_another_form_counts_for_nothing(
    used: tuple[Stack, list[str]], tmp_path: Path, price: object
) -> None:
    """`gpuaas doctor` names it. Neither launches nor runs on hosts stop because of it."""
    stack, _ = used
    stack.settings = priced(stack, tmp_path, price)
    assert stack.client("member").get(OWN).json()["totals"][0]["cost"] is None
    (finding,) = [row for row in installation.profiles(stack.settings) if row.status != "ok"]
    assert "gpu_hour_price" in str(finding)
    with transaction(stack.engine) as conn:
        task = queue.every(conn)[0]
        profile = open_work(conn, stack.settings, task).profile
    assert (profile["sku"], "gpu_hour_price" in profile) == ("lab-edu-slice", False)


def priced(stack: Stack, folder: Path, price: object, **more: object) -> Settings:
    """Settings with a folder of profiles in which slices of the lab's hardware have a price."""
    file = stack.settings.profiles_dir / "lab.yml"
    document = yaml.safe_load(file.read_text(encoding="utf-8")) | more
    document["gpu_hour_price"] = price
    profiles = folder / "priced"
    profiles.mkdir(parents=True)
    (profiles / "lab.yml").write_text(yaml.safe_dump(document), encoding="utf-8")
    return stack.settings.model_copy(update={"profiles_dir": profiles})


@pytest.mark.covers("CTRL-14", "CTRL-10")
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
        # Changes from now on lie after the requested period.
        answers.extend(stack.client("admin").get(SITE).json()["items"])
        with transaction(stack.engine) as conn:
            host.lost(conn, NODE, ACT)
            recovery.force_release(conn, made[1], ACT)
            host.regained(conn, NODE, ACT)

    over, running = _table(_read_slowly(stack, f"{PREFIX}/{SITE}", rests))
    assert [over["allocation_id"], running["allocation_id"]] == made
    assert float(over["gpu_seconds"]) == answers[0]["gpu_seconds"]
    # Counted to the moment of this request, which came before the other request.
    assert 0 <= float(running["gpu_seconds"]) <= answers[1]["gpu_seconds"]


@pytest.mark.covers("CTRL-10")
def test_a_download_breaks_off_with_its_token(
    used: tuple[Stack, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The download has no proper end, so that a part is not taken for the whole."""
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

"""The leader's loop: a pass when it is asked for, after changes, and at intervals."""

from __future__ import annotations

from typing import Any

import pytest
import sqlalchemy as sa

from reconciler.db import clock, journal
from reconciler.db import settings as site
from reconciler.db.engine import reading, transaction
from reconciler.db.schema import Slot, slots
from reconciler.inventory import readings, sync
from reconciler.inventory.netbox import Client, Unfinished
from reconciler.service import process
from reconciler.settings import Settings
from tests.standin.netbox import DEVICES
from tests.unit.reconciler.conftest import ADMIN
from tests.unit.reconciler.inventory.conftest import Pass, device
from tests.unit.reconciler.service.service import until

pytestmark = pytest.mark.covers("ECO-2")


class Loop:
    """Turns of the loop, with the automatic on or off."""

    def __init__(self, netbox: Pass) -> None:
        self.netbox = netbox
        self.engine = netbox.site.engine

    def __call__(self, *, automatic: bool = False) -> tuple[int, int]:
        """Requests that read and that wrote during a turn."""
        before = len(self.netbox.record["requests"])
        settings = self.netbox.settings.model_copy(update={"netbox_sync": automatic})
        sync.tend(self.engine, settings)
        words = [request.split()[0] for request in self.netbox.record["requests"][before:]]
        return words.count("GET"), words.count("PATCH")

    def latest(self) -> dict[str, Any]:
        with reading(self.engine) as conn:
            return sync.READINGS.latest(conn) or {}

    def age(self, seconds: float) -> None:
        with transaction(self.engine) as conn:
            document = {**(sync.READINGS.latest(conn) or {}), "at": clock.read(conn) - seconds}
            site.store(conn, sync.READINGS.key, document)

    def block_a_slot(self) -> None:
        with transaction(self.engine) as conn:
            key = conn.execute(sa.select(slots.c.id).where(slots.c.status == "available"))
            journal.advance(conn, Slot, key.scalars().first(), "block", ADMIN)


@pytest.fixture
def turn(netbox: Pass) -> Loop:
    return Loop(netbox)


def test_without_the_automatic_it_only_compares_every_quarter_of_an_hour(turn: Loop) -> None:
    assert turn() == (4, 0)
    turn.block_a_slot()
    assert turn() == (0, 0)
    turn.age(readings.EVERY_S + 1)
    assert turn() == (4, 0)
    assert turn.latest()["counts"] == {"netbox_outdated": 1}


def test_with_the_automatic_a_change_is_written_at_the_next_turn(turn: Loop) -> None:
    assert turn(automatic=True) == (4, 1)
    assert turn(automatic=True) == (0, 0)
    turn.block_a_slot()
    assert turn(automatic=True) == (4, 1)
    # Reports of hosts come every few minutes and change no state.
    with transaction(turn.engine) as conn:
        journal.emit(conn, "node.drift", "node", "n1", payload={})
    assert turn(automatic=True) == (0, 0)


def test_what_somebody_changed_in_netbox_is_seen_by_the_loop(turn: Loop, netbox: Pass) -> None:
    turn(automatic=True)
    row = netbox.objects(DEVICES)[0]
    row["custom_fields"]["gpuaas_slots_total"] = 99
    netbox.begin(row)
    turn.age(readings.EVERY_S + 1)
    assert turn(automatic=True) == (4, 0)
    assert turn.latest()["counts"] == {"netbox_foreign_edit": 1}


def test_a_netbox_that_fails_is_left_alone_for_a_while(turn: Loop, netbox: Pass) -> None:
    netbox.begin(device("n1"), status={"GET": 500})
    assert turn(automatic=True) == (1, 0)
    turn.block_a_slot()
    assert turn(automatic=True) == (0, 0)
    turn.age(readings.RETRY_S + 1)
    netbox.begin(device("n1"))
    assert turn(automatic=True) == (4, 1)


def test_an_error_of_ours_has_a_name_and_is_not_repeated_at_once(
    turn: Loop, netbox: Pass, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> Any:
        raise ZeroDivisionError("an answer that no code foresaw\0")

    with monkeypatch.context() as patch:
        patch.setattr(sync, "compare", fail)
        assert turn(automatic=True)[0] > 0
        assert turn(automatic=True) == (0, 0)
    error = turn.latest()["error"]
    assert error["code"] == "netbox_comparison_failed"
    assert error["found"] == "ZeroDivisionError: an answer that no code foresaw\ufffd"
    turn.age(readings.RETRY_S + 1)
    assert turn(automatic=True) == (4, 1)


def test_a_clock_that_was_set_back_does_not_end_the_comparisons(turn: Loop) -> None:
    turn()
    turn.age(-1_000_000.0)
    assert turn() == (4, 0)


def test_a_request_is_served_once_and_as_it_was_made(turn: Loop, netbox: Pass) -> None:
    turn()
    for apply, writes in ((False, 0), (True, 1)):
        with transaction(turn.engine) as conn:
            number = sync.ask(conn, netbox.settings, ADMIN, apply=apply)
        assert turn() == (4, writes)
        assert turn.latest()["request_number"] == number
        assert turn() == (0, 0)


def test_of_several_requests_none_waits_in_vain(turn: Loop, netbox: Pass) -> None:
    def ask(*, apply: bool) -> int:
        with transaction(turn.engine) as conn:
            return sync.ask(conn, netbox.settings, ADMIN, apply=apply)

    first, second = ask(apply=True), ask(apply=False)
    assert turn() == (4, 1), "the later request does not change the earlier"
    assert turn.latest()["request_number"] == second > first
    assert turn() == (0, 0)

    # A request during a pass is served by the next pass, and the earlier request stays served.
    due = sync.READINGS.due(turn.engine)
    third = ask(apply=False)
    reading_ = sync.NetboxReading(due.at, due.event_id, due.request_number)
    assert sync.run(turn.engine, netbox.settings, reading_).request_number == second
    assert turn() == (4, 0)
    assert turn.latest()["request_number"] == third


def test_a_comparison_ends_no_sync_that_goes_on(
    turn: Loop, netbox: Pass, monkeypatch: pytest.MonkeyPatch
) -> None:
    def without_time(_client: Client) -> None:
        raise Unfinished("netbox_unfinished", expected="time", found="none", remedy="none")

    with transaction(turn.engine) as conn:
        sync.ask(conn, netbox.settings, ADMIN, apply=True)
    with monkeypatch.context() as patch:
        patch.setattr(Client, "require_time", without_time)
        assert turn() == (4, 0)
    with transaction(turn.engine) as conn:
        sync.ask(conn, netbox.settings, ADMIN, apply=False)
    assert turn() == (4, 1)


def test_a_site_without_netbox(turn: Loop) -> None:
    sync.tend(turn.engine, Settings())
    assert turn.latest() == {}


def test_the_process_that_leads_follows_netbox(netbox: Pass) -> None:
    settings = netbox.settings.model_copy(
        update={"netbox_sync": True, "database_url": str(netbox.site.engine.url), "workers": 0}
    )
    with process.running(settings, netbox.site.engine, work=True):
        until(lambda: "PATCH" in str(netbox.record["requests"]))
    assert netbox.objects(DEVICES)[0]["custom_fields"]["gpuaas_state"] == "ready"

"""The ring of samples: bounded whatever comes, kept a day, and only a host's own slices."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import pytest
import sqlalchemy as sa

from reconciler.api import metrics
from reconciler.db import clock
from reconciler.db.engine import reading, transaction
from reconciler.db.schema import allocations, telemetry_samples
from reconciler.lifecycle import retention, slice_telemetry
from reconciler.model.slice_telemetry import Snapshot, is_silent
from tests.unit.reconciler.conftest import Site

pytestmark = pytest.mark.covers("SLICE-11")


def snapshot(allocation_id: str, guest: dict[str, Any] | None = None, **host: Any) -> Snapshot:
    part = {"allocation_id": allocation_id, "host": {"state": "running", **host}, "guest": guest}
    read = Snapshot.read(json.dumps({"version": 1, "slices": [part]}).encode())
    assert isinstance(read, Snapshot), read
    return read


def test_the_ring_has_a_place_per_minute_of_the_day(
    on_either: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    with transaction(on_either.engine) as conn:
        mine = on_either.active(conn)
        now = clock.read(conn)
        # Two days, a sample per 15 minutes.
        for at in range(0, 2 * 24 * 60, 15):
            monkeypatch.setattr(clock, "read", lambda _c, at=at: now - 2 * 86_400 + at * 60 + 60)
            slice_telemetry.record(conn, "n1", snapshot(mine, cpu_s=float(at)))
        places = conn.execute(sa.select(sa.func.count()).select_from(telemetry_samples)).scalar()
        assert places == 24 * 4
        kept = slice_telemetry.samples(conn, mine, slice_telemetry.RING)
        assert [row.host["cpu_s"] for row in kept] == list(range(24 * 60, 2 * 24 * 60, 15))
        assert len(slice_telemetry.samples(conn, mine, 60)) == 4


def test_samples_older_than_a_day_are_deleted(on_either: Site) -> None:
    with transaction(on_either.engine) as conn:
        mine = on_either.active(conn)
        slice_telemetry.record(conn, "n1", snapshot(mine))
        assert retention.telemetry(conn) == 0
        age = sa.update(telemetry_samples).values(at=clock.now() - 86_401)
        conn.execute(age)
        assert retention.telemetry(conn) == 1


def test_a_host_speaks_of_its_own_active_slices_only(on_either: Site) -> None:
    with transaction(on_either.engine) as conn:
        mine, requested = on_either.active(conn), on_either.allocate(conn)
        for node_id, key in (("n2", mine), ("n1", requested), ("n1", "f" * 36)):
            assert slice_telemetry.record(conn, node_id, snapshot(key)) == 0
        assert slice_telemetry.record(conn, "n1", snapshot(mine)) == 1
        metal = sa.update(allocations).where(allocations.c.id == mine)
        conn.execute(metal.values(capacity_shape="baremetal"))
        assert slice_telemetry.record(conn, "n1", snapshot(mine)) == 0


@pytest.mark.covers("SLICE-8")
def test_a_slice_that_goes_off_unasked_is_named_once(on_either: Site) -> None:
    with transaction(on_either.engine) as conn:
        mine = on_either.active(conn)
        off = snapshot(mine, state="shut off")
        look = partial(slice_telemetry.switched_off, conn, "n1")
        assert look(off) == [mine], "a slice that should run and was never seen"
        slice_telemetry.record(conn, "n1", snapshot(mine))
        assert look(snapshot(mine)) == []
        assert slice_telemetry.switched_off(conn, "n2", off) == []
        assert look(off) == [mine]
        for values in ({"stopped": True}, {"power_action": "restart"}):
            update = sa.update(allocations).where(allocations.c.id == mine)
            conn.execute(update.values(**values))
            assert look(off) == []
            conn.execute(update.values(stopped=False, power_action=""))
        # A host that loses power is silent for longer than a sample counts as current.
        conn.execute(sa.update(telemetry_samples).values(at=clock.now() - 3600))
        assert look(off) == [mine]
        slice_telemetry.record(conn, "n1", off)
        assert look(off) == []
        assert look(off, again=True) == [mine]


IDLE = {"state": "running", "sent_packets": 5, "disk_writes": 7}


def minutes(last: int, first: int = 30, **change: Any) -> list[tuple[float, Any, Any]]:
    """Samples of these minutes before the end, with these values of an idle guest."""
    guest = change.pop("guest", None)
    return [(-60.0 * at, {**IDLE, **change}, guest) for at in range(first, last, -1)]


@pytest.mark.covers("SLICE-8")
@pytest.mark.parametrize(
    ("samples", "silent"),
    [
        (minutes(0), True),
        (minutes(0)[::4], True),
        # A value that was never there, and a value that is missing now.
        ([(at, {**host, "sent_packets": None}, guest) for at, host, guest in minutes(0)], False),
        ([*minutes(1), (-60.0, {"state": "running", "sent_packets": 5}, None)], False),
        # Signs of life.
        ([*minutes(1), *minutes(0, 1, sent_packets=6)], False),
        ([*minutes(1), *minutes(0, 1, disk_writes=8)], False),
        ([*minutes(29), *minutes(0, 29, disk_writes=8)], False),
        ([*minutes(20), *minutes(19, 20, guest={"age_s": 1.0}), *minutes(0, 19)], False),
        # It has not run all the time.
        ([*minutes(20), *minutes(19, 20, state="paused"), *minutes(0, 19)], False),
        (minutes(0, state="shut off"), False),
        # It may have spoken meanwhile.
        ([], False),
        (minutes(0, 25), False),
        (minutes(5), False),
        ([*minutes(20), *minutes(0, 15)], False),
    ],
)
def test_what_shows_that_a_guest_no_longer_answers(samples: Any, silent: bool) -> None:
    assert is_silent(samples, since=-1800, until=0, gap_s=240) is silent


@pytest.mark.covers("SLICE-8")
def test_a_guest_that_has_spoken_within_the_day_is_silent(
    on_either: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    with transaction(on_either.engine) as conn:
        mine, now = on_either.active(conn), clock.read(conn)

        def record(*ages: int, guest: dict[str, Any] | None = None) -> None:
            for age in ages:
                with monkeypatch.context() as past:
                    past.setattr(clock, "read", lambda _c, age=age: now - 60 * age)
                    slice_telemetry.record(conn, "n1", snapshot(mine, guest, **IDLE))

        silent = partial(slice_telemetry.silent, conn, mine)
        assert not silent(named=True), "nothing was ever read"
        record(*range(32, -1, -1))
        assert not silent(named=False), "an image without telemetry"
        assert silent(named=True), "it spoke before the ring began"
        record(600, guest={"age_s": 1.0})
        assert silent(named=False)
        record(3, guest={"age_s": 200.0})
        assert not silent(named=True)


def test_metrics_have_a_series_per_value_and_none_from_names_of_a_guest(on_either: Site) -> None:
    # A slice with one GPU: more of them, and the same twice, are no further series.
    gpus = [{"index": index, "power_w": 5.5} for index in (0, 0, *range(1, 14))]
    guest = {"age_s": 3.0, "load_1": 0.5, "cuda": "ready", "gpus": gpus, "invented": 1}
    with transaction(on_either.engine) as conn:
        mine = on_either.active(conn)
        host = {"sent_bytes": 7, "node_memory_bytes": [0, 9]}
        host |= {"refused_packets": {"arp": 2, "invented": 1}}
        slice_telemetry.record(conn, "n1", snapshot(mine, guest, **host))
    text = metrics.exposition(on_either.engine).decode()
    labels = f'allocation="{mine}",project="p1",source='
    rows = [line for line in text.splitlines() if line.startswith("gpuaas_slice_")]
    assert len(rows) == 6
    assert {*rows} == {
        f'gpuaas_slice_sent_bytes{{{labels}"host"}} 7.0',
        f'gpuaas_slice_age_s{{{labels}"guest"}} 3.0',
        f'gpuaas_slice_load_1{{{labels}"guest"}} 0.5',
        f'gpuaas_slice_gpu_power_w{{allocation="{mine}",gpu="0",project="p1",source="guest"}} 5.5',
        *(
            f'gpuaas_slice_node_memory_bytes{{allocation="{mine}",numa_node="{node}",project="p1",'
            f'source="host"}} {size}.0'
            for node, size in enumerate((0, 9))
        ),
    }
    # The guard's counters go to the totals of the allocation.
    assert 'gpuaas_refused_packets{kind="arp"} 2.0' in text and "invented" not in text
    with transaction(on_either.engine) as conn:
        conn.execute(sa.update(telemetry_samples).values(at=clock.now() - 300))
    assert "gpuaas_slice_" not in metrics.exposition(on_either.engine).decode()


@pytest.mark.parametrize(
    "change",
    [
        {"cpu_s": -1},
        {"node_memory_bytes": [0, -1]},
        {"node_memory_bytes": [0] * 17},
        {"cpu_s": "1"},
        {"sent_bytes": 2**53},
        {"sent_bytes": 1.5},
        {"vcpus": True},
        {"state": "gone"},
        {"refused_packets": {"A" * 40: 1}},
    ],
)
def test_a_snapshot_with_a_value_out_of_range_is_refused(change: dict[str, Any]) -> None:
    part = {"allocation_id": "a", "host": {"state": "running", **change}}
    refused = Snapshot.read(json.dumps({"version": 1, "slices": [part]}).encode())
    assert isinstance(refused, str) and next(iter(change)) in refused


def test_a_snapshot_is_bounded() -> None:
    part = {"allocation_id": "a", "host": {"state": "running"}}
    for document in ({"version": 1, "slices": [part] * 300}, {"version": 2, "slices": []}, []):
        assert isinstance(Snapshot.read(json.dumps(document).encode()), str)
    assert isinstance(Snapshot.read(b"[" * 100_000), str)
    assert isinstance(Snapshot.read(b"\xff"), str)


def test_a_host_is_due_once_per_minute_while_it_has_active_slices(on_either: Site) -> None:
    with reading(on_either.engine) as conn:
        assert slice_telemetry.due(conn) == []
    with transaction(on_either.engine) as conn:
        mine = on_either.active(conn)
        assert [node.id for node in slice_telemetry.due(conn)] == ["n1"]
        slice_telemetry.record(conn, "n1", snapshot(mine))
        assert slice_telemetry.due(conn) == []
        conn.execute(sa.update(telemetry_samples).values(at=clock.now() - 56))
        assert [node.id for node in slice_telemetry.due(conn)] == ["n1"]


def test_a_day_of_samples_makes_the_question_for_due_hosts_no_slower(sold: Site) -> None:
    """It is asked every few seconds, and read all samples of all slices."""
    steps: list[int] = []
    with transaction(sold.engine) as conn:
        mine, now = sold.active(conn), clock.read(conn)
        database = conn.connection.driver_connection
        assert database is not None
        for minutes in (range(2, 4), range(4, slice_telemetry.RING)):
            samples = [
                {
                    "allocation_id": mine,
                    "minute": int(now // 60 - back) % slice_telemetry.RING,
                    "at": now - back * 60,
                    "host": {"state": "running"},
                    "guest": None,
                }
                for back in minutes
            ]
            conn.execute(sa.insert(telemetry_samples), samples)
            steps.append(0)
            database.set_progress_handler(lambda: steps.__setitem__(-1, steps[-1] + 1), 10)
            assert [node.id for node in slice_telemetry.due(conn)] == ["n1"]
            database.set_progress_handler(None, 0)
    assert steps[1] < steps[0] + 20, steps

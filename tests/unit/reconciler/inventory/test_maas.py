"""Comparison with a stand-in MAAS: which machine is which node, locks, tags, annotations."""

from __future__ import annotations

import time
from typing import Any

import pytest
import sqlalchemy as sa

from reconciler.db import leader
from reconciler.db import settings as site
from reconciler.db.engine import reading, transaction
from reconciler.db.schema import slots
from reconciler.inventory import maas as client
from reconciler.inventory import maas_sync
from reconciler.inventory.compare import Finding
from reconciler.inventory.patches import BLOCKED
from reconciler.inventory.readings import Reading
from reconciler.lifecycle import launch as launching
from reconciler.model.states import NodeMode, SlotState
from reconciler.records import nodes
from tests.standin.maas import TABLE
from tests.unit.reconciler.conftest import ADMIN, code
from tests.unit.reconciler.work import test_maas
from tests.unit.reconciler.work.test_maas import BAREMETAL, SLICE, Maas, machine

pytestmark = pytest.mark.covers("ECO-3")
process, maas = test_maas.process, test_maas.maas
OTHER: dict[str, Any] = {
    **{"system_id": "def456", "hostname": "m2", "serial": "S2", "hardware_uuid": "U-2"},
    **{"macs": ["52:54:00:00:00:02"], "ip_addresses": ["10.0.2.16"]},
}


def codes(reading: Reading) -> list[str]:
    assert reading.complete, reading.error
    return [row.code.removeprefix("maas_") for row in reading.findings if row.action != "upload"]


def by_code(reading: Reading, code: str) -> Finding:
    return next(row for row in reading.findings if row.code == f"maas_{code}")


def add(maas: Maas, node_id: str = "m2", address: str = "10.0.2.16") -> None:
    with transaction(maas.engine) as conn:
        nodes.create(conn, ADMIN, id=node_id, address=address, mode=NodeMode.BAREMETAL)


def test_a_second_pass_writes_nothing(maas: Maas) -> None:
    assert maas.asked() == ["set_workload_annotations"]
    reading = maas.compare()
    assert (codes(reading), reading.done) == ([], {})
    node = maas.node()
    assert node.maas_tags == [BAREMETAL, "rack-7"]
    assert node.maas and node.maas["system_id"] == "abc123"
    annotations = maas.manager.record()["machines"]["abc123"]["workload_annotations"]
    assert annotations["gpuaas.node"] == "m1"


DOUBTFUL: list[tuple[dict[str, Any], list[str]]] = [
    ({"tag_names": [SLICE, BAREMETAL]}, ["both_tags"]),
    ({"serial": "S1"}, ["machine_twice"]),
    ({"hardware_uuid": "u-1"}, ["machine_twice"]),
    ({"macs": ["52:54:00:00:00:01"]}, ["machine_twice"]),
    ({"ip_addresses": ["172.16.0.9"]}, ["address_outside"]),
    ({"ip_addresses": ["10.0.2.99"]}, ["unsure"]),
    ({"hostname": "m3"}, ["unsure"]),
    ({"serial": "Unknown", "hardware_uuid": None, "macs": []}, ["no_identity"]),
]


def test_a_doubtful_machine_is_named_and_no_node(maas: Maas) -> None:
    add(maas)
    for change, expected in DOUBTFUL:
        maas.begin(machine(), machine(**{**OTHER, **change}))
        assert codes(maas.compare()) == expected
        with reading(maas.engine) as conn:
            assert nodes.get(conn, "m2").maas is None
        requests = maas.manager.record()["requests"]
        assert {row["key"] for row in requests if row["operation"][:4] != "GET "} <= {"abc123"}
    # The name of a node, and the id of another.
    with transaction(maas.engine) as conn:
        nodes.change(conn, "m2", ADMIN, name="other")
        nodes.create(conn, ADMIN, id="m3", name="m2", address="10.0.2.17", mode=NodeMode.BAREMETAL)
    maas.begin(machine(), machine(**{**OTHER, "ip_addresses": []}))
    assert codes(maas.compare()) == ["unsure"]
    with reading(maas.engine) as conn:
        assert [nodes.get(conn, key).maas for key in ("m2", "m3")] == [None, None]
    # The address of a node whose machine MAAS knows.
    new = {"hostname": "m9", "tag_names": [BAREMETAL, "gpuaas-hardware-lab"]}
    maas.begin(machine(), machine(**{**OTHER, **new, "ip_addresses": ["10.0.2.15"]}))
    assert codes(maas.compare()) == ["unsure"]


STRANGE: list[tuple[dict[str, Any], str]] = [
    ({"serial": "S9"}, "identity_changed"),
    ({"macs": []}, "identity_changed"),
    ({"owner": "somebody"}, "foreign_owner"),
    ({"ip_addresses": ["10.0.2.99"]}, "address_differs"),
    ({"tag_names": [SLICE]}, "intent_differs"),
    ({"tag_names": []}, "intent_differs"),
    ({"status": 4}, "not_deployed"),
    ({"system_id": "gone"}, "machine_lost"),
]


def test_a_known_machine_in_another_condition_is_named_and_not_written_to(maas: Maas) -> None:
    with transaction(maas.engine) as conn:
        maas.machines.active(conn)
    for change, expected in STRANGE:
        maas.begin(machine(**change))
        assert expected in codes(maas.compare())
        assert maas.asked() == []
        if "tag_names" in change:
            assert maas.node().maas_tags == change["tag_names"]


def test_a_host_with_another_serial_number_is_named_and_its_machine_not_locked(maas: Maas) -> None:
    maas.report("S7")
    maas.begin()
    with transaction(maas.engine) as conn:
        maas.machines.active(conn)
    reading = maas.compare()
    assert (codes(reading), reading.done) == (["serial_differs"], {})
    assert by_code(reading, "serial_differs").found == "S7 at the host, S1 in MAAS"
    assert maas.asked() == []


def test_a_machine_is_not_bound_to_a_host_with_another_serial_number(maas: Maas) -> None:
    maas.machines.machine("m2", 2, address="10.0.2.16")
    maas.report("S9", "m2", 2)
    maas.begin(machine(), machine(**OTHER))
    assert codes(maas.compare()) == ["serial_differs"]
    maas.report("S2", "m2", 2)
    assert maas.compare().done["nodes bound"] == 1


@pytest.mark.parametrize(
    ("serial", "expected"), [("", "unsure"), ("S9", "serial_differs"), ("S2", "not_deployed")]
)
def test_an_installed_node_is_not_bound_to_a_free_machine_by_its_name_alone(
    maas: Maas, serial: str, expected: str
) -> None:
    """Its deployment would end the keys of the node's host, and install another machine as it."""
    maas.machines.machine("m2", 2, address="10.0.2.16")
    if serial:
        maas.report(serial, "m2", 2)
    maas.begin(machine(), machine(**{**OTHER, "status": 4, "owner": "", "ip_addresses": []}))
    maas.compare()
    assert codes(maas.compare()) == [expected]
    with reading(maas.engine) as conn:
        assert bool(nodes.get(conn, "m2").maas) == (serial == "S2")


def test_a_machine_of_another_user_is_not_locked_when_it_is_bound(maas: Maas) -> None:
    maas.machines.machine("m2", 2, address="10.0.2.16")
    with transaction(maas.engine) as conn:
        nodes.update(conn, "m2", unclean_allocation_id="tenant")
    maas.begin(machine(), machine(**{**OTHER, "owner": "somebody"}))
    assert codes(maas.compare()) == ["foreign_owner"]
    assert maas.asked() == ["set_workload_annotations"], "that of our own machine"


@pytest.mark.parametrize("tenant", [False, True])
def test_hosts_with_one_serial_number_are_left_alone(maas: Maas, tenant: bool) -> None:
    """But for the lock of a tenant's machine, which MAAS itself knows by this number: no other host
    takes it away.
    """
    maas.machines.machine("m2", 2, address="10.0.2.16")
    maas.report("S1", "m2", 2)
    maas.report("S1")
    if tenant:
        with transaction(maas.engine) as conn:
            maas.machines.active(conn)
    maas.begin(machine(), machine(**{**OTHER, "serial": "Unknown"}))
    reading = maas.compare()
    assert codes(reading) == ["serial_twice"]
    assert by_code(reading, "serial_twice").found == "m1, m2"
    assert maas.asked() == (["set_workload_annotations", "lock"] if tenant else [])


def test_a_host_with_the_serial_number_of_another_stops_only_itself(maas: Maas) -> None:
    """MAAS itself knows both machines, and a third machine that is no node yet."""
    maas.machines.machine("m2", 2, address="10.0.2.16")
    machines = [machine(), machine(**OTHER)]
    maas.begin(*machines)
    assert maas.compare().done["nodes bound"] == 1
    maas.report("S1")
    maas.report("S1", "m2", 2)
    maas.begin(*machines)
    assert codes(maas.compare()) == ["serial_differs", "serial_twice"]
    assert maas.asked() == ["set_workload_annotations"]
    third = {"system_id": "ghi789", "hostname": "m3", "serial": "S3", "hardware_uuid": "U-3"}
    third |= {"macs": ["52:54:00:00:00:03"], "ip_addresses": ["10.0.2.17"]}
    maas.report("S3", "m2", 2)
    maas.begin(*machines, machine(**third))
    assert "unsure" not in codes(maas.compare())


def test_a_host_without_a_machine_in_maas_takes_no_serial_number_from_one_that_has(
    maas: Maas,
) -> None:
    """It came with a number of its own, so it is no second record of the bound machine."""
    maas.machines.machine("m2", 2, address="10.0.2.16")
    maas.report("S1")
    maas.report("S2", "m2", 2)
    maas.report("S1", "m2", 2)
    with transaction(maas.engine) as conn:
        maas.machines.active(conn)
    maas.begin(machine(), machine(**{**OTHER, "serial": "Unknown"}))
    reading = maas.compare()
    assert codes(reading) == ["serial_twice"]
    finding = by_code(reading, "serial_twice")
    assert (finding.expected, finding.found) == ("the host of node m1 only", "m2")
    assert maas.asked() == ["set_workload_annotations", "lock"]
    # Neither bound nor written to.
    assert "nodes bound" not in reading.done


def test_a_tenant_locks_the_machine_and_its_end_unlocks_it(maas: Maas) -> None:
    with transaction(maas.engine) as conn:
        key = maas.machines.active(conn)
    assert maas.compare().done == {"machines locked": 1}
    assert maas.compare().done == {}
    with transaction(maas.engine) as conn:
        launching.release(conn, key, ADMIN)
    assert maas.compare().done == {}
    with transaction(maas.engine) as conn:
        assert maas.machines.released(conn, key)
    assert maas.compare().done == {"machines unlocked": 1}
    maas.begin(machine(locked=True))
    assert maas.compare().done == {}, "the lock of a person stays"


def test_a_conversion_sets_the_tag_and_a_slice_host_is_locked(maas: Maas) -> None:
    with transaction(maas.engine) as conn:
        nodes.update(conn, "m1", mode=NodeMode.CONVERTING_TO_SLICE.value)
    # Not while MAAS shows it twice: the other may be the machine.
    maas.begin(machine(), machine(**{**OTHER, "serial": "S1"}))
    assert (codes(maas.compare()), maas.asked()) == (["machine_twice"], [])
    maas.begin()
    done = maas.compare().done
    assert done == {"tags set": 1, "machines annotated": 1, "machines locked": 1}
    row = maas.manager.record()["machines"]["abc123"]
    assert (sorted(row["tag_names"]), row["locked"]) == ([SLICE, "rack-7"], True)
    reading = maas.compare()
    assert (codes(reading), reading.done, maas.node().maas_tags) == ([], {}, [SLICE, "rack-7"])
    # A person takes it back in MAAS: that is not our intent, and is reported.
    maas.begin(machine(locked=True))
    assert codes(maas.compare()) == ["intent_differs"]


def test_a_conversion_that_stopped_between_two_tags_goes_on(maas: Maas) -> None:
    with transaction(maas.engine) as conn:
        nodes.update(conn, "m1", mode=NodeMode.CONVERTING_TO_SLICE.value)
    maas.begin(machine(tag_names=[SLICE, BAREMETAL]))
    assert maas.compare().done["tags set"] == 1
    assert maas.manager.record()["machines"]["abc123"]["tag_names"] == [SLICE]


def test_a_sync_adds_new_machines_and_uploads_scripts(maas: Maas) -> None:
    new = machine(**{**OTHER, "tag_names": [SLICE, "gpuaas-hardware-lab"]})
    maas.begin(machine(), new, machine("x1", hostname="m8", tag_names=[SLICE]))
    with transaction(maas.engine) as conn:
        maas_sync.ask(conn, maas.settings, ADMIN, apply=True)
    maas_sync.tend(maas.engine, maas.settings)
    with reading(maas.engine) as conn:
        document = site.read(conn, maas_sync.READINGS.key)
        assert (document["applied"], document["done"]["scripts uploaded"]) == (True, 2)
    maas.begin(machine(), new)
    with transaction(maas.engine) as conn:
        maas_sync.ask(conn, maas.settings, ADMIN, apply=True)
    maas_sync.tend(maas.engine, maas.settings)
    with reading(maas.engine) as conn:
        node = nodes.get(conn, "m2")
    assert (node.state, node.mode, node.profile) == ("enrolling", "converting_to_slice", "lab")
    assert node.maas and node.maas["system_id"] == "def456"
    uploaded = maas.manager.record()["scripts"]
    for kind, path in maas_sync.MAAS_SCRIPTS.items():
        assert f"# script_type: {kind}\n" in uploaded[path.stem]


def test_scripts_are_compared_by_digest(maas: Maas) -> None:
    path, other = maas_sync.MAAS_SCRIPTS.values()
    released = {other.stem: other.read_text()}
    for scripts, expected in (
        ({}, ["none", "none"]),
        ({path.stem: "#!/bin/sh\n", **released}, ["SHA-256"]),
        ({path.stem: path.read_text(), **released}, []),
    ):
        maas.begin(scripts=scripts)
        rows = [row for row in maas.compare().findings if row.code == "maas_script"]
        assert [row.found.split()[0] for row in rows] == expected


def test_a_process_that_leads_no_more_stops_writing(
    maas: Maas, monkeypatch: pytest.MonkeyPatch
) -> None:
    with transaction(maas.engine) as conn:
        term = leader.campaign(conn, leader.LOOPS, "a", 30)
    assert term is not None
    maas.meanwhile(monkeypatch, lambda conn: leader.resign(conn, term))
    maas.begin(scripts={})
    with pytest.raises(leader.Deposed):
        maas_sync.run(
            leader.led_by(maas.engine, term), maas.settings, Reading(at=0.0, applied=True)
        )
    record = maas.manager.record()
    assert {row["operation"][:4] for row in record["requests"]} == {"GET "}


def test_the_loop_waits_without_a_change(maas: Maas) -> None:
    maas_sync.tend(maas.engine, maas.settings)
    before = len(maas.manager.record()["requests"])
    maas_sync.tend(maas.engine, maas.settings)
    assert len(maas.manager.record()["requests"]) == before
    with transaction(maas.engine) as conn:
        maas.machines.active(conn)
    maas_sync.tend(maas.engine, maas.settings)
    assert "lock" in maas.asked()
    maas.begin(body="<html>")
    with transaction(maas.engine) as conn:
        maas_sync.ask(conn, maas.settings, ADMIN, apply=False)
    maas_sync.tend(maas.engine, maas.settings)
    with reading(maas.engine) as conn:
        document = maas_sync.READINGS.latest(conn) or {}
    assert (document["error"]["code"], document["complete"]) == ("maas_silent", False)


def test_a_node_that_was_unbound_is_found_again(maas: Maas) -> None:
    with transaction(maas.engine) as conn:
        maas_sync.unbind(conn, "m1", ADMIN)
    maas.begin(machine(serial="S9"))
    assert maas.compare().done["nodes bound"] == 1
    assert code(maas.queue) == "node_in_service"


def test_a_node_that_changes_during_a_pass_is_not_bound(
    maas: Maas, monkeypatch: pytest.MonkeyPatch
) -> None:
    add(maas)
    maas.meanwhile(monkeypatch, lambda conn: nodes.change(conn, "m2", ADMIN, address="10.0.2.99"))
    maas.begin(machine(), machine(**OTHER))
    maas.compare()
    with reading(maas.engine) as conn:
        assert nodes.get(conn, "m2").maas is None


@pytest.mark.parametrize("tenant", [True, False])
def test_a_lock_does_not_pass_to_the_machine_that_a_node_is_bound_to_meanwhile(
    maas: Maas, monkeypatch: pytest.MonkeyPatch, tenant: bool
) -> None:
    """The machine that was locked may be another node's."""
    with transaction(maas.engine) as conn:
        key = maas.machines.active(conn)
    if not tenant:
        maas.compare()
        with transaction(maas.engine) as conn:
            launching.release(conn, key, ADMIN)
            assert maas.machines.released(conn, key)
    other = {"system_id": "def456", "locked": False}
    maas.meanwhile(monkeypatch, lambda conn: nodes.update(conn, "m1", maas=other))
    assert maas.compare().complete
    assert "lock" in maas.asked()
    assert maas.node().maas == other


def test_a_machine_that_two_nodes_are_bound_to_is_not_written_to(maas: Maas) -> None:
    add(maas)
    with transaction(maas.engine) as conn:
        nodes.update(conn, "m2", maas=maas.node().maas)
        maas.machines.active(conn)
    maas.begin()
    assert codes(maas.compare()).count("bound_twice") == 2
    assert maas.asked() == []


def test_two_machines_that_claim_to_be_one_node(maas: Maas) -> None:
    add(maas)
    same = {"hostname": "m2", "ip_addresses": [], "tag_names": [BAREMETAL]}
    rows = [
        machine(f"x{n}", **{**same, "serial": f"X{n}", "macs": [], "hardware_uuid": ""})
        for n in "12"
    ]
    maas.begin(machine(), *rows)
    assert codes(maas.compare()) == ["unsure", "unsure"]
    new = {"tag_names": [BAREMETAL, "gpuaas-hardware-lab"], "ip_addresses": ["10.0.2.77"]}
    maas.begin(
        machine(), *({**row, **new, "hostname": f"y{row['serial'].lower()}"} for row in rows)
    )
    assert codes(maas.compare()) == ["new_machine", "new_machine", "unsure", "unsure"]
    with reading(maas.engine) as conn:
        assert [node.id for node in nodes.every(conn) if node.maas] == ["m1"]


def test_a_machine_is_locked_although_its_annotation_is_refused(maas: Maas) -> None:
    with transaction(maas.engine) as conn:
        maas.machines.active(conn)
    maas.begin(status={"set_workload_annotations": 403})
    reading = maas.compare()
    assert (codes(reading), reading.done) == (["not_written"], {"machines locked": 1})


def test_a_machine_that_maas_cannot_write_keeps_no_other_from_its_lock(maas: Maas) -> None:
    add(maas)
    maas.begin(machine(), machine(**OTHER))
    maas.compare()
    with transaction(maas.engine) as conn:
        nodes.update(conn, "m2", unclean_allocation_id="tenant")
        maas.machines.active(conn)
    maas.begin(
        machine(), machine(**OTHER), status={"lock abc123": 500, "set_workload_annotations": 403}
    )
    assert maas.compare().error
    machines = maas.manager.record()["machines"]
    assert (machines["abc123"]["locked"], machines["def456"]["locked"]) == (False, True)


@pytest.mark.parametrize("status", [500, 403])
def test_a_machine_without_tags_that_maas_cannot_show_is_named_and_stops_no_other(
    maas: Maas, status: int
) -> None:
    add(maas)
    maas.begin(machine(), machine(**OTHER))
    maas.compare()
    with transaction(maas.engine) as conn:
        maas.machines.active(conn)
    maas.begin(machine(), machine(**{**OTHER, "tag_names": []}), status={"GET def456": status})
    result = maas.compare()
    assert codes(result) == ["not_read"]
    row = by_code(result, "not_read")
    assert (row.subject, row.expected) == ("node m2", "machine def456")
    assert f"HTTP {status}" in row.found
    assert maas.asked() == ["set_workload_annotations", "lock"]
    with reading(maas.engine) as conn:
        assert (nodes.get(conn, "m2").maas or {})["system_id"] == "def456"


UNREADABLE: list[dict[str, Any]] = [
    {"locked": "perhaps"},
    {"tag_names": [BAREMETAL, 7]},
    {"hostname": "x" * 400},
    {"hardware_info": None},
]


@pytest.mark.parametrize("wrong", UNREADABLE)
def test_a_tagged_machine_in_another_form_is_named_and_stops_no_other(
    maas: Maas, wrong: dict[str, Any]
) -> None:
    add(maas)
    maas.begin(machine(), machine(**OTHER))
    maas.compare()
    with transaction(maas.engine) as conn:
        maas.machines.active(conn)
        known = nodes.get(conn, "m2").maas or {}
        nodes.update(conn, "m2", maas={**known, "locked": True})
    strange = machine(**{**OTHER, "locked": True})
    maas.begin(machine(), strange, wrong={"def456": wrong})
    result = maas.compare()
    assert codes(result) == ["not_read"]
    row = by_code(result, "not_read")
    assert (row.subject, row.expected) == ("node m2", "machine def456")
    assert f"another form: {next(iter(wrong))}" in row.found
    assert maas.asked() == ["set_workload_annotations", "lock"]
    with reading(maas.engine) as conn:
        bound = nodes.get(conn, "m2").maas or {}
    assert (bound["system_id"], bound["locked"]) == ("def456", True)


def test_a_machine_in_another_form_is_named_without_a_node_and_without_an_id(maas: Maas) -> None:
    maas.begin(
        *(machine(), machine(**OTHER), machine("third3", tag_names=[SLICE])),
        wrong={"def456": {"status": None}, "third3": {"system_id": "../x"}},
    )
    result = maas.compare()
    assert codes(result) == ["not_read", "not_read"]
    subjects = {row.subject for row in result.findings if row.action != "upload"}
    assert subjects == {"machine def456", "machine with the tag gpuaas-profile-slice-vm"}
    # The machine of a node may be the machine without an id. It is asked for by its id.
    maas.begin(machine(), wrong={"abc123": {"system_id": None}})
    assert codes(maas.compare()) == ["not_read", "not_read"]


def test_a_maas_that_shows_no_machine_ends_the_pass(maas: Maas) -> None:
    """The third silence means MAAS itself, of which nothing may be concluded."""
    keys = ["def4", "def5", "def6"]
    for key in keys:
        add(maas, key)
        with transaction(maas.engine) as conn:
            nodes.update(conn, key, maas={"system_id": key})
    maas.begin(status={f"GET {key}": 503 for key in keys})
    assert (maas.compare().error or {})["code"] == "maas_silent"
    assert maas.asked() == []


def test_a_list_takes_longer_than_a_request_of_a_task(
    maas: Maas, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A busy machine takes its time for the other requests.
    monkeypatch.setattr(client.Client, "REQUEST_S", 1.0)
    maas.begin(list_s=1.5)
    assert maas.compare().complete


@pytest.mark.parametrize("request_name", ["GET def456", "set_workload_annotations def456"])
def test_a_machine_that_hangs_takes_the_time_of_no_other(
    maas: Maas, monkeypatch: pytest.MonkeyPatch, request_name: str
) -> None:
    add(maas)
    maas.begin(machine(), machine(**OTHER))
    maas.compare()
    with transaction(maas.engine) as conn:
        maas.machines.active(conn)
    monkeypatch.setattr(client.Client, "REQUEST_S", 0.5)
    tags = [] if request_name.startswith("GET") else [BAREMETAL]
    # Each byte comes in time.
    maas.begin(machine(**{**OTHER, "tag_names": tags}), machine(), trickle_s={request_name: 4.0})
    began = time.monotonic()
    result = maas.compare()
    assert time.monotonic() - began < 3.0
    silence = by_code(result, "not_read").found if not tags else str(result.error)
    assert "maas_silent" in silence
    assert "lock" in maas.asked()


@pytest.mark.parametrize("faults", [{"lost": ["lock"]}, {"other": {"lock": "other9"}}])
def test_a_lock_whose_answer_is_lost_is_ours(maas: Maas, faults: dict[str, Any]) -> None:
    with transaction(maas.engine) as conn:
        key = maas.machines.active(conn)
    maas.begin(machine(), machine("other9", tag_names=[]), **faults)
    reading = maas.compare()
    assert reading.error or "maas_wrong_machine" in by_code(reading, "not_written").found
    with transaction(maas.engine) as conn:
        launching.release(conn, key, ADMIN)
        assert maas.machines.released(conn, key)
    assert maas.compare().done["machines unlocked"] == 1


@pytest.mark.parametrize("seen", [True, False])
def test_a_lock_that_never_reached_maas_makes_no_persons_lock_ours(maas: Maas, seen: bool) -> None:
    """seen: whether a comparison sees it while the tenant is there."""
    with transaction(maas.engine) as conn:
        key = maas.machines.active(conn)
    maas.begin(status={"lock": 502})
    assert maas.compare().error
    row = {"node": "abc123", "type": "User locking node", "description": "(ann) - audit"}
    maas.begin(machine(locked=True), events=[row])
    if seen:
        assert codes(maas.compare()) == []
    with transaction(maas.engine) as conn:
        launching.release(conn, key, ADMIN)
        assert maas.machines.released(conn, key)
    assert codes(maas.compare()) == ["lock_unsure"]
    assert maas.asked() == []


def test_whose_a_lock_is_is_asked_before_its_event_is_old(maas: Maas) -> None:
    """MAAS shows the newest events of a machine only, and a tenant stays for months."""
    with transaction(maas.engine) as conn:
        key = maas.machines.active(conn)
    maas.begin(lost=["lock"])
    assert maas.compare().error
    assert codes(maas.compare()) == []
    maas.begin(machine(locked=True))
    with transaction(maas.engine) as conn:
        launching.release(conn, key, ADMIN)
        assert maas.machines.released(conn, key)
    assert maas.compare().done["machines unlocked"] == 1


def test_a_lock_after_an_unlock_without_an_answer_may_be_a_persons(maas: Maas) -> None:
    with transaction(maas.engine) as conn:
        nodes.update(conn, "m1", maas={**(maas.node().maas or {}), "locked": True})
    maas.begin(machine(locked=True), lost=["unlock"])
    assert maas.compare().error
    maas.begin(machine(locked=True))
    assert codes(maas.compare()) == ["lock_unsure"]
    assert maas.asked() == []
    maas.begin(machine(locked=True), status={"unlock": 403})
    with transaction(maas.engine) as conn:
        nodes.update(conn, "m1", maas={**(maas.node().maas or {}), "locked": True})
    assert codes(maas.compare()) == ["not_written"]
    assert (maas.node().maas or {})["locked"] is True


def test_an_unlock_that_never_reached_maas_is_asked_for_again(maas: Maas) -> None:
    with transaction(maas.engine) as conn:
        key = maas.machines.active(conn)
    assert maas.compare().done == {"machines locked": 1}
    events = maas.manager.record()["events"]
    with transaction(maas.engine) as conn:
        launching.release(conn, key, ADMIN)
        assert maas.machines.released(conn, key)
    maas.begin(machine(locked=True), events=events, status={"unlock": 502})
    assert maas.compare().error
    # A person's requests after it: the lock is not ours any more.
    row = {"node": "abc123", "description": "(ann) - audit"}
    theirs = [{**row, "type": f"User {verb}ing node"} for verb in ("unlock", "lock")]
    maas.begin(machine(locked=True), events=[*events, *theirs])
    assert codes(maas.compare()) == ["lock_unsure"]
    maas.begin(machine(locked=True), events=events)
    assert maas.compare().done["machines unlocked"] == 1


@pytest.mark.parametrize("shown", [True, False])
def test_a_persons_lock_in_the_place_of_ours_stays(maas: Maas, shown: bool) -> None:
    """shown: whether MAAS shows its events."""
    with transaction(maas.engine) as conn:
        key = maas.machines.active(conn)
    assert maas.compare().done == {"machines locked": 1}
    events = maas.manager.record()["events"]
    row = {"node": "abc123", "description": "(ann) - audit"}
    theirs = [{**row, "type": f"User {verb}ing node"} for verb in ("unlock", "lock")]
    with transaction(maas.engine) as conn:
        launching.release(conn, key, ADMIN)
        assert maas.machines.released(conn, key)
    faults: dict[str, Any] = {} if shown else {"status": {"query": 403}}
    maas.begin(machine(locked=True), events=[*events, *theirs], **faults)
    assert codes(maas.compare()) == ["lock_unsure"]
    assert maas.asked() == []
    maas.begin(machine(locked=True), events=events)
    assert maas.compare().done["machines unlocked"] == 1


def test_a_tag_shows_blocked_slots_of_a_locked_machine(maas: Maas) -> None:
    fleet = maas.machines.site
    fleet.node("n1")
    with transaction(maas.engine) as conn:
        nodes.update(conn, "n1", address="10.0.2.16")
        fleet.failed(conn)
    host = machine(**{**OTHER, "hostname": "n1", "tag_names": [SLICE], "locked": True})
    maas.begin(machine(), host, missing=[BLOCKED])
    assert codes(maas.compare()) == ["not_written"]
    maas.begin(machine(), host)
    assert maas.compare().done["tags set"] == 1
    assert maas.manager.record()["machines"]["def456"]["tag_names"] == [SLICE, BLOCKED]
    assert "tags set" not in maas.compare().done
    with reading(maas.engine) as conn:
        assert nodes.get(conn, "n1").maas_tags == [SLICE]
    maas.begin(machine(), {**host, "tag_names": [SLICE, BLOCKED]})
    with transaction(maas.engine) as conn:
        conn.execute(sa.update(slots).values(status=SlotState.DISABLED))
    assert maas.compare().done["tags set"] == 1
    assert maas.manager.record()["machines"]["def456"]["tag_names"] == [SLICE]


@pytest.mark.parametrize("seen", [False, True])
def test_a_lock_of_a_person_that_came_before_ours_is_theirs(maas: Maas, seen: bool) -> None:
    with transaction(maas.engine) as conn:
        key = maas.machines.active(conn)
    if seen:
        # A person took our lock off, and set another just before our next lock.
        assert maas.compare().done == {"machines locked": 1}
        maas.begin(status={"lock": 409})
        assert codes(maas.compare()) == ["not_written"]
        maas.begin(machine(locked=True))
    else:
        maas.begin(edits={"lock": {"locked": True}})
        assert codes(maas.compare()) == ["not_written"]
    with transaction(maas.engine) as conn:
        launching.release(conn, key, ADMIN)
        assert maas.machines.released(conn, key)
    assert maas.compare().done == {}
    assert maas.manager.record()["machines"]["abc123"]["locked"]


def test_a_slice_host_to_be_is_not_locked_again_while_it_is_installed(maas: Maas) -> None:
    with transaction(maas.engine) as conn:
        nodes.update(conn, "m1", mode=NodeMode.CONVERTING_TO_SLICE.value)
    maas.maintain()
    maas.compare()
    maas.queue()
    maas.step()
    assert maas.compare().done == {}
    assert maas.play().state == "succeeded"
    assert maas.asked()[-4:] == ["lock", "unlock", "release", "deploy"]


def test_statuses_and_events_have_the_words_of_maas() -> None:
    for status in client.Status:
        assert TABLE["statuses"][status.name]["number"] == status
    assert TABLE["events"] == [client._LOCKING, client._UNLOCKING]


def test_strange_tags_reach_no_run(maas: Maas) -> None:
    many = [f"t{number}" for number in range(99)]
    maas.begin(machine(tag_names=[BAREMETAL, "a b", "x" * 99, "\x1b", *many]))
    maas.compare()
    tags = maas.node().maas_tags or []
    assert BAREMETAL in tags
    assert len(tags) == 64
    assert all(tag.isalnum() or tag == BAREMETAL for tag in tags)


def test_text_that_a_database_cannot_store_keeps_no_machine_from_its_lock(maas: Maas) -> None:
    """PostgreSQL refuses this character, for which the pass would end at the first machine."""
    with transaction(maas.engine) as conn:
        maas.machines.active(conn)
    maas.begin(machine(distro_series="nob\0le"))
    reading = maas.compare()
    assert codes(reading) == []
    assert (maas.node().maas or {})["series"] == "nob\ufffdle"
    assert "lock" in maas.asked()
    maas.begin()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(maas_sync, "compare", lambda *_: 1 / 0)
        assert (maas.compare().error or {})["code"] == "maas_comparison_failed"

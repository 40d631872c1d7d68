"""Partitions of an InfiniBand fabric, on a stand-in for UFM; not run on hardware."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
import yaml

from reconciler.db import journal
from reconciler.db.engine import transaction
from reconciler.db.schema import Task, slots, tasks
from reconciler.lifecycle import gate
from reconciler.lifecycle import launch as launching
from reconciler.model.errors import Problem
from reconciler.model.states import TaskKind
from reconciler.model.storable import unstorable
from reconciler.records import allocations, nodes, projects, queue
from reconciler.records import slots as slot_records
from reconciler.runs import contract
from reconciler.settings import Settings
from reconciler.work import partitions, ufm
from tests.standin.service import Manager, standing
from tests.standin.ufm import TOKEN
from tests.unit.reconciler.conftest import ADMIN, Site
from tests.unit.reconciler.holdings import nothing
from tests.unit.reconciler.work.conftest import READINESS, Attend, Runs, attend_next

pytestmark = pytest.mark.covers("SLICE-9")

PROFILES = Path(__file__).parents[4] / "profiles"
GUIDS = ["02:a4:79:e9:da:2a:a8:ac", "02:af:19:91:4e:3d:11:07"]
BARE = [guid.replace(":", "") for guid in GUIDS]
STRANGER = "b83fd20300aa0001"
MEMBER = f'{{"guid": "{STRANGER}", "membership": "full"}}'
# Answers that show no members, although the partition has some, and an answer of a proxy.
UNREADABLE = [
    "{}",
    '{"0x7fff": {"guids": []}, "0x10": {"partition": "api_pkey_0x10"}}',
    '{"0x7fff": {"guids": []}, "0x10": {"guids": null}}',
    '{"0x7fff": {"guids": []}, "0x10": {"guids": {}}}',
    '{"0x7fff": {"membership": "limited"}}',
    '{"0x10": {"guids": []}}',
    # The same key twice, of which the last would hide a member, and a member with two memberships.
    f'{{"0x7fff": {{"guids": []}}, "0x10": {{"guids": [{MEMBER}]}}, "0x8010": {{"guids": []}}}}',
    f'{{"0x7fff": {{"guids": [{MEMBER}, {MEMBER.replace("full", "limited")}]}}}}',
]


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Manager]:
    with standing(tmp_path_factory.mktemp("ufm"), "ufm", TOKEN) as manager:
        yield manager


@pytest.fixture
def manager(process: Manager, monkeypatch: pytest.MonkeyPatch) -> Manager:
    process.begin()
    for name in ("DEADLINE_S", "REQUEST_S"):
        monkeypatch.setattr(ufm.Client, name, 30.0)
    monkeypatch.setattr(partitions, "_READ_AGAIN_S", 0.05)
    return process


@pytest.fixture
def settings(tmp_path: Path, manager: Manager) -> Settings:
    profile = yaml.safe_load((PROFILES / "lab.yml").read_text())
    del profile["fabric"]["vlans"]
    profile["fabric"] |= {"link": "infiniband", "partitions": [16, 18]}
    (tmp_path / "ib.yml").write_text(yaml.safe_dump(profile))
    state = tmp_path / "state"
    return Settings(state_dir=state, profiles_dir=tmp_path, poll_s=0.01, **manager.settings)


@pytest.fixture
def attend(sold: Site, settings: Settings, runs: Runs) -> Attend:
    """Lease the next task of a node on InfiniBand, and bring it to its end."""
    with transaction(sold.engine) as conn:
        nodes.change(conn, "n1", ADMIN, profile="ib")
        for slot, guid in zip(slot_records.of_node(conn, "n1"), GUIDS, strict=True):
            slot_records.update(conn, slot.id, fabric_identity=guid)

    return partial(attend_next, sold.engine, settings)


def launch(sold: Site, runs: Runs) -> str:
    runs.alive = False
    runs.ends(evidence={"readiness": READINESS, "plan": {}, "image": {}})
    with transaction(sold.engine) as conn:
        return sold.allocate(conn)


def enqueue(sold: Site, kind: TaskKind) -> None:
    with transaction(sold.engine) as conn:
        item = queue.Enqueue(kind=kind, node_id="n1", subject_kind="node", subject_id="n1")
        queue.enqueue(conn, item, ADMIN)


def audited(sold: Site) -> list[tuple[str, Any]]:
    with transaction(sold.engine) as conn:
        rows = journal.audit_rows(conn)
    entries = [(row.action, row.detail) for row in rows if row.action.startswith("fabric.")]
    assert TOKEN not in str(rows)
    return entries[::-1]


def test_a_tenants_functions_are_in_its_partition_from_before_the_start_to_the_release(
    sold: Site, runs: Runs, attend: Callable[[], Task], manager: Manager
) -> None:
    manager.begin(late=1)
    key = launch(sold, runs)
    assert attend().state == "succeeded"
    (spec,) = runs.launched
    contract.check_vars("provision_slice", spec.variables)
    network = spec.variables["slice_fabric"]
    assert (network["partition"], network["vlan"]) == ("0x10", 0)
    assert list(network["identities"].values()) == GUIDS[:1]
    record = manager.record()
    assert record["partitions"]["0x10"] == {BARE[0]: "full"}
    # Added once, and read until UFM showed it.
    assert [request.split()[0] for request in record["requests"]] == ["GET", "POST", "GET", "GET"]

    runs.alive = False
    runs.ends("failed", error={"code": "x", "expected": "", "found": "y", "remedy": ""})
    with transaction(sold.engine) as conn:
        launching.release(conn, key, ADMIN)
    attend()
    # Gone although the run failed, because the function is taken away before anything else.
    assert list(manager.record()["partitions"]) == ["0x7fff"]
    assert [(action, detail["partition"]) for action, detail in audited(sold)] == [
        ("fabric.partition.joined", "0x10"),
        ("fabric.partition.left", "none"),
    ]


def test_projects_never_share_a_partition(
    sold: Site, runs: Runs, attend: Callable[[], Task], manager: Manager
) -> None:
    launch(sold, runs)
    attend()
    with transaction(sold.engine) as conn:
        sold.project = projects.create(conn, "p2", ADMIN, id="p2").id
    launch(sold, runs)
    assert attend().state == "succeeded"
    now = manager.record()["partitions"]
    assert (now["0x10"], now["0x11"]) == ({BARE[0]: "full"}, {BARE[1]: "full"})


def test_two_machines_of_a_project_that_join_at_the_same_time_both_stay(
    sold: Site,
    runs: Runs,
    attend: Callable[[], Task],
    manager: Manager,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The other machine is claimed and joins while this machine asks for the partitions."""
    reads = ufm.Client.partitions
    launch(sold, runs)

    def meanwhile(client: ufm.Client) -> dict[int, ufm.Partition]:
        monkeypatch.setattr(ufm.Client, "partitions", reads)
        with transaction(sold.engine) as conn:
            sold.allocate(conn)
        client.add(0x10, GUIDS[1:])
        return reads(client)

    monkeypatch.setattr(ufm.Client, "partitions", meanwhile)
    assert attend().state == "succeeded"
    assert manager.record()["partitions"]["0x10"] == dict.fromkeys(BARE, "full")


def test_what_an_earlier_tenant_left_is_removed_first(
    sold: Site, runs: Runs, attend: Callable[[], Task], manager: Manager
) -> None:
    """The function in another project's partition, and another slot's function in its own."""
    manager.begin(partitions={"0x11": {BARE[0]: "full"}, "0x10": {BARE[1]: "full"}})
    launch(sold, runs)
    assert attend().state == "succeeded"
    assert manager.record()["partitions"] == {"0x7fff": {}, "0x10": {BARE[0]: "full"}}


@pytest.mark.parametrize(
    ("faults", "code", "left"),
    [
        ({"default": "full"}, "partition_default_full", {}),
        ({"default": ""}, "partition_default_full", {}),
        ({"default": "\0"}, "partition_default_full", {}),
        ({"partitions": {"0x7fff": {BARE[0]: "full"}}}, "partition_default_full", {}),
        ({"partitions": {"0x10": {STRANGER: "full"}}}, "partition_strangers", {STRANGER: "full"}),
        ({"partitions": {"0x10": {"x" * 16: "full"}}}, "partition_strangers", {"x" * 16: "full"}),
        ({"partitions": {"0x900": {BARE[0]: "full"}}}, "partition_unproven", {}),
        ({"deaf": ["POST"]}, "partition_unproven", {}),
        ({"status": {"POST": 400}}, "ufm_refused", {}),
        ({"status": {"POST": 409}}, "ufm_refused", {}),
        ({"accepts": "another"}, "ufm_forbidden", {}),
    ],
)
def test_without_proof_of_isolation_no_machine_starts(
    sold: Site,
    runs: Runs,
    attend: Callable[[], Task],
    manager: Manager,
    monkeypatch: pytest.MonkeyPatch,
    faults: dict[str, Any],
    code: str,
    left: dict[str, str],
) -> None:
    # The deadline is too near for a second look, which would show the same.
    monkeypatch.setattr(partitions, "_READ_AGAIN_S", 30.0)
    key = launch(sold, runs)
    manager.begin(**faults)
    task = attend()
    assert (task.state, task.error["code"]) == ("failed", code)
    assert all(task.error[part] for part in ("expected", "found", "remedy"))
    assert unstorable(task.error) is None
    assert not runs.launched and TOKEN not in str(task)
    assert manager.record()["partitions"].get("0x10", {}) == left
    with transaction(sold.engine) as conn:
        assert allocations.get(conn, key).state == "failed"


@pytest.mark.parametrize(
    "faults",
    [
        {"status": {"GET": 503}},
        {"status": {"GET": 429}},
        {"body": "<html>"},
        {"body": "[]"},
        {"body": '{"0x10": []}'},
        {"body": '{"0x10": {"guids": [{"guid": "1", "membership": "owner"}]}}'},
        {"body": '{"zz": {}}'},
        *({"body": body} for body in UNREADABLE),
        {"body": "{" + " " * 4000 + "}", "drip_s": 0.01},
    ],
)
def test_a_manager_without_a_reliable_answer_delays_the_launch(
    sold: Site,
    runs: Runs,
    attend: Callable[[], Task],
    manager: Manager,
    monkeypatch: pytest.MonkeyPatch,
    faults: dict[str, Any],
) -> None:
    monkeypatch.setattr(ufm.Client, "DEADLINE_S", 0.5)
    launch(sold, runs)
    manager.begin(**faults)
    task = attend()
    assert (task.state, task.error["code"]) == ("waiting", "ufm_silent") and not runs.launched


def test_an_answer_without_end_is_cut_off(
    sold: Site,
    runs: Runs,
    attend: Callable[[], Task],
    manager: Manager,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ufm.Client, "LARGEST", 1000)
    launch(sold, runs)
    manager.begin(body="{" + " " * 4000 + "}")
    assert attend().error["found"] == "more than 1000 bytes"


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"ufm_url": ""}, "ufm_missing"),
        ({"ufm_ca_file": PROFILES / "lab.yml"}, "ufm_ca_unreadable"),
        ({"ufm_ca_file": None}, "ufm_untrusted"),
        ({"ufm_token_file": PROFILES / "none"}, "ufm_token_unreadable"),
        ({"ufm_token_file": PROFILES / "lab.yml"}, "ufm_token_unreadable"),
    ],
)
def test_a_manager_that_is_not_configured_is_refused_by_name(
    sold: Site,
    runs: Runs,
    attend: Callable[[], Task],
    settings: Settings,
    change: dict[str, Any],
    code: str,
) -> None:
    for name, value in change.items():
        setattr(settings, name, value)
    launch(sold, runs)
    assert attend().error["code"] == code


@pytest.mark.parametrize("guid", ["", "b8:3f:d2:03:00:aa:00:01", "02:00:00:00:00:01"])
def test_only_a_guid_of_slice_mode_enters_a_partition(
    sold: Site, runs: Runs, attend: Callable[[], Task], manager: Manager, guid: str
) -> None:
    """A host cannot have the GUID of a switch or of a storage server added."""
    launch(sold, runs)
    with transaction(sold.engine) as conn:
        conn.execute(sa.update(slots).values(fabric_identity=guid).where(slots.c.slot_index == 0))
    assert attend().error["code"] == "fabric_guid_missing"
    assert list(manager.record()["partitions"]) == ["0x7fff"]


def test_a_late_release_leaves_the_next_tenants_partition_alone(
    sold: Site, runs: Runs, attend: Callable[[], Task], manager: Manager
) -> None:
    key = launch(sold, runs)
    attend()
    with transaction(sold.engine) as conn:
        launching.release(conn, key, ADMIN)
        conn.execute(sa.update(slots).values(fence=slots.c.fence + 1))
    runs.alive = False
    runs.ends("failed", error={"code": "stale_fence", "expected": "", "found": "", "remedy": ""})
    attend()
    assert manager.record()["partitions"]["0x10"] == {BARE[0]: "full"}


@pytest.mark.parametrize("body", UNREADABLE)
def test_an_answer_without_members_proves_no_leaving(
    sold: Site, runs: Runs, attend: Callable[[], Task], manager: Manager, body: str
) -> None:
    key = launch(sold, runs)
    attend()
    with transaction(sold.engine) as conn:
        launching.release(conn, key, ADMIN)
    runs.alive, launched = False, len(runs.launched)
    manager.begin(partitions={"0x10": {BARE[0]: "full"}}, body=body)
    task = attend()
    assert (task.state, task.error["code"]) == ("waiting", "ufm_silent")
    assert len(runs.launched) == launched
    assert [action for action, _ in audited(sold)] == ["fabric.partition.joined"]


def test_a_late_launch_enters_no_partition(
    sold: Site, runs: Runs, attend: Callable[[], Task], manager: Manager
) -> None:
    launch(sold, runs)
    with transaction(sold.engine) as conn:
        conn.execute(sa.update(slots).values(fence=slots.c.fence + 1))
    assert attend().state == "canceled" and not runs.launched
    assert list(manager.record()["partitions"]) == ["0x7fff"]


@pytest.mark.parametrize("kind", ["launch", "release"])
def test_a_worker_that_was_paused_changes_no_partition_of_the_next_tenant(
    sold: Site,
    runs: Runs,
    attend: Callable[[], Task],
    manager: Manager,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
) -> None:
    """The slot gets a later claim while the worker stands between its records and UFM."""
    reads = ufm.Client.partitions

    def paused(client: ufm.Client) -> dict[int, ufm.Partition]:
        monkeypatch.setattr(ufm.Client, "partitions", reads)
        with transaction(sold.engine) as conn:
            conn.execute(sa.update(slots).values(fence=slots.c.fence + 1))
        manager.begin(partitions={"0x11": {BARE[0]: "full"}})
        return reads(client)

    key = launch(sold, runs)
    if kind == "release":
        attend()
        with transaction(sold.engine) as conn:
            launching.release(conn, key, ADMIN)
        runs.alive = False
        runs.ends(
            "failed", error={"code": "stale_fence", "expected": "", "found": "", "remedy": ""}
        )
    monkeypatch.setattr(ufm.Client, "partitions", paused)
    attend()
    assert manager.record()["partitions"] == {"0x7fff": {}, "0x11": {BARE[0]: "full"}}
    assert [detail["partition"] for _, detail in audited(sold)] == ["0x10"] * (kind == "release")


def test_a_comparison_that_was_paused_takes_no_function_out_of_the_next_tenants_partition(
    sold: Site,
    runs: Runs,
    attend: Callable[[], Task],
    manager: Manager,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reads = ufm.Client.partitions

    def paused(client: ufm.Client) -> dict[int, ufm.Partition]:
        monkeypatch.setattr(ufm.Client, "partitions", reads)
        launch(sold, runs)
        manager.begin(partitions={"0x10": {BARE[0]: "full"}})
        return reads(client)

    monkeypatch.setattr(ufm.Client, "partitions", paused)
    runs.ends(evidence={"holdings": nothing(), "identity": sold.document(0)["identity"]})
    enqueue(sold, TaskKind.SLICE_DRIFT_RECONCILE)
    attend()
    assert manager.record()["partitions"] == {"0x7fff": {}, "0x10": {BARE[0]: "full"}}


@pytest.mark.parametrize("kind", ["launch", "release", "drift"])
def test_a_worker_that_lost_its_lease_meanwhile_changes_no_partition(
    sold: Site,
    runs: Runs,
    attend: Callable[[], Task],
    manager: Manager,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
) -> None:
    """The slot is the next tenant's after any other task, of which none begins under a lease."""
    if kind == "release":
        key = launch(sold, runs)
        attend()
        with transaction(sold.engine) as conn:
            launching.release(conn, key, ADMIN)
        runs.alive = False
    elif kind == "launch":
        launch(sold, runs)
    else:
        enqueue(sold, TaskKind.SLICE_DRIFT_RECONCILE)
    reads = ufm.Client.partitions

    def paused(client: ufm.Client) -> dict[int, ufm.Partition]:
        with transaction(sold.engine) as conn:
            conn.execute(sa.update(tasks).values(lease_token="another's"))
        manager.begin(partitions={"0x11": {BARE[0]: "full"}})
        return reads(client)

    monkeypatch.setattr(ufm.Client, "partitions", paused)
    with pytest.raises(Problem, match="stale_lease"):
        attend()
    assert manager.record()["partitions"] == {"0x7fff": {}, "0x11": {BARE[0]: "full"}}


def test_drift_takes_idle_functions_out_and_closes_what_it_cannot_prove(
    sold: Site, runs: Runs, attend: Callable[[], Task], manager: Manager
) -> None:
    manager.begin(partitions={"0x10": {BARE[0]: "full"}, "0x12": {BARE[1]: "full"}})
    runs.ends(evidence={"holdings": nothing(), "identity": sold.document(0)["identity"]})
    enqueue(sold, TaskKind.SLICE_DRIFT_RECONCILE)
    attend()
    assert list(manager.record()["partitions"]) == ["0x7fff"]
    assert audited(sold)[0][0] == "fabric.partition.removed"
    for faults, state, text in (
        ({"partitions": {"0x900": {BARE[0]: "full"}}}, ["available", "disabled"], "0x900"),
        ({"default": "full"}, ["disabled", "disabled"], "default partition"),
        ({"default": "\0"}, ["disabled", "disabled"], "default partition"),
        ({"status": {"GET": 500}}, ["disabled", "disabled"], "ufm_silent"),
        *(({"body": body}, ["disabled", "disabled"], "ufm_silent") for body in UNREADABLE),
        ({}, ["available", "available"], ""),
    ):
        manager.begin(**faults)
        runs.alive = False
        enqueue(sold, TaskKind.SLICE_DRIFT_RECONCILE)
        attend()
        with transaction(sold.engine) as conn:
            assert sorted(sold.statuses(conn)) == state
            first = slot_records.of_node(conn, "n1")[0].id
            shut = [row for row in gate.gate(conn, first) if row.code == "fabric_not_isolated"]
            assert bool(shut) == bool(text) and text in "".join(row.detail for row in shut)
            assert unstorable(nodes.get(conn, "n1").fabric_reading) is None

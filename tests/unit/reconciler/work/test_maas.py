"""Installation of machines by MAAS and their return, against a stand-in; not run on a MAAS."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from reconciler.db import clock, journal, rows
from reconciler.db.engine import reading, transaction
from reconciler.db.schema import Node, Task, enrolment_tokens, tasks
from reconciler.inventory import maas_sync
from reconciler.inventory.maas import Client
from reconciler.inventory.machines import UNSURE, lock_comment
from reconciler.inventory.readings import Reading
from reconciler.lifecycle import baremetal, host, installation, slots, task_failures
from reconciler.lifecycle import launch as launching
from reconciler.model.bundle import Bundle
from reconciler.model.errors import Problem
from reconciler.model.states import NodeMode, NodeState, TaskKind, TaskState
from reconciler.records import leasing, nodes, queue, tokens
from reconciler.settings import Settings
from reconciler.work import maas as maas_tasks
from reconciler.work import worker
from tests.standin.maas import TOKEN, USER
from tests.standin.service import Manager, standing
from tests.unit.reconciler.conftest import ADMIN, PostgresDatabase, Site, code
from tests.unit.reconciler.whole_machines import Machines

pytestmark = pytest.mark.covers("ECO-3", "CTRL-15")

PROFILES = Path(__file__).parents[4] / "profiles"
DEPLOY, RELEASE = TaskKind.NODE_DEPLOY, TaskKind.NODE_RELEASE
SLICE, BAREMETAL = "gpuaas-profile-slice-vm", "gpuaas-profile-baremetal"
ADDRESS = "10.0.2.15"
REQUESTS = ("deploy", "release", "lock", "unlock", "set_workload_annotations", "update_nodes")


def machine(system_id: str = "abc123", **values: Any) -> dict[str, Any]:
    """The machine of node m1, deployed by us."""
    return {
        **{"system_id": system_id, "hostname": "m1", "status": 6, "owner": USER, "serial": "S1"},
        **{"hardware_uuid": "U-1", "macs": ["52:54:00:00:00:01"], "ip_addresses": [ADDRESS]},
        **{"tag_names": [BAREMETAL, "rack-7"]},
        **values,
    }


@pytest.fixture(scope="session")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Manager]:
    with standing(tmp_path_factory.mktemp("maas"), "maas", TOKEN) as manager:
        yield manager


class Maas:
    """A site with the whole machine m1, which is a machine of MAAS."""

    def __init__(self, machines: Machines, manager: Manager, settings: Settings) -> None:
        self.machines, self.manager, self.settings = machines, manager, settings
        self.engine = machines.engine

    def begin(self, *rows: dict[str, Any], **faults: Any) -> None:
        self.manager.begin(machines=rows or [machine()], **faults)

    def compare(self) -> Reading:
        with reading(self.engine) as conn:
            now = clock.read(conn)
        return maas_sync.run(self.engine, self.settings, Reading(now))

    def meanwhile(
        self, monkeypatch: pytest.MonkeyPatch, change: Callable[[sa.Connection], object]
    ) -> None:
        """Make the change in each comparison, between its reads and its writes."""
        compare = maas_sync._compare

        def changed(*arguments: Any) -> Any:
            result = compare(*arguments)
            with transaction(self.engine) as conn:
                change(conn)
            return result

        monkeypatch.setattr(maas_sync, "_compare", changed)

    def node(self) -> Node:
        with reading(self.engine) as conn:
            return nodes.get(conn, "m1")

    def asked(self) -> list[str]:
        """Requests that change something, in order."""
        record = self.manager.record()
        assert record["violations"] == []
        assert TOKEN.split(":")[2] not in str(record["requests"])
        words = [row["operation"].split()[-1] for row in record["requests"]]
        return [word for word in words if word in REQUESTS]

    def fields(self, verb: str) -> list[dict[str, str]]:
        requests = self.manager.record()["requests"]
        return [row["fields"] for row in requests if row["operation"].endswith(f" {verb}")]

    def tenancy(self) -> None:
        """A tenant had the machine, and its disks are wiped with proof."""
        with transaction(self.engine) as conn:
            key = self.machines.active(conn)
            launching.release(conn, key, ADMIN)
            assert self.machines.released(conn, key)

    def report(self, serial: str, node_id: str = "m1", number: int = 1) -> None:
        """The host reports its serial number."""
        self.machines.serials[node_id] = serial
        with transaction(self.engine) as conn:
            self.machines.discover(conn, node_id, number)

    def locked(self) -> None:
        """We have locked it."""
        with transaction(self.engine) as conn:
            binding = nodes.get(conn, "m1").maas or {}
            nodes.update(conn, "m1", maas={**binding, "locked": True})

    def queue(self, kind: TaskKind = DEPLOY) -> Task:
        with transaction(self.engine) as conn:
            return installation.queue(conn, "m1", kind, ADMIN)

    def maintain(self) -> None:
        with transaction(self.engine) as conn:
            host.drain(conn, "m1", ADMIN)
            host.maintain(conn, "m1", ADMIN)

    def enrol(self, ticket: str = "") -> None:
        """The machine runs its userdata: it fetches a token, and enrols under a new identity. A
        person enrols it without a ticket.
        """
        with transaction(self.engine) as conn:
            if ticket:
                tokens.redeem_ticket(conn, "m1", ticket, address=ADDRESS)
            identity = {"machine_id": rows.new_id(), "host_key": f"ssh-ed25519 {rows.new_id()}"}
            host.enrolled(conn, "m1", ADMIN, **identity)

    def ticket(self) -> str:
        (line,) = [
            row for row in self.fields("deploy")[-1]["user_data"].splitlines() if "token='" in row
        ]
        return line.split("'")[1]

    def step(self, owner: str = "worker") -> Task | None:
        """A worker takes a step of the next task, if any task may begin."""
        with transaction(self.engine) as conn:
            conn.execute(sa.update(tasks).values(not_before=None))
            taken = leasing.lease(conn, owner, kinds=[DEPLOY, RELEASE])
        for task in taken:
            worker.attend(self.engine, self.settings, task, threading.Event())
        return self.task(taken[0].id) if taken else None

    def task(self, task_id: str) -> Task:
        with reading(self.engine) as conn:
            return queue.get(conn, task_id)

    def play(self, *, enrols: bool = True) -> Task:
        """Steps by a new worker each, as after restarts, until the task has ended."""
        enrolled = False
        for number in range(40):
            task = self.step(f"worker-{number}")
            assert task is not None
            if task.state != "waiting":
                return task
            if enrols and not enrolled and self.fields("deploy"):
                self.enrol(self.ticket())
                enrolled = True
        raise AssertionError(task)


@pytest.fixture
def maas(site: Site, process: Manager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Maas:
    return bound(site, process, tmp_path, monkeypatch)


def bound(site: Site, process: Manager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Maas:
    machines = Machines(site)
    machines.machine()
    settings = Settings(
        state_dir=tmp_path,
        profiles_dir=PROFILES,
        public_url="https://gpuaas.example",
        **process.settings,
    )
    monkeypatch.setattr(maas_tasks, "REPEAT_S", 0.0)
    made = Maas(machines, process, settings)
    made.begin()
    assert made.compare().done["nodes bound"] == 1
    return made


def test_after_a_tenant_the_machine_is_installed_anew_by_itself(maas: Maas) -> None:
    maas.tenancy()
    assert maas.node().tenant_machine_ids
    old = maas.node()
    task = maas.play()
    assert (task.kind, task.state, task.error) == (DEPLOY, "succeeded", {})
    assert maas.asked() == ["set_workload_annotations", "release", "deploy"]
    (release,) = maas.fields("release")
    # The erasure of MAAS is no proof; ours is from before.
    assert release["erase"] == "false"
    (deployment,) = maas.fields("deploy")
    assert deployment["distro_series"] == "noble"
    assert "https://gpuaas.example" in deployment["user_data"]
    node = maas.node()
    assert not node.tenant_machine_ids
    assert node.machine_id != old.machine_id
    with reading(maas.engine) as conn:
        kinds = [task.kind for task in queue.open_of_node(conn, "m1")]
    assert kinds == ["slice.topology_discover"]


@pytest.mark.postgres
def test_on_postgresql_the_machine_is_installed_anew_as_well(
    postgres_database: PostgresDatabase,
    process: Manager,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Which refuses the locks of rows in a transaction that only reads."""
    engine = postgres_database.restore()
    maas = bound(Site(engine), process, tmp_path, monkeypatch)
    maas.tenancy()
    assert (maas.play().state, maas.asked()[-2:]) == ("succeeded", ["release", "deploy"])
    engine.dispose()


@pytest.mark.parametrize("erased", [True, False])
def test_a_site_whose_maas_erases_disks_at_each_release(maas: Maas, erased: bool) -> None:
    maas.tenancy()
    maas.begin(erases=True, failing={} if erased else {"14": 15}, slow=3)
    task = maas.play()
    assert (task.error or {}).get("code", "") == ("" if erased else "maas_failed")
    if not erased:
        assert "Failed disk erasing" in task.error["found"]
        # MAAS takes the release of such a machine.
        maas.begin(machine(status=15))
        maas.queue()
        assert maas.play().state == "succeeded"
    assert maas.asked()[-2:] == ["release", "deploy"]


@pytest.mark.covers("P11")
def test_a_site_that_has_maas_erase_the_disks_between_tenants(maas: Maas) -> None:
    maas.settings = maas.settings.model_copy(update={"maas_erase_disks": True})
    maas.tenancy()
    # The state of the disks decides, not the task: a failed release is requested again.
    maas.begin(slow=3, failing={"14": 15})
    assert maas.play().error["code"] == "maas_failed"
    maas.begin(machine(status=15))
    maas.queue()
    task = maas.play()
    assert (task.state, maas.asked()) == ("succeeded", ["release", "deploy"])
    (release,) = maas.fields("release")
    # Overwritten as a whole where the drive has no erasure of its own.
    erasure = {name: value for name, value in release.items() if "erase" in name}
    assert erasure == {"erase": "true", "secure_erase": "true", "quick_erase": "false"}
    # Not where no tenant was: the disks may hold the site's data.
    for kind in (DEPLOY, RELEASE):
        with transaction(maas.engine) as conn:
            host.maintain(conn, "m1", ADMIN)
        maas.begin()
        maas.queue(kind)
        maas.step()
        assert [fields["erase"] for fields in maas.fields("release")] == ["false"]
        maas.begin(machine(status=4, owner=""))
        assert maas.play().state == "succeeded"


def test_the_return_of_a_machine_to_maas_erases_no_disk(maas: Maas) -> None:
    """The release script reads our proof back, which an erasure by the drive may end."""
    maas.settings = maas.settings.model_copy(update={"maas_erase_disks": True})
    maas.tenancy()
    maas.begin(failing={"14": 15})
    assert maas.play().error["code"] == "maas_failed"
    maas.begin(machine(status=15))
    maas.queue(RELEASE)
    assert maas.play().state == "succeeded"
    assert [fields["erase"] for fields in maas.fields("release")] == ["false"]


def test_disks_are_erased_once_for_a_tenant(maas: Maas) -> None:
    """Also if the installation after it fails. Zeros on large disks take hours."""
    maas.settings = maas.settings.model_copy(update={"maas_erase_disks": True})
    maas.tenancy()
    maas.begin(fails=["abc123"])
    assert maas.play(enrols=False).error["code"] == "maas_failed"
    assert [fields["erase"] for fields in maas.fields("release")] == ["true"]
    maas.begin(machine(status=11))
    maas.queue()
    maas.step()
    assert [fields["erase"] for fields in maas.fields("release")] == ["false"]


@pytest.mark.parametrize("kind", [DEPLOY, RELEASE])
def test_no_disk_is_erased_that_another_client_may_have_used(maas: Maas, kind: TaskKind) -> None:
    """After the release MAAS has the machine; an installation of which we know nothing failed."""
    maas.settings = maas.settings.model_copy(update={"maas_erase_disks": True})

    def cancel(task: Task) -> None:
        with transaction(maas.engine) as conn:
            queue.cancel(conn, task.id, ADMIN)

    maas.tenancy()
    if kind == RELEASE:
        cancel(maas.queue())
    maas.begin()
    task = maas.queue(kind)
    maas.step()
    assert maas.asked() == ["release"]
    cancel(task)
    maas.begin(machine(status=11))
    maas.queue()
    maas.step()
    assert [fields["erase"] for fields in maas.fields("release")] == ["false"]


def test_no_disk_is_erased_while_the_records_know_something_on_it(maas: Maas) -> None:
    maas.settings = maas.settings.model_copy(update={"maas_erase_disks": True})
    maas.tenancy()
    with transaction(maas.engine) as conn:
        nodes.update(conn, "m1", unclean_allocation_id="tenant")
    assert maas.play().error["code"] == "machine_not_clean"
    assert "release" not in maas.asked()


def test_answers_that_are_lost_are_read_and_not_asked_again(maas: Maas) -> None:
    maas.tenancy()
    maas.begin(lost=["release", "deploy"])
    assert maas.play().state == "succeeded"
    assert maas.asked() == ["release", "deploy"]


def test_a_request_without_effect_is_repeated_and_then_given_up(maas: Maas) -> None:
    maas.maintain()
    maas.queue()
    maas.begin(status={"release": 503})
    task = maas.play()
    assert (task.error["code"], maas.asked()) == ("maas_undone", ["release"] * maas_tasks.MOST)
    # MAAS may have released it later, for another client.
    maas.queue()
    assert maas.play().error["code"] == "maas_occupied"


def test_a_request_is_not_repeated_before_the_proxys_silence_has_shown_its_effect(
    maas: Maas, monkeypatch: pytest.MonkeyPatch
) -> None:
    maas.maintain()
    monkeypatch.setattr(maas_tasks, "REPEAT_S", 600.0)
    maas.begin(status={"release": 503})
    maas.queue()
    for _ in range(5):
        maas.step()
    assert maas.asked() == ["release"]


def test_a_release_without_an_answer_is_not_repeated_after_a_long_time(
    maas: Maas, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It had an effect, and another client of the same user has installed the machine since."""
    maas.maintain()
    maas.begin(lost=["release"])
    maas.queue()
    maas.step()
    assert maas.asked() == ["release"]
    maas.begin(machine())
    monkeypatch.setattr(maas_tasks, "UNSEEN_S", -1.0)
    assert maas.play().error["code"] == "maas_undone"
    maas.queue()
    assert maas.play().error["code"] == "maas_occupied"
    assert maas.asked() == []


CONDITIONS: list[tuple[dict[str, Any], str]] = [
    ({"owner": "somebody"}, "maas_foreign_owner"),
    ({"locked": True}, "maas_locked"),
    ({"tag_names": []}, "maas_tags"),
    ({"tag_names": [SLICE]}, "maas_tags"),
    ({"tag_names": [SLICE, BAREMETAL]}, "maas_tags"),
    ({"serial": "S2"}, "maas_identity_changed"),
    ({"serial": "Unknown"}, "maas_identity_changed"),
    ({"hardware_uuid": "U-9"}, "maas_identity_changed"),
    ({"macs": ["52:54:00:00:00:99"]}, "maas_identity_changed"),
    ({"status": 8}, "maas_state"),
    ({"status": 16}, "maas_state"),
    ({"status": 9}, "maas_state"),
    ({"system_id": "zzz"}, "maas_not_found"),
]


def test_a_machine_in_another_condition_is_left_alone(maas: Maas) -> None:
    maas.maintain()
    before = maas.node()
    for change, expected in CONDITIONS:
        for kind in (DEPLOY, RELEASE):
            maas.queue(kind)
            maas.begin(machine(**change))
            task = maas.play()
            assert (task.state, task.error["code"]) == ("failed", expected), change
            assert task.error["remedy"]
            assert maas.asked() == []
    assert maas.node() == before


def test_a_host_that_is_another_machine_stops_what_would_act_on_it(maas: Maas) -> None:
    maas.maintain()
    maas.report("S7")
    maas.begin()
    for kind in (DEPLOY, RELEASE):
        maas.queue(kind)
        task = maas.play()
        assert (task.state, task.error["code"]) == ("failed", "maas_serial_differs")
        assert "S7 at the host, S1 in MAAS" in task.error["found"]
        assert task.error["remedy"]
        assert maas.asked() == []
    maas.report("s1")
    maas.queue()
    maas.step()
    assert maas.asked() == ["release"], "the same machine"


def test_hosts_with_the_serial_number_of_the_machine_stop_it(maas: Maas) -> None:
    maas.machines.machine("m2", 2)
    maas.maintain()
    maas.begin()
    maas.report("S1")
    maas.report("S1", "m2", 2)
    with pytest.raises(Problem) as refusal:
        maas.queue()
    assert (refusal.value.code, refusal.value.found) == ("serial_twice", "the same at m2")
    # Firmware's placeholder of an unset serial number is not the same number.
    maas.report("0000000", "m2", 2)
    maas.report("0000000")
    maas.queue()
    # After the task is queued, too.
    maas.report("S1", "m2", 2)
    maas.report("S1")
    assert maas.play().error["code"] == "serial_twice"
    assert maas.asked() == []
    # MAAS itself knows the machine of m2 by another number, so its host speaks for itself only.
    with transaction(maas.engine) as conn:
        nodes.update(conn, "m2", maas={"system_id": "def456", "identity": {"serial": "S2"}})
    maas.queue()
    maas.step()
    assert maas.asked() == ["release"]


@pytest.mark.covers("P1")
def test_a_host_that_takes_the_serial_number_of_a_bound_machine_stops_only_itself(
    maas: Maas,
) -> None:
    """However often it changes the number, and however often it reports none."""
    maas.machines.machine("m2", 2)
    maas.maintain()
    maas.begin()
    maas.report("S1")
    for serial in ("S2", "S1", "S2", "0000000", "S1"):
        maas.report(serial, "m2", 2)
    with reading(maas.engine) as conn:
        nodes.require_own_serial(conn, nodes.get(conn, "m1"))
        with pytest.raises(Problem) as refusal:
            nodes.require_own_serial(conn, nodes.get(conn, "m2"))
    assert (refusal.value.code, refusal.value.found) == ("serial_twice", "the same at m1")
    maas.queue()
    maas.step()
    assert maas.asked() == ["release"]


def test_a_host_that_was_installed_on_the_machine_of_another_node_stops_it(maas: Maas) -> None:
    """The record of m2 now is of the machine that MAAS knows as m1's."""
    maas.machines.machine("m2", 2)
    maas.maintain()
    maas.begin()
    maas.report("S1")
    maas.report("S2", "m2", 2)
    with transaction(maas.engine) as conn:
        host.enrolled(conn, "m2", ADMIN, machine_id="e" * 32, host_key="ssh-ed25519 new")
    maas.report("S1", "m2", 2)
    with pytest.raises(Problem) as refusal:
        maas.queue()
    assert (refusal.value.code, refusal.value.found) == ("serial_twice", "the same at m2")


def test_a_serial_number_is_nobodys_while_its_first_host_is_unknown(maas: Maas) -> None:
    """Two records of the same machine report the same from the beginning."""

    def refused() -> list[str]:
        codes = []
        for id in ("m1", "m2"):
            with reading(maas.engine) as conn, suppress(Problem):
                nodes.require_own_serial(conn, nodes.get(conn, id))
                continue
            codes.append(id)
        return codes

    maas.machines.machine("m2", 2)
    bound = maas.node().maas
    maas.report("S1")
    maas.report("S1", "m2", 2)
    assert refused() == ["m1", "m2"]
    maas.report("S2", "m2", 2)
    assert refused() == []
    # The number that m2 reported first.
    maas.report("S1", "m2", 2)
    assert refused() == ["m1", "m2"]
    for first in ("S2", "S1"):
        with transaction(maas.engine) as conn:
            nodes.update(conn, "m2", hardware={"serial": first})
            nodes.update(conn, "m1", maas=None)
        maas.report("S1", "m2", 2)
        assert refused() == ["m1", "m2"], "m1 is not bound"
    # The host of m1 has changed its number, too.
    with transaction(maas.engine) as conn:
        nodes.update(conn, "m1", hardware={"serial": "S9"}, maas=bound)
        nodes.update(conn, "m2", hardware={"serial": "S2"})
    maas.report("S1")
    maas.report("S1", "m2", 2)
    assert refused() == ["m1", "m2"]
    with transaction(maas.engine) as conn:
        nodes.update(conn, "m2", state=NodeState.RETIRED)
        nodes.require_own_serial(conn, nodes.get(conn, "m1"))


def test_the_serial_number_that_a_tenants_installation_reports_is_not_believed(maas: Maas) -> None:
    maas.report("S1")
    maas.tenancy()
    maas.report("S7")
    assert maas.node().hardware == {"vendor": "Dell Inc.", "product": "XE9680L", "serial": "S1"}
    assert maas.play().state == "succeeded"


def test_an_answer_about_another_machine_ends_the_task(maas: Maas) -> None:
    maas.tenancy()
    maas.begin(machine(), machine("other9", serial="S9"), other={"release": "other9"})
    task = maas.play()
    assert (task.error["code"], maas.asked()) == ("maas_wrong_machine", ["release"])
    assert maas.node().tenant_machine_ids


def test_a_lock_or_an_owner_that_comes_before_the_request_is_respected(maas: Maas) -> None:
    maas.tenancy()
    maas.begin(edits={"release": {"locked": True}})
    assert maas.play().error["code"] == "maas_forbidden"
    maas.begin(edits={"deploy": {"owner": "somebody", "status": 10}})
    maas.queue()
    assert maas.play().error["code"] == "maas_forbidden"
    assert maas.manager.record()["machines"]["abc123"]["owner"] == "somebody"


def test_a_machine_lost_or_broken_in_the_middle_is_named(maas: Maas) -> None:
    maas.tenancy()
    maas.begin(vanish="abc123")
    assert maas.play(enrols=False).error["code"] == "maas_not_found"
    maas.begin(machine(status=4, owner=""), failing={"9": 11})
    maas.queue()
    assert maas.play(enrols=False).error["code"] == "maas_failed"
    # The next request begins with the failed machine.
    maas.begin(machine(status=11))
    maas.queue()
    assert maas.play().state == "succeeded"
    assert maas.asked() == ["release", "deploy"]


def test_without_its_enrolment_the_installation_ends_late(
    maas: Maas, monkeypatch: pytest.MonkeyPatch
) -> None:
    maas.tenancy()
    for _ in range(9):
        task = maas.step()
    assert task and "waits for its enrolment" in task.state_reason
    monkeypatch.setattr(maas_tasks, "_LONGEST_S", -1.0)
    task = maas.step()
    assert task and (task.state, task.error["code"]) == ("failed", "maas_late")
    assert code(maas.enrol, maas.ticket()) == "token_invalid"
    assert maas.node().tenant_machine_ids


def test_settings_by_which_no_machine_could_enrol_end_the_task(maas: Maas, tmp_path: Path) -> None:
    maas.maintain()
    maas.queue()
    maas.begin(machine(status=4, owner=""))
    wrong = {"enrolment_ca_file": tmp_path / "absent.pem"}
    maas.settings = maas.settings.model_copy(update=wrong)
    task = maas.step()
    assert task and (task.state, task.error["code"]) == ("failed", "enrolment_ca_unreadable")
    assert maas.asked() == []


def test_a_machine_that_gets_another_address_is_not_waited_for(maas: Maas) -> None:
    """MAAS gives an address at the deployment, unless the machine has a static address."""
    maas.tenancy()
    maas.begin(edits={"deploy": {"ip_addresses": ["10.0.2.99"]}})
    task = maas.play(enrols=False)
    assert task.error and task.error["code"] == "maas_address_differs"
    assert "10.0.2.99" in task.error["found"]


SILENCES: list[dict[str, Any]] = [
    {"body": "<html>502 Bad Gateway</html>"},
    {"body": "[]"},
    {"body": '{"username": "gpuaas", "is_superuser": "perhaps"}'},
    {"status": {"whoami": 504}},
    {"status": {"whoami": 429}},
]


@pytest.mark.parametrize("fault", SILENCES)
def test_a_maas_that_gives_no_readable_answer_ends_the_task_late(
    maas: Maas, monkeypatch: pytest.MonkeyPatch, fault: dict[str, Any]
) -> None:
    maas.maintain()
    maas.queue(RELEASE)
    maas.begin(**fault)
    task = maas.step()
    assert task and (task.state, task.error["code"]) == ("waiting", "maas_silent")
    began_at = task.progress["began_at"]
    task = maas.step()
    assert task and task.progress["began_at"] == began_at
    monkeypatch.setattr(maas_tasks, "_LONGEST_S", -1.0)
    task = maas.step()
    assert task and (task.state, task.error["code"]) == ("failed", "maas_late")
    assert "maas_silent" in task.error["found"]
    assert maas.asked() == []
    # The node is free for another task.
    monkeypatch.undo()
    maas.begin()
    assert maas.queue(RELEASE).id != task.id


def test_no_other_task_begins_on_a_machine_that_maas_installs(maas: Maas) -> None:
    maas.tenancy()
    maas.step()
    with transaction(maas.engine) as conn:
        beside = queue.enqueue(conn, queue.Enqueue(TaskKind.NODE_BOOTSTRAP, "m1"), ADMIN)
        assert leasing.lease(conn, "other") == []
        reason = leasing.wait_reasons(conn, [beside])[beside.id]
        assert reason["code"] == "node_busy"
    assert code(maas.queue, RELEASE) == "node_busy"
    assert maas.play().state == "succeeded"
    with transaction(maas.engine) as conn:
        assert [task.id for task in leasing.lease(conn, "other")] == [beside.id]


def test_a_cancelled_installation_keeps_the_node_from_use(maas: Maas) -> None:
    maas.maintain()
    task = maas.queue()
    maas.step()
    with transaction(maas.engine) as conn:
        queue.cancel(conn, task.id, ADMIN)
    assert maas.task(task.id).state == "canceled"
    assert maas.node().tenant_machine_ids == [maas.node().machine_id]


def test_a_node_in_use_is_neither_installed_nor_returned(maas: Maas) -> None:
    assert code(maas.queue) == "node_in_service"
    with transaction(maas.engine) as conn:
        key = maas.machines.active(conn)
    for kind in (DEPLOY, RELEASE):
        assert code(maas.queue, kind) == "node_in_use"
    with transaction(maas.engine) as conn:
        launching.release(conn, key, ADMIN)
        baremetal.left_behind(conn, key, ADMIN, step="x", error={"code": "wipe_failed"})
    for kind in (DEPLOY, RELEASE):
        assert code(maas.queue, kind) == "machine_not_clean"
    assert maas.asked() == ["set_workload_annotations"]


def test_a_machine_with_a_disk_that_was_never_wiped_is_not_returned(
    maas: Maas, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MAAS may give it to any of its users. An installation keeps it here."""
    maas.maintain()
    # A disk that this node gave up may come back to it, and a disk of another node was seen here.
    here = maas.machines.site.document(1)["nvme"][0]["identity"]
    for unproven in ({"eui.5e": {"m1"}}, {here: {"m9"}}):
        monkeypatch.setattr(installation, "unproven_disks", lambda _conn, disks=unproven: disks)
        assert code(maas.queue, RELEASE) == "disk_not_proven"
    assert maas.queue(DEPLOY).kind == DEPLOY


def test_what_began_to_be_used_after_the_request_is_not_installed(maas: Maas) -> None:
    maas.maintain()
    maas.queue()
    with transaction(maas.engine) as conn:
        host.resume(conn, "m1", ADMIN)
    task = maas.play()
    assert (task.error["code"], maas.asked()) == ("node_in_service", ["set_workload_annotations"])


def resume(maas: Maas) -> None:
    with transaction(maas.engine) as conn:
        host.resume(conn, "m1", ADMIN)


@pytest.mark.parametrize(
    ("change", "expected"),
    [(resume, "node_in_service"), (lambda maas: maas.report("S7"), "maas_serial_differs")],
    ids=["used", "another"],
)
def test_a_change_just_before_the_request_stops_it(
    maas: Maas, monkeypatch: pytest.MonkeyPatch, change: Callable[[Maas], object], expected: str
) -> None:
    maas.maintain()
    maas.queue()
    monkeypatch.setattr(maas_tasks, "_release_script", lambda *_: change(maas) or "")
    assert maas.play().error["code"] == expected
    assert "release" not in maas.asked()


def test_a_slice_host_is_neither_installed_nor_returned(maas: Maas) -> None:
    maas.maintain()
    for mode in (NodeMode.SLICE, NodeMode.CONVERTING_TO_BAREMETAL):
        with transaction(maas.engine) as conn:
            nodes.update(conn, "m1", mode=mode.value)
        for kind in (DEPLOY, RELEASE):
            assert code(maas.queue, kind) == "node_in_slice_mode"


def test_a_conversion_with_approved_slots_is_neither_installed_nor_returned(maas: Maas) -> None:
    """Their disks may be taken over already."""
    maas.maintain()
    with transaction(maas.engine) as conn:
        nodes.update(conn, "m1", mode=NodeMode.SLICE.value)
        bundle = Bundle.of(maas.machines.site.document(1)["candidates"][1]["bundle"])
        slots.approve(conn, "m1", bundle, ADMIN)
        nodes.update(conn, "m1", mode=NodeMode.CONVERTING_TO_SLICE.value)
    for kind in (DEPLOY, RELEASE):
        assert code(maas.queue, kind) == "node_in_slice_mode"


def test_a_node_without_a_machine_in_maas_is_refused(maas: Maas) -> None:
    maas.maintain()
    with transaction(maas.engine) as conn:
        maas_sync.unbind(conn, "m1", ADMIN)
    assert code(maas.queue) == "maas_machine_unknown"


def test_a_machine_that_never_enrolled_keeps_its_installation(maas: Maas) -> None:
    with transaction(maas.engine) as conn:
        nodes.create(conn, ADMIN, id="m2", address="10.0.2.16", mode=NodeMode.BAREMETAL)
    fresh = machine("new2", hostname="m2", serial="S2", hardware_uuid="U-2", macs=["aa"])
    maas.begin(machine(), {**fresh, "ip_addresses": ["10.0.2.16"]})
    maas.compare()
    with transaction(maas.engine) as conn:
        task = installation.queue(conn, "m2", DEPLOY, ADMIN)
    maas.step()
    assert maas.task(task.id).error["code"] == "maas_occupied"
    # It is installed once it is free.
    maas.begin({**fresh, "status": 4, "owner": "", "ip_addresses": []})
    with transaction(maas.engine) as conn:
        installation.queue(conn, "m2", DEPLOY, ADMIN)
    maas.step()
    assert maas.asked() == ["deploy"]


def test_a_returned_machine_that_somebody_deployed_keeps_its_installation(maas: Maas) -> None:
    """Another installation of the same user in MAAS is not ours to release."""
    maas.maintain()
    maas.queue(RELEASE)
    assert maas.play().state == "succeeded"
    count = len(maas.asked())
    maas.begin(machine())
    for kind in (DEPLOY, RELEASE):
        maas.queue(kind)
        assert maas.play().error["code"] == "maas_occupied"
    assert "release" not in maas.asked()[count:]
    # It is free again: the next installation is ours.
    maas.begin(machine(status=4, owner=""))
    maas.queue(DEPLOY)
    maas.step()
    assert maas.asked()[-1] == "deploy"


REFUSED = {"deploy": 400}


@pytest.mark.parametrize("end", ["canceled", "refused", "late", "unbound", "free"])
def test_a_machine_between_its_release_and_our_deployment_is_anybodys(
    maas: Maas, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    """Its release was accepted, or it is free, and its task ends before a deployment of ours."""
    maas.maintain()
    task = maas.queue(DEPLOY)
    if end in ("refused", "free"):
        maas.begin(machine(status=4, owner="") if end == "free" else machine(), status=REFUSED)
        assert maas.play().error["code"] == "maas_refused"
    else:
        maas.step()
        assert maas.asked()[-1] == "release"
    if end == "late":
        with monkeypatch.context() as soon:
            soon.setattr(maas_tasks, "_LONGEST_S", -1.0)
            assert maas.play().error["code"] == "maas_late"
    if end in ("canceled", "unbound"):
        with transaction(maas.engine) as conn:
            queue.cancel(conn, task.id, ADMIN)
    # Another client with the same user deploys it.
    maas.begin(machine())
    if end == "unbound":
        with transaction(maas.engine) as conn:
            maas_sync.unbind(conn, "m1", ADMIN)
        assert maas.compare().done["nodes bound"] == 1
    for kind in (DEPLOY, RELEASE):
        maas.queue(kind)
        assert maas.play().error["code"] == "maas_occupied"
    assert "release" not in maas.asked()


def test_a_deployment_of_ours_that_never_enrolled_can_be_asked_for_again(maas: Maas) -> None:
    maas.maintain()
    task = maas.queue(DEPLOY)
    for _ in range(9):
        maas.step()
    assert maas.asked()[-2:] == ["release", "deploy"]
    with transaction(maas.engine) as conn:
        queue.cancel(conn, task.id, ADMIN)
    maas.queue(DEPLOY)
    maas.step()
    assert maas.asked()[-3:] == ["release", "deploy", "release"]


def test_a_release_that_was_refused_leaves_the_installation_ours(maas: Maas) -> None:
    maas.maintain()
    for faults, expected, returned in (
        ({"status": {"release": 409}}, "maas_conflict", False),
        ({"other": {"release": "other9"}}, "maas_wrong_machine", True),
        ({}, "maas_occupied", True),
    ):
        maas.queue(RELEASE)
        maas.begin(machine(), machine("other9", serial="S9"), **faults)
        assert maas.play().error["code"] == expected
        assert (maas.node().maas or {})["returned"] is returned
    # A machine that has enrolled since is ours, and stays ours when its release is refused.
    maas.enrol()
    with transaction(maas.engine) as conn:
        host.maintain(conn, "m1", ADMIN)
    maas.begin(status={"release": 409})
    for _ in range(2):
        maas.queue(RELEASE)
        assert maas.play().error["code"] == "maas_conflict"


def test_a_returned_machine_is_free_in_maas_and_unused_here(maas: Maas) -> None:
    maas.maintain()
    maas.queue(RELEASE)
    assert maas.play().state == "succeeded"
    assert maas.manager.record()["machines"]["abc123"]["status_name"] == "Ready"
    assert maas.asked()[-1] == "release"
    with transaction(maas.engine) as conn:
        host.resume(conn, "m1", ADMIN)
        assert maas.machines.reasons(conn) == {"m1": "reinstall_required"}


def test_a_machine_that_another_client_has_returned_is_unused_here(maas: Maas) -> None:
    maas.maintain()
    line = {"certificate": "x", "public_key": "ssh-ed25519 AAAA", "principals": ["m1"]}
    with transaction(maas.engine) as conn:
        tokens.record_certificate(conn, "m1", ADMIN, **line, serial="1", valid_until=4e9)
    maas.begin(machine(status=4, owner=""))
    maas.queue(RELEASE)
    assert maas.play().state == "succeeded"
    assert maas.node().tenant_machine_ids == [maas.node().machine_id]
    with reading(maas.engine) as conn:
        assert tokens.revoked_host_keys(conn, "m1") == ["ssh-ed25519 AAAA"]
    # Nor does the site touch it after the node has retired: it may be another node's by then.
    with transaction(maas.engine) as conn:
        nodes.update(conn, "m1", state=NodeState.RETIRED)
    for kind in (DEPLOY, RELEASE):
        assert code(maas.queue, kind) == "node_in_service"


def test_maas_reads_the_disks_back_while_it_releases_a_machine_that_leaves(maas: Maas) -> None:
    """The release script judges, if MAAS has it; MAAS then calls the release failed."""
    maas.maintain()
    file = maas_sync.MAAS_SCRIPTS["release"]
    script = file.stem
    maas.begin(scripts={script: "#!/bin/sh"})
    maas.queue(RELEASE)
    assert maas.play().error["code"] == "maas_script", "another script proves nothing"
    assert maas.node().tenant_machine_ids == [], "nothing was begun"
    maas.begin(scripts={script: file.read_text()}, failing={"12": 13})
    maas.queue(RELEASE)
    assert maas.play().error["code"] == "maas_failed"
    (request,) = (row for row in maas.manager.record()["requests"] if "release" in row["operation"])
    assert request["fields"]["scripts"] == script and request["fields"]["erase"] == "false"


def test_our_lock_is_taken_off_before_the_release_and_that_of_a_person_is_not(maas: Maas) -> None:
    with transaction(maas.engine) as conn:
        key = maas.machines.active(conn)
    assert maas.compare().done == {"machines locked": 1}
    with transaction(maas.engine) as conn:
        launching.release(conn, key, ADMIN)
        assert maas.machines.released(conn, key)
    assert maas.play().state == "succeeded"
    assert maas.asked()[-3:] == ["unlock", "release", "deploy"]


def test_a_machine_that_gets_a_tenant_during_a_pass_keeps_its_lock(
    maas: Maas, monkeypatch: pytest.MonkeyPatch
) -> None:
    with transaction(maas.engine) as conn:
        key = maas.machines.active(conn)
    assert maas.compare().done == {"machines locked": 1}
    with transaction(maas.engine) as conn:
        launching.release(conn, key, ADMIN)
        maas.machines.released(conn, key)
        # A person installs it instead of MAAS.
        (task,) = leasing.lease(conn, "worker", kinds=[DEPLOY])
        maas.machines.end(conn, task, TaskState.CANCELED)
        maas.machines.reinstall(conn)
    maas.meanwhile(monkeypatch, maas.machines.active)
    assert maas.compare().complete
    assert maas.manager.record()["machines"]["abc123"]["locked"]
    assert (maas.node().maas or {})["locked"] is True


@pytest.mark.parametrize("length", [300, 5000])
def test_a_long_text_of_one_machine_stops_no_pass(maas: Maas, length: int) -> None:
    maas.begin(machine(status_message="x" * length))
    assert maas.compare().complete
    # Firmware can have a serial number of any length: it concerns its machine only.
    maas.begin(machine(serial="S1" * length))
    assert [row.code for row in maas.compare().findings if row.action != "upload"] == [
        "maas_identity_changed"
    ]


def test_a_first_binding_leaves_the_tag_that_a_person_has_set(maas: Maas) -> None:
    with transaction(maas.engine) as conn:
        maas_sync.unbind(conn, "m1", ADMIN)
    maas.begin(machine(tag_names=[SLICE]))
    outcome = maas.compare()
    assert "maas_intent_differs" in [finding.code for finding in outcome.findings]
    assert not outcome.done
    assert maas.manager.record()["machines"]["abc123"]["tag_names"] == [SLICE]


def test_a_lock_of_a_person_after_an_unlock_without_an_answer_stays(maas: Maas) -> None:
    maas.tenancy()
    maas.locked()
    maas.begin(machine(locked=True), lost=["unlock"])
    maas.queue()
    maas.step()
    assert (maas.asked()[-1], (maas.node().maas or {})["locked"]) == ("unlock", UNSURE)
    maas.begin(machine(locked=False), edits={"release": {"locked": True}})
    maas.step()
    assert (maas.node().maas or {})["locked"] is False
    maas.queue()
    assert maas.play().error["code"] == "maas_locked"
    assert maas.manager.record()["machines"]["abc123"]["locked"]


@pytest.mark.parametrize("ours", [True, False])
def test_a_lock_without_an_answer_is_taken_off_only_if_maas_shows_that_it_is_ours(
    maas: Maas, ours: bool
) -> None:
    with transaction(maas.engine) as conn:
        key = maas.machines.active(conn)
    maas.begin(lost=["lock"])
    assert maas.compare().error
    if not ours:
        maas.begin(machine(locked=True))
    with transaction(maas.engine) as conn:
        launching.release(conn, key, ADMIN)
        assert maas.machines.released(conn, key)
    assert maas.play().error.get("code") == (None if ours else "maas_locked")
    assert ("unlock" in maas.asked()) == ours


def test_a_persons_lock_in_the_place_of_ours_is_not_taken_off(maas: Maas) -> None:
    maas.tenancy()
    maas.locked()
    ours = {"type": "User locking node", "description": f"(gpuaas) - {lock_comment('m1')}"}
    row = {"description": "(ann) - audit"}
    rows = [ours, *({**row, "type": f"User {verb}ing node"} for verb in ("unlock", "lock"))]
    maas.begin(machine(locked=True), events=[{**row, "node": "abc123"} for row in rows])
    task = maas.play()
    assert (task.error["code"], maas.asked()) == ("maas_locked", [])
    assert "may be a person's" in task.error["found"]


def test_a_lock_that_comes_before_the_next_read_may_be_a_persons(maas: Maas) -> None:
    maas.tenancy()
    maas.locked()
    maas.begin(machine(locked=True), lost=["unlock"])
    maas.queue()
    maas.step()
    maas.begin(machine(locked=True))
    assert maas.play().error["code"] == "maas_locked"
    assert maas.asked() == []
    assert "maas_lock_unsure" in {row.code for row in maas.compare().findings}
    assert maas.asked() == []
    # Unlocked by a person: forgotten.
    maas.begin(machine(locked=False))
    assert "maas_lock_unsure" not in {row.code for row in maas.compare().findings}
    assert (maas.node().maas or {})["locked"] is False


def test_an_unlock_that_never_reached_maas_is_repeated(
    maas: Maas, monkeypatch: pytest.MonkeyPatch
) -> None:
    maas.tenancy()
    maas.locked()
    text = f"(gpuaas) - {lock_comment('m1')}"
    lock = {"node": "abc123", "type": "User locking node", "description": text}
    maas.begin(machine(locked=True), events=[lock], status={"unlock": 502})
    maas.queue()
    maas.step()
    assert (maas.node().maas or {})["locked"] == UNSURE
    with monkeypatch.context() as early:
        early.setattr(maas_tasks, "REPEAT_S", 600.0)
        maas.step()
    assert maas.asked() == ["unlock"], "it may have its effect yet"
    maas.begin(machine(locked=True), events=[lock])
    assert maas.play().state == "succeeded"
    assert maas.asked() == ["unlock", "release", "deploy"]


def test_an_unlock_without_effect_is_given_up_like_any_request(maas: Maas) -> None:
    maas.tenancy()
    maas.locked()
    text = f"(gpuaas) - {lock_comment('m1')}"
    lock = {"node": "abc123", "type": "User locking node", "description": text}
    maas.begin(machine(locked=True), events=[lock], status={"unlock": 502})
    task = maas.play()
    assert task.error.get("code") == "maas_undone"
    assert "after unlock" in task.error["found"]
    assert maas.asked() == ["unlock"] * maas_tasks.MOST
    # Nothing was released, and the lock is still known to be ours.
    maas.begin(machine(locked=True), events=[lock])
    maas.queue()
    assert maas.play().state == "succeeded"


@pytest.mark.parametrize(("status", "locked"), [(403, True), (409, UNSURE)])
def test_our_lock_stays_ours_when_its_unlock_is_refused(
    maas: Maas, status: int, locked: object
) -> None:
    maas.tenancy()
    maas.locked()
    maas.begin(machine(locked=True), status={"unlock": status})
    maas.queue()
    assert maas.play().state == "failed"
    assert (maas.node().maas or {})["locked"] == locked


def test_a_ticket_is_good_once_and_for_its_machine_only(maas: Maas) -> None:
    def redeem(secret: str, address: str = ADDRESS, node: str = "m1") -> str:
        with transaction(maas.engine) as conn:
            tokens.redeem_ticket(conn, node, secret, address=address)
        return "done"

    maas.maintain()
    maas.queue()
    maas.begin(machine(status=4, owner="", ip_addresses=[]))
    maas.step()
    ticket = maas.ticket()
    with transaction(maas.engine) as conn:
        nodes.create(conn, ADMIN, id="m2", address=ADDRESS)
        # A ticket is no token, and a token is no ticket.
        assert code(tokens.require_enrolment, conn, "m1", ticket) == "token_invalid"
        _, token = tokens.issue_enrolment(conn, "m1", ADMIN)
    for secret, address, node in (
        (ticket, "10.0.2.99", "m1"),
        (ticket, "", "m1"),
        (ticket, ADDRESS, "m2"),
        (token, ADDRESS, "m1"),
        ("ticket_guessed", ADDRESS, "m1"),
    ):
        assert code(redeem, secret, address, node) == "token_invalid"
    assert redeem(ticket) == "done"
    assert code(redeem, ticket) == "token_invalid"
    with reading(maas.engine) as conn:
        assert ticket not in str(rows.every(conn, sa.select(enrolment_tokens)))
        assert ticket not in str(journal.audit_rows(conn))


def test_a_ticket_ends_with_its_deployment(maas: Maas) -> None:
    """It stays on the machine, where the next tenant is root."""
    maas.tenancy()
    while not maas.fields("deploy"):
        maas.step()
    maas.enrol()
    assert maas.play(enrols=False).state == "succeeded"
    assert code(maas.enrol, maas.ticket()) == "token_invalid"


@pytest.mark.parametrize("end", ["canceled", "lost", "retired"])
def test_a_ticket_ends_with_a_deployment_that_is_given_up(maas: Maas, end: str) -> None:
    """While it waits for MAAS, because its worker is gone, or with its node."""
    maas.tenancy()
    task = maas.step()
    while not maas.fields("deploy"):
        task = maas.step()
    assert task and task.state == "waiting"
    with transaction(maas.engine) as conn:
        if end == "canceled":
            task_failures.cancel(conn, task.id, ADMIN)
        elif end == "lost":
            conn.execute(sa.update(tasks).values(not_before=None))
            (running,) = leasing.lease(conn, "worker", kinds=[DEPLOY])
            task_failures.lose(conn, running, ADMIN)
        else:
            host.lost(conn, "m1", ADMIN)
            host.retire(conn, "m1", ADMIN.because("it does not come back"))
    assert maas.task(task.id).state == ("lost" if end == "lost" else "canceled")
    assert code(maas.enrol, maas.ticket()) == "token_invalid"
    assert maas.node().tenant_machine_ids


def test_an_answer_without_end_is_cut_off(maas: Maas, monkeypatch: pytest.MonkeyPatch) -> None:
    maas.tenancy()
    monkeypatch.setattr(Client, "LARGEST", 10)
    maas.begin()
    task = maas.step()
    assert task and "more than 10 bytes" in task.error["found"]
    assert maas.asked() == []


def test_a_key_is_refused_by_name(maas: Maas) -> None:
    maas.maintain()
    for faults, expected, word in (
        ({"skew_s": 400}, "maas_unauthorized", "clocks"),
        ({"token": "only-two:parts"}, "maas_token_unreadable", ""),
    ):
        maas.queue()
        maas.begin(**faults)
        error = maas.play().error
        assert error["code"] == expected
        assert word in error["expected"]

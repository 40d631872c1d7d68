"""Telemetry over real SSH servers: a forced command and nothing else, and a host that hangs."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa
from ansible_collections.gpuaas.slice.plugins.module_utils.boot import _telemetry_service
from ansible_collections.gpuaas.slice.plugins.module_utils.slice import _telemetry

from reconciler.db.engine import reading, transaction
from reconciler.db.schema import nodes
from reconciler.lifecycle import drift, slice_telemetry
from reconciler.model.act import Act
from reconciler.model.slice_telemetry import Snapshot
from reconciler.model.states import TaskKind, TaskState
from reconciler.records import allocations, leasing, queue
from reconciler.records import nodes as nodes_of
from reconciler.runs import ssh
from reconciler.runs.spec import NodeAccess, RunError
from reconciler.runs.ssh import SshAccess
from reconciler.trust import ca
from reconciler.work import telemetry
from reconciler.work.telemetry import Telemetry
from tests.unit.reconciler.benchmark.sshd import USER, Boot, Machine, boot
from tests.unit.reconciler.conftest import ADMIN, Site
from tests.unit.reconciler.service.service import until

__all__ = ["boot"]
pytestmark = pytest.mark.covers("SLICE-11")


class Hosts:
    """Hosts whose sshd trusts the site's authority and has the principals file of bootstrap."""

    def __init__(self, folder: Path, site: Site, start: Boot) -> None:
        self.folder, self.site, self._start = folder, site, start
        self.trust = ca.open_trust(folder / "state")
        (folder / "ca.pub").write_text(ca.user_ca(self.trust) + "\n")

    def add(self, node_id: str, *, line: str = _telemetry_service.LINE) -> Machine:
        snapshot, principals = (
            self.folder / f"{node_id}.json",
            self.folder / f"{node_id}.principals",
        )
        principals.write_text(line.replace(_telemetry.SNAPSHOT, str(snapshot)))
        settings = (
            f"TrustedUserCAKeys {self.folder}/ca.pub\nAuthorizedPrincipalsFile {principals}\n"
            "Subsystem sftp internal-sftp"
        )
        machine = self._start(
            node_id,
            login="",
            settings=settings,
            certify=lambda key: ca.certify_host(self.trust, key, node_id),
        )
        with transaction(self.site.engine) as conn:
            row = sa.update(nodes).where(nodes.c.id == node_id)
            conn.execute(row.values(address="127.0.0.1", port=machine.port))
        return machine

    def says(self, node_id: str, allocation_id: str, cpu_s: float = 1.0) -> Path:
        host = {"state": "running", "cpu_s": cpu_s, "refused_packets": {"arp": 3, "invented": 1}}
        part = {"allocation_id": allocation_id, "host": host, "guest": None}
        path = self.folder / f"{node_id}.json"
        path.write_text(json.dumps({"version": 1, "problems": [], "slices": [part]}))
        return path

    def access(self) -> SshAccess:
        identity = ca.telemetry_identity(self.trust, 300)
        return SshAccess(identity.key, identity.certificate, identity.known_hosts)

    def count(self, allocation_id: str) -> int:
        with reading(self.site.engine) as conn:
            return len(slice_telemetry.samples(conn, allocation_id, 60))


@pytest.fixture
def hosts(tmp_path: Path, sold: Site, boot: Boot, monkeypatch: pytest.MonkeyPatch) -> Hosts:
    monkeypatch.setattr(telemetry, "TELEMETRY", USER)
    return Hosts(tmp_path, sold, boot)


@pytest.fixture
def collector(hosts: Hosts) -> Iterator[Telemetry]:
    collector = Telemetry(hosts.site.engine, hosts.access)
    yield collector
    collector._stopping.set()
    for pool in collector._places._pools:
        pool.shutdown()


def active(hosts: Hosts) -> str:
    with transaction(hosts.site.engine) as conn:
        return hosts.site.active(conn, 1)


def test_the_names_are_those_of_the_host() -> None:
    assert ca.TELEMETRY == _telemetry_service.ACCOUNT


def test_a_sample_from_the_snapshot_to_the_database(hosts: Hosts, collector: Telemetry) -> None:
    mine = active(hosts)
    hosts.add("n1")
    hosts.says("n1", mine, cpu_s=4.5)
    assert collector.look() == ["n1"]
    until(lambda: hosts.count(mine) == 1 and not collector._busy)
    with reading(hosts.site.engine) as conn:
        (sample,) = slice_telemetry.samples(conn, mine, 60)
    assert sample.guest is None and sample.host["cpu_s"] == 4.5
    assert sample.host["refused_packets"] == {"arp": 3}
    # The minute has its sample, whichever process took it.
    assert collector.look() == []
    assert Telemetry(hosts.site.engine, hosts.access).look() == []


@pytest.mark.covers("SLICE-8")
def test_a_guest_that_powers_itself_off_is_looked_at_before_its_host_may_restart(
    sold: Site,
) -> None:
    """The comparison records it as stopped, so that no restart of the host starts it."""
    with transaction(sold.engine) as conn:
        mine = sold.active(conn)
    parts = [{"allocation_id": mine, "host": {"state": s}} for s in ("running", "shut off")]
    snapshots = [Snapshot.read(json.dumps({"version": 1, "slices": [p]}).encode()) for p in parts]
    for count, compared in ((0, False), (1, True)):
        collector = Telemetry(sold.engine, SshAccess, drift=compared)  # type: ignore[arg-type]
        for snapshot in (*snapshots, snapshots[1]):
            with transaction(sold.engine) as conn:
                collector._record(conn, "n1", snapshot)  # type: ignore[arg-type]
        with reading(sold.engine) as conn:
            kinds = [task.kind for task in queue.every(conn)]
        assert kinds.count(TaskKind.SLICE_DRIFT_RECONCILE) == count


@pytest.mark.covers("SLICE-8")
def test_a_slice_that_goes_off_during_a_comparison_is_compared_again(
    sold: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That comparison may have looked at the host while the guest ran."""
    with transaction(sold.engine) as conn:
        mine = sold.active(conn)
        drift.queue_comparison(conn, "n1", ADMIN)
        (under_way,) = leasing.lease(conn, "w", kinds=[TaskKind.SLICE_DRIFT_RECONCILE])
    part = {"allocation_id": mine, "host": {"state": "shut off"}}
    off = json.dumps({"version": 1, "slices": [part]}).encode()
    collector = Telemetry(sold.engine, SshAccess)  # type: ignore[arg-type]

    monkeypatch.setattr(ssh, "telemetry", lambda *_: off)
    with reading(sold.engine) as conn:
        node = nodes_of.get(conn, "n1")

    def comparisons() -> int:
        assert collector._collect(SshAccess, node) == ""  # type: ignore[arg-type]
        with reading(sold.engine) as conn:
            return len(queue.every(conn, kind=TaskKind.SLICE_DRIFT_RECONCILE))

    assert [comparisons(), comparisons()] == [1, 1]
    with transaction(sold.engine) as conn:
        queue.finish(conn, under_way.id, under_way.lease_token, TaskState.SUCCEEDED, ADMIN)
    assert [comparisons(), comparisons()] == [2, 2]


@pytest.mark.covers("SLICE-8")
def test_a_host_whose_baseline_differs_is_compared_once_for_it(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = active(hosts)
    hosts.add("n1")
    path = hosts.says("n1", mine)
    with reading(hosts.site.engine) as conn:
        node = nodes_of.get(conn, "n1")
    compared: list[str] = []
    queued = [True]

    def note(_conn: sa.Connection, node_id: str, act: Act, *, pause_s: float) -> bool:
        assert act.reason and pause_s >= 300
        compared.append(node_id)
        return queued[0]

    monkeypatch.setattr(drift, "queue_unasked", note)

    def comparisons(collector: Telemetry, *differs: str) -> int:
        document = {**json.loads(path.read_text()), "differs": differs}
        path.write_text(json.dumps(document) if differs != ("ended",) else "")
        compared.clear()
        collector._collect(hosts.access(), node)
        return len(compared)

    off = Telemetry(hosts.site.engine, hosts.access, drift=False)
    assert comparisons(off, "network_file") == 0
    collector = Telemetry(hosts.site.engine, hosts.access)
    assert comparisons(collector) == 0
    assert [comparisons(collector, "network_file") for _ in range(3)] == [1, 0, 0]
    # It is asked for again until it may be queued.
    queued[0] = False
    assert [comparisons(collector, "host_disk_full") for _ in range(2)] == [1, 1]
    queued[0] = True
    assert [comparisons(collector, "host_disk_full") for _ in range(2)] == [1, 0]
    # A host whose telemetry a person has stopped prints nothing; a comparison starts it again.
    before = path.read_text()
    assert comparisons(collector, "ended") == 1
    path.write_text(before)
    assert comparisons(collector) == 0
    # The end of this process ends its questions; a host that it did not hear out is not compared.
    ending = Telemetry(hosts.site.engine, hosts.access)
    ending._stopping.set()
    path.unlink()
    os.mkfifo(path)
    compared.clear()
    assert ending._collect(hosts.access(), node)
    assert compared == []


def test_the_login_prints_the_snapshot_and_can_do_nothing_else(hosts: Hosts) -> None:
    machine = hosts.add("n1")
    path = hosts.says("n1", "a")
    words = ["ssh", *ssh.options(hosts.access(), "n1"), "-p", str(machine.port), "-l", USER]

    def run(*more: str) -> subprocess.CompletedProcess[bytes]:
        return subprocess.run(
            [*words, *more], capture_output=True, stdin=subprocess.DEVNULL, timeout=30, check=False
        )

    for wish in ((), ("id",), ("sh", "-c", "id; cat /etc/passwd")):
        assert run("127.0.0.1", *wish).stdout == path.read_bytes()
    assert run("-s", "127.0.0.1", "sftp").stdout == path.read_bytes()
    forward = run("-W", f"127.0.0.1:{machine.port}", "127.0.0.1")
    assert forward.returncode != 0 and not forward.stdout
    assert b"PTY allocation request failed" in run("-tt", "127.0.0.1").stderr
    # A service that ended prints nothing, instead of an old snapshot.
    subprocess.run(["touch", "-d", "5 minutes ago", str(path)], check=True)
    assert run("127.0.0.1").stdout == b""


def test_the_operators_certificate_is_not_the_telemetry_accounts(hosts: Hosts) -> None:
    machine = hosts.add("n1")
    hosts.says("n1", "a")
    identity = ca.operator_identity(hosts.trust)
    access = SshAccess(identity.key, identity.certificate, identity.known_hosts)
    node = NodeAccess("n1", "127.0.0.1", machine.port, USER)
    with pytest.raises(Exception, match="Permission denied"):
        ssh.telemetry(access, node, lambda: False)


def ordered(command: str) -> str:
    return f'restrict,command="{command}" {ca.TELEMETRY}\n'


def test_a_host_that_hangs_costs_the_others_nothing(hosts: Hosts, collector: Telemetry) -> None:
    hosts.site.node("n2", (0,), 1)
    ids = [active(hosts) for _ in range(3)]
    with reading(hosts.site.engine) as conn:
        (mine,) = [key for key in ids if allocations.get(conn, key).node_id == "n2"]
    hosts.add("n1", line=ordered("exec sleep 100"))
    hosts.add("n2")
    hosts.says("n2", mine)
    assert sorted(collector.look()) == ["n1", "n2"]
    until(lambda: hosts.count(mine) == 1)
    # The sample is written before its host counts as done.
    until(lambda: collector._busy == {"n1"})
    assert collector.look() == []
    # The end of the service does not wait for it either.
    collector._stopping.set()
    until(lambda: not collector._busy)
    assert collector._plan["n1"][2]


def test_a_machine_without_room_for_an_identity_asks_as_soon_as_it_has_some(
    sold: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    with transaction(sold.engine) as conn:
        sold.active(conn, 1)
    monkeypatch.setattr(ssh, "telemetry", lambda *_: b"")
    room: list[SshAccess] = []
    collector = Telemetry(sold.engine, room.pop)
    with pytest.raises(IndexError):
        collector.look()
    room.append(SshAccess(Path("unused"), Path("unused"), Path("unused")))
    assert collector.look() == ["n1"]
    until(lambda: not collector._busy)


def test_a_host_that_hangs_is_asked_less_often_and_beside_the_others(
    sold: Site, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with transaction(sold.engine) as conn:
        sold.active(conn, 1)
    threads: list[str] = []

    def refuse(_access: SshAccess, _node: NodeAccess, _given_up: object) -> bytes:
        threads.append(threading.current_thread().name)
        now[0] += 60
        raise RunError("telemetry_unanswered", expected="", found="no route", remedy="")

    monkeypatch.setattr(ssh, "telemetry", refuse)
    now, nothing = [0.0], Path("unused")
    access = SshAccess(nothing, nothing, nothing)
    collector = Telemetry(sold.engine, lambda: access, clock=lambda: now[0])
    moments = []
    with caplog.at_level(logging.WARNING, "gpuaas.telemetry"):
        for at in range(0, 1800, 5):
            now[0] = float(at)
            if collector.look():
                moments.append(at)
                until(lambda: not collector._busy)
    assert moments == [0, 115, 285, 565, 1065, 1725]
    assert ["slow" in name for name in threads] == [False] + [True] * 5
    assert caplog.text.count("no telemetry of node n1") == 1


@pytest.mark.parametrize(
    ("command", "problem"),
    [
        ("exec yes", "answer_too_large"),
        ("head -c 2000000 /dev/zero", "not a snapshot"),
        ("echo '[]'", "not a snapshot"),
        ("echo no such file >&2; exit 1", "no such file"),
        ("true", "0 bytes"),
    ],
)
def test_what_a_hostile_host_answers_is_refused(
    hosts: Hosts, collector: Telemetry, command: str, problem: str
) -> None:
    mine = active(hosts)
    hosts.add("n1", line=ordered(command))
    assert collector.look() == ["n1"]
    until(lambda: not collector._busy)
    assert problem in collector._plan["n1"][2]
    assert hosts.count(mine) == 0


def test_a_text_that_postgresql_does_not_take_is_refused(
    hosts: Hosts, collector: Telemetry
) -> None:
    active(hosts)
    hosts.add("n1")
    hosts.says("n1", "\0")
    assert collector.look() == ["n1"]
    until(lambda: not collector._busy)
    assert "slices.0.allocation_id" in collector._plan["n1"][2]

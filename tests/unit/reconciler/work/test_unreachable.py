"""Silent hosts: their tasks wait and continue; nothing is freed meanwhile (I13)."""

from __future__ import annotations

import socket
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import sqlalchemy as sa

from reconciler.db import journal
from reconciler.db import schema as tables
from reconciler.db.engine import transaction
from reconciler.lifecycle import host
from reconciler.lifecycle import launch as launching
from reconciler.model.states import TaskKind
from reconciler.records import allocations, leasing, nodes, queue
from reconciler.runs import ssh
from reconciler.runs.collect import Outcome
from reconciler.runs.spec import NodeAccess
from reconciler.runs.ssh import SshAccess
from reconciler.settings import Settings
from reconciler.work import watch, worker
from reconciler.work.loops import end_overdue
from reconciler.work.watch import FIRST_S, FORGET_S, Watch
from tests.unit.reconciler.conftest import ADMIN, Site
from tests.unit.reconciler.service.service import until
from tests.unit.reconciler.work.conftest import (
    READINESS,
    Attend,
    Runs,
    attending,
    canceled_at_launch,
    launched,
    statuses,
)

pytestmark = pytest.mark.covers("CTRL-8", "I13")

REFUSED = "unreachable: Failed to connect: ssh: connect to host n1 port 22: Connection refused"
SILENT = Outcome("failed", None, REFUSED, unreachable=True, touched=False)
STRANGER = "unreachable: name is not a listed principal Host key verification failed."


@pytest.fixture
def attend(sold: Site, settings: Settings, runs: Runs) -> Attend:
    """Lease the next task and attend it, with the scripted outcome."""
    with transaction(sold.engine) as conn:
        nodes.change(conn, "n1", ADMIN, profile="lab")
    return attending(sold.engine, settings, runs)


def state(sold: Site) -> str:
    with transaction(sold.engine) as conn:
        return str(nodes.get(conn, "n1").state)


def test_a_task_waits_and_goes_on_with_a_run_of_its_own(
    sold: Site, runs: Runs, attend: Attend
) -> None:
    key = launched(sold)
    runs.outcome = SILENT
    waits = attend()
    assert (waits.state, waits.attempt, waits.unreached) == ("waiting", 1, 1)
    assert state(sold) == "unreachable"
    with transaction(sold.engine) as conn:
        reason = leasing.wait_reasons(conn, [waits])[waits.id]
        assert (reason["code"], reason["attempts"]) == ("host_unreachable", 1)
        assert "Connection refused" in reason["detail"]
        assert allocations.get(conn, key).state == "provisioning"
        assert sorted(sold.statuses(conn)) == ["available", "provisioning"]
        assert leasing.lease(conn, "worker") == [], "nothing is tried on a node that is lost"
        assert host.record_answer(conn, "n1", ADMIN)
        assert not host.record_answer(conn, "n1", ADMIN)
    assert state(sold) == "ready"

    runs.ends(evidence={"readiness": READINESS, "plan": {}, "image": {}})
    assert attend().state == "succeeded"
    first, second = (spec.run_id for spec in runs.launched)
    assert second == f"{first}-1"
    with transaction(sold.engine) as conn:
        assert allocations.get(conn, key).state == "active"


def test_a_launch_on_a_host_that_answers_probes_only_ends(
    sold: Site, runs: Runs, attend: Attend, settings: Settings
) -> None:
    """Otherwise its tenant waits for ever: it cannot release an allocation in provisioning."""
    key = launched(sold)
    runs.outcome = SILENT
    minutes = 0
    while True:
        attend()
        with transaction(sold.engine) as conn:
            for table in (tables.tasks, tables.allocations, tables.claims, tables.slots):
                due = sa.update(table).where(table.c.deadline_at.is_not(None))
                conn.execute(due.values(deadline_at=table.c.deadline_at - 600))
            host.record_answer(conn, "n1", ADMIN)
        end_overdue(sold.engine, settings)
        with transaction(sold.engine) as conn:
            if allocations.get(conn, key).state != "provisioning":
                break
        minutes += 10
        assert minutes < 600
    with transaction(sold.engine) as conn:
        assert allocations.get(conn, key).state == "failed"


@pytest.mark.parametrize(
    ("kind", "state"),
    [(TaskKind.SLICE_VM_PROVISION, "provisioning"), (TaskKind.SLICE_VM_RELEASE, "releasing")],
)
def test_the_playbooks_themselves_wait_for_a_host_that_refuses_ssh(
    sold: Site, tmp_path: Path, kind: TaskKind, state: str
) -> None:
    """Ansible checks a role's arguments here, before its first word to the host."""
    settings = Settings(state_dir=tmp_path, public_url="http://127.0.0.1:9")
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # bound and not listening: connections are refused
        port = nobody.getsockname()[1]
        with transaction(sold.engine) as conn:
            nodes.change(conn, "n1", ADMIN, profile="lab", address="127.0.0.1", port=port)
            release = kind == TaskKind.SLICE_VM_RELEASE
            key = sold.active(conn) if release else sold.allocate(conn)
            if release:
                launching.release(conn, key, ADMIN)
            (task,) = leasing.lease(conn, "worker", kinds=[kind], seconds=600)
        worker.attend(sold.engine, settings, task, threading.Event())
    with transaction(sold.engine) as conn:
        waits = queue.get(conn, task.id)
        assert (waits.state, waits.unreached) == ("waiting", 1), waits.error
        assert "Connection refused" in waits.state_reason
        assert allocations.get(conn, key).state == state
        assert sorted(sold.statuses(conn)) == ["available", state]
        assert nodes.get(conn, "n1").state == "unreachable"


def test_what_a_resumed_task_refuses_is_still_known(sold: Site, runs: Runs, attend: Attend) -> None:
    """The host came back under another boot: nothing was touched, so the slot goes back."""
    launched(sold)
    runs.outcome = SILENT
    attend()
    with transaction(sold.engine) as conn:
        host.record_answer(conn, "n1", ADMIN)
        conn.execute(sa.update(tables.nodes).values(boot_id=""))
    ended = attend()
    assert (ended.state, ended.error["code"]) == ("failed", "boot_changed")
    with transaction(sold.engine) as conn:
        assert sold.statuses(conn) == ["disabled", "available"]


@pytest.mark.parametrize(
    ("outcome", "node"),
    [
        # A stranger at the address: an answer, and no reason to wait.
        (replace(SILENT, problem=STRANGER), "ready"),
        # Contact was lost in the middle: what the host did is unknown.
        (replace(SILENT, touched=True), "unreachable"),
    ],
)
def test_a_refusal_and_a_lost_connection_end_the_task_at_once(
    sold: Site, runs: Runs, attend: Attend, outcome: Outcome, node: str
) -> None:
    launched(sold)
    runs.outcome = outcome
    ended = attend()
    assert (ended.state, ended.error["code"]) == ("failed", "host_unreachable")
    assert ended.error["found"] == outcome.problem
    assert state(sold) == node
    assert statuses(sold) == ["available", "cleanup_blocked"]


def test_a_node_that_never_enrolled_is_asked_again_ever_more_rarely(
    sold: Site, runs: Runs, attend: Attend
) -> None:
    with transaction(sold.engine) as conn:
        nodes.create(conn, ADMIN, id="n2", address="10.0.2.16", profile="lab")
        queue.enqueue(conn, queue.Enqueue(TaskKind.NODE_PARITY, "n2", "node", "n2"), ADMIN)
    runs.outcome = SILENT
    pauses = []
    for _ in range(9):
        task = attend()
        with transaction(sold.engine) as conn:
            pauses.append(round(task.not_before - task.state_since))
            assert leasing.lease(conn, "worker") == []
            conn.execute(sa.update(tables.tasks).values(not_before=None))
    assert pauses == [5, 10, 20, 40, 80, 160, 300, 300, 300]
    assert task.attempt == 1


def test_a_task_that_nobody_wants_any_more_does_not_wait(
    sold: Site, runs: Runs, attend: Attend, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched(sold)
    runs.outcome = SILENT
    monkeypatch.setattr(worker, "launch", canceled_at_launch(sold.engine, runs))
    assert attend().state == "failed"


def watch_of(site: Site, now: list[float]) -> Watch:
    unused = Path("unused")
    return Watch(site.engine, lambda: SshAccess(unused, unused, unused), clock=lambda: now[0])


def lose(site: Site, *node_ids: str) -> None:
    for node_id in node_ids:
        with transaction(site.engine) as conn:
            host.record_silence(conn, node_id, ADMIN.because("no route"))


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The answers to come; each question takes the next."""
    script: list[str] = []
    monkeypatch.setattr(ssh, "probe", lambda _access, _node: script.pop(0))
    monkeypatch.setattr(watch, "_WAIT_S", 60.0)
    return script


def test_silent_hosts_are_asked_until_they_answer(sold: Site, answers: list[str]) -> None:
    now = [0.0]
    hosts = watch_of(sold, now)
    assert hosts.look() == []
    lose(sold, "n1")
    for at, answer in ((0, None), (FIRST_S, "refused"), (FIRST_S * 2, None), (FIRST_S * 3, "")):
        now[0] = at
        if answer is not None:
            answers.append(answer)
        silent = hosts.look()
        assert answers == [], f"at {at} s the host was not asked"
    assert silent == ["n1"]
    assert state(sold) == "ready"
    with transaction(sold.engine) as conn:
        row = journal.history_of(conn, "node", "n1")[-1]
        assert (row.event, row.reason) == ("regain_ready", "the host answers again")
        # It may have been restarted, which a comparison sees.
        (looked,) = queue.open_of_node(conn, "n1")
        assert looked.kind == TaskKind.SLICE_DRIFT_RECONCILE
    assert hosts.look() == []


def test_a_host_that_is_lost_again_and_again_is_asked_ever_later(
    sold: Site, answers: list[str]
) -> None:
    """It answers each question and refuses each run, and every run costs seconds."""
    now = [0.0]
    hosts = watch_of(sold, now)

    def until_answered() -> float:
        lose(sold, "n1")
        lost = now[0]
        answers.append("")
        while not hosts.look():
            now[0] += 1
        return now[0] - lost

    waits = [until_answered() for _ in range(7)]
    assert waits == [FIRST_S, *(FIRST_S * 2**number for number in range(1, 5)), 120, 120]
    now[0] += FORGET_S
    assert until_answered() == FIRST_S, "a host that was well since may be restarting"


def test_a_host_that_hangs_keeps_no_other_from_being_seen_again(
    sold: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    sold.node("n2", (0,), 1)
    go, probed, now = threading.Event(), list[str](), [0.0]

    def probe(_access: SshAccess, node: NodeAccess) -> str:
        probed.append(node.node_id)
        if node.node_id == "n1":
            assert go.wait(60)
        return ""

    monkeypatch.setattr(ssh, "probe", probe)
    monkeypatch.setattr(watch, "_WAIT_S", 0.1)
    hosts = watch_of(sold, now)
    lose(sold, "n1", "n2")
    assert hosts.look() == []
    now[0] = FIRST_S
    until(lambda: hosts.look() == ["n2"])
    assert hosts.look() == []
    go.set()
    until(lambda: hosts.look() == ["n1"])
    assert sorted(probed) == ["n1", "n2"], "each is asked once"


def test_hosts_that_hang_again_and_again_wait_for_each_other_only(
    sold: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many as there are places for all. A hanging host answers at times, to count as healthy."""
    hanging = [f"h{number}" for number in range(8)]
    for number, node_id in enumerate((*hanging, "n2"), 1):
        sold.node(node_id, (0,), number)
    go, begun, now = threading.Event(), threading.Semaphore(0), [0.0]
    answers: dict[str, str] = {}

    def probe(_access: SshAccess, node: NodeAccess) -> str:
        if node.node_id in hanging:
            begun.release()
            go.wait()
        return answers.get(node.node_id, "hangs" if node.node_id in hanging else "")

    def hang() -> None:
        for _ in hanging:
            assert begun.acquire(timeout=60)

    monkeypatch.setattr(ssh, "probe", probe)
    monkeypatch.setattr(watch, "_WAIT_S", 0.1)
    hosts = watch_of(sold, now)
    lose(sold, *hanging)
    assert hosts.look() == []
    now[0] += FIRST_S
    assert hosts.look() == []
    hang()
    now[0] += 60
    answers["h0"] = ""
    go.set()
    until(lambda: hosts.look() == ["h0"])
    until(lambda: not hosts._probes or bool(hosts.look()))
    go.clear()
    lose(sold, "h0", "n2")
    assert hosts.look() == []
    now[0] += 2 * FIRST_S
    try:
        until(lambda: "n2" in hosts.look(), 30)
        hang()
    finally:
        go.set()


def test_a_probe_that_fails_counts_as_silence(sold: Site, answers: list[str]) -> None:
    """For example on a machine without room for a process; the host is asked later."""
    now = [0.0]
    hosts = watch_of(sold, now)
    lose(sold, "n1")
    assert hosts.look() == []
    now[0] = FIRST_S
    # The script is empty, so the question raises.
    assert hosts.look() == []
    answers.append("")
    assert hosts.look() == [] and answers, "it has its pause"
    now[0] = 3 * FIRST_S
    assert hosts.look() == ["n1"]


def test_each_task_says_what_it_waits_for(sold: Site) -> None:
    with transaction(sold.engine) as conn:
        queued = {}
        for kind in (TaskKind.NODE_PARITY, TaskKind.NODE_BOOTSTRAP, TaskKind.NODE_IMAGE_CACHE):
            subject = "node" if kind is not TaskKind.NODE_IMAGE_CACHE else "image"
            item = queue.Enqueue(kind, "n1", subject, kind)
            queued[kind] = queue.enqueue(conn, item, ADMIN).id
        later = queue.Enqueue(TaskKind.SLICE_WIPE, "n1", "slot", "s", not_before_s=60)
        queued[TaskKind.SLICE_WIPE] = queue.enqueue(conn, later, ADMIN).id

        def codes() -> dict[str, str]:
            reasons = leasing.wait_reasons(conn, queue.every(conn))
            return {kind: reasons[key]["code"] for kind, key in queued.items() if key in reasons}

        expected = {
            TaskKind.NODE_PARITY: "worker",
            TaskKind.NODE_BOOTSTRAP: "worker",
            TaskKind.NODE_IMAGE_CACHE: "exclusive_first",
            TaskKind.SLICE_WIPE: "later",
        }
        assert codes() == expected
        (parity,) = leasing.lease(conn, "worker")
        assert parity.kind == TaskKind.NODE_PARITY
        del expected[TaskKind.NODE_PARITY]
        assert codes() == expected | {TaskKind.NODE_BOOTSTRAP: "node_busy"}
        host.lost(conn, "n1", ADMIN)
        assert set(codes().values()) == {"host_unreachable"}

"""Faults with names of their own: a full disk, a wrong clock, a lost folder of a run."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
import sqlalchemy as sa

from reconciler.db import clock
from reconciler.db.engine import transaction
from reconciler.db.schema import tasks
from reconciler.lifecycle import gate
from reconciler.model import host_faults
from reconciler.model.states import TaskKind
from reconciler.records import nodes, queue
from reconciler.runs import collect, lock, ssh
from reconciler.runs.collect import Outcome
from reconciler.runs.spec import NodeAccess
from reconciler.settings import Settings
from reconciler.trust import ca
from reconciler.trust.certificates import Signature, certify
from reconciler.work.settle import clock_fault, read_failure
from tests.unit.reconciler.benchmark.sshd import USER, Boot, Machine, boot
from tests.unit.reconciler.conftest import ADMIN, Site, code
from tests.unit.reconciler.holdings import nothing
from tests.unit.reconciler.work.conftest import Attend, Runs, launched, statuses

__all__ = ["boot"]
pytestmark = pytest.mark.covers("CTRL-8", "I13")

# Ansible's message about a module that finds no room, as recorded on a machine with a full disk.
FULL = (
    "Module result deserialization failed: No start of json char found; "
    "raise FileNotFoundError(_errno.ENOENT,\nFileNotFoundError: [Errno 2] No usable temporary "
    "directory found in ['/tmp', '/var/tmp', '/usr/tmp', '/root']"
)
DIED = "OSError: [Errno 28] No space left on device: '/var/lib/gpuaas/ledger/.x' (_host.py:153)"
READ_ONLY = "OSError: [Errno 30] Read-only file system: '/var/lib/gpuaas/ledger/.x' (_host.py:153)"
COPY = (
    "unreachable: Failed to create temporary directory. stderr output: mkdir: cannot create "
    "directory '/root/.ansible': No space left on device"
)


def failed(code: str, found: str) -> Outcome:
    error = {"code": code, "expected": "x", "found": found, "remedy": "y"}
    return Outcome("failed", {"ok": False, "step": "s", "error": error, "evidence": {}})


@pytest.mark.parametrize(
    ("outcome", "code"),
    [
        (failed("task_failed", FULL), "host_disk_full"),
        (failed("system_error", DIED), "host_disk_full"),
        (Outcome("failed", None, COPY, unreachable=True), "host_disk_full"),
        (Outcome("failed", None, f"module_failed: {FULL}"), "host_disk_full"),
        (failed("system_error", READ_ONLY), "host_read_only"),
        (Outcome("failed", None, f"module_failed: {READ_ONLY}"), "host_read_only"),
        (Outcome("failed", None, "module_failed: something else"), "run_failed"),
        # Not of the host: of AWX, or of this machine.
        (Outcome("failed", None, f"result_missing: {DIED}"), "run_failed"),
        (Outcome("lost", None, DIED), "run_lost"),
        (failed("task_failed", "something else"), "task_failed"),
        # A refusal of a module keeps its own name.
        (failed("image_too_large", DIED), "image_too_large"),
    ],
)
def test_a_disk_of_the_host_that_takes_no_writes_has_its_name(outcome: Outcome, code: str) -> None:
    error = read_failure(outcome).error
    assert error["code"] == code
    assert set(error) == {"code", "expected", "found", "remedy"} and all(error.values())


def enqueue_comparison(sold: Site) -> None:
    """A comparison of n1 is wanted."""
    with transaction(sold.engine) as conn:
        kind = TaskKind.SLICE_DRIFT_RECONCILE
        queue.enqueue(conn, queue.Enqueue(kind, "n1", "node", "n1"), ADMIN)


@pytest.mark.parametrize("problem", [FULL, READ_ONLY])
def test_a_host_that_takes_no_writes_sells_nothing_until_a_run_ends_well(
    sold: Site, runs: Runs, attend: Attend, problem: str
) -> None:
    launched(sold)
    full = Outcome("failed", None, f"module_failed: {problem}")
    runs.outcome = full
    assert attend().error["code"] in host_faults.UNWRITABLE
    assert statuses(sold) == ["cleanup_blocked", "disabled"]
    with transaction(sold.engine) as conn:
        assert code(sold.allocate, conn) == "no_capacity"
    # A failure in other words does not show that there is room again.
    for outcome in (failed("nvme_missing", "else"), full):
        enqueue_comparison(sold)
        runs.outcome, runs.alive = outcome, False
        attend()
        with transaction(sold.engine) as conn:
            gate.open_gate(conn, "n1", ADMIN)
        assert statuses(sold) == ["cleanup_blocked", "disabled"]
    enqueue_comparison(sold)
    runs.alive = False
    runs.ends(evidence={"holdings": nothing(), "identity": sold.document(0)["identity"]})
    assert attend().state == "succeeded"
    assert statuses(sold) == ["available", "cleanup_blocked"]


@pytest.fixture
def machine(sold: Site, boot: Boot, tmp_path: Path) -> Machine:
    """The host n1, with a real sshd that trusts the site's user authority."""
    trust = ca.open_trust(tmp_path / "state")
    (tmp_path / "user_ca.pub").write_text(f"{ca.user_ca(trust)}\n")
    (tmp_path / "principals").write_text(f"{ca.OPERATOR}\n")
    settings = (
        f"TrustedUserCAKeys {tmp_path}/user_ca.pub\nAuthorizedPrincipalsFile {tmp_path}/principals"
    )
    server = boot(
        "n1", login="", settings=settings, certify=lambda k: ca.certify_host(trust, k, "n1")
    )
    with transaction(sold.engine) as conn:
        nodes.change(conn, "n1", ADMIN, address="127.0.0.1", port=server.port, ssh_user=USER)
    return server


def test_the_clock_of_a_host_that_refuses_us_is_read_and_nothing_else(
    sold: Site, machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trust = ca.open_trust(tmp_path / "state")
    node = NodeAccess("n1", "127.0.0.1", machine.port, USER)
    # For a host whose clock is wrong, our certificate has ended or has not begun.
    identity = ca.operator_identity(trust)
    with transaction(sold.engine) as conn:
        now = clock.read(conn)
    past = [datetime.fromtimestamp(now - hours * 3600, UTC) for hours in (9, 8)]
    signature = Signature("late", (ca.OPERATOR,), past[0], past[1], serial=1, host=False)
    line = certify(
        trust.user_authority, identity.key.with_name("operator.pub").read_text(), signature
    )
    identity.certificate.write_text(f"{line}\n")
    access = ssh.SshAccess(identity.key, identity.certificate, identity.known_hosts)
    refusal = f"unreachable: {ssh.probe(access, node)}"
    assert ssh.is_refused(refusal), refusal
    outcome = Outcome("failed", None, refusal, unreachable=True, touched=False)
    settings = Settings(state_dir=tmp_path / "state")
    # The clock of this machine is right, so the refusal has another reason.
    assert clock_fault(sold.engine, settings, "n1", outcome) is None
    monkeypatch.setattr(clock, "read", lambda _conn: now + 7200)
    fault = clock_fault(sold.engine, settings, "n1", outcome)
    assert fault is not None and fault["code"] == "clock_wrong"
    assert " s behind; unreachable: " in fault["found"] and "timedatectl" in fault["remedy"]
    by_awx = settings.model_copy(update={"launcher": "awx"})
    named = clock_fault(sold.engine, by_awx, "n1", outcome)
    assert named is not None and named["code"] == "clock_wrong"
    # The certificate without a limit opens nothing else.
    clock_access = ssh.SshAccess(
        identity.key, ca.clock_identity(trust).certificate, identity.known_hosts
    )
    done = ssh._call(clock_access, node, "id; echo reached")
    assert done.stdout.strip().isdigit(), done


def test_a_refusal_of_a_host_that_only_awx_reaches_has_a_name(
    sold: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits: list[float] = []
    monkeypatch.setattr(ssh, "read_clock", lambda *args: limits.append(args[2]))
    refusal = "unreachable: gpuaas@n1: Permission denied (publickey)."
    outcome = Outcome("failed", None, refusal, unreachable=True, touched=False)
    settings = Settings(state_dir=tmp_path / "state")
    assert clock_fault(sold.engine, settings, "n1", outcome) is None
    by_awx = settings.model_copy(update={"launcher": "awx"})
    fault = clock_fault(sold.engine, by_awx, "n1", outcome)
    assert fault is not None and fault["code"] == "awx_login_refused"
    assert refusal in fault["found"] and "date -u" in fault["remedy"]
    # A host that hangs does not cost the worker its lease, which nothing extends meanwhile.
    assert max(limits) <= settings.task_lease_s / 2
    silent = Outcome("failed", None, "unreachable: timed out", unreachable=True, touched=False)
    assert clock_fault(sold.engine, by_awx, "n1", silent) is None


@pytest.mark.parametrize("answer", ["", "soon", "9" * 12, "-99999999999", "1e9", "1\n2"])
def test_a_hostile_answer_is_no_time(monkeypatch: pytest.MonkeyPatch, answer: str) -> None:
    done: subprocess.CompletedProcess[bytes] = subprocess.CompletedProcess(
        [], 0, answer.encode(), b""
    )
    monkeypatch.setattr(ssh, "_call", lambda *_args: done)
    access = ssh.SshAccess(Path("k"), Path("c"), Path("h"))
    assert ssh.read_clock(access, NodeAccess("n1", "h"), 1) is None


@pytest.fixture
def process(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process of a run in the folder `run`, which the caller deletes."""
    environment = {**os.environ, lock.MARK: str(tmp_path / "run")}
    with subprocess.Popen(["sleep", "60"], env=environment) as sleeping:
        yield sleeping
        sleeping.kill()


def test_a_run_whose_folder_is_gone_is_ended_and_named(
    tmp_path: Path, process: subprocess.Popen[bytes]
) -> None:
    outcome = collect.end_without_folder(tmp_path / "run", by_awx=False)
    assert process.wait(60) == -9
    assert outcome is not None
    error = read_failure(outcome).error
    assert (outcome.status, error["code"]) == ("lost", "run_folder_gone")
    assert str(tmp_path / "run") in error["found"]
    awx = collect.end_without_folder(tmp_path / "run", by_awx=True)
    assert awx is not None and awx.may_go_on


def test_a_task_notices_at_once_that_its_runs_folder_is_gone(
    sold: Site, runs: Runs, attend: Attend
) -> None:
    launched(sold)
    runs.during = [lambda: None, lambda: setattr(runs, "alive", False)]
    task = attend()
    assert (task.state, task.error["code"]) == ("lost", "run_folder_gone")
    with transaction(sold.engine) as conn:
        # The run's progress is unknown.
        assert "cleanup_blocked" in sold.statuses(conn)


def test_a_run_that_had_begun_is_not_launched_again(sold: Site, runs: Runs, attend: Attend) -> None:
    with transaction(sold.engine) as conn:
        queue.enqueue(conn, queue.Enqueue(TaskKind.NODE_CONVERT, "n1", "node", "n1"), ADMIN)
        conn.execute(sa.update(tasks).values(progress_offset=10))
    assert attend().error["code"] == "run_folder_gone"
    assert runs.launched == []

"""Full disk: writes are refused by name, nothing is lost, and work continues by itself.

A limit on the size of files stands for the disk: the system refuses the same writes, for this
process only.
"""

from __future__ import annotations

import resource
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import sqlalchemy as sa

from reconciler.db import schema as tables
from reconciler.db.engine import reading, transaction
from reconciler.lifecycle import invariants
from reconciler.model.states import TaskState
from reconciler.records import allocations, queue
from reconciler.runs import collect
from reconciler.runs.launch import Site, launch
from reconciler.runs.spec import LauncherAway, NodeAccess, RunSpec
from reconciler.settings import PROJECT, Settings
from reconciler.trust.ca import open_trust
from reconciler.work import worker
from reconciler.work.kinds import slices
from tests.unit.reconciler.api.stack import Stack
from tests.unit.reconciler.api.test_launches import BODY, PATH

LIMIT_S = 120


@contextmanager
def full(room: int) -> Iterator[None]:
    """No file of this process grows beyond so many bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.covers("I3", "I12", "I21")
def test_a_launch_that_cannot_be_stored_is_refused_and_can_be_repeated(selling: Stack) -> None:
    member = selling.client("member", raise_server_exceptions=False)

    def launch_with(key: str) -> httpx.Response:
        answer: httpx.Response = member.post(PATH, json=BODY, headers={"Idempotency-Key": key})
        return answer

    # The write-ahead log goes into the file: the next change begins with an empty log.
    selling.engine.dispose()
    assert member.get(PATH).json()["items"] == []
    refused: list[str] = []
    for pages in (2, 4, 8, 12, 16, 20):
        with full(pages * 4096):
            answer = launch_with(f"k{pages}")
            if answer.is_success:
                break  # there was room for all of it
            refused.append(f"k{pages}")
            assert (answer.status_code, answer.json()["code"]) == (503, "database_unavailable")
            # Existing rows can still be read.
            assert member.get(PATH).json()["items"] == []
        with reading(selling.engine) as conn:
            assert invariants.check(conn) == []
            for table in (tables.allocations, tables.claims):
                assert conn.execute(sa.select(table)).all() == []
    assert len(refused) > 1, "the disk was full in the middle of it"
    with transaction(selling.engine) as conn:
        # There was no room to give the key back either: it is free when its time has passed.
        conn.execute(sa.update(tables.idempotency_keys).values(expires_at=1.0))
        before = {row.id for row in allocations.every(conn)}
    again = launch_with(refused[-1])
    assert again.status_code == 201, again.text
    with reading(selling.engine) as conn:
        assert {row.id for row in allocations.every(conn)} == {*before, again.json()["id"]}
        assert invariants.check(conn) == []


def spec() -> RunSpec:
    return RunSpec("run-1", "run_ok", NodeAccess("n1", "localhost"), {"word": "x"}, 60, "c")


@pytest.mark.covers("CTRL-9", "I12")
def test_a_run_whose_files_have_no_room_is_not_begun(tmp_path: Path) -> None:
    site = Site(
        tmp_path, PROJECT / "build" / "collections", None, PROJECT / "tests" / "data" / "playbooks"
    )
    for room in (0, 10, 200):
        with full(room), pytest.raises(LauncherAway, match="run_folder_unwritable"):
            launch(site, spec())
    # A partial folder does no harm once there is room.
    outcome = collect.wait(launch(site, spec()), LIMIT_S).outcome
    assert outcome.ok


@pytest.mark.covers("CTRL-8", "CTRL-9")
def test_its_task_waits_and_says_why(
    selling: Stack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The allocation is not lost, and its slot is not given to anybody else."""
    made = selling.client("member").post(PATH, json=BODY, headers={"Idempotency-Key": "k"}).json()
    task = selling.lease()
    settings = Settings(state_dir=tmp_path / "full", public_url=selling.settings.public_url)

    def launch_on_a_full_disk(given: Site, spec: RunSpec) -> Path:
        with full(10):
            return launch(given, spec)

    monkeypatch.setattr(worker, "launch", launch_on_a_full_disk)
    stopping = threading.Event()
    stopping.set()
    worker.attend(selling.engine, settings, task, stopping)
    with transaction(selling.engine) as conn:
        waits = queue.get(conn, task.id)
        assert (waits.state, waits.unreached) == (TaskState.WAITING, 1)
        assert "run_folder_unwritable" in waits.state_reason
        assert allocations.get(conn, made["id"]).state == "provisioning"
        assert invariants.check(conn) == []
    shown = selling.client("admin").get(f"admin/tasks/{task.id}").json()["waits_for"]
    assert shown["code"] == "run_folder_unwritable"
    assert "File too large" in shown["detail"]


@pytest.mark.covers("CTRL-8", "CTRL-9", "I12")
@pytest.mark.parametrize("has_keys", [False, True], ids=["no keys yet", "keys"])
def test_so_does_one_for_which_no_identity_can_be_made(
    selling: Stack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_keys: bool
) -> None:
    """The gateway's authority is asked for first. Our list of revoked keys is written anew before
    each run.
    """
    made = selling.client("member").post(PATH, json=BODY, headers={"Idempotency-Key": "k"}).json()
    settings = Settings(state_dir=tmp_path / "full", public_url=selling.settings.public_url)
    if has_keys:
        open_trust(settings.state_dir)
    place: Any = worker if has_keys else slices
    name = "_access" if has_keys else "open_trust"
    ask = getattr(place, name)

    def on_a_full_disk(*given: Any) -> Any:
        with full(10):
            return ask(*given)

    monkeypatch.setattr(place, name, on_a_full_disk)
    stopping = threading.Event()
    stopping.set()
    task = selling.lease()
    worker.attend(selling.engine, settings, task, stopping)
    with transaction(selling.engine) as conn:
        waits = queue.get(conn, task.id)
        assert (waits.state, waits.run_id) == (TaskState.WAITING, "")
        state = "provisioning" if has_keys else "requested"
        assert allocations.get(conn, made["id"]).state == state
    shown = selling.client("admin").get(f"admin/tasks/{task.id}").json()["waits_for"]
    assert shown["code"] == "controller_unready"
    assert ("File too large" if has_keys else "keygen_failed") in shown["detail"]
    with transaction(selling.engine) as conn:
        conn.execute(sa.update(tables.tasks).values(not_before=None))
    monkeypatch.setattr(place, name, ask)
    again = selling.lease()
    assert again.error == {}
    begun: list[RunSpec] = []
    monkeypatch.setattr(worker, "launch", lambda _site, spec: begun.append(spec))
    worker.attend(selling.engine, settings, again, stopping)
    assert [spec.run_id for spec in begun] == [f"{task.id}-1-1"]

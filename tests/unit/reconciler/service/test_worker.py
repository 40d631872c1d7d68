"""Tasks without an attending worker: of dead workers, of this worker, and canceled tasks."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import sqlalchemy as sa

from reconciler.db import migrations
from reconciler.db import schema as tables
from reconciler.db.engine import transaction
from reconciler.db.schema import Task
from reconciler.model.errors import Problem
from reconciler.model.states import TaskKind, TaskState
from reconciler.records import leasing, queue
from reconciler.settings import Settings
from reconciler.work import worker as module
from reconciler.work.worker import Worker
from tests.unit.reconciler.conftest import ADMIN, Site
from tests.unit.reconciler.service.service import until


@pytest.fixture
def worker(sold: Site, tmp_path: Path) -> Worker:
    """A worker that was not started: the test does its looks."""
    return Worker(Settings(state_dir=tmp_path), sold.engine)


def held(sold: Site, worker: Worker, owner: str, folder: Path) -> Task:
    """A task with a run in this worker's folder, held by `owner` for an hour."""
    with transaction(sold.engine) as conn:
        sold.allocate(conn)
        (task,) = leasing.lease(conn, owner, runner=worker._runner, seconds=3600)
        run = queue.run_id(task)
        queue.started(conn, task.id, task.lease_token, run_id=run, run_directory=str(folder))
    return task


def free(sold: Site, worker: Worker) -> list[str]:
    """The ids of tasks that another worker on the same machine could take now."""
    with transaction(sold.engine) as conn:
        return [task.id for task in leasing.lease(conn, "next", runner=worker._runner)]


def test_what_the_dead_hold_is_free_at_once(sold: Site, worker: Worker, tmp_path: Path) -> None:
    gone = subprocess.Popen([sys.executable, "-S", "-c", ""])
    gone.wait()
    task = held(sold, worker, f"{socket.gethostname()}:{gone.pid}", tmp_path)
    assert free(sold, worker) == []
    worker._free_what_the_dead_hold()
    assert free(sold, worker) == [task.id]


@pytest.mark.parametrize("host", [socket.gethostname(), "elsewhere"])
def test_what_the_living_hold_is_theirs(
    sold: Site, worker: Worker, tmp_path: Path, host: str
) -> None:
    # Of another machine's process only its lease says whether it lives.
    pid = os.getpid() if host == socket.gethostname() else 4_194_999
    held(sold, worker, f"{host}:{pid}", tmp_path)
    worker._free_what_the_dead_hold()
    assert free(sold, worker) == []


def test_it_takes_the_next_task_as_soon_as_it_has_a_place(
    sold: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def attend(engine: sa.Engine, _settings: Settings, task: Task, _stopping: object) -> None:
        with transaction(engine) as conn:
            queue.finish(conn, task.id, task.lease_token, TaskState.SUCCEEDED, ADMIN)

    def succeeded() -> int:
        with transaction(sold.engine) as conn:
            return len(queue.every(conn, state=TaskState.SUCCEEDED))

    with transaction(sold.engine) as conn:
        for number in range(3):
            work = queue.Enqueue(TaskKind.NODE_IMAGE_CACHE, "n1", "image", str(number))
            queue.enqueue(conn, work, ADMIN)
    monkeypatch.setattr(module, "attend", attend)
    # With this pause between its looks, one at a time would take minutes.
    worker = Worker(Settings(state_dir=tmp_path, workers=1, poll_s=100), sold.engine)
    worker.start()
    try:
        until(lambda: succeeded() == 3)
    finally:
        worker.stop()


@pytest.mark.covers("CTRL-8")
def test_a_worker_of_an_older_version_leases_nothing(
    sold: Site, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until its heartbeat ends it."""
    monkeypatch.setattr(module, "attend", lambda *_: None)
    with transaction(sold.engine) as conn:
        sold.allocate(conn)
    with monkeypatch.context() as patch:
        patch.setattr(migrations, "revisions", lambda: ("0001",))
        with pytest.raises(Problem, match="schema_outdated"):
            worker._lease()
    assert len(free(sold, worker)) == 1


def test_a_problem_that_it_does_not_expect_is_logged_with_its_trace(
    worker: Worker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A newer schema ends the process soon, so only that problem needs no trace."""
    codes = iter(("schema_outdated", "not_found"))

    def lease() -> None:
        code = next(codes, None)
        if code is None:
            worker.cease()
            return
        worker._wake.set()
        raise Problem(code, expected="", found="", remedy="")

    monkeypatch.setattr(worker, "_lease", lease)
    worker._run()
    assert [bool(record.exc_info) for record in caplog.records] == [False, True]


@pytest.mark.covers("CTRL-8", "I12")
def test_hosts_that_hang_leave_a_place_to_a_project(
    sold: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their runs end at their deadlines, after an hour."""
    over = threading.Event()
    monkeypatch.setattr(module, "attend", lambda *_: over.wait(60))
    worker = Worker(Settings(state_dir=tmp_path, workers=3), sold.engine)

    def running() -> int:
        worker._lease()
        with transaction(sold.engine) as conn:
            return len(queue.every(conn, state=TaskState.RUNNING))

    try:
        with transaction(sold.engine) as conn:
            for number in range(3):
                work = queue.Enqueue(TaskKind.NODE_IMAGE_CACHE, "n1", "image", str(number))
                queue.enqueue(conn, work, ADMIN)
        assert [running(), running()] == [2, 2]
        with transaction(sold.engine) as conn:
            work = queue.Enqueue(TaskKind.SLICE_VM_POWER, "n1", allocation_id=sold.active(conn))
            queue.enqueue(conn, work, ADMIN)
        assert running() == 3
    finally:
        over.set()
        worker._pool.shutdown()


def test_what_it_dropped_itself_goes_on(sold: Site, worker: Worker, tmp_path: Path) -> None:
    task = held(sold, worker, worker._owner, tmp_path)
    worker._dropped.append(task)
    worker._let_go()
    assert (worker._dropped, free(sold, worker)) == ([], [task.id])
    # By now another worker holds it.
    worker._dropped.append(task)
    worker._let_go()
    assert free(sold, worker) == []


def test_a_run_that_nobody_wants_is_told_where_its_folder_is(
    sold: Site, worker: Worker, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    task = held(sold, worker, "elsewhere:1", run)
    worker._end_unwanted_runs()
    assert not (run / "cancel").exists()
    with transaction(sold.engine) as conn:
        queue.cancel(conn, task.id, ADMIN)
    worker._end_unwanted_runs()
    assert (run / "cancel").exists()
    (run / "cancel").unlink()
    (run / "cancel").mkdir()
    worker._end_unwanted_runs()  # A run that cannot be told to end does not stop the worker.
    (run / "cancel").rmdir()
    with transaction(sold.engine) as conn:
        conn.execute(sa.update(tables.tasks).values(runner="another"))
    worker._end_unwanted_runs()
    assert not (run / "cancel").exists()

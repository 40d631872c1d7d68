"""Tasks whose deadline has passed: ended, or lost with their slots blocked and fenced off."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa

from reconciler.db import clock, journal
from reconciler.db import schema as tables
from reconciler.db.engine import transaction
from reconciler.db.schema import Task
from reconciler.lifecycle import launch, recovery
from reconciler.model.errors import Problem
from reconciler.model.states import TaskKind, TaskState
from reconciler.records import leasing, nodes, queue
from reconciler.runs import collect, lock
from reconciler.runs.collect import Phase, RunState
from reconciler.runs.launch import Site as RunSite
from reconciler.runs.paths import runner_id
from reconciler.settings import Settings
from reconciler.work import worker
from reconciler.work.kinds import HANDLERS
from reconciler.work.loops import end_overdue
from reconciler.work.settle import settle
from tests.unit.reconciler.conftest import ADMIN, Site
from tests.unit.reconciler.work.conftest import launched, statuses

ROOT = Path(__file__).resolve().parents[4]
Look = Callable[[], None]


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(state_dir=tmp_path, poll_s=0.05)


@pytest.fixture
def look(sold: Site, settings: Settings) -> Look:
    """Let every task's deadline pass, then look as a worker does."""

    def passed() -> None:
        with transaction(sold.engine) as conn:
            running = tables.tasks.c.state == TaskState.RUNNING
            past = clock.now() - 1
            conn.execute(sa.update(tables.tasks).where(running).values(deadline_at=past))
        end_overdue(sold.engine, settings)

    return passed


def elsewhere(sold: Site, settings: Settings) -> Task:
    """The next task, its run begun by a worker on another machine that then fell silent."""
    with transaction(sold.engine) as conn:
        nodes.change(conn, "n1", ADMIN, profile="lab")
        (task,) = leasing.lease(conn, "other", runner="another-machine")
    handler = HANDLERS[task.kind]
    worker.prepare(sold.engine, settings, handler, task, f"{task.id}-1")
    with transaction(sold.engine) as conn:
        queue.abandon(conn, "other")
    return task


def current(sold: Site, task: Task) -> Task:
    with transaction(sold.engine) as conn:
        return queue.get(conn, task.id)


def releasing(sold: Site) -> str:
    with transaction(sold.engine) as conn:
        allocation_id = sold.active(conn)
        launch.release(conn, allocation_id, ADMIN)
    return allocation_id


def cleaning(sold: Site) -> str:
    with transaction(sold.engine) as conn:
        allocation_id = sold.failed(conn)
        recovery.repair(conn, recovery.blocked(conn)[0].id, ADMIN)
    return allocation_id


@pytest.mark.covers("CTRL-9", "I12", "I13")
@pytest.mark.parametrize("stage", [launched, releasing, cleaning])
def test_a_task_whose_worker_is_gone_is_lost_and_frees_nothing(
    sold: Site, settings: Settings, look: Look, stage: Callable[[Site], str]
) -> None:
    stage(sold)
    task = elsewhere(sold, settings)
    (fence,) = task.fences.values()

    look()
    canceled = current(sold, task)
    assert (canceled.state, canceled.cancel_requested) == ("running", True)
    with transaction(sold.engine) as conn:
        row = journal.history_of(conn, "task", task.id)[-1]
        assert (row.event, row.reason) == ("cancel_requested", "still running past its deadline")
        assert leasing.lease(conn, "here", runner=runner_id(settings.state_dir)) == []
    end_overdue(sold.engine, settings)
    assert current(sold, task).state == "running", "it has a last while to end in order"

    look()
    lost = current(sold, task)
    assert (lost.state, lost.error["code"]) == ("lost", "deadline_passed")
    with transaction(sold.engine) as conn:
        (slot,) = recovery.blocked(conn)
        assert (slot.fence, slot.health_detail["step"]) == (fence + 1, "deadline")
        row = journal.history_of(conn, "task", task.id)[-1]
        assert (row.event, row.evidence) == ("lose", {"fenced_slots": [slot.id]})
        with pytest.raises(Problem, match="stale_lease"):
            queue.finish(conn, task.id, task.lease_token, TaskState.SUCCEEDED, ADMIN)
    look()


def test_two_workers_that_look_at_once_do_not_take_its_last_while_from_it(
    sold: Site, settings: Settings, look: Look, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched(sold)
    task = elsewhere(sold, settings)
    find, seen = journal.overdue, list[list[journal.Overdue]]()

    def slow(conn: sa.Connection) -> list[journal.Overdue]:
        seen.append(find(conn))
        return seen[0]

    monkeypatch.setattr(journal, "overdue", slow)
    look()
    end_overdue(sold.engine, settings)
    assert current(sold, task).state == "running"
    assert seen[1] == []


@pytest.mark.covers("I10")
def test_the_wipe_that_follows_is_ahead_of_the_lost_run(
    sold: Site, settings: Settings, look: Look
) -> None:
    allocation_id = launched(sold)
    task = elsewhere(sold, settings)
    look()
    look()
    with transaction(sold.engine) as conn:
        recovery.force_cleanup(conn, allocation_id, ADMIN, runtime_verified_absent=True)
        (wipe,) = leasing.lease(conn, "here", runner="here")
        (before,), (after,) = task.fences.values(), wipe.fences.values()
    assert after > before


@pytest.mark.covers("I13")
def test_one_more_word_from_the_holder_after_the_deadline_counts(
    sold: Site, settings: Settings, look: Look
) -> None:
    """A worker that is alive ends its run and says how it went."""
    launched(sold)
    task = elsewhere(sold, settings)
    look()
    with transaction(sold.engine) as conn:
        assert queue.heartbeat(conn, task.id, task.lease_token).cancel_requested
    ended = collect.Outcome("canceled", None)
    handler = HANDLERS[task.kind]
    settle(sold.engine, settings, handler, task, ended)
    settled = current(sold, task)
    assert (settled.state, settled.error["code"]) == ("canceled", "deadline_passed")
    assert statuses(sold) == ["available", "cleanup_blocked"]


def test_the_deadline_of_a_task_is_later_than_that_of_its_run(
    sold: Site, settings: Settings
) -> None:
    """Also where the profile allows a wipe more time than a task has by itself."""
    releasing(sold)
    with transaction(sold.engine) as conn:
        nodes.change(conn, "n1", ADMIN, profile="xe9680l-h200")
        (task,) = leasing.lease(conn, "here")
    handler = HANDLERS[task.kind]
    spec = worker.prepare(sold.engine, settings, handler, task, f"{task.id}-1")
    assert spec.deadline_s > task.deadline_s
    first = current(sold, task)
    assert first.deadline_at > first.started_at + spec.deadline_s
    worker.prepare(sold.engine, settings, handler, task, f"{task.id}-1")
    assert current(sold, task).deadline_at == first.deadline_at, "once for each run"


@pytest.mark.covers("I12")
def test_a_kind_without_a_handler_is_lost_all_the_same(sold: Site, look: Look) -> None:
    with transaction(sold.engine) as conn:
        item = queue.Enqueue(TaskKind.TERMINAL_OPEN, "n1", "node", "n1")
        queue.enqueue(conn, item, ADMIN)
        (task,) = leasing.lease(conn, "other")
        queue.abandon(conn, "other")
    look()
    look()
    assert current(sold, task).state == "lost"


@pytest.mark.covers("I12")
def test_nobody_holds_a_task_past_its_deadline(sold: Site, settings: Settings, look: Look) -> None:
    """A worker that answers, and cannot end its run, keeps the task until its lease ends."""
    launched(sold)
    task = elsewhere(sold, settings)
    with transaction(sold.engine) as conn:
        beat = queue.heartbeat(conn, task.id, task.lease_token)
        assert beat.lease_expires_at > clock.read(conn)
    look()
    look()
    assert current(sold, task).state == "running"
    with transaction(sold.engine) as conn:
        again = queue.heartbeat(conn, task.id, task.lease_token)
        assert again.lease_expires_at == beat.lease_expires_at
        queue.abandon(conn, "other")
        queue.heartbeat(conn, task.id, task.lease_token)
    look()
    assert current(sold, task).state == "lost"


@pytest.mark.covers("CTRL-9")
def test_a_worker_that_comes_back_to_a_lost_task_ends_its_run(
    sold: Site, settings: Settings, look: Look, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched(sold)
    task = elsewhere(sold, settings)
    directory = current(sold, task).run_directory
    look()
    look()
    ended: list[Path] = []
    monkeypatch.setattr(collect, "observe", lambda _directory: RunState(Phase.ALIVE))
    monkeypatch.setattr(collect, "cancel", ended.append)
    with pytest.raises(Problem, match="stale_lease"):
        worker.attend(sold.engine, settings, task, threading.Event())
    assert [str(path) for path in ended] == [directory]


@pytest.fixture
def slow_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Provisioning is a real run that does nothing for long; the file that says that it began."""
    playbooks, began = tmp_path / "playbooks", tmp_path / "began"
    playbooks.mkdir()
    slow = (ROOT / "tests/data/playbooks/run_slow.yml").read_text()
    (playbooks / "provision_slice.yml").write_text(slow.replace("{{ began }}", str(began)))
    site = RunSite(tmp_path, ROOT / "build" / "collections", None, playbooks)
    monkeypatch.setattr(worker, "_site", lambda *_: site)
    yield began
    for run in (tmp_path / "runs").glob("*-1"):
        collect.cancel(run)
        collect.wait(run, 15)
        assert lock.end_processes(run) == []


@pytest.mark.covers("I12")
def test_a_run_that_still_lives_is_ended(
    sold: Site, settings: Settings, look: Look, tmp_path: Path, slow_runs: Path
) -> None:
    """A real process on this runner without an attending worker: all workers may be busy."""
    launched(sold)
    with transaction(sold.engine) as conn:
        nodes.change(conn, "n1", ADMIN, profile="lab")
        (task,) = leasing.lease(conn, "here", runner=runner_id(tmp_path))
    stopping = threading.Event()
    stopping.set()
    worker.attend(sold.engine, settings, task, stopping)
    directory = Path(current(sold, task).run_directory)
    until = time.monotonic() + 60
    while not slow_runs.exists():
        assert time.monotonic() < until, collect.output(directory)
        time.sleep(0.05)

    look()

    assert collect.wait(directory, 30).phase is Phase.FINISHED
    with transaction(sold.engine) as conn:
        queue.abandon(conn, "here")
        (again,) = leasing.lease(conn, "here", runner=runner_id(tmp_path))
    worker.attend(sold.engine, settings, again, threading.Event())
    ended = current(sold, task)
    assert (ended.state, ended.error["code"]) == ("canceled", "deadline_passed")
    assert statuses(sold) == ["available", "cleanup_blocked"]

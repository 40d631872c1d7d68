"""Retention on both engines: old finished rows are deleted, and no others."""

from __future__ import annotations

import fcntl
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import sqlalchemy as sa

from reconciler.db import idempotency
from reconciler.db import schema as tables
from reconciler.db.engine import reading, transaction
from reconciler.db.idempotency import Answer, Call
from reconciler.db.schema import Task
from reconciler.lifecycle import host, invariants, launch, recovery, retention, slices
from reconciler.model.errors import Problem
from reconciler.model.states import Role, TaskKind, TaskState
from reconciler.records import leasing, nodes, queue, reports, slots, tokens
from reconciler.runs.paths import RunPaths, run_directory, write_json
from reconciler.settings import Settings
from reconciler.work.loops import DAY_S, LOOPS, forget, tidy
from tests.unit.reconciler import relay
from tests.unit.reconciler.conftest import Site
from tests.unit.reconciler.whole_machines import Machines

pytestmark = pytest.mark.covers("CTRL-9")
NEVER = threading.Event()
# Rows of these tables are never forgotten.
RECORD = (
    tables.history,
    tables.audit_log,
    tables.claims,
    tables.usage,
    tables.proofs,
    tables.allocations,
    tables.tasks,
)


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.postgres)])
def engine(request: pytest.FixtureRequest) -> Iterator[sa.Engine]:
    """An empty database of either kind."""
    if request.param == "sqlite":
        database = request.getfixturevalue("database")
        yield database.restore(request.getfixturevalue("template"))
        return
    engine = request.getfixturevalue("postgres_database").restore()
    yield engine
    engine.dispose()


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(
        state_dir=tmp_path,
        keep_events_days=1,
        keep_unsent_events_days=3,
        keep_answers_days=2,
        keep_progress_days=2,
        keep_runs_days=2,
    )


def count(conn: sa.Connection, table: sa.Table) -> int:
    return conn.execute(sa.select(sa.func.count()).select_from(table)).scalar_one()


def pass_time(engine: sa.Engine, days: float) -> None:
    """Make the rows of the database that much older."""
    columns = (
        (tables.outbox, ("at", "published_at")),
        (tables.idempotency_keys, ("completed_at", "expires_at", "created_at")),
        (tables.tasks, ("finished_at",)),
    )
    with transaction(engine) as conn:
        for table, names in columns:
            conn.execute(sa.update(table).values({n: table.c[n] - days * DAY_S for n in names}))


def provisioned(site: Site, settings: Settings) -> str:
    """An active allocation that a request with a key made, its task with progress and a run."""
    made: list[str] = []

    def work(conn: sa.Connection) -> Answer:
        made.append(site.allocate(conn))
        return Answer(201, {"id": made[0]})

    idempotency.once(site.engine, Call("POST launch", f"k{made}", {}), work)
    with transaction(site.engine) as conn:
        slices.provision_started(conn, made[0], site.act)
        (task,) = leasing.lease(conn, "w", kinds=[TaskKind.SLICE_VM_PROVISION])
        queue.progress(conn, task.id, task.lease_token, {"task": "boot"})
        queue.finish(conn, task.id, task.lease_token, TaskState.SUCCEEDED, site.act)
        slices.provision_succeeded(conn, made[0], site.act, connection={"host": "gw"})
    ended(settings, task)
    return made[0]


def ended(settings: Settings, task: Task) -> Path:
    """The folder of a run that is over."""
    paths = RunPaths(run_directory(settings.state_dir, queue.run_id(task)))
    paths.root.mkdir(parents=True)
    outcome = {"run_id": paths.root.name, "status": "successful", "rc": 0, "result": None}
    times = {"started_at": "", "finished_at": "", "problem": "", "unreachable": False}
    write_json(paths.outcome, outcome | times)
    return paths.root


def released(site: Site, key: str) -> Task:
    with transaction(site.engine) as conn:
        launch.release(conn, key, site.act)
        proofs = site.proofs(conn, key)
        slices.release_succeeded(conn, key, site.act, proofs=proofs, absence={"absent": True})
        task = site.finish(conn, TaskKind.SLICE_VM_RELEASE)
        conn.execute(sa.insert(tables.task_events).values(task_id=task.id, document={"a": 1}))
    return task


def test_what_a_living_allocation_refers_to_stays(site: Site, settings: Settings) -> None:
    site.node()
    key = provisioned(site, settings)
    pass_time(site.engine, 2.5)
    kinds = ("events", "answers", "progress", "telemetry", "reports", "evidence", "tokens", "jobs")
    nothing = dict.fromkeys(kinds, 0)
    assert forget(site.engine, settings) == nothing
    assert tidy(site.engine, settings, NEVER) == []
    with pytest.raises(Problem, match="idempotency_key_reused"):
        idempotency.once(
            site.engine, Call("POST launch", "k[]", {"other": 1}), lambda _: Answer(201, {})
        )

    release = released(site, key)
    kept_run = ended(settings, release)
    with reading(site.engine) as conn:
        kept = {table.name: count(conn, table) for table in RECORD}
        tasks_of = len(queue.every(conn, allocation_id=key))
    # Its key and its provision are past their ages, its release is not.
    assert forget(site.engine, settings)["answers"] == 1
    folder = run_directory(settings.state_dir, "")
    assert [name[36:] for name in tidy(site.engine, settings, NEVER)] == ["-1"]
    assert list(folder.iterdir()) == [kept_run]
    with reading(site.engine) as conn:
        events = conn.execute(sa.select(tables.task_events.c.task_id)).scalars()
        assert [*events] == [release.id]
        assert {table.name: count(conn, table) for table in RECORD} == kept
        assert len(queue.every(conn, allocation_id=key)) == tasks_of == 2
        assert invariants.check(conn) == []


def test_what_left_a_slot_blocked_stays(site: Site, settings: Settings) -> None:
    site.node()
    with transaction(site.engine) as conn:
        key = site.failed(conn)
        task = queue.every(conn, allocation_id=key)[-1]
        conn.execute(sa.insert(tables.task_events).values(task_id=task.id, document={"a": 1}))
        assert "cleanup_blocked" in site.statuses(conn)
    folder = ended(settings, task)
    pass_time(site.engine, 100)
    assert forget(site.engine, settings)["progress"] == 0
    assert tidy(site.engine, settings, NEVER) == []
    assert folder.is_dir()


def test_what_left_a_machine_unclean_stays(site: Site, settings: Settings) -> None:
    machines = Machines(site)
    machines.machine()
    with transaction(site.engine) as conn:
        key = machines.active(conn)
        host.lost(conn, "m1", site.act)
        recovery.force_release(conn, key, site.act)
        task = queue.every(conn, allocation_id=key)[-1]
        conn.execute(sa.insert(tables.task_events).values(task_id=task.id, document={"a": 1}))
        assert nodes.get(conn, "m1").unclean_allocation_id == key
    folder = ended(settings, task)
    pass_time(site.engine, 100)
    assert forget(site.engine, settings)["progress"] == 0
    assert tidy(site.engine, settings, NEVER) == []
    # It is written off with its node.
    with transaction(site.engine) as conn:
        host.retire(conn, "m1", site.act)
    assert forget(site.engine, settings)["progress"] == 1
    assert tidy(site.engine, settings, NEVER) == [folder.name]


def test_what_is_unfinished_or_unknown_stays(site: Site, settings: Settings) -> None:
    site.node()
    with transaction(site.engine) as conn:
        task = queue.enqueue(
            conn, queue.Enqueue(TaskKind.NODE_PARITY, "n1", "node", "n1"), site.act
        )
        (task,) = leasing.lease(conn, "w", kinds=[TaskKind.NODE_PARITY])
        queue.progress(conn, task.id, task.lease_token, {"task": "look"})
    folders = [ended(settings, task), ended(settings, replace(task, id="0" * 36))]
    pass_time(site.engine, 100)
    assert forget(site.engine, settings)["progress"] == 0
    assert tidy(site.engine, settings, NEVER) == []
    assert all(folder.is_dir() for folder in folders)


def test_a_run_that_lives_keeps_its_files(site: Site, settings: Settings) -> None:
    """Its task was given up; its output still shows the changes on the host."""
    site.node()
    with transaction(site.engine) as conn:
        queue.enqueue(conn, queue.Enqueue(TaskKind.NODE_PARITY, "n1", "node", "n1"), site.act)
        task = site.finish(conn, TaskKind.NODE_PARITY)
    paths = RunPaths(run_directory(settings.state_dir, queue.run_id(task)))
    paths.root.mkdir(parents=True)
    pass_time(site.engine, 100)
    with paths.lock.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        assert tidy(site.engine, settings, NEVER) == []
    assert tidy(site.engine, settings, NEVER) == [paths.root.name]


def test_a_run_whose_files_cannot_be_read_keeps_no_others(site: Site, settings: Settings) -> None:
    site.node()
    with transaction(site.engine) as conn:
        queue.enqueue(conn, queue.Enqueue(TaskKind.NODE_PARITY, "n1", "node", "n1"), site.act)
        task = site.finish(conn, TaskKind.NODE_PARITY)
    broken, whole = (run_directory(settings.state_dir, f"{task.id}-{n}") for n in (1, 2))
    whole.mkdir(parents=True)
    RunPaths(broken).outcome.mkdir(parents=True)
    pass_time(site.engine, 100)
    assert tidy(site.engine, settings, NEVER) == [whole.name]
    assert broken.is_dir()


def test_events_go_sooner_when_a_relay_took_them(
    site: Site, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention, "AT_ONCE", 2)
    site.node()
    with transaction(site.engine) as conn:
        waiting = relay.pending_events(conn)
        relay.mark_published(conn, [waiting[0].id])
    pass_time(site.engine, 2)
    assert forget(site.engine, settings)["events"] == 1
    pass_time(site.engine, 2)
    assert forget(site.engine, settings)["events"] == len(waiting) - 1 > retention.AT_ONCE


def test_a_token_that_ended_goes_after_what_came_from_it(site: Site, settings: Settings) -> None:
    def create(conn: sa.Connection, parent_id: str | None) -> str:
        values = {"role": Role.PROJECT_MEMBER, "name": "me", "project_id": site.project}
        ends = {"until": None, "ttl_s": 60.0}
        made, _ = tokens.issue_own(conn, site.act, parent_id=parent_id, owner="o", **values, **ends)
        return made.id

    def pass_days(days: float) -> None:
        columns = tables.api_tokens.c
        with transaction(site.engine) as conn:
            conn.execute(
                sa.update(tables.api_tokens).values(expires_at=columns.expires_at - days * DAY_S)
            )

    with transaction(site.engine) as conn:
        given, _ = tokens.issue(conn, site.act, role=Role.PLATFORM_ADMIN, name="admin", ttl_s=60)
        first = create(conn, given.id)
        second = create(conn, first)
    pass_days(29)
    assert forget(site.engine, settings)["tokens"] == 0
    pass_days(2)
    # In one transaction or two: a parent goes after its child.
    assert forget(site.engine, settings)["tokens"] + forget(site.engine, settings)["tokens"] == 2
    assert forget(site.engine, settings)["tokens"] == 0
    with reading(site.engine) as conn:
        left = conn.execute(sa.select(tables.api_tokens.c.id)).scalars().all()
    assert given.id in left and not {first, second} & {*left}


def test_a_node_keeps_its_newest_reports_and_those_that_decide(
    site: Site, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hostile host fills each with megabytes."""
    monkeypatch.setattr(retention, "REPORTS", 2)
    site.node()
    site.node("n2", (0,), 1)
    with transaction(site.engine) as conn:
        for failures in (0, 1, 1, 1):
            host.record_discovery(conn, "n1", site.document(0), site.act)
            host.record_parity(conn, "n1", site.parity(failures=failures), site.act)
        discovered, checked = ids(conn, tables.discoveries), ids(conn, tables.parities)
        approved = {slot.approved_discovery_id for slot in slots.of_node(conn, "n1")}
    assert forget(site.engine, settings)["reports"] > 0
    assert forget(site.engine, settings)["reports"] == 0
    with reading(site.engine) as conn:
        assert {*ids(conn, tables.discoveries)} == {*discovered[-2:], *approved} < {*discovered}
        left = ids(conn, tables.parities)
        assert left[-2:] == checked[-2:] and len(left) == 4 < len(checked)
        assert reports.passed(conn, "n1", site.document(0)["identity"]["boot_id"])
        assert reports.latest_parity(conn, "n2") and reports.latest_discovery(conn, "n2")
        assert invariants.check(conn) == []


def test_old_failures_keep_their_error_without_long_evidence(
    site: Site, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hostile host fills each with 64 KiB."""
    monkeypatch.setattr(retention, "REPORTS", 2)
    monkeypatch.setattr(retention, "EVIDENCE_AT_ONCE", 2)
    site.node()
    long, short = {"left": "x" * 60_000}, {"left": "x"}

    def fail(kind: TaskKind, state: TaskState, evidence: dict[str, str]) -> str:
        error = {"code": "c", "expected": "e", "found": "f", "remedy": "r", "step": "s"}
        with transaction(site.engine) as conn:
            queue.enqueue(conn, queue.Enqueue(kind, "n1", "node", "n1"), site.act)
            (task,) = leasing.lease(conn, "w", kinds=[kind])
            error = {**error, "evidence": evidence}
            queue.finish(conn, task.id, task.lease_token, state, site.act, error=error)
            # The clock may give two of them the same time.
            later = sa.update(tables.tasks).values(created_at=tables.tasks.c.created_at - 1)
            conn.execute(later)
        return str(task.id)

    def kept() -> set[str]:
        while forget(site.engine, settings)["evidence"]:
            pass
        with reading(site.engine) as conn:
            every = {id: queue.get(conn, id).error for id in made}
        parts = {"code": "c", "expected": "e", "found": "f", "remedy": "r", "step": "s"}
        assert all(error.items() >= parts.items() for error in every.values())
        return {id for id, error in every.items() if error["evidence"] in (long, short)}

    failed, canceled = TaskState.FAILED, TaskState.CANCELED
    drift, bind = TaskKind.SLICE_DRIFT_RECONCILE, TaskKind.NODE_BIND_TOPOLOGY
    old = [fail(drift, failed, long), fail(drift, canceled, long), fail(bind, failed, long)]
    rest = [fail(drift, TaskState.LOST, long), fail(drift, failed, short)]
    rest += [fail(kind, failed, long) for kind in (drift, drift, bind, bind)]
    made = [*old, *rest]
    # A person may look for the cause of an unclean slot or machine.
    block = sa.update(tables.slots).where(tables.slots.c.slot_index == 0)
    with transaction(site.engine) as conn:
        conn.execute(block.values(status="cleanup_blocked"))
    assert kept() == {*rest, old[2]}
    with transaction(site.engine) as conn:
        conn.execute(block.values(status="disabled"))
        nodes.update(conn, "n1", unclean_allocation_id="a1")
    assert kept() == {*rest, old[2]}
    with transaction(site.engine) as conn:
        nodes.update(conn, "n1", unclean_allocation_id="")
    assert kept() == {*rest}


def ids(conn: sa.Connection, table: sa.Table) -> list[int]:
    """Of the reports of node n1, the oldest first."""
    query = sa.select(table.c.id).where(table.c.node_id == "n1")
    return list(conn.execute(query.order_by(table.c.id)).scalars())


def test_the_leader_does_it() -> None:
    assert forget in [loop.act for loop in LOOPS]

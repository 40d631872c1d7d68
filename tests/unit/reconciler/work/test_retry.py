"""Retries of transient failures where that is safe; refusals are never retried."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import sqlalchemy as sa
from typer.testing import CliRunner

from reconciler.cli.main import app
from reconciler.db import schema as tables
from reconciler.db.engine import transaction
from reconciler.db.schema import Task
from reconciler.lifecycle import host
from reconciler.model.states import TaskKind
from reconciler.records import allocations, leasing, nodes, queue, timeline
from reconciler.runs.collect import Outcome
from reconciler.work import worker
from reconciler.work.settle import read_failure
from tests.unit.reconciler.conftest import ADMIN, Site
from tests.unit.reconciler.work.conftest import Attend, Runs, canceled_at_launch
from tests.unit.reconciler.work.test_unreachable import SILENT, STRANGER, attend

__all__ = ["attend"]
pytestmark = pytest.mark.covers("CTRL-8")

KILLED = replace(SILENT, status="lost", unreachable=False, touched=True, problem="process_gone")


def enqueue(sold: Site, kind: TaskKind = TaskKind.NODE_PARITY) -> None:
    with transaction(sold.engine) as conn:
        queue.enqueue(conn, queue.Enqueue(kind, "n1", "node", "n1"), ADMIN)


def pause(sold: Site, task: Task) -> int:
    """Seconds to the next attempt, which comes now."""
    with transaction(sold.engine) as conn:
        assert leasing.lease(conn, "worker") == [], "not at once"
        conn.execute(sa.update(tables.tasks).values(not_before=None))
    return round(task.not_before - task.state_since)


def test_another_run_of_its_own_a_few_times_and_later_each_time(
    sold: Site, runs: Runs, attend: Attend
) -> None:
    enqueue(sold)
    runs.outcome = KILLED
    first = attend()
    assert (first.state, first.attempt, first.error["code"]) == ("queued", 2, "run_lost")
    with transaction(sold.engine) as conn:
        reason = leasing.wait_reasons(conn, [first])[first.id]
        assert (reason["code"], reason["detail"]) == ("later", "attempt 1 failed: run_lost")
    assert pause(sold, first) == 30
    assert pause(sold, attend()) == 120
    ended = attend()
    assert (ended.state, ended.attempt, ended.error["code"]) == ("lost", 3, "run_lost")
    assert [spec.run_id for spec in runs.launched] == [f"{ended.id}-{n}" for n in (1, 2, 3)]
    with transaction(sold.engine) as conn:
        reasons = [
            row["reason"] for row in timeline.of(conn, node_id="n1") if row["type"] == "state"
        ]
    assert [f"attempt {n} failed: run_lost" in reasons for n in (1, 2, 3)] == [True, True, False]


@pytest.mark.parametrize("problem", ["awx_failed: Job reaped", "awx_silent: HTTP 502"])
def test_what_awx_lost_may_go_on_and_is_not_tried_again(
    sold: Site, runs: Runs, attend: Attend, problem: str
) -> None:
    enqueue(sold)
    runs.outcome = replace(KILLED, problem=problem)
    ended = attend()
    assert (ended.state, ended.attempt, ended.error["code"]) == ("lost", 1, "run_lost")
    with transaction(sold.engine) as conn:
        assert leasing.lease(conn, "worker") == []


def test_an_unknown_end_names_the_commands_that_end_the_doubt() -> None:
    remedy = read_failure(Outcome("lost", None, "awx_silent: no answer")).error["remedy"]
    commands = re.findall("`gpuaas ([^`]+)`", remedy)
    assert [command.partition(" ")[0] for command in commands] == ["recover", *["nodes"] * 3]
    for command in commands:
        words = command.split(" --reason")[0].split()
        result = CliRunner().invoke(app, [*words, "--help"])
        assert result.exit_code == 0 and words[-2] in result.output, result.output


def test_a_run_that_was_never_begun_is_tried_again(sold: Site, runs: Runs, attend: Attend) -> None:
    enqueue(sold)
    runs.outcome = replace(KILLED, status="failed", problem="awx_error: x", begun=False)
    task = attend()
    assert (task.state, task.attempt, task.error["code"]) == ("queued", 2, "run_not_started")
    assert "nothing was done" in task.error["remedy"]


def test_parity_does_not_go_before_the_discovery_that_it_compares_with(
    sold: Site, runs: Runs, attend: Attend
) -> None:
    enqueue(sold, TaskKind.SLICE_TOPOLOGY_DISCOVER)
    enqueue(sold, TaskKind.NODE_PARITY)
    runs.outcome = KILLED
    task = attend()
    assert (task.kind, task.state) == (TaskKind.SLICE_TOPOLOGY_DISCOVER, "queued")
    with transaction(sold.engine) as conn:
        assert leasing.lease(conn, "worker") == []
        conn.execute(sa.update(tables.tasks).values(not_before=tables.tasks.c.not_before - 31))
        (next_one,) = leasing.lease(conn, "worker")
    assert next_one.id == task.id


def test_a_host_that_was_lost_on_the_way_is_waited_for(
    sold: Site, runs: Runs, attend: Attend
) -> None:
    enqueue(sold)
    runs.outcome = replace(SILENT, touched=True)
    task = attend()
    assert (task.state, task.error["code"]) == ("queued", "host_unreachable")
    with transaction(sold.engine) as conn:
        conn.execute(sa.update(tables.tasks).values(not_before=None))
        assert nodes.get(conn, "n1").state == "unreachable"
        assert leasing.lease(conn, "worker") == [], "nothing is tried on a node that is lost"
        assert host.record_answer(conn, "n1", ADMIN)
    runs.ends(evidence={"parity": sold.parity(failures=1)})
    ended = attend()
    assert (ended.state, ended.attempt, ended.error) == ("succeeded", 2, {})


@pytest.mark.parametrize(
    ("kind", "code", "attempts"),
    [
        (TaskKind.NODE_IMAGE_CACHE, "image_unreachable", 2),
        (TaskKind.SLICE_TOPOLOGY_DISCOVER, "command_timeout", 2),
        (TaskKind.NODE_IMAGE_CACHE, "image_digest_mismatch", 1),
        (TaskKind.NODE_ENROL, "certificate_not_taken", 1),
        # It changes the host: its effects are examined before it is repeated.
        (TaskKind.NODE_BOOTSTRAP, "command_timeout", 1),
    ],
)
def test_what_a_repetition_cannot_change_is_final(
    sold: Site, runs: Runs, attend: Attend, kind: TaskKind, code: str, attempts: int
) -> None:
    image = {}
    with transaction(sold.engine) as conn:
        if kind is TaskKind.NODE_IMAGE_CACHE:
            image = {"image_id": conn.execute(sa.select(tables.images.c.id)).scalars().first()}
        given = {"certificate": "c", "public_key": "k", **image}
        item = queue.Enqueue(kind, "n1", "node", "n1", parameters=given)
        queue.enqueue(conn, item, ADMIN)
    error = {"code": code, "expected": "e", "found": "f", "remedy": "r"}
    runs.ends("failed", step="s", error=error, evidence={})
    ended = attend()
    assert (ended.attempt, ended.error["code"]) == (attempts, code)
    assert ended.state == ("queued" if attempts > 1 else "failed")


@pytest.mark.parametrize(
    "outcome",
    [replace(SILENT, problem=STRANGER), replace(KILLED, status="canceled", problem="asked")],
)
def test_a_stranger_and_a_cancellation_are_final(
    sold: Site, runs: Runs, attend: Attend, outcome: Outcome
) -> None:
    enqueue(sold)
    runs.outcome = outcome
    assert attend().finished_at is not None


def test_what_nobody_wants_any_more_is_not_tried_again(
    sold: Site, runs: Runs, attend: Attend, monkeypatch: pytest.MonkeyPatch
) -> None:
    enqueue(sold)
    runs.outcome = KILLED
    monkeypatch.setattr(worker, "launch", canceled_at_launch(sold.engine, runs))
    assert attend().state == "lost"


@pytest.mark.covers("I13")
def test_a_tenants_machine_is_never_built_a_second_time_by_itself(
    sold: Site, runs: Runs, attend: Attend
) -> None:
    with transaction(sold.engine) as conn:
        key = sold.allocate(conn)
    runs.outcome = KILLED
    assert (attend().state, len(runs.launched)) == ("lost", 1)
    with transaction(sold.engine) as conn:
        assert allocations.get(conn, key).state == "failed"
        assert sorted(sold.statuses(conn)) == ["available", "cleanup_blocked"]

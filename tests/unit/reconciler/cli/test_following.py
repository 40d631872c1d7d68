"""Nodes out of use and back, progress of a running task, and `gpuaas check`."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from reconciler.cli import tasks
from reconciler.db import schema as tables
from reconciler.db.engine import transaction
from reconciler.db.schema import Task
from reconciler.model.states import TaskState
from reconciler.records import queue
from tests.unit.reconciler.api.stack import ACT, NODE, Stack
from tests.unit.reconciler.api.test_launches import launch
from tests.unit.reconciler.cli.conftest import Gpuaas

pytestmark = pytest.mark.covers("CTRL-8", "CTRL-12")


def ended(stack: Stack, state: TaskState = TaskState.SUCCEEDED) -> Task:
    """An ended task with a single event."""
    stack.client("admin").post(f"admin/nodes/{NODE}/parity")
    task = stack.lease()
    with transaction(stack.engine) as conn:
        held = (task.id, task.lease_token)
        queue.progress(
            conn, *held, {"at": "now", "event": "failed", "task": "look", "code": "no_nat"}
        )
        error = {"code": "no_nat", "found": "no rule"} if state is TaskState.FAILED else None
        queue.finish(conn, *held, state, ACT, error=error)
    return task


def test_out_of_use_and_back(selling: Stack, gpuaas: Gpuaas) -> None:
    run = gpuaas.at(selling)
    run("nodes", "drain", NODE)
    assert (gpuaas.status, "--reason" in gpuaas.err) == (2, True)
    for verb, state in (("drain", "draining"), ("maintain", "maintenance"), ("resume", "ready")):
        run("nodes", verb, NODE, "--reason", "a new disk", "--output", "json")
        document = json.loads(gpuaas.out)
        assert (document["state"], document["state_reason"]) == (state, "a new disk")
        assert ("nothing is on it" in gpuaas.err) == (verb == "drain")
    text = run("nodes", "timeline", NODE, "--limit", "20")
    assert re.search(r"draining -> maintenance \(maintain by admin:admin#\S+\): a new disk", text)
    assert re.search(r"maintenance -> ready \(resume by admin:admin#\S+\): a new disk", text)
    assert text.index("available -> disabled") < text.rindex("disabled -> available")
    run("nodes", "retire", NODE, "--reason", "sold", "--yes")
    assert "transition_refused" in gpuaas.err


def test_who_drains_a_node_reads_what_it_waits_for(selling: Stack, gpuaas: Gpuaas) -> None:
    allocation_id = launch(selling).json()["id"]
    gpuaas.at(selling)("nodes", "drain", NODE, "--reason", "a new disk", "--output", "json")
    assert json.loads(gpuaas.out)["state"] == "draining"
    assert f"still on it: allocation {allocation_id} of project demo, requested" in gpuaas.err
    assert f"when these are gone: `gpuaas nodes maintain {NODE}" in gpuaas.err


def test_trace_tells_what_followed_from_a_request(prepared: Stack, gpuaas: Gpuaas) -> None:
    admin = prepared.client("admin")
    answer = admin.post(f"admin/nodes/{NODE}/parity", headers={"X-Correlation-Id": "asked-once"})
    prepared.lease()
    run = gpuaas.at(prepared)
    lines = run("trace", "asked-once").splitlines()[1:]
    text = " ".join(lines)
    assert f"task {answer.json()['id']}" in text and "queued -> running" in text
    run("audit", "--correlation", "asked-once", "--output", "json")
    assert {row["correlation_id"] for row in json.loads(gpuaas.out)} <= {"asked-once"}
    assert "asked-once" in gpuaas.out
    run("trace", "never-asked")
    assert (gpuaas.status, "nothing is known of never-asked" in gpuaas.err) == (1, True)


def test_follow_tells_everything_and_fails_with_the_task(prepared: Stack, gpuaas: Gpuaas) -> None:
    task = ended(prepared)
    gpuaas.at(prepared)("tasks", "follow", task.id)
    assert gpuaas.status == 0, gpuaas.err
    text = [line.split()[1:] for line in gpuaas.err.splitlines()]
    assert [words[0].rstrip(":") for words in text] == ["queued", "running", "failed", "succeeded"]
    assert "look  no_nat" in gpuaas.err
    gpuaas("tasks", "follow", task.id, "--output", "json")
    events = [json.loads(line)["event"] for line in gpuaas.out.splitlines()]
    assert events[-1] == "end" and len(events) == 5

    bad = ended(prepared, TaskState.FAILED)
    gpuaas("tasks", "follow", bad.id)
    assert (gpuaas.status, "no_nat" in gpuaas.err) == (1, True)


def test_output_and_why_a_task_waits(prepared: Stack, gpuaas: Gpuaas, tmp_path: Path) -> None:
    gpuaas.at(prepared)("tasks", "output", ended(prepared).id)
    assert (gpuaas.status, gpuaas.out, "no run has begun" in gpuaas.err) == (0, "", True)
    gpuaas("tasks", "cancel", ended(prepared).id)
    assert (gpuaas.status, "it had succeeded" in gpuaas.err) == (0, True)
    for command in (("tasks", "list"), ("audit",)):
        gpuaas(*command, "--limit", "1")
        assert (gpuaas.status, "the newest 1; --limit shows more" in gpuaas.err) == (0, True)
        gpuaas(*command, "--limit", "1000")
        assert (gpuaas.status, gpuaas.err) == (0, "")
    prepared.client("admin").post(f"admin/nodes/{NODE}/bootstrap")
    assert "worker" in gpuaas("tasks", "list", "--state", "queued")


def test_check(
    selling: Stack, gpuaas: Gpuaas, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("GPUAAS_STATE_DIR", str(selling.settings.state_dir))
    gpuaas("check")
    assert (gpuaas.status, "0 violations" in gpuaas.err) == (0, True), gpuaas.err
    with transaction(selling.engine) as conn:
        conn.execute(sa.update(tables.nodes).values(state="draining"))
    gpuaas("check", "--output", "json")
    assert (gpuaas.status, "violations" in gpuaas.err) == (1, True)
    assert {row["invariant"] for row in json.loads(gpuaas.out)} == {"I12", "I20"}
    monkeypatch.setenv("GPUAAS_STATE_DIR", str(tmp_path / "none"))
    gpuaas("check")
    assert (gpuaas.status, "database_missing" in gpuaas.err) == (1, True)
    assert not (tmp_path / "none").exists(), "a check makes nothing"


@pytest.mark.parametrize(
    ("waits", "after_s", "text"),
    [
        ({"code": "host_unreachable", "detail": "no route"}, 0, "host_unreachable: no route"),
        ({"code": "worker", "detail": "a worker that is free"}, 0, ""),
        ({"code": "worker", "detail": "a worker that is free"}, 9, "worker: a worker that is free"),
    ],
)
def test_who_waits_for_a_task_reads_what_it_waits_for(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    waits: dict[str, str],
    after_s: float,
    text: str,
) -> None:
    moments = iter((100.0, 100.0 + after_s, 100.0 + after_s))
    monkeypatch.setattr("reconciler.cli.tasks.time.monotonic", lambda: next(moments))
    states = [
        {"id": "t-1", "state": "queued", "waits_for": waits},
        {"id": "t-1", "state": "succeeded", "result": {}, "waits_for": {}},
    ]

    class Played:
        def wait(self, _task: str, *, unbegun_s: float, on_progress: Any) -> Any:
            for state in states:
                on_progress(state)
            return states[-1]

    monkeypatch.setattr(tasks, "client", Played)
    tasks.wait_for("t-1")
    line = capsys.readouterr().err.splitlines()[0].split("s", 1)[1].strip()
    assert line == f"queued  waits for {text}".removesuffix("  waits for ")

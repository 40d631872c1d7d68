"""Live progress as server-sent events, over a real connection, and a run's output."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import sqlalchemy as sa

from reconciler import client
from reconciler.api import tasks
from reconciler.api.app import create_app
from reconciler.client import Client, Event
from reconciler.db import schema as tables
from reconciler.db.engine import transaction
from reconciler.db.schema import Task
from reconciler.model.errors import Problem
from reconciler.model.states import Role, TaskState
from reconciler.records import queue, tokens
from reconciler.runs.paths import RunPaths
from tests.unit.reconciler.api.stack import ACT, NODE, Stack, listening

pytestmark = pytest.mark.covers("CTRL-8")


def running(stack: Stack) -> Task:
    """A task with a run that has emitted a single event."""
    stack.client("admin").post(f"admin/nodes/{NODE}/parity")
    task = stack.lease()
    with transaction(stack.engine) as conn:
        queue.started(conn, task.id, task.lease_token, run_id="r", run_directory=str(folder(stack)))
    say(stack, task, "look")
    return task


def folder(stack: Stack) -> Path:
    return stack.settings.state_dir / "runs" / "r"


def say(stack: Stack, task: Task, *names: str) -> None:
    with transaction(stack.engine) as conn:
        lines = [{"at": "2026-01-01T00:00:00", "event": "ok", "task": name} for name in names]
        queue.progress(conn, task.id, task.lease_token, *lines)


def end(stack: Stack, task: Task, state: TaskState = TaskState.SUCCEEDED) -> None:
    with transaction(stack.engine) as conn:
        error = {"code": "no_kvm"} if state is TaskState.FAILED else None
        queue.finish(conn, task.id, task.lease_token, state, ACT, error=error)


@pytest.fixture
def service(prepared: Stack) -> Iterator[str]:
    """The API on a real socket."""
    settings = prepared.settings.model_copy(update={"poll_s": 0.02})
    with listening(create_app(settings, prepared.engine)) as url:
        yield url


def step(event: Event) -> str:
    return str(event.document.get("task") or event.document.get("target") or event.name)


def test_events_come_while_the_task_runs_and_end_with_it(prepared: Stack, service: str) -> None:
    task = running(prepared)
    reader = Client(service, prepared.secrets["admin"])
    stream = reader.events(f"/admin/tasks/{task.id}/events")
    begun = [next(stream) for _ in range(3)]
    assert [step(event) for event in begun] == ["queued", "running", "look"]
    say(prepared, task, "measure", "report")
    assert [step(next(stream)) for _ in range(2)] == ["measure", "report"]
    end(prepared, task)
    rest = list(stream)
    assert [(event.name, step(event)) for event in rest] == [("state", "succeeded"), ("end", "end")]
    assert rest[-1].document["state"] == "succeeded"
    reader.close()


def test_a_reader_that_was_cut_off_misses_nothing_and_hears_nothing_twice(
    prepared: Stack, service: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = running(prepared)
    path = f"/admin/tasks/{task.id}/events"
    end(prepared, task)
    reader = Client(service, prepared.secrets["admin"])
    whole = list(reader.events(path))
    for index, event in enumerate(whole[:-1]):
        assert list(reader.events(path, after=event.place)) == whole[index + 1 :]
    # Nothing is left: a browser's EventSource stops asking at 204.
    assert list(reader.events(path, after=whole[-1].place)) == []

    monkeypatch.setattr(time, "sleep", lambda _s: None)
    real, broken = client._parse_events, iter([1, 0])

    def cut(lines: Iterator[str]) -> Iterator[Event | None]:
        for event in real(lines):
            yield event
            if next(broken, None):
                raise httpx.ReadError("the service was restarted")

    monkeypatch.setattr(client, "_parse_events", cut)
    assert list(reader.events(path)) == whole
    reader.close()


@pytest.mark.covers("CTRL-1")
@pytest.mark.parametrize("how", ["revoked", "ended"])
def test_a_stream_ends_with_its_token(
    prepared: Stack, service: str, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setattr(tasks, "_CHECK_S", 0.05)
    task = running(prepared)
    path = f"{service}/api/v1/admin/tasks/{task.id}/events"
    with transaction(prepared.engine) as conn:
        issued, secret = tokens.issue(conn, ACT, role=Role.PLATFORM_ADMIN, name="leaver", ttl_s=60)
    with httpx.stream("GET", path, headers=bearer(secret), timeout=60, trust_env=False) as stream:
        lines = stream.iter_lines()
        while "look" not in next(lines):
            pass
        # As long as it is valid, it goes on: longer than the token is looked at again.
        time.sleep(0.3)
        say(prepared, task, "measure")
        while "measure" not in next(lines):
            pass
        with transaction(prepared.engine) as conn:
            if how == "revoked":
                tokens.revoke(conn, issued.id, ACT)
            else:
                conn.execute(sa.update(tables.api_tokens).values(expires_at=1.0))
        # It ends although the task goes on.
        assert "state" not in "".join(lines)
    again = httpx.get(path, headers=bearer(secret), timeout=60, trust_env=False)
    assert again.status_code == 401


@pytest.mark.covers("CTRL-1")
def test_a_reader_whose_token_has_ended_is_refused(
    prepared: Stack, service: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A script would take the end of the stream for the success of its task."""
    monkeypatch.setattr(tasks, "_CHECK_S", 0.05)
    task = running(prepared)
    reader = Client(service, prepared.secrets["admin"])
    stream = reader.events(f"/admin/tasks/{task.id}/events")
    assert step(next(stream)) == "queued"
    with transaction(prepared.engine) as conn:
        conn.execute(sa.update(tables.api_tokens).values(revoked_at=time.time()))
    with pytest.raises(Problem) as caught:
        list(stream)
    assert caught.value.status == 401
    reader.close()


def bearer(secret: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {secret}"}


def test_what_is_asked_wrongly(prepared: Stack) -> None:
    admin = prepared.client("admin")
    assert admin.get("admin/tasks/none/events").json()["code"] == "task_not_found"
    task = running(prepared)
    wrong = {"Last-Event-ID": "yesterday"}
    answer = admin.get(f"admin/tasks/{task.id}/events", headers=wrong)
    assert answer.json()["code"] == "request_invalid"
    member = prepared.client("member").get(f"admin/tasks/{task.id}/events")
    assert member.status_code == 403


def test_each_event_is_one_line_of_data(prepared: Stack) -> None:
    task = running(prepared)
    say(prepared, task, "two\nlines\r\nid: 9.9")
    end(prepared, task, TaskState.FAILED)
    answer = prepared.client("admin").get(f"admin/tasks/{task.id}/events")
    assert answer.headers["Content-Type"].startswith("text/event-stream")
    blocks = [block.splitlines() for block in answer.text.split("\n\n") if block]
    assert all([line.split(":")[0] for line in b] == ["event", "id", "data"] for b in blocks)
    assert json.loads(blocks[-1][2].removeprefix("data: "))["error"] == {"code": "no_kvm"}


def test_output_without_secrets(prepared: Stack) -> None:
    admin = prepared.client("admin")
    task = running(prepared)
    path = f"admin/tasks/{task.id}/output"
    nothing = {"task_id": task.id, "here": False, "output": ""}
    assert admin.get(path).json() == nothing
    output = RunPaths(folder(prepared)).output
    output.parent.mkdir(parents=True)
    output.write_text("ok: [n1]\nAuthorization: Bearer planted-secret-token\n")
    answer = admin.get(path).json()
    assert (answer["here"], "ok: [n1]" in answer["output"]) == (True, True)
    assert "planted" not in answer["output"]
    assert "planted" not in admin.get(f"admin/tasks/{task.id}").text
    assert admin.get(path, params={"limit": 8}).json()["output"] != answer["output"]

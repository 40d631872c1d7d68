"""Events of a task's stream, against `contracts/asyncapi.yaml`, in both directions."""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator

from reconciler.api.app import PREFIX
from reconciler.db.engine import transaction
from reconciler.model import transitions
from reconciler.model.states import TaskState
from reconciler.records import queue
from reconciler.runs import collect, events
from reconciler.runs.paths import RunPaths
from reconciler.settings import PROJECT
from tests.unit.reconciler.api.stack import ACT, NODE, Stack

pytestmark = pytest.mark.covers("CTRL-1", "CTRL-8")
Record = dict[str, Any]
EVENTS = "text/event-stream"
RAN = "ansible.builtin.command"
# Step events of ansible-runner: every kind that becomes a line.
RUN_EVENTS: tuple[tuple[str, Record], ...] = (
    ("playbook_on_task_start", {"task": "look", "task_action": RAN, "task_uuid": "1"}),
    ("runner_retry", {"task": "look", "res": {}}),
    ("runner_on_ok", {"task": "look", "res": {"changed": False}, "duration": 0.25}),
    ("runner_on_ok", {"task": "write", "res": {"changed": True}, "duration": 1}),
    ("runner_on_skipped", {"task": "reboot", "task_uuid": "2"}),
    ("runner_on_failed", {"task": "measure\n", "res": {"error": {"code": "no_kvm"}}}),
    ("runner_on_unreachable", {"task": "x" * 300, "res": {"msg": "refused"}}),
)


@lru_cache
def contract() -> Record:
    document: Record = yaml.safe_load((PROJECT / "contracts/asyncapi.yaml").read_text())
    return document


def messages() -> dict[str, Record]:
    """By the name that the stream gives them."""
    named = contract()["channels"]["taskStream"]["messages"]
    messages = contract()["components"]["messages"]
    by_name = {name: messages[ref["$ref"].rpartition("/")[2]] for name, ref in named.items()}
    assert {name: message["name"] for name, message in by_name.items()} == {n: n for n in by_name}
    return by_name


def schema(of: Record) -> Record:
    document: Record = contract()["components"]["schemas"][of["$ref"].rpartition("/")[2]]
    return document


def problems(name: str, place: str, document: Record) -> list[str]:
    """Violations of the contract by an event as a reader gets it."""
    message = messages().get(name)
    if message is None:
        return [f"unknown event {name}"]
    wrong = []
    for part, value in (("headers", {"id": place}), ("payload", document)):
        whole = {**message[part], "components": contract()["components"]}
        judge = Draft202012Validator(whole, format_checker=Draft202012Validator.FORMAT_CHECKER)
        wrong += [error.message for error in judge.iter_errors(value)]
    return wrong


def sent(stack: Stack, task_id: str) -> list[tuple[str, str, Record]]:
    """Name, place and document of each event of a task that has ended."""
    answer = stack.client("admin").get(f"admin/tasks/{task_id}/events")
    assert answer.headers["Content-Type"].startswith(EVENTS)
    messages_sent = []
    for block in filter(None, answer.text.split("\n\n")):
        lines = dict(line.split(": ", 1) for line in block.splitlines())
        assert set(lines) == {"event", "id", "data"}
        messages_sent.append((lines["event"], lines["id"], json.loads(lines["data"])))
    return messages_sent


def finished_task(stack: Stack, state: TaskState, folder: Path) -> str:
    """A task with a run that said everything a run can say, was taken over, and ended."""
    stack.client("admin").post(f"admin/nodes/{NODE}/parity")
    task = stack.lease()
    paths = RunPaths(folder)
    paths.progress.parent.mkdir(parents=True, exist_ok=True)
    recorder = events.Recorder(paths.progress)
    for kind, data in RUN_EVENTS:
        recorder({"event": kind, "event_data": data})
    lines, offset = collect.progress(folder)
    with transaction(stack.engine) as conn:
        held = (task.id, task.lease_token)
        queue.progress(conn, *held, *lines, offset=offset)
        queue.wait_for_host(conn, *held, "host_unreachable", act=ACT)
        queue.resume(conn, NODE)
    task = stack.lease()
    with transaction(stack.engine) as conn:
        error = {"code": "no_kvm"} if state is TaskState.FAILED else None
        queue.cancel(conn, task.id, ACT)
        queue.finish(conn, task.id, task.lease_token, state, ACT, error=error)
    return str(task.id)


@pytest.mark.parametrize("state", [TaskState.SUCCEEDED, TaskState.FAILED, TaskState.CANCELED])
def test_what_is_sent_is_in_the_contract(prepared: Stack, tmp_path: Path, state: TaskState) -> None:
    sent_events = sent(prepared, finished_task(prepared, state, tmp_path / "run"))
    wrong = {
        place: faults for name, place, row in sent_events if (faults := problems(name, place, row))
    }
    assert wrong == {}
    # And all that the contract has is sent.
    assert {name for name, _, _ in sent_events} == set(messages())
    lines = [row for name, _, row in sent_events if name == "progress"]
    properties = schema(messages()["progress"]["payload"])["properties"]
    assert {row["event"] for row in lines} == set(properties["event"]["enum"])
    assert {name for row in lines for name in row} == set(properties)
    assert sent_events[-1][0] == "end"
    assert set(sent_events[-1][2]) == set(schema(messages()["end"]["payload"])["properties"])


def test_a_task_that_never_began_ends_by_the_contract(prepared: Stack) -> None:
    admin = prepared.client("admin")
    task = admin.post(f"admin/nodes/{NODE}/parity").json()
    admin.post(f"admin/tasks/{task['id']}/cancel", json={"reason": "no"})
    sent_events = sent(prepared, task["id"])
    assert [name for name, _, _ in sent_events] == ["state", "state", "end"]
    assert [problems(*event) for event in sent_events] == [[], [], []]


def test_the_words_are_the_codes() -> None:
    payload = schema(messages()["state"]["payload"])["properties"]
    of_tasks = {row.event for row in transitions.TABLE if row.entity == "task"}
    assert set(payload["event"]["enum"]) == of_tasks | {"create", "cancel_requested"}
    states = {state.value for state in TaskState}
    assert set(schema(payload["target"])["enum"]) == states
    assert set(payload["source"]["enum"]) == states | {""}
    sources = {row.source for row in transitions.TABLE if row.entity == "task"}
    ended = schema(messages()["end"]["payload"])["properties"]["state"]["enum"]
    assert set(ended) == states - sources


def test_its_address_is_a_route_that_answers_with_events(prepared: Stack) -> None:
    channel = contract()["channels"]["taskStream"]
    paths = prepared.client("admin", base="/").get(f"{PREFIX}/openapi.json").json()["paths"]
    answers = paths[channel["address"]]["get"]["responses"]
    assert EVENTS in answers["200"]["content"]
    assert set(channel["parameters"]) == {"task_id"}


def test_what_is_not_in_the_contract_is_seen(prepared: Stack, tmp_path: Path) -> None:
    sent_events = sent(prepared, finished_task(prepared, TaskState.FAILED, tmp_path / "run"))
    assert problems("news", "1.1", {}) == ["unknown event news"]
    for name, place, document in sent_events:
        assert problems(name, place, {**document, "lease_token": "x"})
        assert problems(name, "yesterday", document)
    line = next(row for name, _, row in sent_events if name == "progress")
    assert problems("progress", "1.1", {**line, "event": "guessed"})

"""A host's text in Ansible's events is data, whatever its form."""

from __future__ import annotations

import importlib
import json
import pkgutil
from pathlib import Path
from typing import Any

import ansible.constants
import ansible.plugins.action
import pytest

from reconciler.runs.events import ON_CONTROLLER, Recorder, judge

GOOD = {"schema": 1, "playbook": "a_test", "ok": True, "step": "", "error": {}, "evidence": {}}


def stats(result: object, **more: object) -> dict[str, Any]:
    data = {"artifact_data": {"slice_result": result}, "dark": {}, **more}
    return {"event": "playbook_on_stats", "event_data": data}


def recorder(tmp_path: Path, *events: dict[str, Any]) -> Recorder:
    heard = Recorder(tmp_path / "progress.jsonl")
    for event in events:
        assert heard(event) is False, "the runner is to keep no event: they hold results"
    return heard


@pytest.mark.covers("CTRL-8", "P3")
def test_only_names_times_and_codes_reach_the_progress(tmp_path: Path) -> None:
    secret = {"msg": "planted-secret", "error": {"code": "disk_in_use", "found": "planted-secret"}}
    recorder(
        tmp_path,
        {"event": "playbook_on_task_start", "event_data": {"task": "Wipe\n\x1b[2J" + "x" * 500}},
        {
            "event": "runner_on_failed",
            "event_data": {"task": "Wipe", "res": secret, "duration": 1.234},
        },
        {"event": "runner_on_ok", "event_data": {"task": "Hold", "res": {"changed": True}}},
        {"event": "verbose", "stdout": "planted-secret"},
        {"event": "runner_on_ok", "event_data": ["not", "a", "mapping"]},
    )
    text = (tmp_path / "progress.jsonl").read_text()
    assert "planted-secret" not in text
    first, second, third = (json.loads(line) for line in text.splitlines())
    assert first["task"] == ("Wipe[2J" + "x" * 500)[:200]
    assert (second["event"], second["code"], second["seconds"]) == ("failed", "disk_in_use", 1.23)
    assert third["event"] == "changed"


def test_the_last_statistics_count(tmp_path: Path) -> None:
    forged = stats(GOOD | {"evidence": {"forged": True}})
    verdict = judge(recorder(tmp_path, forged, stats(GOOD)), "successful", 0, 1.0)
    assert verdict["result"] == GOOD


@pytest.mark.covers("I13")
def test_a_result_that_contradicts_its_run_is_not_believed(tmp_path: Path) -> None:
    verdict = judge(recorder(tmp_path, stats(GOOD)), "failed", -9, 1.0)
    assert (verdict["result"], verdict["problem"]) == (None, "result_contradicts_run")


def test_why_a_host_was_not_reached_is_kept_and_is_only_text(tmp_path: Path) -> None:
    message = "banner\n\x1b[2J" + "x" * 600 + "\nHost key verification failed.\r\n"
    lost = {
        "event": "runner_on_unreachable",
        "event_data": {"task": "Look", "res": {"msg": message}},
    }
    verdict = judge(recorder(tmp_path, lost, stats(None)), "failed", 4, 1.0)
    assert verdict["unreachable"]
    assert verdict["problem"].startswith("unreachable: x")
    assert verdict["problem"].endswith("x Host key verification failed.")
    assert len(verdict["problem"]) < 600 and verdict["problem"].isprintable()
    assert "Host key" not in (tmp_path / "progress.jsonl").read_text()


def test_why_the_last_task_failed_is_kept_when_no_result_follows(tmp_path: Path) -> None:
    full = "No usable temporary directory found in ['/tmp']"
    result = {"msg": "MODULE FAILURE: see stderr", "module_stderr": f"Traceback\n{full}\n"}
    lost = {"event": "runner_on_failed", "event_data": {"task": "Look", "res": result}}
    verdict = judge(recorder(tmp_path, lost, stats(None)), "failed", 2, 1.0)
    expected = f"module_failed: MODULE FAILURE: see stderr Traceback {full}"
    assert (verdict["problem"], verdict["unreachable"]) == (expected, False)
    # The controller's own disk is not the host's.
    result = {"msg": "Task failed: [Errno 28] No space left on device: '/runs/1/tmp'"}
    lost["event_data"] = {"task": "Look", "res": result}
    assert judge(recorder(tmp_path, lost, stats(None)), "failed", 2, 1.0)["problem"] == (
        "result_missing"
    )


@pytest.mark.covers("I13")
@pytest.mark.parametrize("status", ["timeout", "canceled"])
def test_a_run_that_was_stopped_has_no_result(tmp_path: Path, status: str) -> None:
    verdict = judge(recorder(tmp_path, stats(GOOD)), status, 254, 1.0)
    assert (verdict["status"], verdict["result"]) == (status, None)


@pytest.mark.covers("I13")
@pytest.mark.parametrize(
    ("event", "problem"),
    [
        (stats(None), "result_missing"),
        (stats(None, dark={"node-1": 1}), "unreachable"),
        (stats(GOOD | {"schema": 2}), "result_invalid"),
        (stats(["no", "mapping"]), "result_invalid"),
        (stats(GOOD | {"evidence": {"x": "y" * 5_000_000}}), "result_too_large"),
        (stats(GOOD | {"evidence": {"x": "a\0b"}}), "outcome_unreadable: evidence.x"),
        ({"event": "playbook_on_stats", "event_data": {"artifact_data": "text"}}, "result_missing"),
    ],
)
def test_success_without_a_good_result_is_a_failure(
    tmp_path: Path, event: dict[str, Any], problem: str
) -> None:
    verdict = judge(recorder(tmp_path, event), "successful", 0, 1.0)
    assert (verdict["status"], verdict["result"]) == ("failed", None)
    assert verdict["problem"].startswith(problem)


@pytest.mark.covers("CTRL-8", "I13")
def test_what_ansible_does_by_itself_is_what_it_says_of_itself() -> None:
    """A missing action would make every silent host count as touched."""
    package = ansible.plugins.action
    local = {
        f"ansible.builtin.{item.name}"
        for item in pkgutil.iter_modules(package.__path__)
        if not importlib.import_module(
            f"{package.__name__}.{item.name}"
        ).ActionModule._requires_connection
    }
    no_action = {
        name
        for name in (
            *ansible.constants._ACTION_ALL_INCLUDE_IMPORT_TASKS,
            *ansible.constants._ACTION_ALL_PROPER_INCLUDE_IMPORT_ROLES,
            *ansible.constants._ACTION_META,
        )
        if name.startswith("ansible.builtin.")
    }
    assert local and no_action
    assert local | no_action == ON_CONTROLLER


@pytest.mark.covers("I13")
@pytest.mark.parametrize(
    "action", ["other.collection.assert", "assert", "ansible.builtin.raw", None, ["x"]]
)
def test_any_other_action_may_have_been_on_the_host(tmp_path: Path, action: object) -> None:
    data = {"task": "x", "task_uuid": "u1", "task_action": action, "res": {}}
    assert recorder(tmp_path, {"event": "runner_on_ok", "event_data": data}).touched

"""Ansible's events as progress lines, and the verdict on a run.

Events carry module results that the host controls. They are read as data: names are cut and
cleaned, nothing is templated, and only a result document that its schema allows is kept.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from reconciler.runs import contract
from reconciler.runs.contract import ContractError

# A discovery of a large host is about 100 KiB. A document above this limit is an attack.
_LARGEST_RESULT = 4 * 1024 * 1024
_LONGEST_NAME = 200
_MOST_NODES = 3
# Length of a message. Its end names the cause; a banner of the host may come before it.
_LONGEST_REASON = 500
# Actions and keywords that Ansible carries out on the controller, without the host. Before a role
# it runs one of them unasked. A test compares the list with Ansible. Every other action counts as
# having reached the host, also an action of the same name in another collection.
ON_CONTROLLER = frozenset(
    f"ansible.builtin.{name}"
    for name in (
        *("add_host", "assert", "debug", "fail", "group_by", "include_vars"),
        *("set_fact", "set_stats", "validate_argument_spec"),
        *("import_role", "import_tasks", "include_role", "include_tasks", "meta"),
    )
)
# Events whose results came from the host.
_FROM_HOST = frozenset(
    {"runner_on_ok", "runner_on_failed", "runner_retry", "runner_item_on_ok"}
    | {"runner_item_on_failed", "runner_on_async_poll", "runner_on_async_ok"}
)
# Problem of a run that ended with a module that did not start.
MODULE_FAILED = "module_failed"
_CODE = re.compile(r"[a-z][a-z0-9_]{0,63}")

_STATUS = {
    "playbook_on_task_start": "started",
    "runner_on_ok": "ok",
    "runner_on_failed": "failed",
    "runner_on_skipped": "skipped",
    "runner_on_unreachable": "unreachable",
    "runner_retry": "retry",
}


class Recorder:
    """Writes the progress lines of a run and keeps its final artifacts.

    written: how many progress lines of the same events the file holds already.
    """

    def __init__(self, progress: Path, written: int = 0) -> None:
        self._progress = progress
        self._written = written
        self.artifacts: Mapping[str, Any] = {}
        self.unreachable = False
        # Why the last task did not reach the host, or its module did not start there.
        self.reason = ""
        self.over = False
        # Nodes on which modules say that they ran; a host may name any, so few are kept.
        self.answered_by: set[str] = set()
        self._answered = False
        self._begun: set[str] = set()

    @property
    def touched(self) -> bool:
        """False only when no module can have run on the host: none answered, and no second module
        began. A second beginning would mean that the answer to the first was lost.
        """
        return self._answered or len(self._begun) > 1

    @property
    def began(self) -> bool:
        """Whether a task for the host began."""
        return self._answered or self.unreachable or bool(self._begun)

    def __call__(self, event: Mapping[str, Any]) -> bool:
        """Take an event. False tells the runner not to store it: it holds arguments and results."""
        kind = str(event.get("event", ""))
        data = event.get("event_data")
        if not isinstance(data, Mapping):
            return False
        if kind == "playbook_on_stats":
            # The last event counts: host text that imitates an event comes before the end.
            artifacts = data.get("artifact_data")
            self.artifacts = artifacts if isinstance(artifacts, Mapping) else {}
            self.unreachable = self.unreachable or bool(data.get("dark"))
            self.over = True
        self._trace(kind, data)
        if kind in _STATUS:
            self._write(_STATUS[kind], data)
        return False

    def _trace(self, kind: str, data: Mapping[str, Any]) -> None:
        if str(data.get("task_action")) in ON_CONTROLLER:
            return
        if kind in _FROM_HOST:
            self._answered = True
            result = data.get("res")
            node = result.get("answered_by") if isinstance(result, Mapping) else None
            if isinstance(node, str) and len(self.answered_by) < _MOST_NODES:
                self.answered_by.add(_printable(node))
        elif kind == "playbook_on_task_start":
            self._begun.add(str(data.get("task_uuid")))
        elif kind == "runner_on_skipped":
            self._begun.discard(str(data.get("task_uuid")))

    def _write(self, status: str, data: Mapping[str, Any]) -> None:
        result = data.get("res")
        line: dict[str, Any] = {
            "at": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "event": status,
            "task": _printable(data.get("task")),
        }
        if status == "unreachable":
            self.unreachable = True
            self.reason = _reason(result)
        # What only the controller says may be of the controller.
        if status == "failed" and isinstance(result, Mapping) and result.get("module_stderr"):
            self.reason = _reason(result)
        if status == "ok" and isinstance(result, Mapping) and result.get("changed") is True:
            line["event"] = "changed"
        if status == "failed" and (code := _code(result)):
            line["code"] = code
        if isinstance(seconds := data.get("duration"), int | float):
            line["seconds"] = round(seconds, 2)
        if self._written:
            self._written -= 1
            return
        with self._progress.open("a", encoding="utf-8") as handle:
            handle.write(json.dumps(line) + "\n")


def judge(recorder: Recorder, status: str, rc: int | None, seconds: float) -> dict[str, Any]:
    """The verdict on a run whose process did not die before its end."""
    verdict: dict[str, Any] = {
        "status": status if status in {"successful", "timeout", "canceled"} else "failed",
        "rc": rc,
        "seconds": round(seconds, 2),
        "unreachable": recorder.unreachable,
        "touched": recorder.touched,
        "result": None,
        "answered_by": sorted(recorder.answered_by),
    }
    if status in {"timeout", "canceled"}:
        return verdict
    document = recorder.artifacts.get("slice_result")
    if document is None:
        kind = MODULE_FAILED if recorder.reason else "result_missing"
        kind = "unreachable" if recorder.unreachable else kind
        problem = f"{kind}: {recorder.reason}" if recorder.reason else kind
        return verdict | {"status": "failed", "problem": problem}
    if len(json.dumps(document)) > _LARGEST_RESULT:
        return verdict | {"status": "failed", "problem": "result_too_large"}
    try:
        result = contract.check_result(document)
    except ContractError as error:
        problem = f"{error.code}: {error.field}: {error.expected[:300]}"
        return verdict | {"status": "failed", "problem": problem}
    if result["ok"] != (status == "successful"):
        # Ansible died after it sent the document, or the document is not final.
        return verdict | {"status": "failed", "problem": "result_contradicts_run"}
    return verdict | {"result": result}


def _printable(name: object) -> str:
    text = name if isinstance(name, str) else ""
    return "".join(letter for letter in text if letter.isprintable())[:_LONGEST_NAME]


def _reason(result: object) -> str:
    """The message of SSH or of a module, and the end of what the module wrote, on a single line."""
    if not isinstance(result, Mapping):
        return ""
    parts = [result.get(part) for part in ("msg", "module_stderr")]
    text = " ".join(" ".join(part.split()) for part in parts if isinstance(part, str))
    return "".join(letter for letter in text if letter.isprintable())[-_LONGEST_REASON:]


def _code(result: object) -> str:
    """The stable code of a refusal. No other text of a failure goes into the progress."""
    error = result.get("error") if isinstance(result, Mapping) else None
    code = error.get("code") if isinstance(error, Mapping) else None
    return code if isinstance(code, str) and _CODE.fullmatch(code) else ""

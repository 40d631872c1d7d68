"""What Ansible says while it runs, and what it all came to.

Events carry module results that a host made up as it liked. They are read as data: names are cut
and cleaned, nothing is templated, and only the result document is kept, when its schema allows it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from reconciler.runs import contract
from reconciler.runs.errors import ContractError

# A discovery of a large host is about 100 KiB. More than this is not evidence but an attack.
_LARGEST_RESULT = 4 * 1024 * 1024
_LONGEST_NAME = 200
# Of what SSH says: its end names the cause, and a banner of the host may come before it.
_LONGEST_REASON = 500
# What Ansible does by itself, without the host: those of its own actions that say so (before a role
# it begins one of them unasked), and its words that are no action. A test compares with Ansible.
# Any other counts as having been there, one of such a name in another collection too.
AT_HOME = frozenset(
    f"ansible.builtin.{name}"
    for name in (
        *("add_host", "assert", "debug", "fail", "group_by", "include_vars"),
        *("set_fact", "set_stats", "validate_argument_spec"),
        *("import_role", "import_tasks", "include_role", "include_tasks", "meta"),
    )
)
# Their results came from the host, whatever they are.
_FROM_HOST = frozenset(
    {"runner_on_ok", "runner_on_failed", "runner_retry", "runner_item_on_ok"}
    | {"runner_item_on_failed", "runner_on_async_poll", "runner_on_async_ok"}
)
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
    """Writes the progress lines of a run and remembers its last words.

    written: how many lines stand there already, of the same events from the first one on.
    """

    def __init__(self, progress: Path, written: int = 0) -> None:
        self._progress = progress
        self._written = written
        self.artifacts: Mapping[str, Any] = {}
        self.unreachable = False
        self.unreachable_reason = ""
        self.over = False
        self._answered = False
        self._begun: set[str] = set()

    @property
    def touched(self) -> bool:
        """False only when no module can have run on the host: none answered, and no second one was
        begun, which would mean that the word of the first was lost.
        """
        return self._answered or len(self._begun) > 1

    def __call__(self, event: Mapping[str, Any]) -> bool:
        """An event; False tells the runner not to keep it: it holds arguments and results."""
        kind = str(event.get("event", ""))
        data = event.get("event_data")
        if not isinstance(data, Mapping):
            return False
        if kind == "playbook_on_stats":
            # The last one counts: text from a host that looks like an event comes before the end.
            artifacts = data.get("artifact_data")
            self.artifacts = artifacts if isinstance(artifacts, Mapping) else {}
            self.unreachable = self.unreachable or bool(data.get("dark"))
            self.over = True
        self._trace(kind, data)
        if kind in _STATUS:
            self._write(_STATUS[kind], data)
        return False

    def _trace(self, kind: str, data: Mapping[str, Any]) -> None:
        if str(data.get("task_action")) in AT_HOME:
            return
        if kind in _FROM_HOST:
            self._answered = True
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
            said = result.get("msg") if isinstance(result, Mapping) else None
            self.unreachable_reason = _reason(said)
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
    """The verdict on a run whose process lived to its end."""
    verdict: dict[str, Any] = {
        "status": status if status in {"successful", "timeout", "canceled"} else "failed",
        "rc": rc,
        "seconds": round(seconds, 2),
        "unreachable": recorder.unreachable,
        "touched": recorder.touched,
        "result": None,
    }
    if status in {"timeout", "canceled"}:
        return verdict
    document = recorder.artifacts.get("slice_result")
    if document is None:
        missing = "unreachable" if recorder.unreachable else "result_missing"
        reason = recorder.unreachable_reason
        problem = f"{missing}: {reason}" if reason else missing
        return verdict | {"status": "failed", "problem": problem}
    if len(json.dumps(document)) > _LARGEST_RESULT:
        return verdict | {"status": "failed", "problem": "result_too_large"}
    try:
        result = contract.check_result(document)
    except ContractError as error:
        problem = f"{error.code}: {error.field}: {error.expected[:300]}"
        return verdict | {"status": "failed", "problem": problem}
    if result["ok"] != (status == "successful"):
        # Ansible died after the document, or the document did not come from its end.
        return verdict | {"status": "failed", "problem": "result_contradicts_run"}
    return verdict | {"result": result}


def _printable(name: object) -> str:
    text = name if isinstance(name, str) else ""
    return "".join(letter for letter in text if letter.isprintable())[:_LONGEST_NAME]


def _reason(said: object) -> str:
    """What SSH said, on one line."""
    text = " ".join(said.split()) if isinstance(said, str) else ""
    return "".join(letter for letter in text if letter.isprintable())[-_LONGEST_REASON:]


def _code(result: object) -> str:
    """The stable code of a refusal; no other word of a failure goes into the progress."""
    error = result.get("error") if isinstance(result, Mapping) else None
    code = error.get("code") if isinstance(error, Mapping) else None
    return code if isinstance(code, str) and _CODE.fullmatch(code) else ""

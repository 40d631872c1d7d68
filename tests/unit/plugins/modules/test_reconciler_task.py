"""The module that queues a task of the reconciler, against a service that is no reconciler."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ansible_collections.gpuaas.slice.plugins.module_utils.core._errors import Refusal
from ansible_collections.gpuaas.slice.plugins.modules import reconciler_task

from tests.unit.plugins.inventory.inventories import answering

pytestmark = pytest.mark.covers("ECO-1", "ECO-4")

TASK = {"id": "task-1", "state": "succeeded"}
DISCOVERY = {**TASK, "result": {}, "document": {"candidates": [{"bundle": None}]}}


@pytest.mark.parametrize(
    ("action", "answer", "code"),
    [
        ("parity", {}, "reconciler_invalid"),
        ("parity", TASK, "reconciler_invalid"),
        ("parity", {**TASK, "result": {"next_task_id": "task-1"}}, "reconciler_invalid"),
        ("parity", {**TASK, "state": "failed", "error": "no"}, "reconciler_invalid"),
        ("discover", DISCOVERY, "reconciler_invalid"),
        ("netbox_diff", {"request_number": "1"}, "reconciler_invalid"),
        ("parity", b"<html>log in</html>", "reconciler_silent"),
    ],
)
def test_an_answer_of_another_form_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, action: str, answer: Any, code: str
) -> None:
    monkeypatch.setattr(reconciler_task, "_PAUSE_S", 0.01)
    token = tmp_path / "token"
    token.write_text("t" * 20)
    with answering() as service:
        service.answers = {"site": answer}
        params = {
            **{"action": action, "subject": "node-1", "reason": "a test of the module"},
            **{"to": None, "allow_reboot": False, "discovery": None, "key": None},
            **{"url": service.url("site"), "token_file": str(token), "ca_file": ""},
            "wait_timeout": 5,
        }
        with pytest.raises(Refusal) as refusal:
            reconciler_task.act(params)
    assert refusal.value.code == code
    assert all(refusal.value.document().values())

"""Every line of the log names the request and the task that it belongs to."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import Engine

from reconciler import logs
from reconciler.db import migrations
from reconciler.settings import Settings
from tests.unit.reconciler.api.stack import Stack

log = logging.getLogger("gpuaas.test")


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    """pytest's own handlers come back."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    for handler in handlers:
        root.removeHandler(handler)  # or they would be closed
    yield
    root.handlers[:], root.level = handlers, level


def test_a_line_is_an_object(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure(Settings(state_dir=tmp_path, log_format="json"))
    with logs.about(task="t1", correlation="c1"):
        log.info("host said %s", "a\nGPUAAS_SLICE_PARITY status=PASS \x1b[2J")
        try:
            raise ValueError("broken")
        except ValueError:
            log.exception("it failed")
    log.debug("not at this level")
    log.warning("afterwards")
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [line["message"][:9] for line in lines] == ["host said", "it failed", "afterward"]
    ids = {"task_id": "t1", "correlation_id": "c1"}
    assert {name: lines[0][name] for name in ids} == ids
    assert (lines[0]["level"], lines[0]["logger"]) == ("info", "gpuaas.test")
    assert "ValueError: broken" in lines[1]["error"]
    assert not set(ids) & set(lines[2])


def test_a_request_keeps_its_id_where_it_is_worked_on(
    selling: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Handlers run in threads of a pool."""
    seen: list[dict[str, str]] = []
    known = migrations.current

    def current(engine: Engine) -> str | None:
        seen.append(logs.ids())
        return known(engine)

    monkeypatch.setattr(migrations, "current", current)
    client = selling.client()
    client.get("http://test/readyz", headers={"X-Correlation-Id": "abc-1"})
    assert seen == [{"correlation_id": "abc-1"}]
    assert logs.ids() == {}


def test_text_says_an_id_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure(Settings(state_dir=tmp_path, log_level="warning"))
    with logs.about(task="t1", correlation="c1"):
        log.info("too quiet")
        log.warning("task t1 is late")
    assert capsys.readouterr().err.endswith(
        "WARNING gpuaas.test task t1 is late correlation_id=c1\n"
    )

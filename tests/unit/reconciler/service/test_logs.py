"""Every line of the log names the request and the task that it belongs to."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from sqlalchemy import Engine

from reconciler import logs
from reconciler.db import migrations
from reconciler.settings import Settings
from tests.unit.reconciler.api.stack import Stack
from tests.unit.reconciler.service.service import serving, until

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
    original = migrations.current

    def current(engine: Engine) -> str | None:
        seen.append(logs.ids())
        return original(engine)

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


FORGED = "2026-11-22 12:00:00,000 INFO gpuaas.leader leading, epoch 666"
# Line ends of every kind, a terminal's escape sequence in both forms, and a change of direction.
HOSTILE = [
    f"{end}{FORGED}" for end in "\n\r\v\f\x1c\x85\u2028\u2029\x1b\x9b\x00\x7f\u202e\u2066\xa0"
]
_EVENT = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} [A-Z]+ [a-z.]+ ")


def test_no_caller_of_a_running_service_forges_a_line(selling: Stack) -> None:
    with serving(selling.settings.state_dir) as service:
        service.start()
        until(service.ready)
        with httpx.Client(base_url=service.url, trust_env=False, timeout=60) as client:
            for text in HOSTILE:
                client.get("/" + "".join(f"%{byte:02x}" for byte in f"x{text}".encode()))
                client.get("/x", headers={"X-Correlation-Id": text[1:]})
            client.get("/last" + "%0a" * 20_000)
        until(lambda: "/last" in service.log())
        log = service.log()
    assert log.count("epoch 666") >= len(HOSTILE)
    for line in log.removesuffix("\n").split("\n"):
        assert line.isprintable() and _EVENT.match(line), line
        assert "epoch 666" not in line or " gpuaas.api.request GET " in line


def test_an_error_with_a_hosts_words_is_one_event(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    logs.configure(Settings(state_dir=tmp_path))
    for text in [*HOSTILE, "\ud800" + FORGED]:
        try:
            raise ValueError(text)
        except ValueError:
            log.exception("host said %s", text)
    log.info("a" * 10_000_000)
    lines = capsys.readouterr().err.removesuffix("\n").split("\n")
    assert all(line.isprintable() for line in lines)
    events = [line for line in lines if not line.startswith("  ")]
    assert len(events) == len(HOSTILE) + 2
    assert all(" gpuaas.test " in line for line in events)
    assert "  ValueError: " in "\n".join(lines)
    assert len(lines[-1]) < 20_000 and "more characters" in lines[-1]


@pytest.mark.parametrize("form", ["text", "json"])
def test_an_event_has_a_largest_length(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], form: str
) -> None:
    logs.configure(Settings.model_validate({"state_dir": tmp_path, "log_format": form}))
    try:
        raise ValueError("a\n" * 1_000_000)
    except ValueError:
        log.exception("host said %s", "b" * 1_000_000)
    written = capsys.readouterr().err
    assert len(written) < 200_000 and written.count("more characters") == 2

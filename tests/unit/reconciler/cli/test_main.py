"""Shared options, errors, and what a command must not load."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import lab.cli
from reconciler.cli.main import hoist
from reconciler.cli.show import clean
from tests.unit.reconciler.api.world import World
from tests.unit.reconciler.cli.conftest import Gpuaas


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("nodes list", "nodes list"),
        ("nodes list --output json", "--output json nodes list"),
        ("nodes --api=http://x list", "--api=http://x nodes list"),
        ("lab ssh -- ls --output json", "lab ssh -- ls --output json"),
        ("--output json lab up", "--output json lab up"),
        ("nodes show -- --output", "nodes show -- --output"),
        ("nodes list --output", "--output nodes list"),
    ],
)
def test_shared_options_stand_anywhere(line: str, told: str) -> None:
    assert hoist(line.split()) == told.split()


def test_a_command_loads_only_what_it_needs() -> None:
    code = "import sys, reconciler.cli.main; print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    heavy = {"httpx", "sqlalchemy", "fastapi", "pydantic", "uvicorn", "ansible_runner", "lab"}
    assert heavy.isdisjoint(loaded)


def test_an_error_says_what_to_do(new: World, gpuaas: Gpuaas) -> None:
    gpuaas.at(new)("nodes", "show", "none")
    assert (gpuaas.status, gpuaas.out) == (1, "")
    for word in ("node_not_found", "expected", "found", "what to do"):
        assert word in gpuaas.err
    gpuaas("nodes", "show", "none", "--output", "json")
    assert json.loads(gpuaas.err)["code"] == "node_not_found"


def test_no_token_no_service(tmp_path: Path, gpuaas: Gpuaas) -> None:
    missing = tmp_path / "missing"
    gpuaas("nodes", "list", "--token-file", str(missing))
    assert (gpuaas.status, "token_file_unreadable" in gpuaas.err) == (1, True)
    missing.write_text("x")
    gpuaas("nodes", "list", "--token-file", str(missing), "--api", "http://127.0.0.1:9")
    assert (gpuaas.status, "reconciler_unreachable" in gpuaas.err) == (1, True)


def test_a_wrong_command_line_is_exit_2(gpuaas: Gpuaas) -> None:
    gpuaas("nodes", "explode")
    assert gpuaas.status == 2


def test_hosts_cannot_write_to_the_terminal() -> None:
    assert clean("a\x1b[2Jb\r\x07\nc") == "a\N{REPLACEMENT CHARACTER}[2Jb" + (
        "\N{REPLACEMENT CHARACTER}" * 2 + "\nc"
    )


def test_lab_is_handed_on(monkeypatch: pytest.MonkeyPatch, gpuaas: Gpuaas) -> None:
    seen: list[object] = []
    monkeypatch.setattr(lab.cli, "app", lambda args, prog_name: seen.append((args, prog_name)))
    gpuaas("lab", "up", "--fresh", "--help")
    assert seen == [(["up", "--fresh", "--help"], "gpuaas lab")]

"""`gpuaas apps` against a real service."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.unit.reconciler.api.stack import KEY, Stack
from tests.unit.reconciler.api.test_launches import activate, launch
from tests.unit.reconciler.cli.conftest import Gpuaas

pytestmark = pytest.mark.covers("APP-4")
AT = ("--project", "demo")


@pytest.fixture
def key(tmp_path: Path) -> Path:
    file = tmp_path / "controller.pub"
    file.write_text(f"{KEY}\n")
    return file


def test_the_life_of_an_instance(selling: Stack, gpuaas: Gpuaas, key: Path) -> None:
    mine = launch(selling).json()["id"]
    activate(selling, mine)
    gpuaas.at(selling, "member")
    words = ("apps", "create", "slurm", "--controller", mine, "--key", str(key), *AT)
    made = json.loads(gpuaas(*words, "--output", "json"))
    assert (gpuaas.status, made["status"]) == (0, "deploying"), gpuaas.err
    assert made["id"] in gpuaas("apps", "list", *AT)
    assert "member_failed" in gpuaas("apps", "show", made["id"], *AT)
    shown = gpuaas("apps", "members", made["id"], *AT)
    assert "controller" in shown and "gate.example" in shown
    assert "guest_unreachable_by_design" in gpuaas("apps", "operations", made["id"], *AT)
    again = json.loads(gpuaas("apps", "reconcile-ssh", made["id"], *AT, "--output", "json"))
    assert [row["kind"] for row in again] == ["bootstrap_ssh_reconcile"]
    assert "stopped" in gpuaas("apps", "stop", made["id"], "--reason", "done", *AT)
    assert gpuaas.status == 0


def test_a_key_that_is_not_there(selling: Stack, gpuaas: Gpuaas, tmp_path: Path) -> None:
    none = str(tmp_path / "none")
    gpuaas.at(selling, "member")("apps", "create", "s", "--controller", "x", "--key", none, *AT)
    assert (gpuaas.status, "file_invalid" in gpuaas.err) == (1, True)

"""What tenants type, and what operators type when it went wrong."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from reconciler import recovery
from reconciler.store import outcomes
from reconciler.store.engine import transaction
from tests.unit.reconciler.api.world import ACT, KEY, NODE, World
from tests.unit.reconciler.cli.conftest import Gpuaas


@pytest.fixture
def launched(selling: World, gpuaas: Gpuaas, tmp_path: Path) -> dict[str, Any]:
    """An image, and an allocation from it whose run has not begun."""
    image, key = tmp_path / "image.raw", tmp_path / "key.pub"
    image.write_bytes(b"raw")
    key.write_text(KEY + "\n")
    gpuaas.at(selling)("images", "add", str(image), "--name", "base", "--version", "2")
    assert gpuaas.status == 0, gpuaas.err
    (made,) = [
        row
        for row in json.loads(gpuaas("images", "list", "--output", "json"))
        if row["name"] == "base"
    ]
    assert made["digest"] == f"sha256:{hashlib.sha256(b'raw').hexdigest()}"
    assert made["url"] == image.as_uri()
    gpuaas("images", "cache", NODE, made["id"], "--no-wait")
    assert gpuaas.status == 0, gpuaas.err
    words = ("launch", "--project", "demo", "--image", "base", "--key", str(key), "--no-wait")
    found: dict[str, Any] = json.loads(gpuaas.at(selling, "member")(*words, "--output", "json"))
    return found


def test_launch_and_release(selling: World, gpuaas: Gpuaas, launched: dict[str, Any]) -> None:
    assert (launched["state"], launched["capacity_shape"]) == ("requested", "gpu_slice")
    assert launched["id"] in gpuaas("allocations", "--project", "demo")
    assert launched["id"] in gpuaas.at(selling)("allocations")
    gpuaas("release", launched["id"], "--project", "demo", "--output", "json")
    assert json.loads(gpuaas.out)["state"] == "released", "it had not begun"


def test_a_failed_launch_is_an_error(
    selling: World, gpuaas: Gpuaas, launched: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.sleep", lambda _seconds: None)
    error = {"code": "readiness_failed"}
    with transaction(selling.engine) as conn:
        outcomes.provision_started(conn, launched["id"], ACT)
        outcomes.provision_failed(
            conn, launched["id"], ACT, step="ready", error=error, untouched=None
        )
    gpuaas("release", launched["id"], "--project", "demo")
    assert (gpuaas.status, "allocation_not_releasable" in gpuaas.err) == (1, True)


def test_launch_without_a_key(selling: World, gpuaas: Gpuaas, tmp_path: Path) -> None:
    words = ("launch", "--project", "demo", "--image", "x", "--key", str(tmp_path / "none"))
    gpuaas.at(selling, "member")(*words)
    assert (gpuaas.status, "file_invalid" in gpuaas.err) == (1, True)


def test_recover(selling: World, gpuaas: Gpuaas, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def recover(_client: object, allocation: str, reason: str, on_step: Any) -> dict[str, Any]:
        seen.append((allocation, reason))
        on_step("inventory", {})
        return {"inventory": {"s": "available"}}

    monkeypatch.setattr(recovery, "recover", recover)
    gpuaas.at(selling)("recover", "a-1", "--reason", "stuck")
    assert seen == [("a-1", "stuck")]
    assert (gpuaas.status, "available" in gpuaas.out) == (0, True)


@pytest.mark.covers("CTRL-8")
def test_tasks_and_audit(selling: World, gpuaas: Gpuaas, launched: dict[str, Any]) -> None:
    gpuaas.at(selling)("tasks", "list", "--allocation", launched["id"], "--output", "json")
    (task,) = json.loads(gpuaas.out)
    assert task["kind"] == "slice.vm_provision"
    assert "slice.vm_provision" in gpuaas("tasks", "show", task["id"])
    gpuaas("tasks", "cancel", task["id"], "--reason", "no")
    assert "canceled" in gpuaas.out
    gpuaas("tasks", "watch", task["id"])
    assert (gpuaas.status, "error: canceled" in gpuaas.err) == (1, True)
    assert "admin.task.canceled" in gpuaas("audit", "--subject", task["id"])


def test_projects(new: World, gpuaas: Gpuaas) -> None:
    gpuaas.at(new)("projects", "add", "fresh", "--id", "p-1")
    assert gpuaas.status == 0, gpuaas.err
    assert "p-1" in gpuaas("projects", "list")

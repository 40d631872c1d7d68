"""What tenants type, and what operators type when it went wrong."""

from __future__ import annotations

import hashlib
import io
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


@pytest.mark.covers("CTRL-7")
def test_one_allocation(
    selling: World, gpuaas: Gpuaas, launched: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    key = launched["id"]
    assert NODE in gpuaas.at(selling)("allocation", "show", key)
    mine = gpuaas.at(selling, "member")("allocation", "show", key, "--project", "demo")
    assert (key in mine, NODE in mine) == (True, False)
    for state, count in (("requested", 1), ("active", 0)):
        words = ("allocations", "--state", state, "--output", "json")
        assert len(json.loads(gpuaas.at(selling)(*words))) == count
        assert len(json.loads(gpuaas(*words, "--project", "demo"))) == count
    gpuaas("allocation", "force-release", key, "--reason", "gone", "--yes")
    assert (gpuaas.status, "error: " in gpuaas.err) == (1, True), "its host answers"
    monkeypatch.setattr("sys.stdin", io.StringIO("n\n"))
    gpuaas("allocation", "force-release", key, "--reason", "gone")
    assert (gpuaas.status, "Go on?" in gpuaas.err) == (1, True)


def test_a_launch_says_where_and_from_what(
    selling: World, gpuaas: Gpuaas, launched: dict[str, Any], tmp_path: Path
) -> None:
    words = ("launch", "--project", "demo", "--image", "base", "--key", str(tmp_path / "key.pub"))
    gpuaas.at(selling, "member")(*words, "--pool", "elsewhere", "--no-wait", "--output", "json")
    assert json.loads(gpuaas.err)["explanation"]["reasons"]["other_pool"]
    gpuaas(*words, "--image-version", "9", "--no-wait", "--output", "json")
    assert json.loads(gpuaas.err)["code"] == "image_not_found"
    gpuaas(*words, "--image-version", "2", "--pool", "default", "--no-wait")
    assert gpuaas.status == 0, gpuaas.err


def test_a_project_by_its_name(
    selling: World, gpuaas: Gpuaas, launched: dict[str, Any], tmp_path: Path
) -> None:
    made = gpuaas.at(selling)("projects", "add", "team-a", "--output", "json")
    key = json.loads(made)["id"]
    assert key != "team-a"
    words = ("launch", "--image", "base", "--key", str(tmp_path / "key.pub"), "--no-wait")
    gpuaas(*words, "--project", "team-a", "--output", "json")
    assert gpuaas.status == 0, gpuaas.err
    assert json.loads(gpuaas.out)["project_id"] == key
    assert len(json.loads(gpuaas("allocations", "--project", "team-a", "--output", "json"))) == 1
    gpuaas("usage", "--project", "team-a")
    assert gpuaas.status == 0, gpuaas.err
    gpuaas("allocations", "--project", "nobody")
    assert (gpuaas.status, "project_not_found" in gpuaas.err) == (1, True)
    # A name that is another's id means that other.
    gpuaas("projects", "add", "other-name", "--id", "team-b")
    gpuaas("projects", "add", "team-b", "--id", "p-9")
    gpuaas(*words, "--project", "team-b", "--output", "json")
    assert "no_capacity" in gpuaas.err or json.loads(gpuaas.out)["project_id"] == "team-b"


@pytest.mark.covers("CTRL-10")
def test_a_members_projects(new: World, gpuaas: Gpuaas) -> None:
    found = json.loads(gpuaas.at(new, "member")("projects", "list", "--output", "json"))
    assert [row["name"] for row in found] == ["demo"]


def test_projects(new: World, gpuaas: Gpuaas) -> None:
    gpuaas.at(new)("projects", "add", "fresh", "--id", "p-1")
    assert gpuaas.status == 0, gpuaas.err
    assert "p-1" in gpuaas("projects", "list")

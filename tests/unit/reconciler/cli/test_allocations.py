"""Commands of tenants, and commands of operators after a failure."""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from reconciler import client
from reconciler.db.engine import transaction
from reconciler.lifecycle import power, slices
from reconciler.model.states import TaskKind, TaskState
from reconciler.records import queue
from tests.unit.reconciler.api.stack import ACT, KEY, NODE, Stack
from tests.unit.reconciler.api.test_launches import activate, launch
from tests.unit.reconciler.cli.conftest import Gpuaas


@pytest.fixture
def launched(selling: Stack, gpuaas: Gpuaas, tmp_path: Path) -> dict[str, Any]:
    """An image, and an allocation from it whose run has not begun."""
    image, key = selling.settings.images_dir / "image.raw", tmp_path / "key.pub"
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
    (offered,) = [
        row
        for row in json.loads(gpuaas.at(selling, "member")("images", "list", "--output", "json"))
        if row["name"] == "base"
    ]
    assert offered.pop("refusal") is None
    assert offered.items() < made.items() and "url" not in offered
    words = ("launch", "--project", "demo", "--image", "base", "--key", str(key), "--no-wait")
    document: dict[str, Any] = json.loads(gpuaas.at(selling, "member")(*words, "--output", "json"))
    return document


def test_a_launch_that_is_cut_off_is_repeated_under_its_key(
    selling: Stack, gpuaas: Gpuaas, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the tenant launches a second slice and pays for both."""
    key = tmp_path / "key.pub"
    key.write_text(KEY + "\n")
    gpuaas.at(selling, "member")
    http = selling.client("member", base="/")
    send: Any = http.request
    faults: list[httpx.TransportError] = []

    def request(method: str, *words: Any, **options: Any) -> Any:
        answer = send(method, *words, **options)
        if method == "POST" and faults:
            raise faults.pop(0)
        return answer

    monkeypatch.setattr(http, "request", request)
    monkeypatch.setattr("reconciler.client.httpx.Client", lambda **_options: http)
    monkeypatch.setattr("reconciler.client.time.sleep", lambda _seconds: None)
    words = ("launch", "--project", "demo", "--image", "ubuntu", "--key", str(key), "--no-wait")
    faults += [httpx.ReadError("restarted"), httpx.ConnectError("not yet")]
    made = json.loads(gpuaas(*words, "--output", "json"))
    (only,) = selling.client("member").get("projects/demo/allocations").json()["items"]
    assert (gpuaas.status, only["id"]) == (0, made["id"])
    # Nothing was sent, so there is nothing to wait for.
    faults[:] = [httpx.ConnectError("refused"), httpx.ConnectError("refused")]
    gpuaas(*words)
    assert (gpuaas.status, "look whether" in gpuaas.err, len(faults)) == (1, False, 1)
    monkeypatch.setattr(client, "_REPEAT_S", -1.0)
    faults[:] = [httpx.ReadError("restarted"), httpx.ConnectError("for good")]
    gpuaas(*words)
    assert (gpuaas.status, "look whether it was done" in gpuaas.err, faults) == (1, True, [])


def test_a_launch_names_an_offer_of_the_catalogue(
    selling: Stack, gpuaas: Gpuaas, tmp_path: Path
) -> None:
    key = tmp_path / "key.pub"
    key.write_text(KEY + "\n")
    gpuaas.at(selling, "member")
    offers = json.loads(gpuaas("catalog", "--output", "json"))["skus"]
    assert offers[0]["name"] in gpuaas("catalog") and "REGION" in gpuaas.out.upper()
    (line,) = [line for line in gpuaas.out.splitlines() if line.startswith("lab-edu-slice ")]
    assert line.split()[-1] == "2", "free now"
    words = ("launch", "--project", "demo", "--image", "ubuntu", "--key", str(key), "--no-wait")
    gpuaas(*words, "--sku", "unknown")
    assert "sku_unknown" in gpuaas.err
    made = json.loads(gpuaas(*words, "--sku", "lab-edu-slice", "--output", "json"))
    assert made["sku"] == "lab-edu-slice"


@pytest.mark.usefixtures("launched")
def test_an_image_is_cached_by_what_people_call_it(gpuaas: Gpuaas, selling: Stack) -> None:
    run = gpuaas.at(selling)
    tasks = set()
    for image in ("base", "base:2"):
        run("images", "cache", NODE, image, "--no-wait", "--output", "json")
        assert gpuaas.status == 0, gpuaas.err
        tasks.add(json.loads(gpuaas.out)["id"])
    assert len(tasks) == 1
    run("images", "cache", NODE, "base:3", "--no-wait")
    assert (gpuaas.status, "image_not_found" in gpuaas.err) == (1, True)
    assert "gpuaas images list" in gpuaas.err


def test_launch_and_release(selling: Stack, gpuaas: Gpuaas, launched: dict[str, Any]) -> None:
    assert (launched["state"], launched["capacity_shape"]) == ("requested", "gpu_slice")
    assert launched["id"] in gpuaas("allocations", "--project", "demo")
    assert launched["id"] in gpuaas.at(selling)("allocations")
    gpuaas("release", launched["id"], "--project", "demo", "--output", "json")
    assert json.loads(gpuaas.out)["state"] == "released", "it had not begun"


class Terminal(io.StringIO):
    """Standard input of a person at a terminal."""

    def isatty(self) -> bool:
        return True


def test_a_person_confirms_a_release(
    selling: Stack, gpuaas: Gpuaas, launched: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The data on the disks is lost for good. Programs are not asked."""
    monkeypatch.setattr("sys.stdin", Terminal("n\n"))
    gpuaas.at(selling, "member")("release", "slice")
    assert (gpuaas.status, f"slice ({launched['id']}) is lost. Go on?" in gpuaas.err) == (1, True)
    assert launched["id"] in gpuaas("allocations", "--state", "requested")
    gpuaas("release", launched["id"], "--yes")
    assert (gpuaas.status, "released" in gpuaas.out) == (0, True), gpuaas.err


def test_a_machine_is_named_by_its_host_name(
    selling: Stack,
    gpuaas: Gpuaas,
    launched: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def name(name: str) -> str:
        gpuaas.at(selling, "member")("allocation", "show", name, "--project", "demo", "-o", "json")
        return str(json.loads(gpuaas.err)["code"] if gpuaas.err else json.loads(gpuaas.out)["id"])

    assert name("slice") == launched["id"]
    assert name("slice-2") == "allocation_not_found"
    gpuaas("launch", "--image", "base", "--key", str(tmp_path / "key.pub"), "--no-wait")
    assert (gpuaas.status, name("slice")) == (0, "allocation_ambiguous")
    assert launched["id"] in gpuaas.err
    monkeypatch.setattr("sys.stdin", None)  # as after <&-
    gpuaas("release", launched["id"], "--no-wait")
    assert gpuaas.status == 0, gpuaas.err
    second = name("slice")
    assert second not in (launched["id"], "allocation_ambiguous"), "what has ended is gone"
    items, lists = client.Client.items, 0

    def go_on(self: client.Client, path: str, **query: Any) -> Iterator[Any]:
        nonlocal lists
        yield from items(self, path, **query)
        lists += "state" in query
        if lists == 1:
            lists += 1
            activate(selling, second)

    monkeypatch.setattr(client.Client, "items", go_on)
    assert name("slice") == second, "it became active between two requests"
    run = gpuaas.at(selling)
    assert json.loads(run("allocation", "show", "slice", "-o", "json"))["claims"], "for admins too"
    run("allocation", "show", "slice-2")
    assert (gpuaas.status, "allocation_not_found" in gpuaas.err) == (1, True)


def test_a_wait_ends_when_nothing_comes_any_more(
    selling: Stack, gpuaas: Gpuaas, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another member gives the machine back; a person interrupts the command."""
    key = tmp_path / "key.pub"
    key.write_text(KEY + "\n")
    member = selling.client("member")

    def give_back(_seconds: float) -> None:
        (mine,) = member.get("projects/demo/allocations?state=requested").json()["items"]
        member.post(f"projects/demo/allocations/{mine['id']}/release")

    def interrupt(_seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("time.sleep", give_back)
    words = ("launch", "--image", "ubuntu", "--key", str(key))
    gpuaas.at(selling, "member")(*words)
    assert (gpuaas.status, "error: allocation_released" in gpuaas.err) == (1, True)
    monkeypatch.setattr("time.sleep", interrupt)
    gpuaas(*words)
    (mine,) = member.get("projects/demo/allocations?state=requested").json()["items"]
    assert gpuaas.status == 130
    assert f"allocation {mine['id']} goes on without this command; `gpuaas alloc" in gpuaas.err


@pytest.mark.parametrize("terminal", [True, False])
def test_the_steps_of_a_launch_are_shown_at_a_terminal(
    selling: Stack, gpuaas: Gpuaas, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, terminal: bool
) -> None:
    key = tmp_path / "key.pub"
    key.write_text(KEY + "\n")
    steps = ["image_clone", "boot", "boot"]
    tasks: list[Any] = []

    def work(_seconds: float) -> None:
        begins = not tasks
        if begins:
            tasks.append(selling.lease())
        (task,) = tasks
        with transaction(selling.engine) as conn:
            if begins:
                slices.provision_started(conn, task.allocation_id, ACT)
                queue.started(conn, task.id, task.lease_token, run_id="r", run_directory="/none")
            if steps:
                queue.progress(conn, task.id, task.lease_token, {"step": steps.pop(0)})
            else:
                slices.provision_succeeded(conn, task.allocation_id, ACT, connection={})

    monkeypatch.setattr("time.sleep", work)
    monkeypatch.setattr("sys.stderr.isatty", lambda: terminal)
    gpuaas.at(selling, "member")("launch", "--image", "ubuntu", "--key", str(key))
    assert gpuaas.status == 0, gpuaas.err
    shown = [line.strip() for line in gpuaas.err.splitlines() if line.startswith("  ")]
    assert shown == (["image clone", "boot"] if terminal else [])


@pytest.mark.usefixtures("launched")
def test_a_failed_launch_is_an_error(
    selling: Stack, gpuaas: Gpuaas, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = str(tmp_path / "key.pub")
    words = ("launch", "--image", "base", "--key", key, "--idempotency-key", "k-1")
    mine = json.loads(gpuaas(*words, "--no-wait", "-o", "json"))["id"]

    def fail(_seconds: float) -> None:
        error = {"code": "readiness_failed"}
        with transaction(selling.engine) as conn:
            slices.provision_started(conn, mine, ACT)
            slices.provision_failed(conn, mine, ACT, step="ready", error=error, untouched=None)

    monkeypatch.setattr("time.sleep", fail)
    gpuaas(*words)
    assert (gpuaas.status, "error: readiness_failed" in gpuaas.err) == (1, True)
    assert "did not answer SSH" in gpuaas.err
    gpuaas("release", mine, "--project", "demo")
    assert (gpuaas.status, "allocation_not_releasable" in gpuaas.err) == (1, True)
    assert "it has ended; launch again" in gpuaas.err and "wait until" not in gpuaas.err


def test_power(
    selling: Stack, gpuaas: Gpuaas, launched: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    key = launched["id"]
    selling.lease()  # the task of the image's cache
    activate(selling, key)
    words = (key, "--project", "demo", "--output", "json")
    assert json.loads(gpuaas("stop", *words, "--no-wait"))["power_action"] == "stop"

    def fail(_seconds: float) -> None:
        with transaction(selling.engine) as conn:
            (task,) = queue.every(conn, allocation_id=key, kind=TaskKind.SLICE_VM_POWER)
            power.failed(conn, task, {"code": "domain_not_stopped"})

    monkeypatch.setattr("time.sleep", fail)
    gpuaas("stop", *words)
    assert (gpuaas.status, json.loads(gpuaas.err)["code"]) == (1, "domain_not_stopped")


def test_launch_without_a_key(selling: Stack, gpuaas: Gpuaas, tmp_path: Path) -> None:
    words = ("launch", "--project", "demo", "--image", "x", "--key", str(tmp_path / "none"))
    gpuaas.at(selling, "member")(*words)
    assert (gpuaas.status, "file_invalid" in gpuaas.err) == (1, True)


@pytest.mark.covers("SLICE-3")
def test_a_launch_takes_the_tenants_own_cloud_config(
    selling: Stack, gpuaas: Gpuaas, launched: dict[str, Any], tmp_path: Path
) -> None:
    file = tmp_path / "user-data"
    words = ("launch", "--project", "demo", "--image", "base", "--key", str(tmp_path / "key.pub"))
    words = (*words, "--user-data", str(file), "--no-wait", "-o", "json")
    gpuaas.at(selling, "member")
    for text, code in (
        ("#!/bin/sh\nid\n", "user_data_invalid"),
        (f"#cloud-config\n# {'x' * 16384}\n", "user_data_too_large"),
    ):
        file.write_text(text)
        gpuaas(*words)
        assert (gpuaas.status, json.loads(gpuaas.err)["code"]) == (1, code)
    file.write_text("#cloud-config\npackages: [htop]\n")
    id = json.loads(gpuaas(*words))["id"]
    with transaction(selling.engine) as conn:
        (task,) = (task for task in queue.every(conn) if task.allocation_id == id)
    assert "htop" in json.dumps(task.parameters)


@pytest.mark.covers("CTRL-8")
def test_tasks_and_audit(selling: Stack, gpuaas: Gpuaas, launched: dict[str, Any]) -> None:
    gpuaas.at(selling)("tasks", "list", "--allocation", launched["id"], "--output", "json")
    (task,) = json.loads(gpuaas.out)
    assert task["kind"] == "slice.vm_provision"
    assert "slice.vm_provision" in gpuaas("tasks", "show", task["id"])
    gpuaas("tasks", "cancel", task["id"], "--reason", "no")
    assert "canceled" in gpuaas.out and "nothing to cancel" not in gpuaas.err
    gpuaas("tasks", "watch", task["id"])
    assert (gpuaas.status, "error: canceled" in gpuaas.err) == (1, True)
    assert "admin.task.canceled" in gpuaas("audit", "--subject", task["id"])


@pytest.mark.covers("CTRL-7")
def test_one_allocation(
    selling: Stack, gpuaas: Gpuaas, launched: dict[str, Any], monkeypatch: pytest.MonkeyPatch
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
    nobody = "confirmation_missing"
    for given, code in ((io.StringIO("n\n"), "Aborted"), (io.StringIO(""), nobody), (None, nobody)):
        monkeypatch.setattr("sys.stdin", given)
        gpuaas("allocation", "force-release", key, "--reason", "gone")
        assert (gpuaas.status, code in gpuaas.err) == (1, True)
        assert ("Go on?" in gpuaas.err) is (given is not None)


def test_a_launch_says_where_and_from_what(
    selling: Stack, gpuaas: Gpuaas, launched: dict[str, Any], tmp_path: Path
) -> None:
    words = ("launch", "--project", "demo", "--image", "base", "--key", str(tmp_path / "key.pub"))
    gpuaas.at(selling, "member")(*words, "--pool", "elsewhere", "--no-wait", "--output", "json")
    assert json.loads(gpuaas.err)["explanation"]["reasons"]["other_pool"]
    gpuaas(*words, "--pool", "elsewhere", "--no-wait")
    assert "not free: " in gpuaas.err and " other_pool\n" in gpuaas.err
    assert "explain" not in gpuaas.err, "that is for admins"
    gpuaas.at(selling)(*words, "--pool", "elsewhere", "--no-wait")
    assert "`gpuaas explain --gpus 1` shows it by node" in gpuaas.err
    gpuaas.at(selling, "member")
    gpuaas(*words, "--image-version", "9", "--no-wait", "--output", "json")
    assert json.loads(gpuaas.err)["code"] == "image_not_found"
    gpuaas(*words, "--image-version", "2", "--pool", "default", "--no-wait")
    assert gpuaas.status == 0, gpuaas.err


def test_a_launch_is_repeated_by_its_key_and_names_a_version(
    selling: Stack, gpuaas: Gpuaas, launched: dict[str, Any], tmp_path: Path
) -> None:
    rest = ("--key", str(tmp_path / "key.pub"), "--no-wait", "-o", "json")
    gpuaas.at(selling, "member")("launch", "--image", "base:9", *rest)
    assert json.loads(gpuaas.err)["code"] == "image_not_found"
    gpuaas("launch", "--image", "base:2", "--image-version", "2", *rest)
    assert gpuaas.status == 2
    for key in ("", "a b", "a\n", "ä", "a" * 256):
        gpuaas("launch", "--image", "base:2", "--idempotency-key", key, *rest)
        assert json.loads(gpuaas.err)["code"] == "idempotency_key_invalid", "no launch without it"
    words = ("launch", "--image", "base:2", "--idempotency-key", "pipeline-7", *rest)
    ids = {json.loads(gpuaas(*words))["id"] for _ in range(2)}
    assert len(ids) == 1 and launched["id"] not in ids


def test_a_project_by_its_name(
    selling: Stack, gpuaas: Gpuaas, launched: dict[str, Any], tmp_path: Path
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
def test_a_members_projects(new: Stack, gpuaas: Gpuaas) -> None:
    document = json.loads(gpuaas.at(new, "member")("projects", "list", "--output", "json"))
    assert [row["name"] for row in document] == ["demo"]


def test_projects(new: Stack, gpuaas: Gpuaas) -> None:
    gpuaas.at(new)("projects", "add", "fresh", "--id", "p-1")
    assert gpuaas.status == 0, gpuaas.err
    assert "p-1" in gpuaas("projects", "list")


@pytest.mark.covers("CTRL-10")
def test_a_member_need_not_name_its_only_project(selling: Stack, gpuaas: Gpuaas) -> None:
    mine = launch(selling).json()["id"]
    activate(selling, mine)
    for words in (("allocations",), ("allocation", "show", mine), ("usage",), ("usage", "--csv")):
        assert mine in gpuaas.at(selling, "member")(*words), gpuaas.err
        assert NODE not in gpuaas.out
    assert "launches_per_hour" in gpuaas("projects", "quota") and gpuaas("ssh-keys", "list")
    assert gpuaas.status == 0, gpuaas.err
    gpuaas("nodes", "list")
    assert "role_required" in gpuaas.err
    gpuaas.at(selling)("ssh-keys", "list")
    assert (gpuaas.status, "project_required" in gpuaas.err) == (1, True)
    assert "of demo, other" in gpuaas.err and "GPUAAS_PROJECT" in gpuaas.err


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("-----BEGIN OPENSSH PRIVATE KEY-----", "a private key"),
        (f"{KEY}\n{KEY}\n", "2 lines"),
        ("", "0 lines"),
    ],
)
def test_what_is_no_public_key_is_never_sent(
    tmp_path: Path, gpuaas: Gpuaas, selling: Stack, text: str, problem: str
) -> None:
    key = tmp_path / "key"
    key.write_text(text)
    words = ("launch", "--project", "demo", "--image", "base", "--key", str(key))
    gpuaas.at(selling, "member")(*words, "--output", "json")
    document = json.loads(gpuaas.err)
    assert (document["code"], document["found"]) == ("file_invalid", f"{key}: {problem}")


@pytest.mark.covers("CTRL-7")
def test_nobody_waits_for_a_release_that_has_failed(
    selling: Stack, gpuaas: Gpuaas, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = launch(selling).json()["id"]
    activate(selling, key)
    error = {"code": "wipe_failed", "found": "status 0x2"}

    def fail(_seconds: float) -> None:
        task = selling.lease()
        with transaction(selling.engine) as conn:
            queue.finish(conn, task.id, task.lease_token, TaskState.FAILED, ACT, error=error)
            slices.release_failed(conn, key, ACT, step="wipe", error=error)

    monkeypatch.setattr("time.sleep", fail)
    gpuaas.at(selling, "member")("release", key, "--project", "demo", "--output", "json")
    document = json.loads(gpuaas.err.partition("\n")[2])
    assert (gpuaas.status, document["code"]) == (1, "wipe_failed")
    assert f"gpuaas recover {key}" in document["remedy"] and "0x2" not in gpuaas.err


@pytest.mark.covers("CTRL-7")
def test_an_admin_reads_an_allocation_as_tables(
    selling: Stack, gpuaas: Gpuaas, launched: dict[str, Any]
) -> None:
    document = json.loads(
        gpuaas.at(selling)("allocation", "show", launched["id"], "--output", "json")
    )
    assert document["claims"] and document["tasks"] and document["timeline"]
    answer = gpuaas("allocation", "show", launched["id"])
    assert all(task["id"] in answer for task in document["tasks"])
    assert all(claim["nvme_identity"] in answer for claim in document["claims"])
    assert "launched by its project" in answer and '{"' not in answer

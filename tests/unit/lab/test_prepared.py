"""Prepared host of the lab tests, kept and brought back by a real reconciler and no real host."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lab import guest_image, host_image, saved, state
from lab.demo.stage import NODE, Stage
from lab.paths import saved_folder
from tests.lab import prepared

HOST = state.Lab(
    folder="",
    pid=0,
    pid_started=-1,
    ssh_port=2222,
    key="",
    known_hosts="",
    qmp="",
    userdata="",
    accel="tcg",
    qemu="11.1",
    firmware="/fw",
    gateway="127.0.0.1",
    image="/image",
)
UNDER = saved.Image("host-image", "/image", 1, 1)
IMAGE = guest_image.GuestImage("guest.raw", "guest.raw.zst", "5" * 64, 1)
DONE = {"deployed": {"b", "a"}, "transition": {"applied": []}, "bind": object()}


@pytest.fixture(autouse=True)
def images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is built, and a saved lab host consists of the files beside its disks."""
    monkeypatch.setenv("GPUAAS_LAB_SAVED", str(tmp_path / "saved"))
    # CI keeps no copy of its lab host.
    monkeypatch.delenv("GPUAAS_LAB_SAVE", raising=False)
    monkeypatch.setattr(saved, "save", _copy)
    for name in ("this_distro", "host_distro"):
        monkeypatch.setattr(prepared, name, lambda: None)
    monkeypatch.setattr(host_image, "name", lambda _distro: "host-image")
    monkeypatch.setattr(guest_image, "ensure", lambda _distro: IMAGE)


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    """A stage with a reconciler that knows a node; its lab host is a description."""
    stage = Stage(tmp_path / "stage", lab=HOST, facts={"image_id": "5"})
    stage.folder.mkdir()
    stage.open()
    body = {"id": NODE, "name": NODE, "address": "127.0.0.1", "port": 2200}
    stage.api().post("/admin/nodes", {**body, "ssh_user": "root", "profile": "lab"})
    yield stage
    stage.close()


def _copy(name: str, *, replace: bool, extras: dict[str, Path], notes: dict[str, Any]) -> None:
    folder = saved_folder() / name
    if replace:
        shutil.rmtree(folder, ignore_errors=True)
    for extra, source in extras.items():
        shutil.copytree(source, folder / extra)
    facts = {"name": name, "saved_at": "", "running": True, "image": vars(UNDER), "topology": ""}
    facts |= {"lab": vars(HOST), "notes": notes}
    (folder / saved.FACTS).write_text(json.dumps(facts))


@pytest.mark.long
def test_a_later_session_goes_on_with_the_same_reconciler(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepared, "key", lambda _firmware: "this")
    project = stage.facts["project"]
    prepared.save(stage, DONE)
    # The service goes on; later changes are not in the copy.
    stage.api().post("/admin/projects", {"name": "later"})

    proven: list[Stage] = []
    monkeypatch.setattr(prepared, "prove_again", proven.append)
    # It boots on its old port where that is free.
    monkeypatch.setattr(Stage, "boot_saved", lambda self, _name: setattr(self, "lab", HOST))
    stage.close()
    later = Stage(stage.folder)
    try:
        done = prepared.open_on(later)
        assert done == {"deployed": {"a", "b"}, "transition": {"applied": []}}
        assert proven == [later]
        assert later.facts == {"image": IMAGE, "image_id": "5", "project": project}
        names = [row["name"] for row in later.api().get("/admin/projects")["items"]]
        assert names == ["demo"]
        assert later.api().get(later.path())["port"] == HOST.ssh_port
        assert later.member.get(f"/projects/{project}/allocations")["items"] == []
    finally:
        later.close()


def test_a_host_is_saved_once_for_each_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    service = SimpleNamespace(folder=tmp_path / "reconciler", stop=int, start=int)
    service.folder.mkdir()
    idle = SimpleNamespace(get=lambda _path, **_query: {"items": [{"state": "succeeded"}]})
    facts = {"project": "5", "image_id": "5"}
    stage: Any = SimpleNamespace(service=service, firmware="uefi", facts=facts, api=lambda: idle)
    keys = iter(("first", "first", "second"))
    monkeypatch.setattr(prepared, "key", lambda _firmware: next(keys))
    copies: list[str] = []
    monkeypatch.setattr(
        saved,
        "save",
        lambda *words, **named: (copies.append(named["notes"]["key"]), _copy(*words, **named)),
    )
    for _ in range(3):
        prepared.save(stage, DONE)
    assert copies == ["first", "second"]
    monkeypatch.setattr(prepared, "key", lambda _firmware: "third")
    # Nothing that fits is saved, and no host is booted for that.
    assert prepared._loaded(stage) is None
    monkeypatch.setenv("GPUAAS_LAB_SAVE", "0")
    prepared.save(stage, DONE)
    assert copies == ["first", "second"]


def test_every_source_of_a_host_is_in_its_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepared, "REPOSITORY", tmp_path)
    files = [tmp_path / name / "file" for name in prepared.SOURCES]
    assert (tmp_path / "reconciler/db/schema/file") in files
    for file in files:
        file.parent.mkdir(parents=True)
        file.touch()
    keys = {prepared.key("bios"), prepared.key("uefi")}
    for file in files:
        file.write_text("changed")
        keys.add(prepared.key("bios"))
    assert len(keys) == 2 + len(files)

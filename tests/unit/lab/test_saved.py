"""Saved lab hosts: content of a copy, refusals, and a running host that is paused."""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lab import cache, cli, distro, host_image, rootfs, saved, state, topology
from lab.command import LabError

MIB = 1 << 20
HERE = distro.Distro("debian", "bookworm", "main", "http://mirror/", "keyring.gpg")


@pytest.fixture
def image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The host image of this checkout, built."""
    monkeypatch.setenv("GPUAAS_CACHE", str(tmp_path / "own-cache"))
    monkeypatch.setenv("GPUAAS_LAB_SAVED", str(tmp_path / "saved"))
    monkeypatch.setenv("GPUAAS_LAB_DIR", str(tmp_path / "lab"))
    monkeypatch.setattr(saved, "host_distro", lambda: HERE)
    file = tmp_path / "cache" / host_image.name(HERE) / "host.raw"
    file.parent.mkdir(parents=True)
    file.write_bytes(b"image")
    return file


def make_lab(image: Path, folder: Path, *, running: bool = False) -> state.Lab:
    """A lab host with disks that are mostly holes, as the real ones."""
    folder.mkdir(exist_ok=True)
    machine = topology.Machine(folder, Path("/fw"), "tcg", 2222)
    machine.os_disk.write_bytes(b"system")
    for disk in topology.DATA_DISKS:
        file = machine.data_disk(disk)
        file.write_bytes(disk.serial.encode())
        os.truncate(file, 64 * MIB)
    machine.firmware_variables.write_bytes(b"boot entries")
    (folder / "key").write_text("private")
    (folder / "key").chmod(0o600)
    (folder / "key.pub").write_text("public")
    (folder / "known_hosts").write_text("[127.0.0.1]:2222 ssh-ed25519 AAAA\n")
    (folder / "console.log").write_text("not part of the host's state")
    pid = os.getpid() if running else 0
    lab = state.Lab(
        folder=str(folder),
        pid=pid,
        pid_started=state.process_start(pid) or -1,
        ssh_port=2222,
        key=str(folder / "key"),
        known_hosts=str(folder / "known_hosts"),
        qmp=str(machine.qmp),
        userdata=str(machine.userdata),
        accel="tcg",
        qemu="11.1",
        firmware="/fw",
        gateway="10.0.2.2",
        image=str(image),
    )
    lab.save()
    return lab


def test_a_loaded_host_is_the_one_that_was_saved(image: Path, tmp_path: Path) -> None:
    lab = make_lab(image, tmp_path / "lab")
    extra = tmp_path / "reconciler"
    extra.mkdir()
    (extra / "token").write_text("secret")
    kept = saved.save("ready", extras={"reconciler": extra}, notes={"port": 1})
    assert not kept.running
    before = {file.name: file.read_bytes() for file in (tmp_path / "lab").iterdir()}
    for name in ("os.qcow2", "nvme0.raw", "vars.fd", "known_hosts"):
        (tmp_path / "lab" / name).write_bytes(b"changed since")
    (tmp_path / "lab" / "nvme1.raw").unlink()

    loaded = saved.load("ready")
    assert loaded == kept
    assert loaded.notes == {"port": 1}
    assert (loaded.folder / "reconciler" / "token").read_text() == "secret"
    after = {file.name: file.read_bytes() for file in (tmp_path / "lab").iterdir()}
    assert after.keys() == before.keys()
    for name in before.keys() - {"lab.json"}:
        assert after[name] == before[name], name
    assert (tmp_path / "lab" / "key").stat().st_mode & 0o777 == 0o600
    started = state.load(tmp_path / "lab")
    assert started is not None and not started.alive()
    assert (started.ssh_port, started.image) == (lab.ssh_port, lab.image)
    # Holes stay holes: five disks of this size would otherwise fill the machine's.
    assert saved.size_bytes(kept) < MIB


def test_a_host_is_loaded_into_another_folder(
    image: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_lab(image, tmp_path / "lab")
    saved.save("ready")
    monkeypatch.setenv("GPUAAS_LAB_DIR", str(tmp_path / "other"))
    saved.load("ready")
    lab = state.load(tmp_path / "other")
    assert lab is not None
    for path in (lab.folder, lab.key, lab.known_hosts, lab.qmp, lab.userdata):
        assert path.startswith(f"{tmp_path}/other")


def test_a_copy_over_another_image_is_refused(
    image: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_lab(image, tmp_path / "lab")
    saved.save("ready")
    with monkeypatch.context() as patch:
        patch.setattr(host_image, "name", lambda _distro: "host-image-new")
        with pytest.raises(LabError, match=r"this checkout's is host-image-new: .*delete ready"):
            saved.load("ready")
    # Built again from the same recipe: other bytes under the overlay.
    image.write_bytes(b"image")
    os.utime(image, ns=(0, 0))
    with pytest.raises(LabError, match="built again since"):
        saved.load("ready")
    image.unlink()
    with pytest.raises(LabError, match="is gone"):
        saved.load("ready")


def test_a_copy_for_other_devices_is_refused(
    image: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_lab(image, tmp_path / "lab")
    saved.save("ready")
    monkeypatch.setattr(topology, "GPU_NODES", (0, 1))
    with pytest.raises(LabError, match="other virtual devices"):
        saved.load("ready")


def test_names(image: Path, tmp_path: Path) -> None:
    with pytest.raises(LabError, match="there is no lab here"):
        saved.save("ready")
    make_lab(image, tmp_path / "lab")
    saved.save("ready")
    with pytest.raises(LabError, match="saved as ready already"):
        saved.save("ready")
    saved.save("ready", replace=True)
    saved.save("older")
    assert [kept.name for kept in saved.entries()] == ["older", "ready"]
    with pytest.raises(LabError, match="saved are: older, ready"):
        saved.load("another")
    for name in ("../ready", "", ".hidden", "a/b"):
        with pytest.raises(LabError, match="expected a name"):
            saved.save(name)
    saved.delete("older")
    assert [kept.name for kept in saved.entries()] == ["ready"]
    with pytest.raises(LabError, match="no lab host is saved as older"):
        saved.delete("older")
    (tmp_path / "saved" / "ready" / "saved.json").write_text("{}")
    with pytest.raises(LabError, match="of another version"):
        saved.load("ready")
    saved.delete("ready")


def test_an_image_name_needs_no_build(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It is the folder in which `ensure` finds or builds the image."""
    monkeypatch.setattr(rootfs, "ensure", lambda *_recipe: tmp_path / "root.tar")
    monkeypatch.setattr(cache, "ensure", lambda noun, key, _b: Path(f"{noun}-{key}"))
    assert host_image.ensure(HERE).parent.name == host_image.name(HERE)


class Running:
    """A lab host that is up: its control socket, and the ssh that reaches it."""

    def __init__(self, lab: state.Lab, folder: Path) -> None:
        self.lab = lab
        self.log = folder / "log"
        program = folder / "bin" / "ssh"
        program.parent.mkdir()
        program.write_text(f'#!/bin/sh\necho "ssh $*" | sed "s/.*127.0.0.1 //" >> {self.log}\n')
        program.chmod(0o755)
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(lab.qmp)
        self.listener.listen()
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self.listener.accept()
            except OSError:
                return
            with connection, connection.makefile("rwb") as stream:
                stream.write(b'{"QMP": {}}\n')
                stream.flush()
                for line in stream:
                    command = json.loads(line)["execute"]
                    if command != "qmp_capabilities":
                        with self.log.open("a") as log:
                            log.write(f"qmp {command}\n")
                    stream.write(b'{"event": "STOP"}\n{"return": {}}\n')
                    stream.flush()

    def calls(self) -> list[str]:
        return self.log.read_text().splitlines()


@pytest.fixture
def up(image: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Running]:
    running = Running(make_lab(image, tmp_path / "lab", running=True), tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    yield running
    running.listener.shutdown(socket.SHUT_RDWR)
    running.listener.close()


def test_a_running_host_is_paused_while_its_disks_are_copied(
    up: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = saved._copy

    def copy(source: Path, target: Path) -> None:
        with up.log.open("a") as log:
            log.write(f"copy {source.name}\n")
        real(source, target)

    monkeypatch.setattr(saved, "_copy", copy)
    assert saved.save("ready").running
    calls = up.calls()
    assert calls[:3] == ["sync", "qmp stop", "copy os.qcow2"]
    assert calls[-2] == "qmp cont"
    assert calls[-1].startswith("date --utc --set @")


def test_a_copy_that_fails_leaves_the_host_running_and_nothing_saved(
    up: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_source: Path, _target: Path) -> None:
        raise LabError("no space left on device")

    monkeypatch.setattr(saved, "_copy", fail)
    with pytest.raises(LabError, match="no space"):
        saved.save("ready")
    assert up.calls() == ["sync", "qmp stop", "qmp cont"]
    assert saved.entries() == []


def test_nothing_is_loaded_under_a_running_host(up: Running) -> None:
    saved.save("ready")
    with pytest.raises(LabError, match="the lab is up"):
        saved.load("ready")


def test_the_commands(image: Path, tmp_path: Path) -> None:
    make_lab(image, tmp_path / "lab")
    runner = CliRunner()
    assert runner.invoke(cli.app, ["save", "ready"]).exit_code == 0
    refused = runner.invoke(cli.app, ["save", "ready"])
    assert refused.exit_code == 1
    assert runner.invoke(cli.app, ["save", "ready", "--replace"]).exit_code == 0
    (listed,) = json.loads(runner.invoke(cli.app, ["saved"]).stdout)
    assert (listed["name"], listed["image"]) == ("ready", image.parent.name)
    assert runner.invoke(cli.app, ["load", "ready"]).exit_code == 0
    assert runner.invoke(cli.app, ["delete", "ready"]).exit_code == 0
    assert json.loads(runner.invoke(cli.app, ["saved"]).stdout) == []

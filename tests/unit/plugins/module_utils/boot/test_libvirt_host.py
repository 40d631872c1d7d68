"""libvirt on a host: it answers, and QEMU can traverse its directory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.gpuaas.slice.plugins.module_utils.boot import _libvirt_host
from ansible_collections.gpuaas.slice.plugins.module_utils.core import (
    _change,
    _host,
    _host_snapshot,
    _object_names,
)

pytestmark = pytest.mark.covers("HOST-4")

FOLDER = "/var/lib/libvirt"
SHOW = (
    "systemctl", "show", "--timestamp=unix",
    "--property=ActiveState,UnitFileState,ActiveEnterTimestamp,NeedDaemonReload", "--",
    "libvirtd.service", "libvirtd.socket",
)  # fmt: skip


def systemctl_show(daemon: str, socket: str) -> str:
    blocks = (name.split("/") for name in (daemon, socket))
    return "\n\n".join(f"ActiveState={a}\nUnitFileState={f}" for a, f in blocks)


def drive(*, check: bool = False, state: str = "present") -> _change.Outcome:
    params = {"directory": FOLDER, "state": state}
    return _change.drive(_libvirt_host.SUBJECT, params, check_mode=check)


def test_a_closed_directory_and_a_stopped_socket_are_repaired(tree: Path, script: Any) -> None:
    """Seen on a real host: with 0700, QEMU cannot read its own domain's key."""
    folder = tree / "var/lib/libvirt"
    folder.mkdir(parents=True, mode=0o700)
    script.on(*SHOW, out=systemctl_show("inactive/disabled", "inactive/disabled"))
    script.on(*SHOW, out=systemctl_show("inactive/enabled", "active/enabled"))
    script.on("systemctl", "enable", "libvirtd.service")
    script.on("systemctl", "enable", "--now", "libvirtd.socket")
    assert drive().done == [
        "remember_before", "open_directory", "enable_libvirt", "start_socket"
    ]  # fmt: skip
    assert folder.stat().st_mode & 0o777 == 0o755
    assert not drive().changed


def test_an_idle_daemon_is_no_difference_and_check_mode_only_says(tree: Path, script: Any) -> None:
    script.on(*SHOW, out=systemctl_show("inactive/enabled", "active/enabled"))
    outcome = drive(check=True)
    assert [step.name for step in outcome.plan.steps] == ["remember_before", "open_directory"]
    assert not (tree / "var/lib/libvirt").exists()


STOP = (
    "systemctl", "disable", "--now",
    "libvirtd.socket", "libvirtd-ro.socket", "libvirtd-admin.socket", "libvirtd.service",
)  # fmt: skip


@pytest.mark.covers("HOST-15")
@pytest.mark.parametrize(
    ("before", "packages", "done"),
    [
        ("inactive/disabled inactive/disabled", "", ["stop_libvirt", "close_directory"]),
        # Its package, which the product installed, has started it.
        ("inactive/enabled active/enabled", "libvirt-daemon-system", ["stop_libvirt"]),
        ("inactive/enabled active/enabled", "", ["close_directory"]),
    ],
)
def test_libvirt_becomes_what_it_was(
    tree: Path, script: Any, before: str, packages: str, done: list[str]
) -> None:
    (tree / "var/lib/libvirt").mkdir(parents=True, mode=0o700)
    if packages:
        _host.write(_host_snapshot.file_of("packages"), json.dumps({packages: "installed"}))
    running = systemctl_show("inactive/enabled", "active/enabled")
    script.on(*SHOW, out=systemctl_show(*before.split())).on(*SHOW, out=running)
    script.on("systemctl", "enable", "libvirtd.service").on(*STOP)
    script.on("systemctl", "enable", "--now", "libvirtd.socket")
    drive()
    if "stop_libvirt" in done:
        stopped = systemctl_show("inactive/disabled", "inactive/disabled")
        script.answers[SHOW] = []
        script.on(*SHOW, out=running).on(*SHOW, out=stopped)
    # The next tenant of the whole machine is root, and these logs contain output of guests.
    log = f"/var/log/libvirt/qemu/{_object_names.PREFIX}{'0' * 32}.log"
    for path in (log, f"{log}.0", "/var/log/libvirt/qemu/of-the-site.log"):
        _host.write(path, "x")
    assert drive(state="absent").done == ["remove_logs", *done, "forget_before"]
    assert [path.name for path in _host.path(log).parent.iterdir()] == ["of-the-site.log"]
    mode = (tree / "var/lib/libvirt").stat().st_mode & 0o777
    assert mode == (0o700 if "close_directory" in done else 0o755)
    assert not drive(state="absent").changed


VIRSH = ("virsh", "-q", "-c", "qemu:///system")


def serve_network(tree: Path, *members: str) -> Path:
    """libvirt's own network, active and started at every boot, as Ubuntu ships it."""
    networks = tree / "etc/libvirt/qemu/networks"
    (networks / "autostart").mkdir(parents=True)
    for name in ("default.xml", "autostart/default.xml"):
        (networks / name).write_text(
            "<network><bridge name='virbr7' stp='on' delay='0'/></network>"
        )
    link = tree / "sys/class/net/virbr7"
    (link / "bridge").mkdir(parents=True)
    for member in ("virbr7-nic", *members):
        (link / "brif" / member).mkdir(parents=True)
    return link


@pytest.mark.covers("HOST-6", "HOST-15")
def test_libvirts_own_network_is_stopped_and_comes_back(
    tree: Path, script: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tree / "var/lib/libvirt").mkdir(parents=True)
    link = serve_network(tree)
    autostart = tree / "etc/libvirt/qemu/networks/autostart/default.xml"
    text = autostart.read_text()
    script.on(*SHOW, out=systemctl_show("inactive/enabled", "active/enabled"))
    effects = {
        ("net-autostart", "default", "--disable"): autostart.unlink,
        ("net-destroy", "default"): (link / "bridge").rmdir,
        ("net-autostart", "default"): lambda: autostart.write_text(text),
        ("net-start", "default"): (link / "bridge").mkdir,
    }
    for words in effects:
        script.on(*VIRSH, *words)
    run = _libvirt_host._command.run

    def act(argv: list[str], **options: Any) -> Any:
        effects.get(tuple(argv[len(VIRSH) :]), bool)()
        return run(argv, **options)

    monkeypatch.setattr(_libvirt_host._command, "run", act)
    assert drive().done == ["remember_before", "stop_network"]
    assert not drive().changed
    assert drive(state="absent").done == ["restore_network", "forget_before"]
    assert autostart.is_file() and (link / "bridge").is_dir()


@pytest.mark.covers("HOST-6")
def test_a_network_with_a_machine_of_the_site_stays(tree: Path, script: Any) -> None:
    (tree / "var/lib/libvirt").mkdir(parents=True)
    serve_network(tree, "vnet0")
    script.on(*SHOW, out=systemctl_show("inactive/enabled", "active/enabled"))
    assert drive().done == ["remember_before"]


@pytest.mark.covers("HOST-15")
def test_drift_is_not_taken_for_what_was_before(tree: Path, script: Any) -> None:
    """The first run changed nothing, so a repair months later must not close an open directory."""
    folder = tree / "var/lib/libvirt"
    folder.mkdir(parents=True, mode=0o755)
    running, stopped = (systemctl_show(f"inactive/{f}", f"{a}/{f}") for a, f in (
        ("active", "enabled"), ("inactive", "disabled"))
    )  # fmt: skip
    script.on(*SHOW, out=running)
    assert [step.name for step in drive(check=True).plan.steps] == ["remember_before"]
    assert drive().done == ["remember_before"]
    assert not drive().changed

    folder.chmod(0o700)
    script.answers[SHOW] = []
    script.on(*SHOW, out=stopped).on(*SHOW, out=running)
    script.on("systemctl", "enable", "libvirtd.service")
    script.on("systemctl", "enable", "--now", "libvirtd.socket")
    assert drive().done == ["open_directory", "enable_libvirt", "start_socket"]
    assert drive(state="absent").done == ["forget_before"]
    assert folder.stat().st_mode & 0o777 == 0o755


@pytest.mark.covers("HOST-15")
def test_a_libvirt_of_which_nothing_is_remembered_is_left_alone(tree: Path, script: Any) -> None:
    script.on(*SHOW, out=systemctl_show("inactive/enabled", "active/enabled"))
    assert not drive(state="absent").changed

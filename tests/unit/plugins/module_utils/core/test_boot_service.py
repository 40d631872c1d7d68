"""Boot services that restore a part of slice mode after a reboot."""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.gpuaas.slice.plugins.module_utils.core import (
    _boot_files,
    _boot_service,
    _change,
    _host,
    _object_names,
)
from ansible_collections.gpuaas.slice.plugins.module_utils.core._errors import Refusal

pytestmark = pytest.mark.covers("HOST-6", "HOST-7", "HOST-8")

UNIT = _boot_service.Unit(
    name="gpuaas-test",
    description="A concern",
    module="boot._vfio_bind",
    settings_path="/etc/gpuaas/test.json",
    settings={"devices": {}},
    order=("After=network.target", "Before=libvirtd.service"),
    after="/usr/bin/true",
)
SHOW = (
    "systemctl", "show", "--timestamp=unix",
    "--property=ActiveState,UnitFileState,ActiveEnterTimestamp,NeedDaemonReload", "--",
)  # fmt: skip


def block(active: str, enabled: str, since: str = "") -> str:
    return f"ActiveState={active}\nActiveEnterTimestamp={since}\nUnitFileState={enabled}\n"


def step(name: str) -> _change.Step:
    return _change.Step(name, UNIT.service)


def test_a_fresh_host_gets_files_and_a_start(tree: Path, script: Any) -> None:
    script.on(*SHOW, UNIT.service, out=block("inactive", ""))
    installed = _boot_service.observe(UNIT)
    assert [s.name for s in _boot_service.plan(UNIT, installed)] == [
        "install_service",
        "start_service",
    ]
    script.on("systemctl", "daemon-reload").on("systemctl", "enable", "--no-reload", UNIT.service)
    script.on("systemctl", "restart", UNIT.service)
    _boot_service.apply(UNIT, step("install_service"))
    _boot_service.apply(UNIT, step("start_service"))
    unit = _host.read(f"/etc/systemd/system/{UNIT.service}") or ""
    assert "ExecStart=/usr/local/sbin/gpuaas-test\nExecStartPost=/usr/bin/true\n" in unit
    assert "After=network.target\nBefore=libvirtd.service\n" in unit
    assert "Type=oneshot\n" in unit
    assert json.loads(_host.read(UNIT.settings_path) or "") == {"devices": {}}


def test_an_installed_service_plans_nothing(tree: Path, script: Any) -> None:
    script.on("systemctl", "daemon-reload").on("systemctl", "enable", "--no-reload", UNIT.service)
    script.on(*SHOW, UNIT.service, out=block("active", "enabled", "@1700000000"))
    _boot_service.apply(UNIT, step("install_service"))
    assert _boot_service.plan(UNIT, _boot_service.observe(UNIT)) == []
    _host.write("/usr/local/sbin/gpuaas-test", "edited by hand\n")
    assert [s.name for s in _boot_service.plan(UNIT, _boot_service.observe(UNIT))] == [
        "install_service"
    ]


def test_a_unit_that_systemd_has_not_read_again_is_installed(tree: Path, script: Any) -> None:
    """A run was killed after it had written the unit: systemd would still start the former unit."""
    shown = block("active", "enabled", "@9999999999")
    script.on(*SHOW, UNIT.service, out=f"{shown}NeedDaemonReload=yes\n")
    script.on(*SHOW, UNIT.service, out=f"{shown}NeedDaemonReload=no\n")
    script.on("systemctl", "daemon-reload").on("systemctl", "enable", "--no-reload", UNIT.service)
    _boot_service.install(UNIT)
    planned = _boot_service.plan(UNIT, _boot_service.observe(UNIT))
    assert [s.name for s in planned] == ["install_service"]
    _boot_service.apply(UNIT, planned[0])
    assert ("systemctl", "daemon-reload") in script.calls
    assert _boot_service.plan(UNIT, _boot_service.observe(UNIT)) == []


def test_a_guardian_with_former_files_is_restarted(tree: Path, script: Any) -> None:
    """It would restore the state of the release that it was started with."""
    unit = dataclasses.replace(UNIT, guardian=True)
    script.on("systemctl", "daemon-reload").on("systemctl", "enable", "--no-reload", unit.service)
    script.on(*SHOW, unit.service, out=block("active", "enabled", "@9999999999"))
    _boot_service.apply(unit, step("install_service"))
    assert _boot_service.plan(unit, _boot_service.observe(unit)) == []
    _host.write("/usr/local/sbin/gpuaas-test", "of the release before\n")
    planned = _boot_service.plan(unit, _boot_service.observe(unit))
    assert [s.name for s in planned] == ["install_service", "start_service"]


def test_a_guardian_older_than_its_code_is_restarted(tree: Path, script: Any) -> None:
    """A run was killed after it had written the code, or another unit's run wrote a shared file."""
    unit = dataclasses.replace(UNIT, guardian=True)
    other = dataclasses.replace(UNIT, name="gpuaas-other", settings_path="/etc/gpuaas/other.json")
    _boot_service.install(unit)
    for file in (file for file in tree.rglob("*") if file.is_file()):
        os.utime(file, (1_000, 1_000))
    script.on(*SHOW, unit.service, out=block("active", "enabled", "@2000"))
    assert _boot_service.plan(unit, _boot_service.observe(unit)) == []
    # Files of equal content keep their time.
    _boot_service.install(other)
    _boot_service.install(unit)
    assert _boot_service.plan(unit, _boot_service.observe(unit)) == []
    shared = f"{_boot_service.LIBRARY}/{_boot_service.PACKAGE.replace('.', '/')}/core/_host.py"
    _host.write(shared, "# of the release before\n")
    _boot_service.install(other)
    planned = _boot_service.plan(unit, _boot_service.observe(unit))
    assert [s.name for s in planned] == ["start_service"]
    os.utime(_host.path(shared), (9_999_999_999, 9_999_999_999))
    assert _boot_service.plan(unit, _boot_service.observe(unit)) == [], "the clock was set back"


@pytest.mark.covers("HOST-10")
def test_an_edit_of_any_of_its_files_is_undone_by_an_installation(tree: Path, script: Any) -> None:
    script.on("systemctl", "daemon-reload").on("systemctl", "enable", "--no-reload", UNIT.service)
    script.on(*SHOW, UNIT.service, out=block("active", "enabled"))
    override = f"/etc/systemd/system/{UNIT.service}.d/override.conf"
    library = f"{_boot_service.LIBRARY}/{_boot_service.PACKAGE.replace('.', '/')}"
    for path in (
        UNIT.path,
        UNIT.program,
        UNIT.settings_path,
        f"{library}/boot/_vfio_bind.py",
        override,
    ):
        _boot_service.apply(UNIT, step("install_service"))
        assert _boot_files.edited(UNIT) == []
        _host.write(path, "[Service]\n")
        assert path in _boot_service.observe(UNIT).differing
        assert [s.name for s in _boot_service.plan(UNIT, _boot_service.observe(UNIT))] == [
            "install_service"
        ]
        # The unit alone does not contain the expected settings.
        edited = "".join(_boot_files.edited(UNIT))
        assert (path in edited) == (path != UNIT.settings_path)
    _boot_service.apply(UNIT, step("install_service"))
    assert not _host.path(override).parent.exists()
    _host.path(UNIT.program).chmod(0o644)
    assert _boot_service.observe(UNIT).differing == (UNIT.program,)
    _host.remove(_boot_files.RECORD)
    assert _boot_service.observe(UNIT).differing == (UNIT.program, _boot_files.RECORD)


@pytest.mark.covers("HOST-15")
def test_removal_takes_what_changes_the_unit_and_its_record(tree: Path, script: Any) -> None:
    other = dataclasses.replace(UNIT, name="gpuaas-other", settings_path="/etc/gpuaas/other.json")
    script.on("systemctl", "daemon-reload").on(
        "systemctl", "disable", "--now", "--no-reload", UNIT.service
    )
    script.on(*SHOW, UNIT.service, out=block("inactive", ""))
    script.on("systemctl", "disable", "--now", "--no-reload", other.service)
    _boot_service.install(UNIT)
    _boot_service.install(other)
    for path in _boot_service.observe(UNIT).present:
        _host.remove(path)
    folder = f"/etc/systemd/system.control/{UNIT.service}.d"
    _host.write(f"{folder}/50.conf", "[Service]\n")
    assert [s.name for s in _boot_service.plan_removal(UNIT, _boot_service.observe(UNIT))] == [
        "remove_service"
    ]
    _boot_service.apply(UNIT, step("remove_service"))
    assert not _host.path(folder).exists()
    assert set(_boot_files.recorded()) == {other.name}
    assert _boot_files.edited(other) == []
    _boot_service.apply(other, _change.Step("remove_service", other.service))
    assert not _host.path(_boot_files.RECORD).exists()


@pytest.mark.covers("HOST-15")
def test_removal_takes_the_units_own_files_and_the_last_one_the_library(
    tree: Path, script: Any
) -> None:
    other = "/etc/systemd/system/gpuaas-other.service"
    _host.write(other, "[Unit]\n")
    script.on("systemctl", "daemon-reload").on("systemctl", "enable", "--no-reload", UNIT.service)
    script.on("systemctl", "disable", "--now", "--no-reload", UNIT.service)
    script.on(*SHOW, UNIT.service, out=block("active", "enabled"))
    _boot_service.apply(UNIT, step("install_service"))
    assert [s.name for s in _boot_service.plan_removal(UNIT, _boot_service.observe(UNIT))] == [
        "remove_service"
    ]
    _boot_service.apply(UNIT, step("remove_service"))
    assert _boot_service.plan_removal(UNIT, _boot_service.observe(UNIT)) == []
    assert _host.path(f"{_boot_service.LIBRARY}/ansible_collections").is_dir()
    _host.remove(other)
    _boot_service.apply(UNIT, step("install_service"))
    _boot_service.apply(UNIT, step("remove_service"))
    assert not _host.path(_boot_service.LIBRARY).exists()


@pytest.mark.covers("HOST-15")
@pytest.mark.parametrize("site", [(), ("/etc/libvirt/hooks/qemu.d/site",)])
def test_the_start_hook_goes_with_its_unit(tree: Path, script: Any, site: tuple[str, ...]) -> None:
    unit = dataclasses.replace(UNIT, start_hook="network._start_hook")
    for path in ("/etc/libvirt/qemu.conf", *site):
        _host.write(path, "\n")
    script.on("systemctl", "daemon-reload").on("systemctl", "enable", "--no-reload", UNIT.service)
    script.on("systemctl", "disable", "--now", "--no-reload", UNIT.service)
    _boot_service.apply(unit, step("install_service"))
    assert _host.path(_object_names.START_HOOK).stat().st_mode & 0o777 == 0o755
    _host.write(_object_names.START_HOOK, "#!/bin/sh\n", 0o755)
    assert any(_object_names.START_HOOK in problem for problem in _boot_files.edited(unit))
    _boot_service.apply(unit, step("remove_service"))
    files = {file for file in (tree / "etc/libvirt").rglob("*") if file.is_file()}
    assert files == {_host.path(path) for path in ("/etc/libvirt/qemu.conf", *site)}
    assert _host.path("/etc/libvirt/hooks").exists() == bool(site)


def test_the_installed_script_runs_on_the_copied_sources_alone(tree: Path, script: Any) -> None:
    script.on("systemctl", "daemon-reload").on("systemctl", "enable", "--no-reload", UNIT.service)
    _boot_service.apply(UNIT, step("install_service"))
    program = _host.path("/usr/local/sbin/gpuaas-test")
    assert program.stat().st_mode & 0o111
    text = program.read_text().replace(
        _boot_service.LIBRARY, str(_host.path(_boot_service.LIBRARY))
    )
    # Outside slice mode the body of `boot` ends at once, but all its imports have happened.
    done = subprocess.run([sys.executable, "-I", "-c", text], capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")


def test_the_start_hook_concerns_the_start_of_slices_alone(
    tree: Path, script: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_boot_files, "LIBRARY", str(tree / "usr/local/lib/gpuaas"))
    unit = dataclasses.replace(UNIT, start_hook="network._start_hook")
    files = _boot_files.frame(unit)
    hook = tree / "hook"
    hook.write_text(files[_object_names.START_HOOK][0])

    def call(*words: str) -> subprocess.CompletedProcess[str]:
        argv = [sys.executable, "-I", str(hook), *words, "-"]
        return subprocess.run(argv, input="<domain/>", capture_output=True, text=True, check=False)

    slice_vm = f"gpuaas-slice-{'a' * 32}"
    # The library is not there: nothing but the start of a slice needs it.
    for words in ((slice_vm, "stopped", "end"), (slice_vm, "prepare", "begin"),
                  ("site-vm", "start", "begin")):  # fmt: skip
        assert call(*words).returncode == 0
    assert call(slice_vm, "start", "begin").returncode != 0
    for path, (text, _mode) in _boot_service._files(unit).items():
        if path.startswith(_boot_service.LIBRARY):
            file = tree / path[1:]
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
    refused = call(slice_vm, "start", "begin")
    assert refused.returncode == 1 and "guard_missing" in refused.stderr
    assert refused.stdout == ""


@pytest.mark.parametrize(
    "module", ["boot._vfio_bind", "fabric._virtual_functions", "network._bridge"]
)
def test_sources_are_complete(module: str) -> None:
    sources = _boot_service.sources(module)
    shared = ("_boot_service", "_change", "_command", "_errors", "_host")
    assert {module, *(f"core.{name}" for name in shared)} <= set(sources)
    assert all("from __future__" in text for text in sources.values())


def test_services_are_read_in_one_call(tree: Path, script: Any) -> None:
    answer = block("active", "enabled", "@1700000000") + "\n" + block("inactive", "")
    script.on(*SHOW, "a.service", "b.service", out=answer)
    assert _boot_service.services(["a.service", "b.service"]) == {
        "a.service": _boot_service.Service(active=True, enabled=True, started_at=1700000000),
        "b.service": _boot_service.Service(active=False, enabled=False, started_at=0),
    }
    script.on(*SHOW, "c.service", "d.service", out=block("active", "enabled"))
    with pytest.raises(Refusal, match="systemd_answer_unreadable"):
        _boot_service.services(["c.service", "d.service"])


class Late:
    """A subject whose device appears at the third inspection."""

    def __init__(self, code: str) -> None:
        self.code, self.looks = code, 0

    def observe(self, _params: Any) -> int:
        self.looks += 1
        if self.looks < 3:
            raise Refusal(self.code, expected="it", found="not\nyet", remedy="wait")
        return self.looks

    def subject(self) -> _change.Subject:
        return _change.Subject(self.observe, lambda *_: _change.Plan(), lambda *_: None)


def test_boot_waits_for_what_comes_late(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    slept: list[float] = []
    subject = Late("device_missing").subject()
    rc = _boot_service.boot(subject, "/x.json", wait_for=("device_missing",), sleep=slept.append)
    assert (rc, slept) == (0, [2, 2])
    assert capsys.readouterr().out == "done: nothing to do\n"


def test_boot_fails_at_once_on_any_other_refusal(
    tree: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        _boot_service.boot(Late("wrong_class").subject(), "/x.json", wait_for=("device_missing",))
        == 1
    )
    assert capsys.readouterr().out == "wrong_class: expected it; found not yet; wait\n"


def test_boot_gives_up_in_the_end(tree: Path) -> None:
    subject = Late("device_missing").subject()
    assert _boot_service.boot(subject, "/x.json", wait_for=("device_missing",), patience=-1) == 1


def doubtful(looks: list[str]) -> _change.Subject:
    """A subject whose required state is present; its optional state is missing until `looks` is
    used up."""

    def plan(_params: Any, _state: Any) -> _change.Plan:
        doubts = [Refusal(looks.pop(0), expected="", found="x\ny", remedy="")] if looks else []
        return _change.Plan(doubts=tuple(doubts))

    return _change.Subject(lambda _params: None, plan, lambda *_: None)


def test_systemd_is_told_before_what_is_optional_is_waited_for(
    tmp_path: Path, tree: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    heard: list[bytes] = []
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(tmp_path / "notify"))
        systemd.setblocking(False)
        monkeypatch.setattr(_boot_service, "_NOTIFY", {})
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        rc = _boot_service.boot(
            doubtful(["link_missing"]),
            "/x.json",
            wait_for=("link_missing",),
            # No message arrives twice.
            sleep=lambda _: heard.append(systemd.recv(99)),
        )
        with pytest.raises(BlockingIOError):
            systemd.recv(99)
        # A guardian notifies systemd for as long as it lives; programs that it starts do not.
        assert "NOTIFY_SOCKET" not in os.environ
        _boot_service.notify("WATCHDOG=1")
        assert systemd.recv(99) == b"WATCHDOG=1"
    assert (rc, heard) == (0, [b"READY=1"])
    assert capsys.readouterr().out == "done: nothing to do\n"


@pytest.mark.parametrize(("waited", "looks"), [((), 1), (("link_missing",), 3)])
def test_what_stays_of_a_doubt_is_the_last_word_and_no_failure(
    tree: Path, capsys: pytest.CaptureFixture[str], waited: tuple[str, ...], looks: int
) -> None:
    codes, slept = ["link_missing"] * 9, [0.0]
    clock = iter([0.0, 1.0, 2.0, 3.0])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_boot_service.time, "monotonic", lambda: next(clock))
        subject = doubtful(codes)
        rc = _boot_service.boot(subject, "/x.json", wait_for=waited, patience=2, sleep=slept.append)
    assert (rc, 9 - len(codes)) == (0, looks)
    assert capsys.readouterr().out == (
        "done: nothing to do\nWARN link_missing: expected ; found x y; \n"
    )


class Followed:
    """Up at the first inspection, but for its link. `befalls` happens at the second inspection."""

    def __init__(self, *, befalls: Exception | None = None, lost: bool = False) -> None:
        self.befalls, self.lost, self.looks = befalls, lost, 0
        self.acts: list[str] = []

    def observe(self, _params: Any) -> int:
        self.looks += 1
        if self.looks == 2 and self.befalls:
            raise self.befalls
        return self.looks

    def plan(self, _params: Any, looks: int) -> _change.Plan:
        hard = _change.Step("add_bridge", "br0")
        link = _change.Step("address_link", "link", soft=True)
        steps = [hard] if self.lost and looks > 1 else []
        if looks < 3:
            missing = Refusal("link_missing", expected="", found="x", remedy="")
            return _change.Plan(tuple(steps), doubts=(missing,))
        return _change.Plan((*steps, link) if "address_link" not in self.acts else tuple(steps))

    def apply(self, _params: Any, step: _change.Step) -> None:
        self.acts.append(step.name)

    def boot(self) -> int:
        subject = _change.Subject(self.observe, self.plan, self.apply)
        waited = ("link_missing", "command_failed")
        return _boot_service.boot(subject, "/x.json", wait_for=waited, sleep=lambda _: None)


@pytest.mark.parametrize(
    ("befalls", "message"),
    [
        (Refusal("command_failed", expected="", found="x", remedy=""), ""),
        (Refusal("command_timeout", expected="", found="x", remedy=""), "WARN command_timeout"),
        (OSError(5, "Input/output error"), "WARN system_error"),
    ],
)
def test_nothing_fails_a_unit_that_is_up(
    tree: Path, capsys: pytest.CaptureFixture[str], befalls: Exception, message: str
) -> None:
    """Parity would take a failed unit for a host whose guests have no network."""
    followed = Followed(befalls=befalls)
    assert followed.boot() == 0
    assert followed.acts == ([] if message else ["address_link"])
    assert capsys.readouterr().out.splitlines()[1].startswith(message or "done: address_link")


def test_what_the_unit_was_told_up_with_is_not_done_again(tree: Path) -> None:
    """An operator takes the bridge down during the wait for the card's link: it stays down."""
    followed = Followed(lost=True)
    assert (followed.boot(), followed.acts) == (0, ["address_link"])


def test_what_the_system_says_before_the_unit_is_up_is_no_success(tree: Path) -> None:
    followed = Followed(befalls=OSError(5, "Input/output error"))
    followed.looks = 1
    with pytest.raises(OSError, match="Input/output"):
        followed.boot()


@pytest.mark.covers("HOST-15")
@pytest.mark.parametrize("lost", ["forget", "rmtree"])
def test_a_removal_that_broke_off_is_ended(
    tree: Path, script: Any, monkeypatch: pytest.MonkeyPatch, lost: str
) -> None:
    script.on("systemctl", "daemon-reload").on(
        "systemctl", "disable", "--now", "--no-reload", UNIT.service
    )
    script.on(*SHOW, UNIT.service, out=block("inactive", ""))
    _boot_service.install(UNIT)

    def breaks(*_what: Any, **_how: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(_boot_files if lost == "forget" else _boot_service.shutil, lost, breaks)
        _boot_service.apply(UNIT, step("remove_service"))
    assert _boot_service.observe(UNIT).present == ()
    assert [s.name for s in _boot_service.plan_removal(UNIT, _boot_service.observe(UNIT))] == [
        "remove_service"
    ]
    _boot_service.apply(UNIT, step("remove_service"))
    assert _boot_service.plan_removal(UNIT, _boot_service.observe(UNIT)) == []
    assert (
        not _host.path(_boot_files.RECORD).exists()
        and not _host.path(_boot_service.LIBRARY).exists()
    )


@pytest.mark.covers("HOST-15")
def test_what_another_unit_needs_is_no_trace(tree: Path, script: Any) -> None:
    other = dataclasses.replace(UNIT, name="gpuaas-other", settings_path="/etc/gpuaas/other.json")
    script.on(*SHOW, UNIT.service, out=block("inactive", ""))
    _boot_service.install(other)
    assert _boot_service.plan_removal(UNIT, _boot_service.observe(UNIT)) == []


def test_what_a_killed_run_leaves_beside_the_start_hook_is_no_program(
    tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """libvirt runs every program in the folder, and starts no domain when one of them fails."""
    monkeypatch.setattr(Path, "unlink", lambda *_arguments, **_options: None)
    # The text cannot be encoded, so the write ends in its middle.
    with pytest.raises(UnicodeEncodeError):
        _host.write(_object_names.START_HOOK, "#!/usr/bin/python3 -I\n\ud800", 0o755)
    (draft,) = _host.path(_object_names.START_HOOK).parent.iterdir()
    assert not os.access(draft, os.X_OK)


class EndedError(Exception):
    """The guardian's process ends."""


@pytest.mark.parametrize(("took_s", "pause_s"), [(0.01, 2.0), (1.0, 4.0), (60.0, 5.0)])
def test_a_guardian_leaves_a_slow_machine_to_others(
    tree: Path, monkeypatch: pytest.MonkeyPatch, took_s: float, pause_s: float
) -> None:
    now, pauses = [0.0], []
    monkeypatch.setattr(_boot_service.time, "monotonic", lambda: now[0])

    def restore(_settings: dict[str, Any], _turn: int) -> list[str]:
        now[0] += took_s
        return []

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        raise EndedError

    with pytest.raises(EndedError):
        _boot_service.watch("/etc/gpuaas/none.json", restore, trouble="none", sleep=sleep)
    assert pauses == [pause_s]

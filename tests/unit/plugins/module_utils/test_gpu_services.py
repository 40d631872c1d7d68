"""Services that hold GPUs: stopped for slices, and afterwards what they were."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.gpuaas.slice.plugins.module_utils import (
    _change,
    _command,
    _gpu_services,
    _host,
)

pytestmark = pytest.mark.covers("HOST-4")

NAMES = ("a.service", "b.service", "c.service", "d.service")
SHOW = ("systemctl", "show", "--property=ActiveState,UnitFileState", "--", *NAMES)


def shown(*states: str) -> str:
    pairs = (state.split("/") for state in states)
    return "\n\n".join(f"ActiveState={a}\nUnitFileState={f}" for a, f in pairs) + "\n"


RECORD = "/var/lib/gpuaas/before/gpu-services.json"


@pytest.fixture(autouse=True)
def host(tree: Path) -> None:
    """Records go into the tree of a host, never into this machine's."""


def drive(**more: Any) -> _change.Outcome:
    params = {"services": NAMES, **more}
    return _change.drive(_gpu_services.SUBJECT, params, check_mode=False)


def test_running_and_enabled_ones_are_quiesced_and_the_absent_left_alone(script: Any) -> None:
    quiet = shown("inactive/disabled", "failed/disabled", "inactive/static", "inactive/")
    script.on(*SHOW, out=shown("active/enabled", "failed/enabled", "active/static", "inactive/"))
    script.on(*SHOW, out=quiet)
    for name in NAMES[:3]:
        script.on("systemctl", "disable", "--runtime", "--", name)
        script.on("systemctl", "disable", "--now", "--", name)
    outcome = drive()
    assert outcome.done == ["remember_before", *["quiesce_service"] * 3]
    assert [step.before for step in outcome.plan.steps[1:]] == [
        "active and started at boot",
        "started at boot",
        "active",
    ]
    assert not drive().changed


def test_a_service_that_stays_is_a_failure(script: Any) -> None:
    script.on(*SHOW, out=shown("active/enabled", "inactive/", "inactive/", "inactive/"))
    script.on("systemctl", "disable", "--runtime", "--", "a.service")
    script.on("systemctl", "disable", "--now", "--", "a.service")
    failure = drive().failure
    assert failure is not None and failure.code == "verify_failed"


def test_without_names_nothing_is_asked(script: Any) -> None:
    outcome = _change.drive(_gpu_services.SUBJECT, {"services": []}, check_mode=False)
    assert (outcome.changed, script.calls) == (False, [])


class Systemd:
    """Services as active/file. What starts at boot is up to the real systemctl, on the host's tree;
    only what is active is played: no manager runs here.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **services: str) -> None:
        self.active: dict[str, str] = {}
        self.broken = ""
        for name, state in services.items():
            self.put(f"{name}.service", state)
        monkeypatch.setattr(_command, "run", self.run)

    def put(self, name: str, state: str) -> None:
        """A service as its package and somebody's hands have left it."""
        self.active[name], _, file = state.partition("/")
        install = "" if file == "static" else "[Install]\nWantedBy=multi-user.target\n"
        _host.write(f"/usr/lib/systemd/system/{name}", f"[Service]\nExecStart=/bin/true\n{install}")
        for way in file.split("+"):
            if way.startswith("enabled"):
                self._really("enable", *(["--runtime"] if way == "enabled-runtime" else []), name)

    def uninstall(self, name: str) -> None:
        self._really("disable", name)
        _host.remove(f"/usr/lib/systemd/system/{name}")
        del self.active[name]

    def run(self, argv: list[str], **_: Any) -> _command.Result:
        verb, names = argv[1], argv[argv.index("--") + 1 :]
        if verb == "show":
            return _command.Result(0, shown(*map(self._state, names)), "")
        (name,) = names
        if verb == "start":
            self.active[name] = "active" if name != self.broken else self.active[name]
            return _command.Result(0, "", "")
        if "--now" in argv:
            self.active[name] = "inactive"
        self._really(*(word for word in argv[1:] if word != "--now"))
        return _command.Result(0, "", "")

    @property
    def states(self) -> list[str]:
        return [self._state(name) for name in self.active]

    def _state(self, name: str) -> str:
        there = _host.path(f"/usr/lib/systemd/system/{name}").exists()
        file = self._really("is-enabled", name, ok=(0, 1)).strip() if there else ""
        return f"{self.active.get(name, 'inactive')}/{file}"

    @staticmethod
    def _really(*words: str, ok: tuple[int, ...] = (0,)) -> str:
        argv = ["systemctl", f"--root={_host.ROOT}", *words]
        done = subprocess.run(argv, capture_output=True, text=True, check=False)
        assert done.returncode in ok, done.stderr
        return done.stdout


@pytest.mark.parametrize("was", ["enabled", "enabled-runtime", "enabled+enabled-runtime", "static"])
def test_quiet_at_boot_is_what_systemctl_says(monkeypatch: pytest.MonkeyPatch, was: str) -> None:
    systemd = Systemd(monkeypatch, a=f"active/{was}")
    outcome = drive(services=["a.service"])
    assert outcome.failure is None, outcome.failure
    assert systemd.states == ["inactive/static" if was == "static" else "inactive/disabled"]
    assert not drive(services=["a.service"]).changed


@pytest.mark.covers("HOST-15")
def test_each_service_becomes_what_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    was = {"a": "active/enabled", "b": "failed/enabled-runtime", "c": "active/static"}
    systemd = Systemd(monkeypatch, **was, d="inactive/disabled")
    before = systemd.states
    drive()
    assert systemd.states == [
        "inactive/disabled", "inactive/disabled", "inactive/static", "inactive/disabled"
    ]  # fmt: skip
    assert not drive().changed
    # The record names them, not the profile of the day.
    assert drive(services=[], state="restored").failure is None
    before[1] = "inactive/enabled-runtime"
    assert systemd.states == before
    assert _host.read(RECORD) is None
    assert not drive(state="restored").changed


@pytest.mark.covers("HOST-15")
def test_the_first_word_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody started one by hand on the slice host: it was quiet before, and is so again."""
    systemd = Systemd(monkeypatch, a="active/enabled", b="inactive/disabled")
    drive(services=["a.service", "b.service"])
    systemd.put("b.service", "active/enabled")
    drive(services=["a.service", "b.service"])
    assert json.loads(_host.read(RECORD) or "")["b.service"]["active"] is False
    drive(services=[], state="restored")
    assert systemd.states == ["active/enabled", "inactive/disabled"]


@pytest.mark.covers("HOST-15")
def test_drift_is_not_taken_for_what_was_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """All were quiet at the first run; one that is started by hand later is not brought back."""
    systemd = Systemd(monkeypatch, a="inactive/disabled")
    assert drive(services=["a.service"]).done == ["remember_before"]
    assert not drive(services=["a.service"]).changed
    systemd.put("a.service", "active/enabled")
    assert drive(services=["a.service"]).done == ["quiesce_service"]
    assert drive(services=[], state="restored").done == ["forget_before"]
    assert systemd.states == ["inactive/disabled"]


@pytest.mark.covers("HOST-15")
def test_the_record_stays_while_a_service_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    systemd = Systemd(monkeypatch, a="active/enabled")
    drive(services=["a.service"])
    systemd.broken = "a.service"
    failure = drive(services=[], state="restored").failure
    assert failure is not None and failure.code == "service_not_restored"
    systemd.broken = ""
    assert drive(services=[], state="restored").done == ["start_service", "forget_before"]


@pytest.mark.covers("HOST-15")
def test_a_service_that_was_uninstalled_holds_nothing_up(monkeypatch: pytest.MonkeyPatch) -> None:
    systemd = Systemd(monkeypatch, a="active/enabled")
    drive(services=["a.service"])
    systemd.uninstall("a.service")
    assert drive(services=[], state="restored").done == ["forget_before"]


def test_a_record_that_cannot_be_read_is_not_overwritten(monkeypatch: pytest.MonkeyPatch) -> None:
    Systemd(monkeypatch, a="active/enabled")
    _host.write(RECORD, "{broken")
    with pytest.raises(_change.Refusal, match="before_unreadable"):
        drive(services=["a.service"])

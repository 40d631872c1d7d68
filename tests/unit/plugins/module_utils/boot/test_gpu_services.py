"""Services that hold GPUs: stopped for slices, then restored to their earlier state."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible_collections.gpuaas.slice.plugins.module_utils.boot import _gpu_services
from ansible_collections.gpuaas.slice.plugins.module_utils.core import _change, _command, _host

pytestmark = pytest.mark.covers("HOST-4")

ROOT = Path(__file__).parents[5]
NAMES = ("a.service", "b.service", "c.service", "d.service")
SHOW = ("systemctl", "show", "--property=ActiveState,UnitFileState", "--", *NAMES)


def systemctl_show(*states: str) -> str:
    pairs = (state.split("/") for state in states)
    return "\n\n".join(f"ActiveState={a}\nUnitFileState={f}" for a, f in pairs) + "\n"


RECORD = "/var/lib/gpuaas/before/gpu-services.json"
ALONE = "[Install]\nWantedBy=multi-user.target\n"
INSTALL = {"static": "", "indirect": "[Install]\nAlso=other.service\n"}
WAYS = {
    "enabled": ("enable",),
    "enabled-runtime": ("enable", "--runtime"),
    "masked": ("mask",),
    "masked-runtime": ("mask", "--runtime"),
}


@pytest.fixture(autouse=True)
def host(tree: Path) -> None:
    """Records go into the tree of a host, never into this machine's."""


def drive(**more: Any) -> _change.Outcome:
    params = {"services": NAMES, **more}
    return _change.drive(_gpu_services.SUBJECT, params, check_mode=False)


def test_the_shipped_profile_names_what_holds_an_h200() -> None:
    profile = yaml.safe_load((ROOT / "profiles" / "xe9680l-h200.yml").read_text())
    holders = {"dcgm-exporter.service", "nvidia-imex.service", "nvidia-persistenced.service"}
    # The path unit would start the service again, whenever a file of the driver changes.
    holders |= {"nvidia-cdi-refresh.path", "nvidia-cdi-refresh.service"}
    assert holders <= set(profile["gpu_services"])


def test_running_and_enabled_ones_are_quiesced_and_the_absent_left_alone(script: Any) -> None:
    quiet = systemctl_show("inactive/masked", "failed/masked", "inactive/masked", "inactive/")
    script.on(
        *SHOW, out=systemctl_show("active/enabled", "failed/enabled", "active/static", "inactive/")
    )
    script.on(*SHOW, out=quiet)
    expected = [
        ("disable_service", "a.service at boot", "enabled"),
        ("stop_service", "a.service", "active"),
        ("mask_service", "a.service mask", "enabled"),
        ("disable_service", "b.service at boot", "enabled"),
        ("mask_service", "b.service mask", "enabled"),
        ("stop_service", "c.service", "active"),
        ("mask_service", "c.service mask", "static"),
    ]
    for step, subject, _before in expected:
        verb, name = step.partition("_")[0], subject.partition(" ")[0]
        for words in [[verb, "--runtime"], [verb]] if verb == "disable" else [[verb]]:
            script.on("systemctl", *words, "--", name)
    outcome = drive()
    assert outcome.done == ["remember_before", *(step for step, *_rest in expected)]
    assert [(s.name, s.subject, s.before) for s in outcome.plan.steps[1:]] == expected
    assert not drive().changed


def test_a_service_that_stays_is_a_failure(script: Any) -> None:
    script.on(*SHOW, out=systemctl_show("active/enabled", "inactive/", "inactive/", "inactive/"))
    script.on("systemctl", "disable", "--runtime", "--", "a.service")
    for verb in ("disable", "stop", "mask"):
        script.on("systemctl", verb, "--", "a.service")
    failure = drive().failure
    assert failure.code == "verify_failed"


def test_without_names_nothing_is_asked(script: Any) -> None:
    outcome = _change.drive(_gpu_services.SUBJECT, {"services": []}, check_mode=False)
    assert (outcome.changed, script.calls) == (False, [])


class Systemd:
    """Services as active/file. The real systemctl decides on the host's tree about the start at
    boot; only the active state is simulated, because no manager runs here."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **services: str) -> None:
        self.active: dict[str, str] = {}
        self.broken = ""
        for name, state in services.items():
            self.put(f"{name}.service", state)
        monkeypatch.setattr(_command, "run", self.run)

    def put(self, name: str, state: str, folder: str = "/usr/lib/systemd/system") -> None:
        """Set a service to the state that its package and an administrator have left."""
        self.active[name], _, file = state.partition("/")
        whole = name if name.endswith(".service") else f"{name}.service"
        text = f"[Service]\nExecStart=/bin/true\n{INSTALL.get(file, ALONE)}"
        # An instance has a template.
        _host.write(f"{folder}/{re.sub('@.*[.]', '@.', whole)}", text)
        for way in file.split("+"):
            if way in WAYS:
                self._really(*WAYS[way], name)

    def uninstall(self, name: str) -> None:
        _host.remove(f"/usr/lib/systemd/system/{name}")

    def run(self, argv: list[str], **_: Any) -> _command.Result:
        if argv[1] == "daemon-reload":
            return _command.Result(0, "", "")
        verb, names = argv[1], argv[argv.index("--") + 1 :]
        if verb == "show":
            return _command.Result(0, systemctl_show(*map(self._state, names)), "")
        (name,) = names
        if verb == "start":
            assert not self._state(name).endswith(("masked", "masked-runtime"))
            self.active[name] = "active" if name != self.broken else self.active[name]
        elif verb == "stop":
            self.active[name] = "inactive"
        else:
            self._really(*argv[1:])
        return _command.Result(0, "", "")

    @property
    def states(self) -> list[str]:
        return [self._state(name) for name in self.active]

    def _state(self, name: str) -> str:
        # It prints nothing for a unit without files, as `show` does.
        file = self._really("is-enabled", name, ok=(0, 1)).strip()
        return f"{self.active.get(name, 'inactive')}/{file}"

    @staticmethod
    def _really(*words: str, ok: tuple[int, ...] = (0,)) -> str:
        argv = ["systemctl", f"--root={_host.ROOT}", *words]
        done = subprocess.run(argv, capture_output=True, text=True, check=False)
        assert done.returncode in ok, done.stderr
        return done.stdout


KINDS = (
    "enabled",
    "enabled-runtime",
    "enabled+enabled-runtime",
    "disabled",
    "static",
    "indirect",
    "masked",
    "masked-runtime",
)


@pytest.mark.covers("HOST-15")
@pytest.mark.parametrize("was", KINDS)
def test_nothing_can_start_it_until_it_is_what_it_was(
    monkeypatch: pytest.MonkeyPatch, was: str
) -> None:
    """Ubuntu's nvidia-persistenced is static and a udev rule starts it: disabling has no effect."""
    systemd = Systemd(monkeypatch, a=f"active/{was}")
    (before,) = systemd.states
    outcome = drive(services=["a.service"])
    assert outcome.failure is None, outcome.failure
    assert systemd.states == ["inactive/masked"]
    assert not drive(services=["a.service"]).changed
    assert drive(services=[], state="restored").failure is None
    # A service that ran beneath a mask cannot be started, now as before.
    assert systemd.states == [before.replace("active/masked", "inactive/masked")]
    assert _host.read(RECORD) is None


@pytest.mark.covers("HOST-15")
def test_each_service_becomes_what_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    was = {"a": "active/enabled", "b": "failed/enabled-runtime", "c": "active/static"}
    systemd = Systemd(monkeypatch, **was, d="inactive/disabled")
    before = systemd.states
    drive()
    assert systemd.states == [
        "inactive/masked", "failed/masked", "inactive/masked", "inactive/masked"
    ]  # fmt: skip
    assert not drive().changed
    # The record names the services; the profile may have changed since.
    assert drive(services=[], state="restored").failure is None
    assert systemd.states == before
    assert _host.read(RECORD) is None
    assert not drive(state="restored").changed


def test_a_mask_of_the_sites_stays_and_hides_no_running_service(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A running service that is masked or lost its unit is stopped and cannot start again."""
    systemd = Systemd(monkeypatch, a="active/masked")
    assert drive(services=["a.service"]).done == ["remember_before", "stop_service"]
    assert drive(services=[], state="restored").done == ["forget_before"]
    assert systemd.states == ["inactive/masked"]


@pytest.mark.covers("HOST-15")
@pytest.mark.parametrize("folder", ["/usr/lib/systemd/system", "/etc/systemd/system"])
@pytest.mark.parametrize("name", ["a", "a.b", "a@1.service", "a@1"])
@pytest.mark.parametrize("was", ["enabled", "static"])
def test_a_unit_by_any_name_that_systemctl_takes_becomes_what_it_was(
    monkeypatch: pytest.MonkeyPatch, name: str, folder: str, was: str
) -> None:
    systemd = Systemd(monkeypatch)
    systemd.put(name, f"active/{was}", folder)
    root = _host.path("/etc/systemd/system")
    before = sorted(root.rglob("*"))
    assert drive(services=[name]).failure is None
    # A site's template leaves room for the mask of an instance.
    is_instance = "@" not in name and folder.startswith("/etc")
    assert systemd.states == [f"inactive/{was if is_instance else 'masked'}"]
    assert is_instance == _host.path(f"/etc/systemd/system/{name}.service.d").is_dir()
    assert not drive(services=[name]).changed
    restored = drive(services=[], state="restored")
    assert restored.failure is None and "start_service" in restored.done
    assert systemd.states == [f"active/{was}"]
    assert [path for path in sorted(root.rglob("*")) if not path.name.endswith(".wants")] == [
        path for path in before if not path.name.endswith(".wants")
    ]


@pytest.mark.covers("HOST-15")
@pytest.mark.parametrize("was", ["enabled", "static"])
def test_a_unit_file_of_the_sites_own_is_barred(monkeypatch: pytest.MonkeyPatch, was: str) -> None:
    """The unit file is at the mask's place, and systemctl refuses to put a mask there."""
    systemd = Systemd(monkeypatch)
    systemd.put("a.service", f"active/{was}", "/etc/systemd/system")
    folder = _host.path("/etc/systemd/system")
    before = sorted(folder.rglob("*"))
    assert drive(services=["a.service"]).done == ["remember_before", "stop_service", "bar_service"]
    assert systemd.states == [f"inactive/{was}"]
    assert not drive(services=["a.service"]).changed
    # An edited bar has no effect.
    _host.write(f"/etc/systemd/system/a.service.d/{_gpu_services.BAR}", "[Unit]\n")
    assert drive(services=["a.service"]).done == ["bar_service"]
    given = ["unbar_service", "start_service", "forget_before"]
    assert drive(services=[], state="restored").done == given
    assert (systemd.states, sorted(folder.rglob("*"))) == ([f"active/{was}"], before)


@pytest.mark.covers("HOST-15")
def test_the_first_word_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A service that an operator started on the slice host ends stopped, as it was before."""
    systemd = Systemd(monkeypatch, a="active/enabled", b="inactive/disabled")
    drive(services=["a.service", "b.service"])
    _command.run(["systemctl", "unmask", "--", "b.service"])
    systemd.put("b.service", "active/enabled")
    drive(services=["a.service", "b.service"])
    assert json.loads(_host.read(RECORD) or "")["b.service"]["active"] is False
    drive(services=[], state="restored")
    assert systemd.states == ["active/enabled", "inactive/disabled"]


@pytest.mark.covers("HOST-15")
def test_drift_is_not_taken_for_what_was_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """All were stopped at the first run, so a service that started later is not restored."""
    systemd = Systemd(monkeypatch, a="inactive/disabled")
    assert drive(services=["a.service"]).done == ["remember_before", "mask_service"]
    assert not drive(services=["a.service"]).changed
    _command.run(["systemctl", "unmask", "--", "a.service"])
    systemd.put("a.service", "active/enabled")
    again = ["disable_service", "stop_service", "mask_service"]
    assert drive(services=["a.service"]).done == again
    assert drive(services=[], state="restored").done == ["unmask_service", "forget_before"]
    assert systemd.states == ["inactive/disabled"]


@pytest.mark.covers("HOST-15")
def test_the_record_stays_while_a_service_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    systemd = Systemd(monkeypatch, a="active/enabled")
    drive(services=["a.service"])
    systemd.broken = "a.service"
    failure = drive(services=[], state="restored").failure
    assert failure.code == "service_not_restored"
    systemd.broken = ""
    assert drive(services=[], state="restored").done == ["start_service", "forget_before"]


@pytest.mark.covers("HOST-15")
def test_a_service_that_was_uninstalled_holds_nothing_up(monkeypatch: pytest.MonkeyPatch) -> None:
    systemd = Systemd(monkeypatch, a="active/enabled")
    drive(services=["a.service"])
    systemd.uninstall("a.service")
    # The project's mask is removed all the same.
    assert drive(services=[], state="restored").done == ["unmask_service", "forget_before"]
    assert systemd.states == ["inactive/"]


def test_a_record_that_cannot_be_read_is_not_overwritten(monkeypatch: pytest.MonkeyPatch) -> None:
    Systemd(monkeypatch, a="active/enabled")
    _host.write(RECORD, "{broken")
    with pytest.raises(_change.Refusal, match="before_unreadable"):
        drive(services=["a.service"])

"""GPU services of a slice host (persistence, fabric manager, DCGM), stopped and barred.

Each is masked: disabling takes back its own [Install] alone, and a udev rule or another unit may
want it too, as the rules of Ubuntu's driver want nvidia-persistenced when `nvidia` is loaded. Where
the site's own unit file leaves no place for a mask, a drop-in bars it. A service that is not there
is quiet already. What each was is remembered before it is stopped, and returning to bare metal
makes it that again, no more and no less: what was masked stays so.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ansible_collections.gpuaas.slice.plugins.module_utils.core import (
    _change,
    _command,
    _host,
    _host_snapshot,
)
from ansible_collections.gpuaas.slice.plugins.module_utils.core._errors import Refusal
from ansible_collections.gpuaas.slice.plugins.module_utils.tenant import _tenancy

RECORD = "gpu-services"

_AT_BOOT = ("enabled", "enabled-runtime")
_MASKED = "masked"
_QUIET = ("inactive", "failed")
# Where a mask is a link to /dev/null, unless a unit file of the site's is there.
_MASKS = "/etc/systemd/system"
BAR = "90-gpuaas-slice.conf"
_BARRED = """\
# Written by the gpuaas.slice collection; changed by its playbooks only.
# Never true: the GPUs of this host belong to slices.
[Unit]
ConditionPathExists=!/
"""
# Types of units, one of which systemctl takes a name to end in; it adds the first where none is.
_TYPES = (
    *(".service", ".socket", ".target", ".timer", ".path", ".mount", ".automount", ".swap"),
    *(".slice", ".scope", ".device"),
)
# Where packages have their units, for what lies beneath a mask: systemd does not say.
_PACKAGED = (
    "/run/systemd/system",
    "/usr/local/lib/systemd/system",
    "/usr/lib/systemd/system",
    "/lib/systemd/system",
)

Params = Mapping[str, Any]


@dataclass(frozen=True)
class Service:
    """What systemd says of a unit. file: its UnitFileState, "" when there is no such unit.

    own: the site's unit file is where the mask would be. drop_in: our drop-in's text, None without
    one. installed: there is a unit to bring back.
    """

    active: str
    file: str
    own: bool
    drop_in: str | None
    installed: bool

    @property
    def runs(self) -> bool:
        return self.active not in _QUIET

    @property
    def words(self) -> tuple[str, ...]:
        """What it does; () when it is quiet."""
        return tuple(filter(None, (self.active if self.runs else "", self.at_boot)))

    @property
    def at_boot(self) -> str:
        """How it could run after a boot; "" when nothing starts it."""
        if self.file in ("", _MASKED) or (self.own and self.drop_in == _BARRED.strip()):
            return ""
        if self.file in _AT_BOOT:
            return "started at boot"
        return "not barred" if self.own else "not masked"


@dataclass(frozen=True)
class State:
    """before: what was remembered of each service at our first look; None when nothing ever was."""

    services: Mapping[str, Service]
    before: Mapping[str, Any] | None


def observe(params: Params) -> State:
    before = _host_snapshot.recall(RECORD)
    names = list(params["services"])
    if _restored(params):
        names += [name for name in before or {} if name not in names]
    if not names:
        return State({}, before)
    out = _command.run(["systemctl", "show", "--property=ActiveState,UnitFileState", "--", *names])
    blocks = out.out.strip().split("\n\n")
    return State({n: _service(n, block) for n, block in zip(names, blocks, strict=True)}, before)


def plan(params: Params, state: State) -> _change.Plan:
    return _change.Plan(tuple(_to_restore(state) if _restored(params) else _to_quiesce(state)))


def apply(params: Params, step: _change.Step) -> dict[str, Any] | None:
    if step.name == _host_snapshot.FORGET:
        _prove_restored(params)
    if step.name in _host_snapshot.STEPS:
        _host_snapshot.apply(step)
        return None
    # The subject is the unit, then what of it: a diff has one entry for each.
    unit = step.subject.partition(" ")[0]
    if step.name in ("bar_service", "unbar_service"):
        _write_bar(unit, step.after)
        _command.run(["systemctl", "daemon-reload"])
        return None
    for words in _commands(step):
        _command.run(["systemctl", *words, "--", unit], timeout=120)
    return None


def _write_bar(unit: str, text: str | None) -> None:
    path = _bar(unit)
    if text is not None:
        _host.write(path, text)
        return
    _host.remove(path)
    # The folder stays where the site has something in it.
    with contextlib.suppress(OSError):
        _host.path(path).parent.rmdir()


def _commands(step: _change.Step) -> list[list[str]]:
    if step.name == "disable_service":
        # What was enabled until the next boot is not disabled without the word, and stays beside
        # what was enabled for good.
        return [["disable", "--runtime"], ["disable"]]
    if step.name == "enable_service":
        return [["enable", *(["--runtime"] if step.after == "enabled-runtime" else [])]]
    return [[step.name.partition("_")[0]]]


def facts(_params: Params, state: State) -> dict[str, Any]:
    return {
        "services": {name: " and ".join(found.words) for name, found in state.services.items()},
        "before": dict(state.before or {}),
    }


SUBJECT = _tenancy.guarded(
    _change.Subject(observe, plan, apply, facts),
    lambda params, found: bool(found.steps) or not _restored(params),
)


def _to_quiesce(state: State) -> list[_change.Step]:
    # The quiet ones as well, at the first run: one that is started by hand later was quiet before.
    there = {
        name: {"active": found.runs, "file": found.file}
        for name, found in state.services.items()
        if found.file
    }
    return [
        *(_host_snapshot.remember_steps(RECORD, state.before, there) if there else []),
        *(step for name, found in state.services.items() for step in _quiesce(name, found)),
    ]


def _quiesce(name: str, found: Service) -> list[_change.Step]:
    steps = []
    if found.file in _AT_BOOT and not found.own:
        # Before the mask, which would hide it: who unmasks the unit later must not start it too.
        after = "disabled"
        steps.append(_change.Step("disable_service", f"{name} at boot", found.file, after))
    if found.runs:
        # Before the mask, which would hide how the unit wants to be stopped.
        steps.append(_change.Step("stop_service", name, found.active, "inactive"))
    if found.at_boot and found.own:
        # Enabled or not, as it is: that it is a link may be all that its enabling consists of.
        steps.append(_change.Step("bar_service", f"{name} bar", found.drop_in, _BARRED))
    elif found.at_boot:
        steps.append(_change.Step("mask_service", f"{name} mask", found.file, _MASKED))
    return steps


def _to_restore(state: State) -> list[_change.Step]:
    return [*_still_quiet(state), *_host_snapshot.forget_steps(RECORD, state.before)]


def _still_quiet(state: State) -> list[_change.Step]:
    steps = []
    for name, was in sorted((state.before or {}).items()):
        now = state.services[name]
        if now.drop_in is not None:
            steps.append(_change.Step("unbar_service", f"{name} bar", now.drop_in, None))
        if was["file"] == _MASKED:
            continue
        if now.file == _MASKED:
            steps.append(_change.Step("unmask_service", f"{name} mask", _MASKED, was["file"]))
        # A service that was uninstalled meanwhile cannot be brought back by us.
        if not now.installed:
            continue
        if was["file"] in _AT_BOOT and now.file != was["file"]:
            steps.append(_change.Step("enable_service", f"{name} at boot", now.file, was["file"]))
        # One that ran beneath its mask could be started by nobody.
        if was["active"] and not now.runs and was["file"] != "masked-runtime":
            steps.append(_change.Step("start_service", name, now.active, "active"))
    return steps


def _prove_restored(params: Params) -> None:
    """The record goes only when the services are what it says."""
    left = _still_quiet(observe(params))
    if left:
        raise Refusal(
            "service_not_restored",
            expected="the GPU services as they were before this was a slice host",
            found=", ".join(f"{step.subject} is {step.before}" for step in left),
            remedy="read the service's journal; after a reboot its driver may be missing",
        )


def _restored(params: Params) -> bool:
    return str(params.get("state")) == "restored"


def _service(name: str, block: str) -> Service:
    values = dict(row.partition("=")[::2] for row in block.splitlines())
    return service(name, values.get("ActiveState", ""), values.get("UnitFileState", ""))


def service(name: str, active: str, file: str) -> Service:
    """The unit of which systemd says so much, with what it does not say."""
    return Service(
        active=active,
        file=file,
        own=_own(name),
        drop_in=_host.kept(_bar(name)),
        installed=_beneath(name) if file == _MASKED else file != "",
    )


def _bar(name: str) -> str:
    return f"{_MASKS}/{_whole(name)}.d/{BAR}"


def _own(name: str) -> bool:
    return _defined(f"{_MASKS}/{_whole(name)}")


def _beneath(name: str) -> bool:
    unit = _whole(name)
    # A unit that is generated from a script is not generated while it is masked.
    places = [f"/etc/init.d/{unit.removesuffix('.service')}"]
    places += [f"{folder}/{unit}" for folder in _PACKAGED]
    # Of an instance its mask hides nothing but the name: the site's own template counts too.
    template, at, rest = unit.partition("@")
    if at:
        kind = rest.rpartition(".")[2]
        places += [f"{folder}/{template}@.{kind}" for folder in (_MASKS, *_PACKAGED)]
    return any(_defined(place) for place in places)


def _whole(name: str) -> str:
    """The name of the unit's files, which systemctl is told without `.service` too."""
    return name if name.endswith(_TYPES) else f"{name}.service"


def _defined(absolute: str) -> bool:
    """Whether there is a file of a unit, and not just a mask."""
    place = _host.path(absolute)
    if place.is_symlink():
        return str(place.readlink()) != "/dev/null"
    return place.exists()

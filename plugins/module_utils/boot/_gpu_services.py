"""GPU services of a slice host (persistence, fabric manager, DCGM), stopped and barred.

Each service is masked. Disabling is not enough: it removes only the unit's own [Install] links, and
a udev rule or another unit may still start it. For example, the rules of Ubuntu's driver start
nvidia-persistenced when `nvidia` loads. If the site's own unit file occupies the place of the mask,
a drop-in bars the service. A service that is not installed counts as quiet. The earlier state is
recorded before the stop, and the return to bare metal restores exactly that state: a service that
was masked stays masked.
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

RECORD = _host_snapshot.GPU_SERVICES

_AT_BOOT = ("enabled", "enabled-runtime")
_MASKED = "masked"
_QUIET = ("inactive", "failed")
# Folder of the masks: a mask is a link to /dev/null, unless the site has a unit file there.
_MASKS = "/etc/systemd/system"
BAR = "90-gpuaas-slice.conf"
_BARRED = """\
# Written by the gpuaas.slice collection; changed by its playbooks only.
# Never true: the GPUs of this host belong to slices.
[Unit]
ConditionPathExists=!/
"""
# Suffixes of unit names. systemctl adds the first if a name has none.
_TYPES = (
    *(".service", ".socket", ".target", ".timer", ".path", ".mount", ".automount", ".swap"),
    *(".slice", ".scope", ".device"),
)
# Unit folders of packages, for the unit beneath a mask, which systemd does not report.
_PACKAGED = (
    "/run/systemd/system",
    "/usr/local/lib/systemd/system",
    "/usr/lib/systemd/system",
    "/lib/systemd/system",
)

Params = Mapping[str, Any]


@dataclass(frozen=True)
class Service:
    """State of a systemd unit. file: its UnitFileState, "" when there is no such unit.

    site_unit: the site's unit file is in the place of the mask. drop_in: text of the managed
    drop-in, None without it. installed: a unit exists that can be restored.
    """

    active: str
    file: str
    site_unit: bool
    drop_in: str | None
    installed: bool

    @property
    def runs(self) -> bool:
        return self.active not in _QUIET

    @property
    def words(self) -> tuple[str, ...]:
        """Its activity; () when it is quiet."""
        return tuple(filter(None, (self.active if self.runs else "", self.at_boot)))

    @property
    def at_boot(self) -> str:
        """How it could run after a boot; "" when nothing starts it."""
        if self.file in ("", _MASKED) or (self.site_unit and self.drop_in == _BARRED.strip()):
            return ""
        if self.file in _AT_BOOT:
            return "started at boot"
        return "not barred" if self.site_unit else "not masked"


@dataclass(frozen=True)
class State:
    """before: recorded state of each service before the first change; None without a record."""

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
    # The subject is the unit and the changed aspect, because a diff has one entry for each.
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
    # The folder stays if the site has other files in it.
    with contextlib.suppress(OSError):
        _host.path(path).parent.rmdir()


def _commands(step: _change.Step) -> list[list[str]]:
    if step.name == "disable_service":
        # A unit enabled until the next boot is disabled only with `--runtime`, and that state can
        # coexist with permanent enabling.
        return [["disable", "--runtime"], ["disable"]]
    if step.name == "enable_service":
        return [["enable", *(["--runtime"] if step.after == "enabled-runtime" else [])]]
    return [[step.name.partition("_")[0]]]


def facts(_params: Params, state: State) -> dict[str, Any]:
    return {
        "services": {name: " and ".join(service.words) for name, service in state.services.items()},
        "before": dict(state.before or {}),
    }


SUBJECT = _tenancy.guarded(
    _change.Subject(observe, plan, apply, facts),
    lambda params, planned: bool(planned.steps) or not _restored(params),
)


def _to_quiesce(state: State) -> list[_change.Step]:
    # The first run records quiet services too: if one is started by hand later, it was still quiet
    # before.
    there = {
        name: {"active": service.runs, "file": service.file}
        for name, service in state.services.items()
        if service.file
    }
    return [
        *(_host_snapshot.remember_steps(RECORD, state.before, there) if there else []),
        *(step for name, service in state.services.items() for step in _quiesce(name, service)),
    ]


def _quiesce(name: str, service: Service) -> list[_change.Step]:
    steps = []
    if service.file in _AT_BOOT and not service.site_unit:
        # Before the mask, which would hide the unit. Otherwise the service would start again when
        # an operator unmasks it.
        after = "disabled"
        steps.append(_change.Step("disable_service", f"{name} at boot", service.file, after))
    if service.runs:
        # Before the mask, which would hide the unit's own stop command.
        steps.append(_change.Step("stop_service", name, service.active, "inactive"))
    if service.at_boot and service.site_unit:
        # Enabling is left unchanged, because the unit may be enabled only by being a link.
        steps.append(_change.Step("bar_service", f"{name} bar", service.drop_in, _BARRED))
    elif service.at_boot:
        steps.append(_change.Step("mask_service", f"{name} mask", service.file, _MASKED))
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
        # A service that was uninstalled in the meantime cannot be restored.
        if not now.installed:
            continue
        if was["file"] in _AT_BOOT and now.file != was["file"]:
            steps.append(_change.Step("enable_service", f"{name} at boot", now.file, was["file"]))
        # A service that ran beneath its mask cannot be started again.
        if was["active"] and not now.runs and was["file"] != "masked-runtime":
            steps.append(_change.Step("start_service", name, now.active, "active"))
    return steps


def _prove_restored(params: Params) -> None:
    """Delete the record only when the services are in the recorded state."""
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
    """The unit's state from systemd's values, with the details that systemd does not report."""
    return Service(
        active=active,
        file=file,
        site_unit=_has_site_unit(name),
        drop_in=_host.kept(_bar(name)),
        installed=_beneath(name) if file == _MASKED else file != "",
    )


def _bar(name: str) -> str:
    return f"{_MASKS}/{_whole(name)}.d/{BAR}"


def _has_site_unit(name: str) -> bool:
    return _defined(f"{_MASKS}/{_whole(name)}")


def _beneath(name: str) -> bool:
    unit = _whole(name)
    # A unit that is generated from a script is not generated while it is masked.
    places = [f"/etc/init.d/{unit.removesuffix('.service')}"]
    places += [f"{folder}/{unit}" for folder in _PACKAGED]
    # The mask of an instance hides only that instance's name, so the site's own template counts
    # too.
    template, at, rest = unit.partition("@")
    if at:
        kind = rest.rpartition(".")[2]
        places += [f"{folder}/{template}@.{kind}" for folder in (_MASKS, *_PACKAGED)]
    return any(_defined(place) for place in places)


def _whole(name: str) -> str:
    """The name of the unit's files; systemctl also accepts it without `.service`."""
    return name if name.endswith(_TYPES) else f"{name}.service"


def _defined(absolute: str) -> bool:
    """Whether a unit file exists that is not just a mask."""
    place = _host.path(absolute)
    if place.is_symlink():
        return str(place.readlink()) != "/dev/null"
    return place.exists()

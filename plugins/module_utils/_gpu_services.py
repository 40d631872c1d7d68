"""Services that hold a host's GPUs (persistence, fabric manager, DCGM): quiet, so slices get them.

A service that is not there is quiet already. What each was is remembered before it is stopped, and
returning to bare metal makes it that again, no more and no less.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ansible_collections.gpuaas.slice.plugins.module_utils import (
    _before,
    _change,
    _command,
    _tenancy,
)
from ansible_collections.gpuaas.slice.plugins.module_utils._errors import Refusal

RECORD = "gpu-services"

# A static unit starts only when something else asks for it, and cannot be disabled.
_AT_BOOT = ("enabled", "enabled-runtime")
_QUIET = ("inactive", "failed")

Params = Mapping[str, Any]


@dataclass(frozen=True)
class Service:
    """What systemd says of a unit. file: its UnitFileState, "" when there is no such unit."""

    active: str
    file: str

    @property
    def runs(self) -> bool:
        return self.active not in _QUIET

    @property
    def words(self) -> tuple[str, ...]:
        """What it does; () when it is quiet."""
        at_boot = ("started at boot",) if self.file in _AT_BOOT else ()
        return ((self.active,) if self.runs else ()) + at_boot


@dataclass(frozen=True)
class State:
    """before: what was remembered of each service at our first look; None when nothing ever was."""

    services: Mapping[str, Service]
    before: Mapping[str, Any] | None


def observe(params: Params) -> State:
    before = _before.recalled(RECORD)
    names = list(params["services"])
    if _restored(params):
        names += [name for name in before or {} if name not in names]
    if not names:
        return State({}, before)
    out = _command.run(["systemctl", "show", "--property=ActiveState,UnitFileState", "--", *names])
    blocks = out.out.strip().split("\n\n")
    return State({n: _service(block) for n, block in zip(names, blocks, strict=True)}, before)


def plan(params: Params, state: State) -> _change.Plan:
    return _change.Plan(tuple(_to_restore(state) if _restored(params) else _to_quiesce(state)))


def apply(params: Params, step: _change.Step) -> dict[str, Any] | None:
    if step.name == _before.FORGET:
        _prove_restored(params)
    if step.name in _before.STEPS:
        _before.apply(step)
    elif step.name == "enable_service":
        runtime = ["--runtime"] if step.after == "enabled-runtime" else []
        _command.run(["systemctl", "enable", *runtime, "--", step.subject.partition(" ")[0]])
    elif step.name == "start_service":
        _command.run(["systemctl", "start", "--", step.subject], timeout=120)
    else:
        # What was enabled until the next boot is not disabled without the word, and stays beside
        # what was enabled for good.
        _command.run(["systemctl", "disable", "--runtime", "--", step.subject])
        _command.run(["systemctl", "disable", "--now", "--", step.subject], timeout=120)
    return None


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
    loud = {name: found for name, found in state.services.items() if found.words}
    # The quiet ones as well, at the first run: one that is started by hand later was quiet before.
    there = {
        name: {"active": found.runs, "file": found.file}
        for name, found in state.services.items()
        if found.file
    }
    return [
        *(_before.remembering(RECORD, state.before, there) if there else []),
        *(
            _change.Step("quiesce_service", name, " and ".join(found.words), "quiet, also at boot")
            for name, found in loud.items()
        ),
    ]


def _to_restore(state: State) -> list[_change.Step]:
    return [*_still_quiet(state), *_before.forgetting(RECORD, state.before)]


def _still_quiet(state: State) -> list[_change.Step]:
    steps = []
    for name, was in sorted((state.before or {}).items()):
        now = state.services[name]
        # A service that was uninstalled meanwhile cannot be brought back by us.
        if not now.file:
            continue
        if was["file"] in _AT_BOOT and now.file != was["file"]:
            steps.append(_change.Step("enable_service", f"{name} at boot", now.file, was["file"]))
        if was["active"] and not now.runs:
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


def _service(block: str) -> Service:
    values = dict(row.partition("=")[::2] for row in block.splitlines())
    return Service(values.get("ActiveState", ""), values.get("UnitFileState", ""))

"""Virtual functions of the fabric cards, now and at every boot."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from ansible_collections.gpuaas.slice.plugins.module_utils import (
    _boot,
    _boot_units,
    _change,
    _sriov,
)


@dataclass(frozen=True)
class State:
    live: _sriov.State
    installed: _boot.Installed


def observe(params: _change.Params) -> State:
    return State(_sriov.observe(params), _boot.observe(_unit(params)))


def plan(params: _change.Params, state: State) -> _change.Plan:
    live = _sriov.plan(params, state.live)
    if params["count"]:
        service = _boot.plan(_unit(params), state.installed)
    else:
        service = _boot.plan_removal(_unit(params), state.installed)
    return _change.Plan((*live.steps, *service), live.blockers)


def apply(params: _change.Params, step: _change.Step) -> dict[str, Any] | None:
    if step.name not in _boot.STEPS:
        return _sriov.apply(params, step)
    _boot.apply(_unit(params), step)
    return None


def facts(params: _change.Params, state: State) -> dict[str, Any]:
    return _sriov.facts(params, state.live)


SUBJECT = _change.Subject(observe, plan, apply, facts)


def _unit(params: _change.Params) -> _boot.Unit:
    return dataclasses.replace(_boot_units.FABRIC, settings=settings(params))


def settings(params: _change.Params) -> dict[str, Any]:
    """What the boot service is told."""
    return {key: params[key] for key in ("pfs", "pf_ids", "count", "macs")}

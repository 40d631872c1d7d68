"""Slice mode of a host: its marker, and the service that keeps it.

Without the marker no device is bound on the host, now or at boot, and the service repairs nothing.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

# The service's code is carried to the host with this file.
from ansible_collections.gpuaas.slice.plugins.module_utils.boot import (
    _upkeep_service,  # noqa: F401
)
from ansible_collections.gpuaas.slice.plugins.module_utils.core import (
    _boot_service,
    _boot_units,
    _change,
    _host,
)
from ansible_collections.gpuaas.slice.plugins.module_utils.tenant import _tenancy

Params = Mapping[str, Any]


def observe(_params: Params) -> str | None:
    return _host.kept(_boot_service.SLICE_MODE)


def plan(params: Params, state: str | None) -> _change.Plan:
    content = None
    if _present(params):
        content = json.dumps({"mode": "slice", "profile": params["profile"]})
    if state == content:
        return _change.Plan()
    name = "remove_file" if content is None else "write_file"
    return _change.Plan((_change.Step(name, _boot_service.SLICE_MODE, state, content),))


def apply(_params: Params, step: _change.Step) -> dict[str, Any] | None:
    if step.after is None:
        _host.remove(step.subject)
    else:
        _host.write(step.subject, f"{step.after}\n")
    return None


def _present(params: Params) -> bool:
    return bool(params.get("state", "present") == "present")


def _unit(params: Params) -> _boot_service.Unit:
    settings = {"gpu_services": list(params.get("gpu_services") or ())}
    return dataclasses.replace(_boot_units.UPKEEP, settings=settings)


def _observe_service(params: Params) -> _boot_service.Installed:
    return _boot_service.observe(_unit(params))


def _plan_service(params: Params, state: _boot_service.Installed) -> _change.Plan:
    wish = _boot_service.plan if _present(params) else _boot_service.plan_removal
    return _change.Plan(tuple(wish(_unit(params), state)))


def _apply_service(params: Params, step: _change.Step) -> None:
    _boot_service.apply(_unit(params), step)


# Removing the marker is always allowed. While it exists, a tenant of the whole machine cannot even
# be released.
SUBJECT = _tenancy.guarded(
    _change.Subject(observe, plan, apply), lambda params, _plan: _present(params)
)
SERVICE = _change.Subject(_observe_service, _plan_service, _apply_service)


def parts(_params: Params) -> tuple[_change.Part, ...]:
    """The marker first, also on the way back, so that the service repairs nothing from then on."""
    return (
        _change.Part("mark_host", SUBJECT, lambda given, _facts: given),
        _change.Part("keep_host", SERVICE, lambda given, _facts: given),
    )

"""Slice mode marker. Without it no device is bound on the host, now or at boot."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ansible_collections.gpuaas.slice.plugins.module_utils.core import _change, _host, _host_mode
from ansible_collections.gpuaas.slice.plugins.module_utils.tenant import _tenancy

Params = Mapping[str, Any]


def observe(_params: Params) -> str | None:
    return _host.kept(_host_mode.MARKER)


def plan(params: Params, state: str | None) -> _change.Plan:
    content = None
    if _present(params):
        content = json.dumps({"mode": "slice", "profile": params["profile"]})
    if state == content:
        return _change.Plan()
    name = "remove_file" if content is None else "write_file"
    return _change.Plan((_change.Step(name, _host_mode.MARKER, state, content),))


def apply(_params: Params, step: _change.Step) -> dict[str, Any] | None:
    if step.after is None:
        _host.remove(step.subject)
    else:
        _host.write(step.subject, f"{step.after}\n")
    return None


def _present(params: Params) -> bool:
    return bool(params.get("state", "present") == "present")


# Removing the marker is always allowed. While it exists, a tenant of the whole machine cannot even
# be released.
SUBJECT = _tenancy.guarded(
    _change.Subject(observe, plan, apply), lambda params, _plan: _present(params)
)

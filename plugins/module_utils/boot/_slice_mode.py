"""Slice mode marker. Without it no device is bound on the host, now or at boot.

A host without slice mode is an ordinary machine: its operator may use a disk that was proven clean,
and no ledger records that. All proofs therefore end before the marker is written. They do not end
when slice mode ends, because the sale of the whole machine, which wipes its disks first, relies on
them. Bootstrap writes the marker, and takes no disk over, so no fresh proof of a takeover is lost.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ansible_collections.gpuaas.slice.plugins.module_utils.core import (
    _change,
    _host,
    _host_mode,
    _ledger,
)
from ansible_collections.gpuaas.slice.plugins.module_utils.disk import _erase_journal
from ansible_collections.gpuaas.slice.plugins.module_utils.tenant import _tenancy

Params = Mapping[str, Any]
END_PROOFS = "end_proofs"


@dataclass(frozen=True)
class State:
    """marker: content of the marker file. proven: slots and disks whose proofs must end first."""

    marker: str | None
    proven: tuple[str, ...] = ()


def observe(params: Params) -> State:
    marker = _host.kept(_host_mode.MARKER)
    if not _present(params) or _host_mode.is_slice():
        return State(marker)
    return State(marker, tuple(_ledger.proven()))


def plan(params: Params, state: State) -> _change.Plan:
    content = None
    if _present(params):
        content = json.dumps({"mode": "slice", "profile": params["profile"]})
    if state.marker == content:
        return _change.Plan()
    steps = []
    if state.proven:
        proven = list(state.proven)
        steps.append(_change.Step(END_PROOFS, _ledger.DIRECTORY, before=proven, after=[]))
    name = "remove_file" if content is None else "write_file"
    steps.append(_change.Step(name, _host_mode.MARKER, state.marker, content))
    return _change.Plan(tuple(steps))


def apply(_params: Params, step: _change.Step) -> dict[str, Any] | None:
    if step.name == END_PROOFS:
        _erase_journal.forget_ended()
        _ledger.end_proofs()
    elif step.after is None:
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

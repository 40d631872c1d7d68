"""Snapshot of the host from before slice mode, which a return to bare metal restores.

Each subject has a file. Its first run writes the file before any change, and also if there is
nothing to change; this is reported as a change. Otherwise a repair of drift, months later, would
record the drift as the original state. A recorded value is never overwritten, because a second
bootstrap sees a host that is already changed. The file is deleted after the restore.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ansible_collections.gpuaas.slice.plugins.module_utils.core import _change, _host

FOLDER = f"{_host.STATE_DIRECTORY}/before"
REMEMBER, FORGET = "remember_before", "forget_before"
STEPS = (REMEMBER, FORGET)
# The subjects whose records list the packages installed for slices, and the GPU services stopped.
PACKAGES, GPU_SERVICES = "packages", "gpu-services"


def file_of(subject: str) -> str:
    return f"{FOLDER}/{subject}.json"


def recall(subject: str) -> dict[str, Any] | None:
    """The subject's record; None without a record."""
    return _host.document(
        file_of(subject),
        code="before_unreadable",
        remedy="record the host's earlier state there by hand, or remove the file: "
        "the way back then takes the host for a freshly deployed one",
    )


def remember_steps(
    subject: str, snapshot: Mapping[str, Any] | None, new: Mapping[str, Any]
) -> list[_change.Step]:
    """A step that adds missing values to the record; [] when it is complete."""
    added = {key: value for key, value in new.items() if key not in (snapshot or {})}
    if snapshot is not None and not added:
        return []
    after = {**added, **(snapshot or {})}
    return [_change.Step(REMEMBER, file_of(subject), dict(snapshot) if snapshot else None, after)]


def forget_steps(subject: str, snapshot: Mapping[str, Any] | None) -> list[_change.Step]:
    """The last step of a restore."""
    if snapshot is None:
        return []
    return [_change.Step(FORGET, file_of(subject), dict(snapshot), None)]


def apply(step: _change.Step) -> None:
    """Do a step of STEPS."""
    if step.name == REMEMBER:
        _host.write(step.subject, json.dumps(step.after, indent=2, sort_keys=True) + "\n")
    else:
        _host.remove(step.subject)

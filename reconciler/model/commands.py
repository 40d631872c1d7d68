"""CLI commands for events: which command causes an event, and which commands must precede it.

Messages name commands instead of events. An event that only the service causes has no command, and
messages do not name it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from reconciler.model import transitions
from reconciler.model.states import ENDED_TASKS, NodeMode, NodeState

COMMANDS = {
    ("node", "drain"): "gpuaas nodes drain {id} --reason WHY",
    ("node", "maintain"): "gpuaas nodes maintain {id} --reason WHY",
    ("node", "resume"): "gpuaas nodes resume {id} --reason WHY",
    ("node", "retire"): "gpuaas nodes retire {id} --reason WHY",
    ("node_mode", "to_slice"): "gpuaas nodes convert {id} slice",
    ("node_mode", "to_baremetal"): "gpuaas nodes convert {id} baremetal",
    ("slot", "disable"): "gpuaas slots disable {node_id} {id} --reason WHY",
    ("slot", "enable"): "gpuaas slots enable {node_id} {id} --reason WHY",
    ("slot", "clean"): "gpuaas slots repair {node_id} {id}",
    ("slot", "withdraw"): "gpuaas slots withdraw {node_id} {id} --reason WHY",
    ("allocation", "withdraw"): "gpuaas release {id} --project {project_id}",
    ("allocation", "release"): "gpuaas release {id} --project {project_id}",
    ("allocation", "force_release"): "gpuaas allocation force-release {id} --reason WHY",
    ("task", "cancel"): "gpuaas tasks cancel {id}",
    ("app_instance", "stop"): "gpuaas apps stop {id} --project {project_id}",
}
# Steps that take a node out of use, in order: each step may need the steps before it.
_LADDER = ("drain", "maintain", "retire")
# Remedies by state for requests that no command of the entity can help.
_OTHERWISE: dict[tuple[str, str], str] = {
    ("node", NodeState.ENROLLING): "enrol its host first: `gpuaas nodes userdata {id}`",
    ("node", NodeState.BOOTSTRAPPING): "end its bootstrap first: `gpuaas nodes bootstrap {id}`",
    ("node", NodeState.MAINTENANCE): "nothing: it takes nothing new already; resume it to use it",
    ("node", NodeState.UNREACHABLE): "bring its host back to answering SSH: the node is then what"
    " it was before; one that never answers again can be retired",
    ("node", NodeState.RETIRED): "nothing: it never comes back; add the machine under another id",
    ("node_mode", NodeMode.SLICE): "nothing: it is a slice host already",
    ("node_mode", NodeMode.BAREMETAL): "nothing: it is bare metal already",
    **{("task", state): "nothing: it has ended" for state in ENDED_TASKS},
}


def commands(entity: str, record: Mapping[str, Any], source: str) -> list[str]:
    """Commands that are possible for an entity in this state."""
    texts = (COMMANDS.get((entity, event)) for event in transitions.events(entity, source))
    return [_fill(command, record) for command in texts if command]


def named(entity: str, record: Mapping[str, Any], event: str) -> str:
    """The command for an event; the event's name when only the service causes it."""
    command = COMMANDS.get((entity, event))
    return f"`{_fill(command, record)}`" if command else repr(event)


def sources(entity: str, event: str) -> list[str]:
    """The states in which an event is possible."""
    rows = transitions.TABLE
    return [str(row.source) for row in rows if (row.entity, row.event) == (entity, event)]


def remedy(entity: str, record: Mapping[str, Any], source: str, event: str) -> str:
    """Remedy for a request whose event is not possible in this state."""
    if (entity, event) in COMMANDS and source in _targets(entity, event):
        return f"nothing: it is {source} already"
    first = _before(entity, source, event)
    if first:
        steps = ", ".join(f"`{_fill(COMMANDS[entity, step], record)}`" for step in first)
        return f"{' and '.join(first)} first: {steps}; then ask again"
    otherwise = _OTHERWISE.get((entity, source))
    return _fill(otherwise, record) if otherwise else f"read the {entity} and act on its state"


def _before(entity: str, source: str, event: str) -> list[str]:
    """Steps that lead from `source` to a state in which the event is possible; [] if none do."""
    if event not in _LADDER:
        return []
    state = source
    steps: list[str] = []
    for step in _LADDER[: _LADDER.index(event)]:
        reached = transitions.target(entity, state, step)
        if reached is not None:
            state, steps = reached, [*steps, step]
    return steps if transitions.target(entity, state, event) else []


def _targets(entity: str, event: str) -> set[str]:
    rows = transitions.TABLE
    return {str(row.target) for row in rows if (row.entity, row.event) == (entity, event)}


def _fill(text: str, record: Mapping[str, Any]) -> str:
    return text.format_map({name: record.get(name) for name in ("id", "node_id", "project_id")})

"""Remedies: the commands that a refusal names, in each state of each entity."""

from __future__ import annotations

import re

import pytest

from reconciler.model import transitions
from reconciler.model.commands import COMMANDS, commands, remedy

RECORD = {"id": "x1", "node_id": "n1", "project_id": "p1"}
INTERNAL = re.compile(r"\b(lose|regain_\w+|converted|revert|fail|strand|lease|to_slice)\b")


@pytest.mark.covers("CTRL-12")
@pytest.mark.parametrize("entity", sorted({name for name, _ in COMMANDS}))
def test_only_commands_are_named(entity: str) -> None:
    events = [event for name, event in COMMANDS if name == entity]
    for state in map(str, transitions.ENTITIES[entity]):
        for command in commands(entity, RECORD, state):
            assert command.startswith("gpuaas ") and "x1" in command
        for event in events:
            if transitions.target(entity, state, event) is None:
                text = remedy(entity, RECORD, state, event)
                assert text and not INTERNAL.search(text) and "None" not in text


def test_every_command_is_of_an_event_that_there_is() -> None:
    assert set(COMMANDS) <= {(row.entity, row.event) for row in transitions.TABLE}


def test_what_comes_first() -> None:
    assert remedy("node", RECORD, "ready", "maintain").startswith("drain first: ")
    assert remedy("node", RECORD, "ready", "retire").startswith("drain and maintain first: ")
    assert remedy("node", RECORD, "bootstrapping", "retire").startswith("maintain first: ")
    enrolling = remedy("node", RECORD, "enrolling", "drain")
    assert enrolling == "enrol its host first: `gpuaas nodes userdata x1`"
    # Out of use and back would be a way around the bootstrap.
    resumed = remedy("node", RECORD, "bootstrapping", "resume")
    assert resumed == "end its bootstrap first: `gpuaas nodes bootstrap x1`"

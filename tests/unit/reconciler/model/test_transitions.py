"""The table is complete, closed and explained."""

from __future__ import annotations

import pytest

from reconciler.model.states import LIVE_CLAIMS, Role, TaskKind
from reconciler.model.transitions import DEADLINES, ENTITIES, TABLE, events, target
from scripts.state_diagram import markdown, mermaid

STABLE = {
    "node": {"ready", "maintenance", "retired"},
    "node_mode": {"baremetal", "slice"},
    "slot": {"disabled", "available", "active"},
    "allocation": {"active", "released", "failed"},
    "claim": {"active", "released", "failed"},
    "task": {"succeeded", "failed", "canceled", "lost"},
    "app_instance": {"running", "failed", "stopped"},
    "app_member": {"ready", "failed"},
    "app_operation": {"succeeded", "failed"},
    "recovery_case": {"recovered", "failed"},
    "ingress_rule": {"applied", "removed", "failed"},
    "pool": {"running", "stopped", "evicted", "failed"},
}


@pytest.mark.covers("CTRL-6", "I12")
@pytest.mark.parametrize("entity", ENTITIES)
def test_every_state_is_explained_reached_and_limited(entity: str) -> None:
    states = list(ENTITIES[entity])
    reached = {row.target for row in TABLE if row.entity == entity} | {states[0]}
    for state in states:
        assert state.meaning.endswith(".")
        assert state in reached
        assert (state in STABLE[entity]) != ((entity, state) in DEADLINES)


def test_table_speaks_of_known_states_once() -> None:
    keys = [(row.entity, row.source, row.event) for row in TABLE]
    assert len(keys) == len(set(keys))
    for row in TABLE:
        assert row.source in set(ENTITIES[row.entity])
        assert row.target in set(ENTITIES[row.entity])


@pytest.mark.covers("I12")
def test_deadline_events_are_possible() -> None:
    for (entity, state), deadline in DEADLINES.items():
        assert deadline.event == "" or deadline.event in events(entity, state)


@pytest.mark.covers("CTRL-6", "I6")
def test_nothing_leaves_cleanup_blocked_but_by_evidence() -> None:
    # `withdraw` needs a discovery in which a device of it is gone; it leads to no sale.
    assert set(events("slot", "cleanup_blocked")) == {"return", "park", "clean", "withdraw"}
    assert target("slot", "cleanup_blocked", "enable") is None


def test_live_claims_are_those_that_can_still_end() -> None:
    ending = {row.source for row in TABLE if row.entity == "claim"}
    assert set(LIVE_CLAIMS) == ending


def test_diagram_names_every_event() -> None:
    drawn = mermaid("slot")
    assert drawn.startswith("stateDiagram-v2\n    [*] --> disabled")
    assert "    available --> reserved: reserve" in drawn
    text = markdown()
    assert all(f"**{state}**" in text for states in ENTITIES.values() for state in states)
    assert all(row.event in text for row in TABLE)


def test_kinds_and_roles() -> None:
    assert TaskKind.NODE_BOOTSTRAP.exclusive
    assert not TaskKind.SLICE_VM_PROVISION.exclusive
    assert all(kind.name == kind.value.upper().replace(".", "_") for kind in TaskKind)
    assert Role("platform-admin") is Role.PLATFORM_ADMIN

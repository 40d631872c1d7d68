"""Specification of a run: addresses, ids and variables that are refused."""

from __future__ import annotations

from typing import Any

import pytest

from reconciler.runs.spec import NodeAccess, RunSpec, SpecError

HOSTILE = ["", "-oProxyCommand=id", "{{ lookup('pipe','id') }}", "a b", "a\n", "a;id", "$(id)"]


@pytest.mark.covers("P2")
@pytest.mark.parametrize("text", HOSTILE)
@pytest.mark.parametrize("field", ["node_id", "address", "user"])
def test_what_reaches_inventory_and_ssh_is_plain(field: str, text: str) -> None:
    values: dict[str, Any] = {"node_id": "node-1", "address": "10.0.0.1", field: text}
    with pytest.raises(SpecError, match=f"spec_invalid: expected {field}"):
        NodeAccess(**values)


@pytest.mark.parametrize("address", ["10.0.0.1", "fe80::1%eth0", "::1", "host-1.example"])
def test_addresses_of_all_kinds_are_taken(address: str) -> None:
    assert NodeAccess("node-1", address).address == address


@pytest.mark.parametrize("field", ["id", "node_id", "correlation_id"])
def test_the_variables_cannot_speak_of_another_run(field: str) -> None:
    run = {"id": "run-1", "node_id": "node-1", "correlation_id": "c-1"}
    node = NodeAccess("node-1", "10.0.0.1")
    RunSpec("run-1", "discover", node, {"slice_run": run}, 60, "c-1")
    with pytest.raises(SpecError, match=f"variables.slice_run.{field}"):
        RunSpec("run-1", "discover", node, {"slice_run": run | {field: "else"}}, 60, "c-1")


@pytest.mark.parametrize(
    "change", [{"run_id": "../x"}, {"playbook": "../x"}, {"deadline_s": 0}, {"correlation_id": " "}]
)
def test_ids_and_deadlines_are_checked(change: dict[str, Any]) -> None:
    values: dict[str, Any] = {
        "run_id": "run-1",
        "playbook": "discover",
        "node": NodeAccess("node-1", "10.0.0.1"),
        "variables": {},
        "deadline_s": 60,
        "correlation_id": "c-1",
    }
    with pytest.raises(SpecError):
        RunSpec(**values | change)

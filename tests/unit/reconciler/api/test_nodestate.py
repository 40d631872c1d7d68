"""States of a node: out of use and back, and no sales meanwhile."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.reconciler.api.stack import NODE, Stack
from tests.unit.reconciler.api.test_launches import launch

pytestmark = pytest.mark.covers("CTRL-12")

PATH = f"admin/nodes/{NODE}"


def move(stack: Stack, verb: str, **headers: str) -> Any:
    body = {"reason": f"because of {verb}"}
    return stack.client("admin").post(f"{PATH}/{verb}", json=body, headers=headers)


def test_a_draining_node_sells_nothing_and_goes_on_selling_after_it(selling: Stack) -> None:
    seen = {"If-Match": selling.client("admin").get(PATH).headers["ETag"]}
    assert move(selling, "drain", **seen).json()["state"] == "draining"
    assert move(selling, "resume", **seen).json()["code"] == "precondition_failed"
    refused = launch(selling)
    assert (refused.status_code, refused.json()["code"]) == (409, "no_capacity")
    assert move(selling, "resume").json()["state"] == "ready"
    assert launch(selling).status_code == 201
    log = selling.client("admin").get("admin/audit", params={"subject_id": NODE}).json()["items"]
    reasons = {row["action"]: row["reason"] for row in log}
    assert reasons["admin.node.drain"] == "because of drain"
    assert reasons["admin.node.resume"] == "because of resume"


def test_out_of_use_only_when_drained_and_empty(selling: Stack) -> None:
    assert move(selling, "maintain").json()["code"] == "transition_refused"
    assert launch(selling).status_code == 201
    move(selling, "drain")
    busy = move(selling, "maintain").json()
    assert (busy["code"], "reserved" in busy["found"]) == ("node_in_use", True)
    assert move(selling, "retire").json()["code"] == "transition_refused"


def test_who_is_refused_reads_what_can_be_asked_for(selling: Stack) -> None:
    """Commands, and never the events that only the service brings about."""
    problem = move(selling, "maintain").json()
    assert problem["remedy"].startswith(f"drain first: `gpuaas nodes drain {NODE} --reason WHY`")
    assert problem["found"] == (
        f"ready; what can be asked for there: `gpuaas nodes drain {NODE} --reason WHY`"
    )
    assert move(selling, "resume").json()["remedy"] == "nothing: it is ready already"
    assert move(selling, "retire").json()["remedy"].startswith("drain and maintain first: ")
    move(selling, "drain")
    assert move(selling, "retire").json()["remedy"].startswith("maintain first: ")
    again = move(selling, "drain").json()
    assert (again["found"].count("gpuaas nodes"), "lose" in str(again)) == (2, False)


def test_the_way_to_the_end(selling: Stack) -> None:
    for verb, state in (("drain", "draining"), ("maintain", "maintenance"), ("retire", "retired")):
        assert move(selling, verb).json()["state"] == state
    assert move(selling, "resume").json()["code"] == "transition_refused"


def test_without_a_reason_nothing_moves(selling: Stack) -> None:
    admin = selling.client("admin")
    for body in ({}, {"reason": ""}, {"reason": "  "}):
        assert admin.post(f"{PATH}/drain", json=body).json()["code"] == "request_invalid"
    assert admin.get(PATH).json()["state"] == "ready"

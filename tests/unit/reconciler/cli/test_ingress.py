"""`gpuaas ingress` against a real service."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from reconciler.db.engine import transaction
from reconciler.lifecycle import ingress
from reconciler.model.states import TaskState
from reconciler.records import queue
from tests.unit.reconciler.api.stack import ACT, Stack
from tests.unit.reconciler.api.test_ingress import ADDRESS, with_addresses
from tests.unit.reconciler.api.test_launches import activate, launch
from tests.unit.reconciler.cli.conftest import Gpuaas

pytestmark = pytest.mark.covers("SLICE-9")
AT = ("--project", "demo", "--output", "json")


@pytest.fixture
def mine(selling: Stack, gpuaas: Gpuaas, monkeypatch: pytest.MonkeyPatch) -> str:
    """An active slice. The host plays its task while a command waits."""
    allocation = str(launch(selling).json()["id"])
    activate(selling, allocation)
    gpuaas.at(with_addresses(selling), "member")

    def work(_seconds: float) -> None:
        task = selling.lease()
        present = task.parameters["state"] == "present"
        with transaction(selling.engine) as conn:
            rule = task.parameters["rule_id"]
            in_force = [rule] if present else []
            ingress.reported(conn, rule, ACT, present=present, in_force=in_force)
            queue.finish(conn, task.id, task.lease_token, TaskState.SUCCEEDED, ACT)

    monkeypatch.setattr(time, "sleep", work)
    return allocation


def add(gpuaas: Gpuaas, allocation: str, *more: str) -> dict[str, Any]:
    words = ("ingress", "add", allocation, "--address", ADDRESS, "--port", "443")
    given = (*words, "--guest-port", "8443", "--source", "198.51.100.0/24", *AT, *more)
    document: dict[str, Any] = json.loads(gpuaas(*given) or "{}")
    return document


def test_the_life_of_a_rule(gpuaas: Gpuaas, mine: str) -> None:
    rule = add(gpuaas, mine, "--hours", "2")
    assert (gpuaas.status, rule["state"]) == (0, "applied"), gpuaas.err
    assert rule["id"] in gpuaas("ingress", "list", mine, *AT)
    gone = json.loads(gpuaas("ingress", "remove", mine, rule["id"], *AT))
    assert (gpuaas.status, gone["state"]) == (0, "removed"), gpuaas.err


def test_a_rule_that_its_host_refuses_ends_the_command_with_its_code(
    selling: Stack, gpuaas: Gpuaas, mine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = {"code": "guest_port_silent", "expected": "a", "found": "b", "remedy": "c"}

    def refuse(_seconds: float) -> None:
        rule = selling.lease().parameters["rule_id"]
        with transaction(selling.engine) as conn:
            ingress.failed(conn, rule, ACT, error, forwards=False)

    monkeypatch.setattr(time, "sleep", refuse)
    add(gpuaas, mine)
    assert (gpuaas.status, "guest_port_silent" in gpuaas.err) == (1, True)

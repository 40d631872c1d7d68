"""`gpuaas nodes convert` goes all the way to slots on sale, and fails when it stops before."""

from __future__ import annotations

from typing import Any

import pytest

from reconciler.db.schema import Task
from reconciler.model.states import TaskKind
from reconciler.work.handler import open_work
from reconciler.work.kinds import HANDLERS
from reconciler.work.settle import queue_next_step
from tests.unit.reconciler import wipes
from tests.unit.reconciler.api.stack import NODE, Stack, discovery
from tests.unit.reconciler.cli.conftest import Gpuaas

pytestmark = pytest.mark.covers("HOST-15")

IDENTITY = {"identity": discovery()["identity"]}
PROVEN = wipes.proven(discovery())


@pytest.mark.parametrize(("failures", "status"), [(0, 0), (1, 1)])
def test_one_command_is_followed_to_its_end(
    selling: Stack, gpuaas: Gpuaas, failures: int, status: int
) -> None:
    report = {"intent": "slice", "warnings": 0, "checks": [], **PROVEN, "failures": failures}
    evidence: dict[str, dict[str, Any]] = {
        TaskKind.NODE_CONVERT: IDENTITY,
        TaskKind.NODE_BOOTSTRAP: IDENTITY,
        TaskKind.NODE_BIND_TOPOLOGY: {"bound": []},
        TaskKind.SLICE_TOPOLOGY_DISCOVER: {"discovery": discovery()},
        TaskKind.NODE_PARITY: {"parity": report},
    }

    def act(conn: Any, task: Task) -> dict[str, Any]:
        work = open_work(conn, selling.settings, task)
        kind = task.kind
        return queue_next_step(work, HANDLERS[kind].succeed(work, evidence[kind]))

    run = gpuaas.at(selling).ending(selling, act)
    run("nodes", "convert", NODE, "baremetal")
    assert (run.status, " follows" in run.err) == (0, False), run.err
    run("nodes", "convert", NODE, "slice", "--allow-reboot")
    assert run.status == status, run.err
    assert run.err.count(" follows") == 3
    assert (f"gpuaas nodes parity {NODE}" in run.err) is bool(failures)
    run("slots", "list", NODE)
    assert ("available" in run.out) is not bool(failures)

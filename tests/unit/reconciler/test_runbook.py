"""Curl commands of the recovery of an allocation, and of docs/tenants.md, on a real socket.

The commands are played as they are written. An operator has set BASE_URL, TOKEN, NODE_ID and
ALLOCATION_ID only. The host's clean-up, which the last command requests, is simulated.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from reconciler.api.app import create_app
from reconciler.db.engine import transaction
from reconciler.lifecycle import slices
from reconciler.model.states import TaskState
from reconciler.records import queue
from tests.unit.reconciler import wipes
from tests.unit.reconciler.api.conftest import databases, new, prepared, selling
from tests.unit.reconciler.api.stack import ACT, KEY, NODE, Stack, listening
from tests.unit.reconciler.api.test_allocations import failed

__all__ = ["databases", "new", "prepared", "selling"]

SLOTS = """curl -sS \\
  -H "Authorization: Bearer $TOKEN" \\
  "$BASE_URL/api/v1/admin/nodes/$NODE_ID/resource-slots" | jq
"""
ALLOCATION = """curl -sS \\
  -H "Authorization: Bearer $TOKEN" \\
  "$BASE_URL/api/v1/admin/allocations/$ALLOCATION_ID" | jq
"""
KEEP_BLOCKED = """curl -sS -X POST \\
  -H "Authorization: Bearer $TOKEN" \\
  -H "Content-Type: application/json" \\
  -H "X-Idempotency-Key: $(uuidgen)" \\
  "$BASE_URL/api/v1/admin/allocations/$ALLOCATION_ID/force-cleanup" \\
  -d '{
    "reason": "ops cleanup after failed slice provisioning",
    "runtime_verified_absent": false
  }' | jq
"""
RETURN = """curl -sS -X POST \\
  -H "Authorization: Bearer $TOKEN" \\
  -H "Content-Type: application/json" \\
  -H "X-Idempotency-Key: $(uuidgen)" \\
  "$BASE_URL/api/v1/admin/allocations/$ALLOCATION_ID/force-cleanup" \\
  -d '{
    "reason": "ops cleanup after verifying no slice runtime remains",
    "runtime_verified_absent": true
  }' | jq
"""
# Tools that an operator's machine has and this machine lacks.
STAND_INS = {"jq": "exec cat", "uuidgen": "exec cat /proc/sys/kernel/random/uuid"}


class Operator:
    """A shell with four variables."""

    def __init__(self, folder: Path, **variables: str) -> None:
        self._environment = {"PATH": f"{os.environ['PATH']}:{folder}", **variables}
        for name, line in STAND_INS.items():
            if shutil.which(name) is None:
                (folder / name).write_text(f"#!/bin/sh\n{line}\n")
                (folder / name).chmod(0o755)

    def types(self, command: str) -> Any:
        shell = ["bash", "-e", "-o", "pipefail", "-c", command]
        ended = subprocess.run(
            shell, env=self._environment, capture_output=True, text=True, timeout=60, check=True
        )
        return json.loads(ended.stdout)


@pytest.fixture
def base_url(selling: Stack) -> Iterator[str]:
    """The service, listening."""
    with listening(create_app(selling.settings, selling.engine), lifespan="off") as url:
        yield url


@pytest.mark.covers("CTRL-7")
def test_the_commands_work_as_written(selling: Stack, base_url: str, tmp_path: Path) -> None:
    stuck = failed(selling)
    operator = Operator(
        tmp_path,
        BASE_URL=base_url,
        TOKEN=selling.secrets["admin"],
        NODE_ID=NODE,
        ALLOCATION_ID=stuck,
    )
    # 1. Identify the blocked slot and owning allocation.
    blocked = [row for row in operator.types(SLOTS)["items"] if row["status"] == "cleanup_blocked"]
    (slot,) = blocked
    assert slot["health_state"] == "failed"
    assert slot["health_detail"]["allocation_id"] == stuck
    assert slot["health_detail"]["reason"] == "none"
    # "Record: node_id, slot_id, slot_index, allocation_id, health_detail.reason."
    assert (slot["node_id"], isinstance(slot["slot_index"], int)) == (NODE, True)
    assert slot["slot_id"] == slot["id"]
    # 2. Check the allocation state.
    assert operator.types(ALLOCATION)["state"] == "failed"
    # 4. Runtime state not yet verified absent: failed, and the slot stays blocked.
    kept = operator.types(KEEP_BLOCKED)
    assert (kept["state"], kept["slots"][0]["status"]) == ("failed", "cleanup_blocked")
    # Verified absent: the slot is on its way back, through wipe and verification.
    back = operator.types(RETURN)
    assert (back["state"], back["slots"][0]["status"]) == ("failed", "cleanup")
    _clean(selling, stuck)
    # 5. Confirm slot recovery.
    (after,) = [row for row in operator.types(SLOTS)["items"] if row["id"] == slot["id"]]
    assert (after["status"], after["health_state"], after["health_detail"]) == (
        "available",
        "healthy",
        {},
    )
    audit = selling.client("admin").get(
        "admin/audit", params={"action": "admin.allocation.force_cleanup.applied"}
    )
    entries = [(row["reason"], row["detail"]["runtime_verified_absent"]) for row in
            audit.json()["items"]]  # fmt: skip
    assert entries == [
        ("ops cleanup after verifying no slice runtime remains", True),
        ("ops cleanup after failed slice provisioning", False),
    ]


@pytest.mark.covers("CTRL-11")
def test_a_member_launches_and_releases_by_the_requests_of_its_page(
    selling: Stack, base_url: str, tmp_path: Path
) -> None:
    page = (Path(__file__).parents[3] / "docs" / "tenants.md").read_text()
    (block,) = re.findall(r"^```\n(curl .*?)^```$", page, re.DOTALL | re.MULTILINE)
    catalog, launch, show, release = block.split("\n\n")
    file = tmp_path / ".ssh" / "id_ed25519.pub"
    file.parent.mkdir()
    file.write_text(f"{KEY}\n")
    given = {
        "GPUAAS_API": base_url,
        "GPUAAS_TOKEN": selling.secrets["member"],
        "PROJECT": "demo",
        "HOME": str(tmp_path),
    }
    tenant = Operator(tmp_path, **given)
    assert tenant.types(catalog)["skus"]
    made = tenant.types(launch)
    assert (made["state"], made["ssh_keys"]) == ("requested", [KEY])
    tenant = Operator(tmp_path, **given, ALLOCATION=made["id"])
    assert tenant.types(show)["id"] == made["id"]
    assert tenant.types(release)["state"] == "released"


def _clean(stack: Stack, allocation_id: str) -> None:
    with transaction(stack.engine) as conn:
        # The run that failed has ended by now.
        conn.exec_driver_sql("UPDATE tasks SET state = 'canceled' WHERE state = 'running'")
    task = stack.lease()
    with transaction(stack.engine) as conn:
        given = wipes.proofs(conn, allocation_id)
        absence = {"absent": True}
        assert slices.cleanup_succeeded(conn, allocation_id, ACT, proofs=given, absence=absence)
        queue.finish(conn, task.id, task.lease_token, TaskState.SUCCEEDED, ACT)

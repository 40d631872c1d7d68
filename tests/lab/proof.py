"""State of a host and of the service, before and after refusals that must change nothing."""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable
from typing import Any

import pytest

from lab.demo.stage import Stage
from reconciler.model.errors import Problem


def prove_again(stage: Stage) -> None:
    """Rediscover and run parity: no check fails, and every slot without a tenant is available."""
    stage.task(stage.path("/slice-topology/discovery"))
    parity = stage.task(stage.path("/parity"))
    checks = stage.api().get(stage.path("/parity"))["document"]["checks"]
    assert parity["failures"] == 0, [check for check in checks if check["status"] == "FAIL"]
    slots = stage.api().get(stage.path("/resource-slots"))["items"]
    sold = ("available", "active")
    closed = {slot["id"]: slot["status_reason"] for slot in slots if slot["status"] not in sold}
    assert not closed, closed


def differences(stage: Stage) -> set[str]:
    """Differences between the host and the records, by code."""
    result = stage.task(stage.path("/drift"))
    assert (result["unknown"], result["skipped"]) == ({}, [])
    return {each["code"] for each in result["differences"]}


def records(stage: Stage) -> dict[str, Any]:
    """Records that no refusal may change: slots, allocations, claims, tasks, audit log."""
    api = stage.api()
    fields = ("state", "generation", "claims", "task_ids")
    allocations = {}
    for row in list(api.items("/admin/allocations")):
        allocation = api.get(f"/admin/allocations/{row['id']}")
        allocations[row["id"]] = {name: allocation[name] for name in fields}
    return {
        "slots": list(api.items(stage.path("/resource-slots"))),
        "allocations": allocations,
        "audit": list(api.items("/admin/audit")),
    }


def refusal(stage: Stage, ask: Callable[[], Any]) -> str:
    """Return the code with which the request is refused; the request must change nothing."""
    before = records(stage)
    with pytest.raises(Problem) as refused:
        ask()
    problem = refused.value
    assert problem.expected and problem.found and problem.remedy
    assert records(stage) == before, problem.code
    return problem.code


def ledger_entry(stage: Stage, slot_id: str) -> dict[str, Any]:
    """Return the host ledger's entry for a slot."""
    text = stage.on_host("cat", f"/var/lib/gpuaas/ledger/{slot_id}.json")
    entry: dict[str, Any] = json.loads(text)
    return entry


def changed_lines(before: str, after: str) -> list[str]:
    lines = difflib.unified_diff(before.splitlines(), after.splitlines(), lineterm="", n=0)
    return [line for line in lines if line[:2] not in ("--", "++", "@@")]


def beginning(stage: Stage, device: str, mib: int = 16) -> str:
    """Return a digest of the disk's first bytes, where an image or a signature would be."""
    reader = f"dd if={device} bs=1M count={mib} iflag=direct status=none | sha256sum"
    return stage.on_host("sh", "-c", f"'{reader}'").split()[0]

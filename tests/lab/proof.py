"""What a host is asked: a new parity proof, and its differences from the records."""

from __future__ import annotations

from lab.demo.stage import Stage


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

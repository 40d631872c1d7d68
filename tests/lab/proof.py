"""New parity proof of a host: the gate of its slots opens, or the failed checks are shown."""

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

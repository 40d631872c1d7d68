"""Demonstration steps with two slices at once: isolation, power, and a restart of their host."""

from __future__ import annotations

import json
import re
import time
from typing import Any

from lab.command import LabError
from lab.demo import slice_steps
from lab.demo.report import Evidence
from lab.demo.stage import NODE, Stage

# The guests of an emulated host need some minutes to boot, both at once longer.
BOOT_S = 1500
BOOT_ID = "cat /proc/sys/kernel/random/boot_id"
# Run in a guest with an address: three pings, and a connection to the SSH server there.
KNOCK = """
import json, socket, subprocess, sys
words = ["ping", "-n", "-c", "3", "-W", "2", sys.argv[1]]
ping = subprocess.run(words, capture_output=True, text=True)
try:
    socket.create_connection((sys.argv[1], 22), 10).close()
    tcp = "connected"
except OSError as error:
    tcp = str(error)
print(json.dumps({"ping": ping.stdout + ping.stderr, "tcp": tcp}))
"""


def provision(stage: Stage) -> Evidence:
    """Launch two slices at once and wait for the first, which has two GPUs."""
    first = slice_steps.launch(stage, gpu_count=2)
    stage.facts["second"] = slice_steps.launch(stage, hostname="second")
    evidence = slice_steps.provisioned(stage, first)
    return {**evidence, "beside": stage.facts["second"]["id"]}


def isolation(stage: Stage) -> Evidence:
    """Send packets from each of both slices to the other, in vain."""
    second = slice_steps.wait_for(stage, stage.facts["second"]["id"], {"active", "failed"})
    if second["state"] != "active":
        raise LabError(f"provisioning failed: {slice_steps.why(stage, second)}")
    stage.facts["second"] = second
    pair = _pair(stage)
    attempts = []
    for sender, receiver in (pair, pair[::-1]):
        address = receiver["claims"][0]["private_ip"]
        answer = slice_steps.in_guest(stage, f"sudo python3 - {address}", KNOCK, allocation=sender)
        outcome = json.loads(answer)
        if reached(outcome):
            raise LabError(f"{sender['id']} reached {address}: {outcome}")
        attempts.append({"from": sender["claims"][0]["private_ip"], "to": address, **outcome})
    # Both answer to their tenants, so nothing but the isolation kept the packets off.
    users = [slice_steps.in_guest(stage, "id -un", allocation=each).strip() for each in pair]
    return {"attempts": attempts, "logged_in": users}


def reached(outcome: dict[str, str]) -> bool:
    """Whether a guest reached the other, or the attempt itself did not happen."""
    none = re.search(r"\b0 received\b|Network is unreachable", outcome["ping"]) is not None
    return outcome["tcp"] == "connected" or not none


def power(stage: Stage) -> Evidence:
    """Restart the second slice for its tenant; the first is not disturbed."""
    if stage.member is None:
        raise LabError("there is no tenant yet")
    first, second = _pair(stage)
    before = _boots(stage)
    path = f"/projects/{stage.facts['project']}/allocations/{second['id']}/power"
    stage.member.post(path, {"action": "restart"})
    _await_boot(stage, second, before[second["id"]])
    after = _boots(stage)
    if after[first["id"]] != before[first["id"]]:
        raise LabError(f"the other slice, {first['id']}, was restarted too")
    return {"restarted": second["id"], "before": before, "after": after}


def reboot(stage: Stage) -> Evidence:
    """Restart the host under both slices by `gpuaas nodes reboot`; both start again."""
    if stage.service is None:
        raise LabError("the reconciler is not started")
    host = stage.api().get(stage.path())["boot_id"]
    before, pair = _boots(stage), _pair(stage)
    named = [word for each in pair for word in ("--allocation", each["id"])]
    words = ("nodes", "reboot", NODE, "--reason", "demo: restart of the host", *named)
    stage.console.print(f"      [dim]gpuaas {' '.join(words)}[/]", highlight=False)
    stage.service.cli("--output", "json", *words)
    booted = stage.api().get(stage.path())["boot_id"]
    if booted == host:
        raise LabError(f"the host was not restarted: its boot is still {host}")
    for allocation in pair:
        _await_boot(stage, allocation, before[allocation["id"]])
    after = _boots(stage)
    return {"host": {"before": host, "after": booted}, "slices": after, "slices_before": before}


def _pair(stage: Stage) -> list[dict[str, Any]]:
    return [stage.facts["allocation"], stage.facts["second"]]


def _boots(stage: Stage) -> dict[str, str]:
    """Boot ids of both guests, by allocation."""
    return {
        each["id"]: slice_steps.in_guest(stage, BOOT_ID, allocation=each).strip()
        for each in _pair(stage)
    }


def _await_boot(stage: Stage, allocation: dict[str, Any], before: str) -> None:
    """Wait until the newest task of a slice has ended well and its guest has another boot."""
    end = time.monotonic() + BOOT_S
    while True:
        latest = stage.api().get(f"/admin/allocations/{allocation['id']}")
        stage.follow({"id": latest["task_ids"][-1]})
        try:
            if slice_steps.in_guest(stage, BOOT_ID, allocation=allocation).strip() != before:
                return
            now = "the boot that it had"
        except LabError as error:
            now = str(error)
        if time.monotonic() > end:
            raise LabError(f"{allocation['id']} has not booted again in {BOOT_S} s: {now}")
        time.sleep(5)

"""Demonstration steps 9 to 14: a tenant's VM from launch to wipe proof, and a recovery."""

from __future__ import annotations

import json
import secrets
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lab import canary
from lab.command import LabError
from lab.demo.report import Evidence
from lab.demo.stage import TASK_DEADLINE_S, Stage
from lab.paths import REPOSITORY
from reconciler.runs.ssh import SshAccess, options
from reconciler.trust.ca import known_hosts, open_trust, operator_identity

USER = "tenant"
# Shorter than any VM's boot in the lab, so that the readiness gate must fail.
HOPELESS_DEADLINE_S = 20
HOST_SIDE = (
    "ps -o pid,etime,time,stat,comm -C qemu-system-x86_64,dnsmasq; journalctl -u dnsmasq -n 20"
)
PROOF = REPOSITORY / "lab" / "guest" / "gpu_proof.py"


def provision(stage: Stage) -> Evidence:
    """Launch a slice: a transaction claims the slot, a task brings the VM to the readiness gate."""
    allocation = wait_for(stage, launch(stage)["id"], {"active", "failed"})
    if allocation["state"] != "active":
        raise LabError(f"provisioning failed: {why(stage, allocation)}")
    task = stage.api().get(f"/admin/tasks/{allocation['task_ids'][0]}")
    stage.facts["allocation"] = allocation
    return {
        "allocation": allocation["id"],
        "claims": allocation["claims"],
        "readiness": task["result"]["readiness"],
        "image": task["result"]["image"],
        "plan": task["result"]["plan"],
        "firmware": stage.firmware,
        "domain": task["result"]["domain"],
    }


def login(stage: Stage) -> Evidence:
    """Log in as tenant and prove that the GPU stand-in computes, does DMA and interrupts."""
    proof = json.loads(in_guest(stage, "sudo python3 -", PROOF.read_text()))
    mark = secrets.token_hex(32)
    stage.facts["canary"] = mark
    in_guest(stage, "sudo python3 -", canary.writer(mark))
    copies = canary.count(_disk_file(stage), mark)
    if copies == 0:
        raise LabError("the canary is not on the disk: its later absence would prove nothing")
    return {
        "gpu": proof,
        "canary_copies_on_disk": copies,
        "user": in_guest(stage, "id -un").strip(),
    }


def release(stage: Stage, meanwhile: Callable[[str], object] = lambda _task_id: None) -> Evidence:
    """Release the slice: graceful shutdown, removal of all traces, wipe, proof, available slot.

    `meanwhile` runs as soon as the task exists.
    """
    allocation = stage.facts["allocation"]
    stage.api().post(f"/projects/{stage.facts['project']}/allocations/{allocation['id']}/release")
    task_id = stage.api().get(f"/admin/allocations/{allocation['id']}")["task_ids"][-1]
    meanwhile(task_id)
    result = stage.follow({"id": task_id})
    ended = stage.api().get(f"/admin/allocations/{allocation['id']}")
    return {
        "allocation": ended["state"],
        "shutdown": result["shutdown"],
        "absence": result["absence"],
        "slot": slot_of(stage, ended)["status"],
    }


def wipe_proof(stage: Stage) -> Evidence:
    """Check the stored proof, and search every byte of the disk for the tenant's data."""
    slot = slot_of(stage, stage.facts["allocation"])
    copies = canary.count(_disk_file(stage), stage.facts["canary"])
    if copies or slot["status"] != "available":
        raise LabError(f"slot {slot['status']}, canary found {copies} times after the wipe")
    return {"proof": slot["last_proof"], "canary_copies_on_disk": copies, "slot": slot["status"]}


def blocked(stage: Stage) -> Evidence:
    """Launch a VM that boots but is not reachable in time: it fails and its slot is blocked."""
    allocation = launch(stage, ready_deadline_s=HOPELESS_DEADLINE_S)
    ended = wait_for(stage, allocation["id"], {"active", "failed"})
    slot = slot_of(stage, ended)
    if ended["state"] != "failed" or slot["status"] != "cleanup_blocked":
        raise LabError(f"expected failed and cleanup_blocked; found {ended['state']}, {slot}")
    stage.facts["blocked"] = ended
    return {
        "allocation": ended["id"],
        "error": ended["error"],
        "slot": slot["status"],
        "health_state": slot["health_state"],
        "health_detail": slot["health_detail"],
    }


def recover(stage: Stage) -> Evidence:
    """Play the recovery runbook by its command, `gpuaas recover`."""
    if stage.service is None:
        raise LabError("the reconciler is not started")
    words = ("recover", stage.facts["blocked"]["id"], "--reason", "demo: readiness gate failed")
    stage.console.print(f"      [dim]gpuaas {words[0]} {words[1]}[/]", highlight=False)
    evidence: Evidence = json.loads(stage.service.cli("--output", "json", *words))
    slot = slot_of(stage, stage.facts["blocked"])
    if (slot["status"], slot["health_state"], slot["health_detail"]) != (
        "available",
        "healthy",
        {},
    ):
        raise LabError(f"expected an available, healthy slot; found {slot}")
    return evidence


def launch(stage: Stage, *, ready_deadline_s: int = 0, **changes: Any) -> dict[str, Any]:
    """Launch a VM with one GPU as the tenant, with the tenant's own key.

    Only an admin may set a deadline that a guest cannot meet.
    """
    key = stage.folder / "tenant_key"
    if not key.exists():
        words = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "tenant", "-f", str(key)]
        subprocess.run(words, check=True)
    if stage.member is None:
        raise LabError("there is no tenant yet")
    body = {
        "capacity_shape": "gpu_slice",
        "gpu_count": 1,
        "username": USER,
        "ssh_keys": [key.with_suffix(".pub").read_text().strip()],
        "hostname": "slice",
        "image_id": stage.facts["image_id"],
        "parameters": {"ready_deadline_s": ready_deadline_s} if ready_deadline_s else {},
        **changes,
    }
    client = stage.api() if ready_deadline_s else stage.member
    allocation: dict[str, Any] = client.post(
        f"/projects/{stage.facts['project']}/allocations", body
    )
    return allocation


def wait_for(stage: Stage, allocation_id: str, states: set[str]) -> dict[str, Any]:
    """Wait until the allocation is in one of `states`, and show the progress of its task."""
    end = time.monotonic() + TASK_DEADLINE_S
    while time.monotonic() < end:
        allocation: dict[str, Any] = stage.api().get(f"/admin/allocations/{allocation_id}")
        if allocation["state"] in states:
            return allocation
        stage.show_progress(stage.api().get(f"/admin/tasks/{allocation['task_ids'][-1]}"))
        time.sleep(1)
    raise LabError(f"allocation {allocation_id} did not reach {states} in {TASK_DEADLINE_S} s")


def why(stage: Stage, allocation: dict[str, Any]) -> str:
    """Explain a failed allocation: its error, and the last known state of its guest.

    The explanation includes the host's view of the guest's QEMU process and of the DHCP server,
    because a guest waits for both.
    """
    task = stage.api().get(f"/admin/tasks/{allocation['task_ids'][-1]}")
    readiness = dict((task["error"] or {}).get("evidence", {}).get("readiness", {}))
    console = readiness.pop("console_tail", [])
    lines = [json.dumps(allocation["error"]), json.dumps(readiness), "console:", *console]
    return "\n".join([*lines, "host:", stage.on_host("sh", "-c", f"'{HOST_SIDE}'")])


def slot_of(stage: Stage, allocation: dict[str, Any]) -> dict[str, Any]:
    slot_id = allocation["claims"][0]["slot_id"]
    slots = stage.api().get(stage.path("/resource-slots"))["items"]
    slot: dict[str, Any] = next(slot for slot in slots if slot["id"] == slot_id)
    return slot


def in_guest(stage: Stage, command: str, stdin: str = "") -> str:
    """Run a command in the VM, through the host as operator, with the tenant's key.

    The guest has no certificate, so its key is read by ssh-keyscan. The scan runs on the host, over
    the bridge, whose port rules let only this VM answer from its address. After that, no other key
    is accepted. Only this demonstration does so: hosts are certified at enrolment and never
    scanned.
    """
    address = stage.facts["allocation"]["claims"][0]["private_ip"]
    file = stage.folder / "guest_known_hosts"
    if stage.facts.get("guest_key_of") != stage.facts["allocation"]["id"]:
        # ssh-keyscan's default limit is five seconds; a guest in two layers of emulation needs
        # longer.
        scan = ("ssh-keyscan", "-T", "120", "-t", "ed25519", address)
        file.write_text(stage.on_host(*scan))
        stage.facts["guest_key_of"] = stage.facts["allocation"]["id"]
    words = ["ssh", "-F", "/dev/null", "-i", str(stage.folder / "tenant_key")]
    words += ["-o", "IdentitiesOnly=yes", "-o", "StrictHostKeyChecking=yes"]
    words += ["-o", f"UserKnownHostsFile={file}", "-o", "LogLevel=ERROR"]
    words += ["-o", f"ProxyCommand={_hop(stage, address)}", f"{USER}@{address}", command]
    done = subprocess.run(
        words, input=stdin, capture_output=True, text=True, timeout=600, check=False
    )
    if done.returncode != 0:
        raise LabError(f"`{command}` in the VM: {done.stderr.strip()[-800:] or done.stdout[-800:]}")
    return done.stdout


def _hop(stage: Stage, address: str) -> str:
    if stage.service is None:
        raise LabError("the reconciler is not started")
    trust = open_trust(stage.service.folder)
    identity = operator_identity(trust)
    access = SshAccess(identity.key, identity.certificate, known_hosts(trust))
    words = ["ssh", "-F", "/dev/null", *options(access, "lab-host")]
    words += ["-p", str(stage.host().ssh_port), "-W", f"{address}:22", "root@127.0.0.1"]
    return " ".join(words)


def _disk_file(stage: Stage) -> Path:
    """Return the file that backs the boot disk of the tenant's slot in the lab's QEMU."""
    claim = stage.facts["allocation"]["claims"][0]
    eui = claim["nvme_identity"].removeprefix("eui.")
    for index, disk in enumerate(stage.host().devices["data"]):
        if disk["eui64"] == eui:
            return Path(stage.host().folder) / f"nvme{index}.raw"
    raise LabError(f"no disk of the lab has the identity {eui}")

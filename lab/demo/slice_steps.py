"""Steps 9 to 14: a tenant's VM from launch to a slot proven clean, and a failure recovered."""

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
# Less than any VM needs to boot here: the readiness gate must fail.
HOPELESS_DEADLINE_S = 20
HOST_SIDE = (
    "ps -o pid,etime,time,stat,comm -C qemu-system-x86_64,dnsmasq; journalctl -u dnsmasq -n 20"
)
PROOF = REPOSITORY / "lab" / "guest" / "gpu_proof.py"


def provision(stage: Stage) -> Evidence:
    """One transaction claims the slot; a task brings the VM up to the readiness gate."""
    allocation = wait_for(stage, launch(stage)["id"], {"active", "failed"})
    if allocation["state"] != "active":
        raise LabError(f"provisioning failed: {why(stage, allocation)}")
    task = stage.api().get(f"/admin/tasks/{allocation['task_ids'][0]}")
    stage.known["allocation"] = allocation
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
    """As the tenant, with the tenant's key: the GPU stand-in computes, does DMA and interrupts."""
    proof = json.loads(in_guest(stage, "sudo python3 -", PROOF.read_text()))
    mark = secrets.token_hex(32)
    stage.known["canary"] = mark
    in_guest(stage, "sudo python3 -", canary.writer(mark))
    found = canary.count(_disk_file(stage), mark)
    if found == 0:
        raise LabError("the canary is not on the disk: its later absence would prove nothing")
    return {"gpu": proof, "canary_copies_on_disk": found, "user": in_guest(stage, "id -un").strip()}


def release(stage: Stage, meanwhile: Callable[[str], object] = lambda _task_id: None) -> Evidence:
    """Graceful shutdown, removal of every trace, wipe, proof; the slot is available again.

    meanwhile: what is done as soon as the task is there.
    """
    allocation = stage.known["allocation"]
    stage.api().post(f"/projects/{stage.known['project']}/allocations/{allocation['id']}/release")
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
    """The stored proof, and a search of every byte of the disk for what the tenant wrote."""
    slot = slot_of(stage, stage.known["allocation"])
    found = canary.count(_disk_file(stage), stage.known["canary"])
    if found or slot["status"] != "available":
        raise LabError(f"slot {slot['status']}, canary found {found} times after the wipe")
    return {"proof": slot["last_proof"], "canary_copies_on_disk": found, "slot": slot["status"]}


def blocked(stage: Stage) -> Evidence:
    """A VM that boots but is not reachable in time fails, and its slot is blocked."""
    allocation = launch(stage, ready_deadline_s=HOPELESS_DEADLINE_S)
    ended = wait_for(stage, allocation["id"], {"active", "failed"})
    slot = slot_of(stage, ended)
    if ended["state"] != "failed" or slot["status"] != "cleanup_blocked":
        raise LabError(f"expected failed and cleanup_blocked; found {ended['state']}, {slot}")
    stage.known["blocked"] = ended
    return {
        "allocation": ended["id"],
        "error": ended["error"],
        "slot": slot["status"],
        "health_state": slot["health_state"],
        "health_detail": slot["health_detail"],
    }


def recover(stage: Stage) -> Evidence:
    """The seed's runbook as one command: `gpuaas recover`."""
    if stage.service is None:
        raise LabError("the reconciler is not started")
    words = ("recover", stage.known["blocked"]["id"], "--reason", "demo: readiness gate failed")
    stage.console.print(f"      [dim]gpuaas {words[0]} {words[1]}[/]", highlight=False)
    evidence: Evidence = json.loads(stage.service.cli("--output", "json", *words))
    slot = slot_of(stage, stage.known["blocked"])
    if (slot["status"], slot["health_state"], slot["health_detail"]) != (
        "available",
        "healthy",
        {},
    ):
        raise LabError(f"expected an available, healthy slot; found {slot}")
    return evidence


def launch(stage: Stage, *, ready_deadline_s: int = 0, **changes: Any) -> dict[str, Any]:
    """Launch a VM with one GPU as the tenant, with a key of the tenant's own."""
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
        "image_id": stage.known["image_id"],
        "parameters": {"ready_deadline_s": ready_deadline_s} if ready_deadline_s else {},
        **changes,
    }
    found: dict[str, Any] = stage.member.post(
        f"/projects/{stage.known['project']}/allocations", body
    )
    return found


def wait_for(stage: Stage, allocation_id: str, states: set[str]) -> dict[str, Any]:
    """The allocation once it is in one of `states`, showing the progress of its task."""
    end = time.monotonic() + TASK_DEADLINE_S
    while time.monotonic() < end:
        allocation: dict[str, Any] = stage.api().get(f"/admin/allocations/{allocation_id}")
        if allocation["state"] in states:
            return allocation
        stage.show_progress(stage.api().get(f"/admin/tasks/{allocation['task_ids'][-1]}"))
        time.sleep(1)
    raise LabError(f"allocation {allocation_id} did not reach {states} in {TASK_DEADLINE_S} s")


def why(stage: Stage, allocation: dict[str, Any]) -> str:
    """What an allocation that failed says of itself, with what was last seen of its guest.

    And what the host says of the two that a guest waits for: its QEMU and the DHCP server.
    """
    task = stage.api().get(f"/admin/tasks/{allocation['task_ids'][-1]}")
    readiness = dict((task["error"] or {}).get("evidence", {}).get("readiness", {}))
    console = readiness.pop("console_tail", [])
    told = [json.dumps(allocation["error"]), json.dumps(readiness), "console:", *console]
    return "\n".join([*told, "host:", stage.on_host("sh", "-c", f"'{HOST_SIDE}'")])


def slot_of(stage: Stage, allocation: dict[str, Any]) -> dict[str, Any]:
    slot_id = allocation["claims"][0]["slot_id"]
    slots = stage.api().get(stage.path("/resource-slots"))["items"]
    found: dict[str, Any] = next(slot for slot in slots if slot["id"] == slot_id)
    return found


def in_guest(stage: Stage, command: str, stdin: str = "") -> str:
    """Run a command in the VM: a hop through the host as operator, the tenant's key at the end.

    Only this demonstration asks a machine for its key (ssh-keyscan), as the guest is not certified:
    from the host, over the bridge whose port rules let only this VM answer from its address. From
    then on that key and no other is accepted. Hosts are certified at enrolment and never asked.
    """
    address = stage.known["allocation"]["claims"][0]["private_ip"]
    file = stage.folder / "guest_known_hosts"
    if stage.known.get("guest_key_of") != stage.known["allocation"]["id"]:
        # Its own limit is five seconds: a guest in two layers of emulation takes longer.
        scan = ("ssh-keyscan", "-T", "120", "-t", "ed25519", address)
        file.write_text(stage.on_host(*scan))
        stage.known["guest_key_of"] = stage.known["allocation"]["id"]
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
    """The file behind the boot disk of the tenant's slot, as the lab's QEMU keeps it."""
    claim = stage.known["allocation"]["claims"][0]
    eui = claim["nvme_identity"].removeprefix("eui.")
    for index, disk in enumerate(stage.host().devices["data"]):
        if disk["eui64"] == eui:
            return Path(stage.host().folder) / f"nvme{index}.raw"
    raise LabError(f"no disk of the lab has the identity {eui}")

"""Demonstration steps of a single slice: from launch to wipe proof, and a recovery."""

from __future__ import annotations

import json
import secrets
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lab import canary, machine
from lab.command import LabError
from lab.demo.report import Evidence
from lab.demo.stage import TASK_DEADLINE_S, Stage
from lab.paths import REPOSITORY
from reconciler.cli.ssh import config
from reconciler.runs.ssh import SshAccess, options
from reconciler.trust.ca import known_hosts, open_trust, operator_identity

USER = "tenant"
# The guest's first line, the next measurement of the host, and the next question to the host.
TELEMETRY_S = 300
# An emulated host answers the gateway late while it starts another guest; nothing has run then.
SILENT_S = 600
HOST_SIDE = (
    "ps -o pid,etime,time,stat,comm -C qemu-system-x86_64,dnsmasq; journalctl -u dnsmasq -n 20"
)
PROOF = REPOSITORY / "lab" / "guest" / "gpu_proof.py"


def provision(stage: Stage, **changes: Any) -> Evidence:
    """Launch a slice: a transaction claims the slot, a task brings the VM to the readiness gate."""
    return provisioned(stage, launch(stage, **changes))


def provisioned(stage: Stage, launched: dict[str, Any]) -> Evidence:
    """Wait for a launched slice, which the later steps use."""
    allocation = wait_for(stage, launched["id"], {"active", "failed"})
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
    """Log in as tenant and prove that the GPU stand-in is clean, computes, does DMA and interrupts.

    The first login is an ordinary client's through the gateway. The proof leaves data in the
    device, as the canary does on the disk.
    """
    user = through_gateway(stage, "id -un")
    proof = json.loads(in_guest(stage, "sudo python3 -", PROOF.read_text()))
    mark = secrets.token_hex(32)
    stage.facts["canary"] = mark
    in_guest(stage, "sudo python3 -", canary.writer(mark))
    copies = canary.count(disk_file(stage), mark)
    if copies == 0:
        raise LabError("the canary is not on the disk: its later absence would prove nothing")
    return {
        "gpu": proof,
        "canary_copies_on_disk": copies,
        "user": user,
    }


def telemetry(stage: Stage) -> Evidence:
    """Wait for a sample of the slice with all counters and with what its guest says.

    An emulated guest begins late. A sample lacks the counters of the disk if libvirt asked a QEMU
    whose monitor was in use.
    """
    path = f"/projects/{stage.facts['project']}/allocations/{stage.facts['allocation']['id']}"
    end = time.monotonic() + TELEMETRY_S
    counters = ("sent_bytes", "disk_read_bytes")
    while True:
        latest = stage.api().get(f"{path}/telemetry")["latest"]
        if latest and latest["guest"] and all(latest["host"][name] for name in counters):
            evidence: Evidence = latest
            return evidence
        if time.monotonic() > end:
            raise LabError(f"no telemetry of the guest in {TELEMETRY_S} s; newest sample: {latest}")
        time.sleep(2)


def release(stage: Stage, meanwhile: Callable[[str], object] = lambda _task_id: None) -> Evidence:
    """Release the slice: graceful shutdown, removal of all traces, wipe, proof, available slots.

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
        "slots": [slot["status"] for slot in slots_of(stage, ended)],
    }


def wipe_proof(stage: Stage) -> Evidence:
    """Check the stored proofs, and search the whole disks and the GPUs for the tenant's data."""
    slots = slots_of(stage, stage.facts["allocation"])
    mark, places = stage.facts["canary"], range(len(slots))
    copies = sum(canary.count(disk_file(stage, place), mark) for place in places)
    gpus = []
    for slot in slots:
        words = ("python3", "-", "--remains", slot["gpu_pci_address"])
        gpus.append(json.loads(stage.on_host(*words, stdin=PROOF.read_text())))
    status = [slot["status"] for slot in slots]
    if copies or not all(gpu["ok"] for gpu in gpus) or set(status) != {"available"}:
        raise LabError(f"slots {status}, canary found {copies} times; in the GPUs: {gpus}")
    proofs = [slot["last_proof"] for slot in slots]
    return {"proofs": proofs, "canary_copies_on_disk": copies, "gpus_after_reset": gpus}


def blocked(stage: Stage) -> Evidence:
    """Launch a VM on a GPU that loses what it is given: it fails and its slot is blocked."""
    with machine.forgetful_gpus():
        allocation = launch(stage)
        ended = wait_for(stage, allocation["id"], {"active", "failed"})
    slot = slot_of(stage, ended)
    if ended["state"] != "failed" or slot["status"] != "cleanup_blocked":
        raise LabError(f"expected failed and cleanup_blocked; found {ended['state']}, {slot}")
    if ended["error"]["code"] != "probe_failed":
        raise LabError(f"expected a GPU that does not compute; found {why(stage, ended)}")
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


def launch(stage: Stage, **changes: Any) -> dict[str, Any]:
    """Launch a VM with a GPU as the tenant, with the tenant's own key."""
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
        **changes,
    }
    allocation: dict[str, Any] = stage.member.post(
        f"/projects/{stage.facts['project']}/allocations", body
    )
    return allocation


def wait_for(stage: Stage, allocation_id: str, states: set[str]) -> dict[str, Any]:
    """Wait for any of these states of the allocation, and show the progress of its task."""
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
    """Return the slot of the first GPU."""
    return slots_of(stage, allocation)[0]


def slots_of(stage: Stage, allocation: dict[str, Any]) -> list[dict[str, Any]]:
    slots = {slot["id"]: slot for slot in stage.api().get(stage.path("/resource-slots"))["items"]}
    return [slots[claim["slot_id"]] for claim in allocation["claims"]]


def gateway_settings(stage: Stage, allocation: dict[str, Any] | None = None) -> Path:
    """OpenSSH's settings for the tenant's machine, as `gpuaas ssh-config` prints them. After its
    end the tenant has the old ones.
    """
    if stage.member is None:
        raise LabError("no tenant is admitted")
    mine = allocation or stage.facts["allocation"]
    document = stage.member.get(f"/projects/{stage.facts['project']}/allocations/{mine['id']}")
    file, known_hosts = stage.folder / "ssh_config", stage.folder / "known_hosts"
    if document["connection"]:
        file.write_text(config(document, known_hosts, stage.folder / "tenant_key"))
        known_hosts.write_text(document["connection"]["known_hosts"])
    return file


def through_gateway(
    stage: Stage, command: str, stdin: str = "", *, allocation: dict[str, Any] | None = None
) -> str:
    """Run a command as the tenant does, who knows the machine's key from the allocation alone."""
    if stage.service is None:
        raise LabError("the reconciler is not started")
    id = (allocation or stage.facts["allocation"])["id"]
    settings = str(gateway_settings(stage, allocation))
    words = ["ssh", "-F", settings, "-o", "BatchMode=yes", id, command]
    end = time.monotonic() + SILENT_S
    with stage.service.gateway():
        while True:
            done = subprocess.run(
                words, input=stdin, capture_output=True, text=True, timeout=600, check=False
            )
            if "machine_silent" not in done.stderr or time.monotonic() > end:
                break
    if done.returncode != 0:
        raise LabError(f"`{command[:200]}` through the gateway: {done.stderr.strip()[-800:]}")
    return done.stdout.strip()


def in_guest(
    stage: Stage, command: str, stdin: str = "", *, allocation: dict[str, Any] | None = None
) -> str:
    """Run a command in the VM, through the host as operator, with the tenant's key.

    The guest has no certificate, so its key is read by ssh-keyscan. The scan runs on the host, over
    the bridge, whose port rules let only this VM answer from its address. After that, no other key
    is accepted. Only this demonstration does so: hosts are certified at enrolment and never
    scanned.
    """
    allocation = allocation or stage.facts["allocation"]
    address = allocation["claims"][0]["private_ip"]
    file = stage.folder / f"known_hosts_{address}"
    keys = stage.facts.setdefault("guest_keys", {})
    if allocation["id"] not in keys:
        # ssh-keyscan's default limit is five seconds; a guest in two layers of emulation needs
        # longer.
        scan = ("ssh-keyscan", "-T", "120", "-t", "ed25519", address)
        keys[allocation["id"]] = stage.on_host(*scan)
        file.write_text(keys[allocation["id"]])
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


def disk_file(stage: Stage, position: int = 0) -> Path:
    """Return the file that backs a disk of the tenant, the boot disk first, in the lab's QEMU."""
    claim = stage.facts["allocation"]["claims"][position]
    eui = claim["nvme_identity"].removeprefix("eui.")
    for index, disk in enumerate(stage.host().devices["data"]):
        if disk["eui64"] == eui:
            return Path(stage.host().folder) / f"nvme{index}.raw"
    raise LabError(f"no disk of the lab has the identity {eui}")

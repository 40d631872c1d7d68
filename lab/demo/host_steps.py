"""Demonstration steps 1 to 8: from a deployed machine to slots that can be sold."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from lab import guest_image, packages, userdata
from lab.command import LabError
from lab.demo.report import Evidence
from lab.demo.stage import NODE, Stage
from lab.distro import this_distro

IMAGE_NAME = "lab-slice"


def host(stage: Stage) -> Evidence:
    """Build the parts that the cache lacks, then boot a freshly deployed machine."""
    packages.ensure()
    # Guests start minutes later, so their image is built beside the host's. After an interruption
    # the build is one of the processes that the demo ends, so nothing waits for it here.
    builder = ThreadPoolExecutor(1)
    try:
        image = builder.submit(guest_image.ensure, this_distro())
        lab = stage.boot()
        stage.facts["image"] = image.result()
    finally:
        builder.shutdown(wait=False)
    return {
        "accelerator": lab.accel,
        "qemu": lab.qemu,
        "firmware": lab.firmware,
        "ssh_port": lab.ssh_port,
        "devices": lab.devices,
        "kernel": stage.on_host("uname", "-r").strip(),
    }


def enrol(stage: Stage) -> Evidence:
    """Register the node and give its userdata to cloud-init, which certifies its SSH host key."""
    stage.open()
    lab = stage.host()
    api = stage.api()
    body = {"id": NODE, "name": NODE, "address": "127.0.0.1", "port": lab.ssh_port}
    api.post("/admin/nodes", {**body, "ssh_user": "root", "profile": "lab"})
    token = api.post(stage.path("/enrollment-token"))
    script = userdata.by_cloud_init(token["userdata"])
    answer = userdata.deliver(Path(lab.userdata), script)
    if answer.exit_code != 0:
        raise LabError(f"enrolment failed on the host: {answer.output[-1000:]}")
    node = api.get(stage.path())
    prefix = "gpuaas-enrol: "
    return {
        "state": node["state"],
        "machine_id": node["machine_id"],
        "host_said": [
            line.removeprefix(prefix)
            for line in answer.output.splitlines()
            if line.startswith(prefix)
        ],
        "token_expires_at": token["expires_at"],
    }


def bootstrap(stage: Stage) -> Evidence:
    """Set up kernel arguments, VFIO, libvirt, bridge, NAT and dnsmasq, with a real reboot."""
    before = stage.api().get(stage.path())["boot_id"]
    result = stage.task(stage.path("/bootstrap"), {"allow_reboot": True})
    return {
        "rebooted": result["rebooted"],
        "boot_id_before": before,
        "boot_id_after": result["identity"]["boot_id"],
        "kernel_command_line": stage.on_host("cat", "/proc/cmdline").strip(),
    }


def discover(stage: Stage) -> Evidence:
    """Discover the host's hardware as candidates, which the scheduler cannot use."""
    result = stage.task(stage.path("/slice-topology/discovery"))
    return {"candidate_summary": result["candidate_summary"], "candidates": _bundles(stage)}


def transition(stage: Stage) -> Evidence:
    """Take over disks of host storage: plan first, then erase under the approved identity."""
    disks = _disks(stage)
    devices = sorted(disks)
    path = stage.path("/storage-transition")
    dry = stage.task(path, {"devices": devices, "apply": False})
    if any(device.get("proof") for device in dry["devices"]):
        raise LabError("the dry run acted: it returned a proof")
    for device in dry["devices"]:
        plan = ", ".join(f"{step['name']} {step['subject']}" for step in device["steps"])
        stage.console.print(f"      [dim]dry run: {plan}[/]", highlight=False)
    expected = {device["nvme_device"]: device["approval"] for device in dry["devices"]}
    done = stage.task(path, {"devices": devices, "apply": True, "expected": expected})
    return {
        "dry_run": [{key: d[key] for key in ("nvme_device", "steps")} for d in dry["devices"]],
        "applied": done["devices"],
        "manifest": done["manifest"],
    }


def approve(stage: Stage) -> Evidence:
    """Approve the stage's bundles from a fresh discovery, as the operator; they stay disabled."""
    stage.task(stage.path("/slice-topology/discovery"))
    bundles = [_bundles(stage)[index] for index in stage.slots]
    body = {"slots": bundles, "reason": "demo: approved from discovery"}
    slots = stage.api().post(stage.path("/resource-slots"), body)["items"]
    if {slot["status"] for slot in slots} != {"disabled"}:
        raise LabError(f"approved slots must stay disabled; found {slots}")
    return {"approved": bundles, "status": [slot["status"] for slot in slots]}


def bind(stage: Stage) -> Evidence:
    """Bind the GPUs and virtual functions of the approved topology to vfio-pci."""
    return stage.task(stage.path("/bind-topology"))


def parity(stage: Stage) -> Evidence:
    """Rediscover the host and run parity in one pass. Only a pass makes the slots available."""
    # The host fetches the image meanwhile, so that a launch finds it.
    caching = _cache_image(stage)
    stage.task(stage.path("/slice-topology/discovery"))
    result = stage.task(stage.path("/parity"))
    report = stage.api().get(stage.path("/parity"))["document"]
    failed = [check for check in report["checks"] if check["status"] == "FAIL"]
    if failed:
        raise LabError(f"parity failed: {failed}")
    slots = stage.api().get(stage.path("/resource-slots"))["items"]
    status = [slot["status"] for slot in slots]
    if set(status) != {"available"}:
        raise LabError(f"expected every slot available after parity; found {status}: {result}")
    stage.follow(caching)
    stage.api().put("/admin/settings/slice-scheduling", {"enabled": True})
    stage.api().put(stage.path("/scheduling"), {"enabled": True})
    return {
        "failures": report["failures"],
        "warnings": report["warnings"],
        "checks": {check["check"]: check["status"] for check in report["checks"]},
        "slots": status,
    }


def _cache_image(stage: Stage) -> dict[str, Any]:
    """Register the image; return the task that caches it on the host."""
    api, image = stage.api(), stage.facts["image"]
    entry = api.post(
        "/admin/images",
        {
            "name": IMAGE_NAME,
            "version": image.sha256[:12],
            "digest": f"sha256:{image.sha256}",
            "size_bytes": image.size,
            "url": Path(image.zst).as_uri(),
            "compression": "zstd",
        },
    )
    stage.facts["image_id"] = entry["id"]
    task: dict[str, Any] = api.post(stage.path("/image-cache"), {"image_id": entry["id"]})
    return task


def _document(stage: Stage) -> dict[str, Any]:
    latest: dict[str, Any] = stage.api().get(stage.path("/slice-topology/discovery"))["document"]
    return latest


def _bundles(stage: Stage) -> list[dict[str, Any]]:
    return [candidate["bundle"] for candidate in _document(stage)["candidates"]]


def _disks(stage: Stage) -> dict[str, dict[str, Any]]:
    devices = {_bundles(stage)[index]["nvme_device"] for index in stage.slots}
    return {disk["by_id"]: disk for disk in _document(stage)["nvme"] if disk["by_id"] in devices}

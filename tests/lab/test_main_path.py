"""Main job of the product on a real (virtual) slice host, in story order, with its refusals.

The steps are those of `make demo`. Here each step is checked, and the reconciler is killed midway.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lab.command import LabError
from lab.demo import host_steps, slice_steps
from lab.demo.stage import NODE, Stage
from reconciler.model.errors import Problem
from tests.lab import byhand, captures, networks, prepared, traces
from tests.lab.conftest import Chapter

# Host key of a machine that does not exist.
OTHER_KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAILw6MHUfBS0BkklFB8Qsked8rLaWhYoJ7HQ8JG+KpgdX"


def test_a_freshly_deployed_machine_boots(stage: Stage, story: Chapter) -> None:
    evidence = host_steps.host(stage)
    assert "intel_iommu=on" not in stage.on_host("cat", "/proc/cmdline")
    # Reference for the way back: a snapshot that knows nothing of slice mode.
    story.done["deployed"] = traces.look(stage)
    story.done["host"] = evidence


@pytest.mark.covers("HOST-13")
def test_enrolment_certifies_the_host_key(stage: Stage, story: Chapter) -> None:
    story.needs("host")
    evidence = host_steps.enrol(stage)
    assert evidence["state"] == "bootstrapping"
    log = stage.on_host("journalctl", "-t", "gpuaas-enrol", "-o", "cat", "--no-pager")
    assert "node certificate enrolled" in log
    # cloud-init, which a deployment runs, also accepted the script as userdata and reports success.
    result = json.loads(stage.on_host("cat", "/run/cloud-init/result.json"))["v1"]
    assert result["errors"] == [], result
    assert "NoCloud" in result["datasource"], result
    story.done["enrol"] = evidence


@pytest.mark.covers("HOST-13", "P6")
def test_no_connection_to_a_host_without_a_certificate(stage: Stage, story: Chapter) -> None:
    """Under another node id the same machine's certificate does not match, so SSH refuses."""
    story.needs("enrol")
    api = stage.api()
    body = {"id": "stranger", "name": "stranger", "address": "127.0.0.1"}
    api.post(
        "/admin/nodes",
        {**body, "port": stage.host().ssh_port, "ssh_user": "root", "profile": "lab"},
    )
    early = "/admin/nodes/stranger/slice-topology/discovery"
    with pytest.raises(Problem) as none_enrolled:
        api.post(early)
    assert none_enrolled.value.code == "node_not_enrolled"
    # Another machine enrols as that node, but this machine answers at its address.
    said = {"node_id": "stranger", "hostname": "stranger", "machine_id": "5" * 32}
    said |= {"host_key": OTHER_KEY, "boot_id": "55555555-5555-4555-8555-555555555555"}
    token = api.post("/admin/nodes/stranger/enrollment-token")["token"]
    api.post("/nodes/stranger/enrol", {**said, "token": token})
    task = api.post(early)
    refused = api.wait(task["id"], deadline_s=120)["error"]
    assert refused["code"] == "host_unreachable", refused
    # The refusal is specific: SSH read the certificate and rejected the principal.
    assert "not a listed principal" in refused["found"], refused
    assert "Host key verification failed" in refused["found"], refused
    for verb in ("maintain", "retire"):
        api.post(f"/admin/nodes/stranger/{verb}", {"reason": "there is no such machine"})


@pytest.mark.covers("HOST-4")
def test_bootstrap_reboots_into_a_slice_host(stage: Stage, story: Chapter) -> None:
    story.needs("enrol")
    evidence = host_steps.bootstrap(stage)
    assert evidence["rebooted"]
    assert evidence["boot_id_after"] != evidence["boot_id_before"]
    assert "intel_iommu=on" in evidence["kernel_command_line"]
    assert "iommu=pt" in evidence["kernel_command_line"]
    story.done["bootstrap"] = evidence


@pytest.mark.covers("HOST-11")
def test_discovery_finds_what_the_machine_has(stage: Stage, story: Chapter) -> None:
    story.needs("bootstrap")
    evidence = host_steps.discover(stage)
    summary = evidence["candidate_summary"]
    assert summary["gpu_devices"] == 4
    assert summary["nvme_devices"] == 5  # four data disks and the OS disk
    assert len(evidence["candidates"]) == 4
    story.done["discover"] = evidence


def _kept(stage: Stage) -> dict[str, Any]:
    """Records that no refusal may change: slots, allocations, claims, tasks, audit log."""
    api = stage.api()
    fields = ("state", "generation", "claims", "task_ids")
    allocations = {}
    for row in list(api.items("/admin/allocations")):
        found = api.get(f"/admin/allocations/{row['id']}")
        allocations[row["id"]] = {name: found[name] for name in fields}
    return {
        "slots": list(api.items(stage.path("/resource-slots"))),
        "allocations": allocations,
        "audit": list(api.items("/admin/audit")),
    }


def _refused(stage: Stage, ask: Callable[[], Any]) -> str:
    """Return the code with which the request is refused; the request must change nothing."""
    before = _kept(stage)
    with pytest.raises(Problem) as refused:
        ask()
    problem = refused.value
    assert problem.expected and problem.found and problem.remedy
    assert _kept(stage) == before, problem.code
    return problem.code


def _approve(stage: Stage, **changes: Any) -> str:
    """Approve the first candidate with these changes; return the code of the refusal."""
    bundle = {**host_steps._bundles(stage)[0], **changes}
    body = {"slots": [bundle], "reason": "test"}
    return _refused(stage, lambda: stage.api().post(stage.path("/resource-slots"), body))


def _ledger(stage: Stage, slot_id: str) -> dict[str, Any]:
    """Return the host ledger's entry for a slot."""
    text = stage.on_host("cat", f"/var/lib/gpuaas/ledger/{slot_id}.json")
    found: dict[str, Any] = json.loads(text)
    return found


def _beginning(stage: Stage, device: str, mib: int = 16) -> str:
    """Return a digest of the disk's first bytes, where an image or a signature would be."""
    reader = f"dd if={device} bs=1M count={mib} iflag=direct status=none | sha256sum"
    return stage.on_host("sh", "-c", f"'{reader}'").split()[0]


@pytest.mark.covers("HOST-11", "CTRL-3")
def test_the_system_disk_is_refused_by_every_alias(stage: Stage, story: Chapter) -> None:
    story.needs("discover")
    disks = host_steps._document(stage)["nvme"]
    system = next(disk for disk in disks if disk["os_disk"])
    for name in {system["by_id"], *system["aliases"]}:
        code = _approve(
            stage, nvme_device=name, nvme_serial=system["serial"], nvme_eui=system["eui"]
        )
        assert code == "os_disk", name


@pytest.mark.covers("HOST-11", "CTRL-3")
def test_a_disk_with_a_mounted_child_is_refused(stage: Stage, story: Chapter) -> None:
    story.needs("discover")
    assert _approve(stage) == "mounted_child"


@pytest.mark.covers("HOST-9", "HOST-11", "CTRL-3")
def test_disks_in_other_use_are_refused(stage: Stage, story: Chapter) -> None:
    """Swap, LVM, md and a filesystem on the two blank disks, made with the real tools.

    The API refuses the disks by the discovery report. The host refuses them whatever was approved.
    """
    story.needs("discover")
    disks = {disk["serial"]: disk for disk in host_steps._document(stage)["nvme"]}
    spare = {key: disks[serial]["by_id"] for key, serial in (("b", "LABNVME1"), ("d", "LABNVME3"))}
    rounds = [
        (
            f"mkswap -q {spare['b']}; swapon {spare['b']}; pvcreate -q {spare['d']};"
            f"vgcreate -q test {spare['d']}; lvcreate -q -y -n t -l 100%FREE test",
            # This includes LVM's own record of the group, because the way back compares all of
            # /etc.
            f"swapoff {spare['b']}; vgremove -q -y test; pvremove -q {spare['d']};"
            "rm -f /etc/lvm/archive/test_* /etc/lvm/backup/test",
            {"LABNVME1": "swap_in_use", "LABNVME3": "lvm_member"},
        ),
        (
            f"mdadm -q --create /dev/md/t --run --level=1 --raid-devices=2 {spare['b']} missing;"
            f"mkfs.ext4 -q {spare['d']}",
            f"mdadm -q --stop /dev/md/t; mdadm -q --zero-superblock {spare['b']}",
            {"LABNVME1": "md_member", "LABNVME3": "unexpected_filesystem"},
        ),
    ]
    for make, undo, expected in rounds:
        try:
            stage.on_host("sh", "-c", f"'{make}; udevadm settle'")
            stage.task(stage.path("/slice-topology/discovery"))
            found = {}
            for serial in expected:
                disk = disks[serial]
                found[serial] = _approve(
                    stage, nvme_device=disk["by_id"], nvme_serial=serial, nvme_eui=disk["eui"]
                )
            taken = _taken(stage, [disks[serial] for serial in expected])
        finally:
            blank = "".join(f"blkdiscard --zeroout {d};" for d in spare.values())
            stage.on_host("sh", "-c", f"'{undo}; {blank} udevadm settle'")
        assert found == expected
        # A plain filesystem that was approved is no obstacle; the other disk stops the takeover of
        # both.
        assert set(expected.values()) - {"unexpected_filesystem"} <= taken


def _taken(stage: Stage, disks: list[dict[str, Any]]) -> set[str]:
    """Return the codes with which the host refuses to take disks whose whole content was approved.

    No byte of any disk may change, including the disk that alone would have been taken.
    """
    kinds = ["swap", "ext4", "LVM2_member", "linux_raid_member"]
    expected = {
        disk["by_id"]: {"serial": disk["serial"], "eui": disk["eui"], "filesystems": kinds}
        for disk in disks
    }
    # On a swap disk only the header is stable.
    before = [_beginning(stage, path, mib=1) for path in expected]
    asked = {"devices": list(expected), "apply": True, "expected": expected}
    refused = stage.module("nvme_transition", asked)
    assert [_beginning(stage, path, mib=1) for path in expected] == before
    assert refused["failed"] and not refused["changed"], refused
    assert refused["done"] == []
    return {blocker["code"] for blocker in refused["blockers"]}


@pytest.mark.covers("HOST-9")
def test_a_transition_under_a_wrong_identity_is_refused(stage: Stage, story: Chapter) -> None:
    story.needs("discover")
    stage.task(stage.path("/slice-topology/discovery"))
    disk = next(d for d in host_steps._document(stage)["nvme"] if d["serial"] == "LABNVME0")
    expected = {disk["by_id"]: {"serial": disk["serial"], "eui": "5e0000000000a009"}}
    task = stage.api().post(
        stage.path("/storage-transition"),
        {"devices": [disk["by_id"]], "apply": True, "expected": expected},
    )
    ended = stage.api().wait(task["id"], deadline_s=300)
    assert ended["state"] == "failed"
    assert ended["error"]["code"] == "identity_mismatch"
    assert "/share0" in stage.on_host("findmnt", "-rno", "TARGET")


@pytest.mark.covers("HOST-9")
def test_two_disks_leave_host_storage(stage: Stage, story: Chapter) -> None:
    story.needs("discover")
    evidence = host_steps.transition(stage)
    assert all(device["proof"]["verified"] for device in evidence["applied"])
    assert "/share0" not in stage.on_host("findmnt", "-rno", "TARGET")
    assert "gpuaas-slice-storage-disabled" in stage.on_host("cat", "/etc/fstab")
    story.done["transition"] = evidence


@pytest.mark.covers("CTRL-3")
def test_approved_slots_stay_disabled(stage: Stage, story: Chapter) -> None:
    story.needs("transition")
    evidence = host_steps.approve(stage)
    assert evidence["status"] == ["disabled", "disabled"]
    story.done["approve"] = evidence


@pytest.mark.covers("HOST-8")
def test_the_approved_devices_are_bound_to_vfio(stage: Stage, story: Chapter) -> None:
    story.needs("approve")
    host_steps.bind(stage)
    for bundle in story.done["approve"]["approved"]:
        for key in ("gpu_pci_address", "fabric_vf_pci_address"):
            driver = stage.on_host("readlink", f"/sys/bus/pci/devices/{bundle[key]}/driver")
            assert driver.strip().endswith("/vfio-pci")
    story.done["bind"] = True


@pytest.mark.covers("HOST-9")
def test_the_host_makes_nothing_of_approved_disks(stage: Stage, story: Chapter) -> None:
    """They have no name but their own, for the running udev and for that of the next boot."""
    story.needs("bind")
    for bundle in story.done["approve"]["approved"]:
        stage.on_host("udevadm", "trigger", "--action=add", "--settle", bundle["nvme_device"])
        shown = stage.on_host("udevadm", "info", "--query=property", bundle["nvme_device"])
        properties = dict(line.partition("=")[::2] for line in shown.splitlines())
        assert properties["DEVLINKS"] == bundle["nvme_device"]
        assert properties["SYSTEMD_READY"] == "0"
    built = stage.on_host("sh", "-c", "'lsinitramfs /boot/initrd.img-$(uname -r)'")
    assert "udev/rules.d/62-gpuaas-slice-disks.rules" in built


@pytest.mark.covers("HOST-6", "HOST-10")
def test_a_missing_nat_rule_fails_parity_though_all_services_run(
    stage: Stage, story: Chapter
) -> None:
    story.needs("bind")
    rule = "POSTROUTING -s 10.100.0.0/24 -j MASQUERADE"
    with byhand.hanging_guardian(stage):
        stage.on_host("iptables", "-t", "nat", "-D", *rule.split())
        stage.task(stage.path("/slice-topology/discovery"))
        assert stage.task(stage.path("/parity"))["failures"] > 0
    checks = stage.api().get(stage.path("/parity"))["document"]["checks"]
    failed = {check["check"] for check in checks if check["status"] == "FAIL"}
    assert {"nat", "guest_egress"} <= failed
    assert not failed & {"dnsmasq", "libvirt", "ovs_bridge"}
    slots = stage.api().get(stage.path("/resource-slots"))["items"]
    assert {slot["status"] for slot in slots} == {"disabled"}


@pytest.mark.covers("HOST-6", "HOST-10")
def test_tcp_that_stops_fails_parity_by_name(stage: Stage, story: Chapter) -> None:
    """Of each connection of a guest, a filter passes the first packet only; pings are answered."""
    story.needs("bind")
    rule = "FORWARD -i ovsbr0 -p tcp ! --syn -j DROP"
    stage.on_host("iptables", "-I", *rule.split())
    try:
        stage.task(stage.path("/parity"))
    finally:
        stage.on_host("iptables", "-D", *rule.split())
    rows = stage.api().get(stage.path("/parity"))["document"]["checks"]
    failed = {row["check"]: row["detail"] for row in rows if row["status"] == "FAIL"}
    assert "begins, and stops after 0 of 8 messages" in failed["guest_tcp"], failed
    assert not failed.keys() & {"guest_egress", "nat", "ip_forwarding", "ovs_bridge"}, failed
    assert "gsparity" not in stage.on_host("ip", "-o", "link")


ONBOARD = ("nodes", "onboard", NODE, "--reason", "a walk over the lab host")


@pytest.mark.covers("CTRL-15")
def test_one_command_goes_on_here_and_erases_nothing_without_its_plan(
    stage: Stage, story: Chapter
) -> None:
    """Two candidates are left. The command looks at the host, and stops before their disks."""
    story.needs("bind")
    rows = host_steps._document(stage)["candidates"]
    left = {row["bundle"]["nvme_device"] for row in rows if row["slot_index"] not in stage.slots}
    with pytest.raises(LabError, match="plan_unapproved"):
        stage.service.cli(*ONBOARD, "--yes-to", "sha256:0")
    kind = {"node_id": NODE, "kind": "node.storage_transition"}
    newest = max(stage.api().items("/admin/tasks", **kind), key=lambda task: task["created_at"])
    planned = newest["result"]["devices"]
    assert {device["nvme_device"] for device in planned} <= left
    assert planned and not any(device.get("proof") for device in planned)
    slots = stage.api().get(stage.path("/resource-slots"))["items"]
    assert {slot["status"] for slot in slots} == {"disabled"}


@pytest.mark.covers("HOST-6", "HOST-7", "HOST-10", "HOST-14", "CTRL-3")
def test_parity_opens_the_gate(stage: Stage, story: Chapter) -> None:
    story.needs("bind")
    evidence = host_steps.parity(stage)
    assert evidence["failures"] == 0
    assert evidence["slots"] == ["available", "available"]
    # With its slots on sale, a host is at the end of the walk, and nothing more is done to it.
    tasks = {task["id"] for task in stage.api().items("/admin/tasks", node_id=NODE)}
    assert '"available"' in stage.service.cli("--output", "json", *ONBOARD)
    assert {task["id"] for task in stage.api().items("/admin/tasks", node_id=NODE)} == tasks
    story.done["parity"] = evidence


@pytest.mark.covers("CTRL-5")
def test_more_gpus_than_one_node_has_are_refused(stage: Stage, story: Chapter) -> None:
    story.needs("parity")
    assert _refused(stage, lambda: slice_steps.launch(stage, gpu_count=3)) == "no_capacity"
    stage.use_vm(span_numa=False)
    code = _refused(stage, lambda: slice_steps.launch(stage, gpu_count=2))
    stage.use_vm(span_numa=True)
    assert code == "numa_node_exceeded", "the slots are on two NUMA nodes"


@pytest.mark.covers("I4", "SLICE-2", "P14")
def test_an_image_with_another_digest_never_reaches_the_disk(stage: Stage, story: Chapter) -> None:
    story.needs("parity")
    image = stage.facts["image"]
    entry = stage.api().post(
        "/admin/images",
        {
            "name": "forged",
            "version": "1",
            "digest": "sha256:" + "0" * 64,
            "size_bytes": image.size,
            "url": Path(image.zst).as_uri(),
            "compression": "zstd",
        },
    )
    disks = [slot["nvme_device"] for slot in stage.bundles()]
    before = [_beginning(stage, disk) for disk in disks]
    allocation = slice_steps.launch(stage, image_id=entry["id"])
    ended = slice_steps.wait_for(stage, allocation["id"], {"active", "failed"})
    assert ended["state"] == "failed"
    error = ended["error"]
    assert error["code"] == "image_digest_mismatch"
    assert error["expected"] and error["found"] and error["remedy"]
    # Nothing was written, so the slot is free at once and needs no wipe.
    slot = slice_steps.slot_of(stage, ended)
    assert slot["status"] == "available"
    # The host's ledger and the disks confirm the run's report.
    ledger = _ledger(stage, slot["id"])
    assert (ledger["dirty"], ledger["allocation_id"]) == (False, "")
    assert [_beginning(stage, disk) for disk in disks] == before


@pytest.mark.covers("CTRL-9", "I12", "SLICE-4", "SLICE-5")
def test_provisioning_survives_a_killed_reconciler(stage: Stage, story: Chapter) -> None:
    """After kill -9 in the middle of a run, it continues and the next reconciler settles it."""
    story.needs("parity")
    allocation = slice_steps.launch(stage)
    task_id = stage.api().get(f"/admin/allocations/{allocation['id']}")["task_ids"][-1]
    _kill_the_reconciler(stage, task_id)
    ended = slice_steps.wait_for(stage, allocation["id"], {"active", "failed"})
    assert ended["state"] == "active", slice_steps.why(stage, ended)
    task = stage.api().get(f"/admin/tasks/{task_id}")
    assert (task["state"], task["attempt"]) == ("succeeded", 1)
    readiness = task["result"]["readiness"]
    assert readiness["actual_ip"] == readiness["expected_ip"]
    assert readiness["lease_state"] == "bound"
    assert readiness["host_keys"][0].startswith("ssh-ed25519 ")
    # The guest's own probe answered over the virtio-serial channel.
    probes = {row["name"]: row for row in readiness["probes"]}
    assert list(probes) == ["address", "lease", "ssh", "gpu_compute"]
    assert all(row["ok"] for row in probes.values())
    assert probes["gpu_compute"]["values"] == {"gpus": 1, "memory_bytes": 4096}
    # Open vSwitch has the profile's limit for each direction, and a single QoS row for it.
    wanted = stage.profile()["vm"]["mgmt_qos"]
    limit = task["result"]["domain"]["qos"]
    assert {name: limit[name] for name in wanted} == wanted
    assert (limit["shaped_bps"], limit["rows"]) == (1000 * wanted["rate_kbps"], 1)
    stage.facts["allocation"] = ended
    story.done["provision"] = ended


@pytest.mark.covers("CTRL-7")
def test_an_active_allocation_is_not_force_cleaned(stage: Stage, story: Chapter) -> None:
    story.needs("provision")
    path = f"/admin/allocations/{story.done['provision']['id']}/force-cleanup"
    body = {"reason": "test", "runtime_verified_absent": True}
    assert _refused(stage, lambda: stage.api().post(path, body)) == "allocation_active"


@pytest.mark.covers("SLICE-3", "SLICE-4")
def test_the_tenant_computes_on_the_gpu(stage: Stage, story: Chapter) -> None:
    story.needs("provision")
    evidence = slice_steps.login(stage)
    assert evidence["user"] == slice_steps.USER
    (gpu,) = evidence["gpu"]["gpus"]
    assert gpu["remains"]["ok"], gpu
    story.done["login"] = evidence


@pytest.mark.covers("SLICE-9", "HOST-6")
def test_a_guest_speaks_tcp_to_an_allowed_network(stage: Stage, story: Chapter) -> None:
    """Through the guard and NAT, both ways, in a kernel's own tracking of connections."""
    story.needs("login")
    with networks.management(stage):
        networks.assert_guest_uses_storage(stage)


@pytest.mark.covers("HOST-12")
def test_host_and_vm_are_measured_by_the_same_harness(
    stage: Stage, story: Chapter, tmp_path: Path
) -> None:
    """Measure the VM through its host, with the key from its console; missing tools are named."""
    story.needs("login")
    taken = {claim["slot_id"] for claim in stage.facts["allocation"]["claims"]}
    disk = next(one["nvme_device"] for one in stage.bundles() if one["slot_id"] not in taken)
    node = stage.on_host("readlink", "-f", disk).strip()
    written = captures.writes(stage, node)
    files = [tmp_path / "bare.json", tmp_path / "slice.json"]
    host = captures.of_host(stage, files[0], "--fio-target", disk)
    assert captures.writes(stage, node) == written
    targets = ["--fio-target", "/dev/vda", "--rdma-peer", "10.100.0.1"]
    guest = captures.of_guest(stage, files[1], "--sudo", "--vcpus", "1", *targets)
    assert (guest["kind"], guest["vcpus"], guest["host"]["hostname"]) == ("vm", 1, "slice")
    assert guest["harness"]["digest"] == host["harness"]["digest"]

    found = captures.probes(guest)
    for name in ("cpu", "memory"):
        assert found[name]["status"] == "ok", found[name]["reason"]
    lacking = {"disk": "tool_missing", "rdma": "tool_missing", "gpu": "cuda_driver_missing"}
    for name, code in {**lacking, "vllm": "tool_missing"}.items():
        assert (found[name]["status"], found[name]["reason"]["code"]) == ("unavailable", code)
        assert found[name]["reason"]["remedy"]
    assert captures.probes(host)["disk"]["status"] == "ok"

    rows = captures.compared(stage, files, tmp_path / "difference.svg")
    for metric in ("cpu.integer", "cpu.float", "memory.copy"):
        assert rows[metric]["delta_percent"] is not None, rows[metric]
        assert rows[metric]["direction"] in ("better", "worse", "same", "unclear")
    missing = (rows["disk.read"]["direction"], rows["disk.read"]["note"])
    assert missing == ("missing", "unavailable: tool_missing")


@pytest.mark.covers("SLICE-11")
def test_telemetry_comes_from_the_host_and_from_the_guest(stage: Stage, story: Chapter) -> None:
    """Over a real virtio-serial channel and the account that bootstrap added."""
    story.needs("provision")
    latest = slice_steps.telemetry(stage)
    host, guest = latest["host"], latest["guest"]
    assert (host["source"], host["state"], host["address_leased"]) == ("host", "running", True)
    assert host["cpu_s"] > 0 and host["disk_read_bytes"] > 0 and host["received_packets"] > 0
    assert guest["source"] == "guest" and guest["cuda"] in ("absent", None)
    assert guest["cpus"] == host["vcpus"]
    assert 0 < guest["memory_available_bytes"] < guest["memory_total_bytes"]
    assert guest["memory_total_bytes"] < host["memory_bytes"]
    assert 0 < guest["disk_free_bytes"] < guest["disk_total_bytes"]
    # The account can do nothing but print, whatever is asked of it.
    words = stage.on_host("cat", "/etc/ssh/gpuaas_principals/gpuaas-telemetry")
    assert words.startswith("restrict,command=")
    assert "gpuaas-telemetry" not in stage.on_host("cat", "/etc/ssh/gpuaas_principals/root")


@pytest.mark.covers("I7", "HOST-9")
def test_the_disk_of_a_running_machine_is_not_wiped(stage: Stage, story: Chapter) -> None:
    """The call carries the tenant's own fence, so that only QEMU's open descriptor protects the
    disk."""
    story.needs("login")
    claim = stage.facts["allocation"]["claims"][0]
    slot = next(one for one in stage.bundles() if one["slot_id"] == claim["slot_id"])
    ledger = _ledger(stage, slot["slot_id"])
    # Only the partition table is stable, because the guest writes behind it.
    before = _beginning(stage, slot["nvme_device"], mib=1)
    refused = stage.module("nvme_wipe", {"slots": [{**slot, "fence": ledger["fence"]}]})
    assert refused["failed"] and not refused["changed"], refused
    assert refused["error"]["code"] == "disk_in_use"
    assert "open in QEMU" in refused["error"]["found"]
    assert refused["error"]["expected"] and refused["error"]["remedy"]
    assert _beginning(stage, slot["nvme_device"], mib=1) == before
    assert _ledger(stage, slot["slot_id"]) == ledger


@pytest.mark.covers("CTRL-9", "I12", "SLICE-6", "SLICE-7")
def test_release_ends_with_an_available_slot(stage: Stage, story: Chapter) -> None:
    """The reconciler is killed during this release as well."""
    story.needs("login")
    evidence = slice_steps.release(stage, lambda task_id: _kill_the_reconciler(stage, task_id))
    assert evidence["allocation"] == "released"
    assert evidence["shutdown"] == "graceful"
    assert evidence["absence"]["absent"]
    assert evidence["slot"] == "available"
    assert stage.on_host("ovs-vsctl", "--timeout=60", "list", "QoS").strip() == ""
    story.done["release"] = evidence


@pytest.mark.covers("I4", "SLICE-6", "P11")
def test_no_byte_of_the_tenant_is_left(stage: Stage, story: Chapter) -> None:
    story.needs("release")
    evidence = slice_steps.wipe_proof(stage)
    assert evidence["proof"]["kind"] == "wipe"
    assert evidence["canary_copies_on_disk"] == 0
    # The tenant left a pattern in the whole buffer of its GPU, and values in its registers.
    assert evidence["gpu_after_reset"]["buffer_bytes"] == 0
    gpu = evidence["proof"]["document"]["gpu"]
    assert (gpu["method"], gpu["scrub"]["method"], gpu["verified"]) == ("bus", "edu", True)


@pytest.mark.covers("I10", "SLICE-1")
def test_a_stale_fence_is_refused_by_the_host(stage: Stage, story: Chapter) -> None:
    """The host's ledger has a higher fence than a run from an older claim carries."""
    story.needs("release")
    claim = stage.facts["allocation"]["claims"][0]
    slot = next(one for one in stage.bundles() if one["slot_id"] == claim["slot_id"])
    device = slot["nvme_device"]
    # The disk now has data to lose. With the present fence the same call wipes it, as the end
    # shows.
    stage.on_host("sh", "-c", f"'mkswap -q {device}; udevadm settle'")
    ledger, disk = _ledger(stage, slot["slot_id"]), _beginning(stage, device)
    kept = _kept(stage)

    stale = stage.module("nvme_wipe", {"slots": [{**slot, "fence": ledger["fence"] - 1}]})
    assert stale["failed"]
    assert not stale["changed"]
    assert stale["error"]["code"] == "stale_fence"
    assert stale["error"]["expected"] and stale["error"]["found"] and stale["error"]["remedy"]
    assert _ledger(stage, slot["slot_id"]) == ledger
    assert _beginning(stage, device) == disk
    assert _kept(stage) == kept

    wiped = stage.module("nvme_wipe", {"slots": [{**slot, "fence": ledger["fence"]}]})
    assert wiped["done"] == ["wipe_disk"], wiped
    again = stage.module("nvme_wipe", {"slots": [{**slot, "fence": ledger["fence"]}]})
    assert (again["failed"], again["changed"]) == (False, False), again
    assert _beginning(stage, device) != disk
    assert not _ledger(stage, slot["slot_id"])["dirty"]


@pytest.mark.covers("I6", "SLICE-3", "SLICE-5")
def test_a_vm_whose_gpu_does_not_compute_blocks_its_slot(stage: Stage, story: Chapter) -> None:
    """Its tenant's own cloud-config hides the GPU from the probe."""
    story.needs("release")
    evidence = slice_steps.blocked(stage)
    assert evidence["health_state"] == "failed"
    assert evidence["health_detail"]["allocation_id"] == evidence["allocation"]
    assert evidence["error"]["code"] == "readiness_failed"
    assert evidence["error"]["found"] == "gpu_compute: 0 GPUs compute, expected 1"
    story.done["blocked"] = evidence


@pytest.mark.covers("CTRL-7", "I21")
def test_force_cleanup_wants_an_idempotency_key_and_keeps_to_it(
    stage: Stage, story: Chapter
) -> None:
    story.needs("blocked")
    path = f"/admin/allocations/{story.done['blocked']['allocation']}/force-cleanup"
    body = {"reason": "test", "runtime_verified_absent": False}
    api, other = stage.api(), {**body, "reason": "another"}
    assert _refused(stage, lambda: api.post(path, body, key=None)) == "idempotency_key_required"
    first = api.post(path, body, key="same-key")
    assert api.post(path, body, key="same-key") == first
    code = _refused(stage, lambda: api.post(path, other, key="same-key"))
    assert code == "idempotency_key_reused"
    # If the operator answers "not verified", the slot stays blocked.
    slot = slice_steps.slot_of(stage, stage.facts["blocked"])
    assert slot["status"] == "cleanup_blocked"


@pytest.mark.covers("CTRL-7")
def test_recovery_brings_the_slot_back(stage: Stage, story: Chapter) -> None:
    story.needs("blocked")
    evidence = slice_steps.recover(stage)
    assert evidence["audit"]["events"]
    assert all(slot["status"] == "available" for slot in evidence["inventory_after"].values())
    story.done["recover"] = evidence
    story.done["prepared"] = True


def test_the_prepared_host_is_saved_for_later_sessions(stage: Stage, story: Chapter) -> None:
    """The host continues after the save without a boot, and the reconciler keeps its records."""
    story.needs("prepared")
    before = byhand.boot(stage), _statuses(stage)
    prepared.save(stage, story.done)
    assert (byhand.boot(stage), _statuses(stage)) == before


def _statuses(stage: Stage) -> dict[str, str]:
    slots = stage.api().get(stage.path("/resource-slots"))["items"]
    return {slot["id"]: slot["status"] for slot in slots}


def _kill_the_reconciler(stage: Stage, task_id: str) -> None:
    """Kill the reconciler once the task's run works on the host; start a new one five seconds
    later."""
    assert stage.service is not None
    end = time.monotonic() + 120
    while True:
        task = stage.api().get(f"/admin/tasks/{task_id}")
        if task["state"] == "running" and task.get("progress"):
            break
        assert time.monotonic() < end, "the run did not start in two minutes"
        time.sleep(0.5)
    stage.service.kill()
    time.sleep(5)
    stage.service.start()

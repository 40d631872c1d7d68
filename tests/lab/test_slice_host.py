"""A deployed machine becomes a slice host with slots for sale; wrong steps are refused.

The steps are those of `make demo`. Here each step is checked.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lab.command import LabError
from lab.demo import host_steps
from lab.demo.stage import NODE, Stage
from reconciler.model import firmware
from reconciler.model.errors import Problem
from tests.lab import byhand, prepared, traces
from tests.lab.conftest import Chapter
from tests.lab.proof import beginning, refusal

# Host key of a machine that does not exist.
OTHER_KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAILw6MHUfBS0BkklFB8Qsked8rLaWhYoJ7HQ8JG+KpgdX"
# An array and a physical volume on a disk. Prints its signature and the number of arrays, then its
# signature and the number of volumes of LVM, with the host's configuration and without its filter.
FOREIGN_LABELS = """set -e
disk=$1
settle() { udevadm trigger --action=add --settle "$disk"; }
blank() { blkdiscard --zeroout "$disk"; settle; }
trap blank EXIT
mdadm -q --create /dev/md/t --run --level=1 --raid-devices=2 --metadata=1.2 "$disk" missing
mdadm -q --stop /dev/md/t
settle
blkid -p -s TYPE -o value "$disk"
mdadm -q --assemble --scan || true
grep -c '^md' /proc/mdstat || true
blkdiscard --zeroout "$disk"
open='devices { global_filter = [ "a|.*|" ] }'
pvcreate -q -y --config "$open" "$disk" > /dev/null
settle
blkid -p -s TYPE -o value "$disk"
pvs --noheadings -o pv_name | wc -l
pvs --noheadings -o pv_name --config "$open" | wc -l
"""
FOREIGN_ENTRY = """cat > /etc/grub.d/45_memory_test <<'SCRIPT'
#!/bin/sh
exec tail -n +3 "$0"
menuentry 'Memory test' {
  linux /boot/memtest86+x64.bin
}
SCRIPT
chmod 755 /etc/grub.d/45_memory_test
"""


def test_a_freshly_deployed_machine_boots(stage: Stage, story: Chapter) -> None:
    evidence = host_steps.host(stage)
    assert "intel_iommu=on" not in stage.on_host("cat", "/proc/cmdline")
    # An entry of the site that starts no kernel of the host, last in the menu.
    stage.on_host("sh", "-s", stdin=FOREIGN_ENTRY)
    # Reference for the way back: a snapshot that is independent of slice mode.
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
    identity = {"node_id": "stranger", "hostname": "stranger", "machine_id": "5" * 32}
    identity |= {"host_key": OTHER_KEY, "boot_id": "55555555-5555-4555-8555-555555555555"}
    token = api.post("/admin/nodes/stranger/enrollment-token")["token"]
    api.post("/nodes/stranger/enrol", {**identity, "token": token})
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
    # A GRUB without these commands waits for 40 seconds, and takes each condition for true.
    console = Path(stage.host().folder, "console.log").read_text(errors="replace")
    # The file may begin with earlier hosts of this folder.
    latest = console.rpartition("reboot: machine restart")[2]
    assert "Welcome to GRUB" in latest and "can't find command" not in latest
    assert "Memory test" in stage.on_host("cat", "/boot/grub/grub.cfg")
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


def _approve(stage: Stage, **changes: Any) -> str:
    """Approve the first candidate with these changes; return the code of the refusal."""
    bundle = {**host_steps._bundles(stage)[0], **changes}
    body = {"slots": [bundle], "reason": "test"}
    return refusal(stage, lambda: stage.api().post(stage.path("/resource-slots"), body))


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

    The API refuses the disks by the discovery report. The host refuses them even if approved.
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
            codes = {}
            for serial in expected:
                disk = disks[serial]
                codes[serial] = _approve(
                    stage, nvme_device=disk["by_id"], nvme_serial=serial, nvme_eui=disk["eui"]
                )
            taken = _taken(stage, [disks[serial] for serial in expected])
        finally:
            blank = "".join(f"blkdiscard --zeroout {d};" for d in spare.values())
            stage.on_host("sh", "-c", f"'{undo}; {blank} udevadm settle'")
        assert codes == expected
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
    before = [beginning(stage, path, mib=1) for path in expected]
    arguments = {"devices": list(expected), "apply": True, "expected": expected}
    refused = stage.module("nvme_transition", arguments)
    assert [beginning(stage, path, mib=1) for path in expected] == before
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
    # Set by a kernel argument, as in the profile.
    idle = stage.on_host("cat", "/sys/module/vfio_pci/parameters/disable_idle_d3")
    assert idle.strip() == "Y"
    story.done["bind"] = True


@pytest.mark.covers("HOST-9")
def test_the_host_makes_nothing_of_approved_disks(stage: Stage, story: Chapter) -> None:
    """Neither the running udev nor that of the next boot gives them names from their content."""
    story.needs("bind")
    for bundle in story.done["approve"]["approved"]:
        stage.on_host("udevadm", "trigger", "--action=add", "--settle", bundle["nvme_device"])
        shown = stage.on_host("udevadm", "info", "--query=property", bundle["nvme_device"])
        properties = dict(line.partition("=")[::2] for line in shown.splitlines())
        assert properties["DEVLINKS"] == bundle["nvme_device"]
        assert properties["SYSTEMD_READY"] == "0"
        # Labels as a tenant could write them: mdadm and LVM recognize them, and activate nothing.
        types = stage.on_host("sh", "-s", bundle["nvme_device"], stdin=FOREIGN_LABELS).split()
        assert types == ["linux_raid_member", "0", "LVM2_member", "0", "1"], types
    built = stage.on_host("sh", "-c", "'lsinitramfs /boot/initrd.img-$(uname -r)'")
    assert "udev/rules.d/62-gpuaas-slice-disks.rules" in built


@pytest.mark.covers("P11")
def test_a_boot_entry_that_is_new_is_a_difference_of_the_firmware(
    stage: Stage, story: Chapter
) -> None:
    """By the real UEFI variables of the lab host."""
    story.needs("bind")
    before = byhand.firmware_report(stage)
    stage.on_host("python3", "-", stdin=byhand.ADD_BOOT_ENTRY)
    try:
        stage.task(stage.path("/slice-topology/discovery"))
    finally:
        stage.on_host("sh", "-s", stdin=byhand.REMOVE_BOOT_ENTRY)
    (row,) = firmware.differences(before, byhand.firmware_report(stage))
    assert (row["section"], row["name"], row["change"]) == ("uefi", "Boot00AA", "added")


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
    """A filter drops all but the first packet of a guest's TCP connection; pings are answered."""
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
    # A host with its slots on sale is completely onboarded: the command queues no task.
    tasks = {task["id"] for task in stage.api().items("/admin/tasks", node_id=NODE)}
    assert '"available"' in stage.service.cli("--output", "json", *ONBOARD)
    assert {task["id"] for task in stage.api().items("/admin/tasks", node_id=NODE)} == tasks
    story.done["parity"] = evidence
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

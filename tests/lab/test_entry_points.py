"""Command-line programs of the product, run by hand over SSH as an operator runs them.

Plays on the host that test_upkeep.py left: two slots, bound and available, and no VM. The last test
checks that the host is as it was, whatever the other tests did to it.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lab.demo.stage import INVENTORY, Stage
from lab.paths import REPOSITORY
from tests.lab import byhand, captures, strangers
from tests.lab.conftest import Chapter
from tests.lab.proof import changed_lines, prove_again
from tests.lab.strangers import Stranger

BASELINE = "gpuaas-slice-network-baseline.service"
DNSMASQ = "/etc/dnsmasq.d/gpuaas-slice.conf"
BIN = Path(sys.executable).parent

LOOK = r"""
cd /
ls -d /sys/class/block/* /sys/class/infiniband/* /sys/class/nvme/* /var/tmp/* 2> /dev/null \
  | grep -v systemd-private
for device in sys/bus/pci/devices/*; do
  echo $device $(readlink $device/driver) $(cat $device/driver_override)
done
for place in etc/gpuaas etc/dnsmasq.d etc/systemd/system etc/sysctl.d etc/fstab usr/local/sbin \
  var/lib/gpuaas/ledger var/lib/gpuaas/dnsmasq/hosts.d; do
  [ -e $place ] || continue
  find $place -type l -printf "%p -> %l\n"
  find $place -type f ! -name "*lock*" -exec sha256sum {} +
done | sort -k 2
iptables -t nat -S | sort
ovs-vsctl list-br
ip -br -4 address show | sort
cat /proc/sys/net/ipv4/ip_forward /proc/sys/kernel/random/boot_id
findmnt -rno TARGET,SOURCE -t ext4
systemctl list-units --all --plain --no-legend "gpuaas-test*"
true
"""


@pytest.fixture(scope="module", autouse=True)
def state(stage: Stage, story: Chapter) -> str:
    """State of the host before the first of these tests."""
    story.needs("prepared")
    return _look(stage)


@pytest.mark.covers("HOST-10", "HOST-14")
def test_parity_over_ssh_with_the_reconcilers_evidence(stage: Stage) -> None:
    report = byhand.parity(stage, *byhand.token(stage))
    assert (report.status, report.having("FAIL")) == (0, {})
    assert (report.summary["failures"], report.summary["checks"]) == ("0", str(len(report.checks)))
    assert report.checks["api_topology"]["status"] == "PASS"
    assert report.checks["vfio_binding"]["detail"].startswith("4 devices on vfio-pci")
    # The checks are those that open the gate.
    gate = stage.api().get(stage.path("/parity"))["document"]["checks"]
    assert list(report.checks) == [check["check"] for check in gate]


@pytest.mark.covers("HOST-6", "HOST-10")
def test_a_missing_nat_rule_is_named_with_its_remedy_and_repaired_on_request(stage: Stage) -> None:
    """Without a token the API checks only warn; with a token the slots are proven too."""
    subnet = stage.profile()["network"]["subnet"]
    rule = ["POSTROUTING", "-s", subnet, "-j", "MASQUERADE"]
    stage.on_host("iptables", "-t", "nat", "-D", *rule)
    try:
        report = byhand.parity(stage, "--profile", "lab")
        assert report.status == 1
        assert set(report.having("FAIL")) == {"nat", "guest_egress"}
        assert report.summary["failures"] == "2"
        for check in report.having("FAIL").values():
            assert (
                "run playbook gpuaas.slice.bootstrap (role slice_network)" in check["remediation"]
            )
        assert report.checks["api_topology"]["status"] == "WARN"

        repaired = byhand.parity(stage, *byhand.token(stage), "--remediate")
        assert (repaired.status, repaired.having("FAIL")) == (0, {})
        # Checks that passed were not touched.
        lines = [line for line in repaired.output.splitlines() if "repaired: " in line]
        assert lines == ["repaired: slice_network"]
        stage.on_host("iptables", "-t", "nat", "-C", *rule)
    finally:
        stage.on_host("systemctl", "restart", BASELINE)


@pytest.mark.covers("HOST-10")
def test_parity_from_the_installed_archive(stage: Stage, tmp_path: Path) -> None:
    """Run parity from the built archive and the lab's inventory, without the checkout."""
    installed = tmp_path / "installed"
    environment = {
        **stage.ansible_environment(),
        "ANSIBLE_COLLECTIONS_PATH": str(installed),
        "ANSIBLE_COLLECTIONS_SCAN_SYS_PATH": "false",
    }

    def play(program: str, *words: str) -> str:
        done = subprocess.run(
            [str(BIN / program), *words],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=900,
            check=False,
        )
        assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
        return done.stdout

    play("ansible-galaxy", "collection", "build", str(REPOSITORY), "--output-path", str(tmp_path))
    (archive,) = tmp_path.glob("gpuaas-slice-*.tar.gz")
    play("ansible-galaxy", "collection", "install", str(archive), "-p", str(installed), "--offline")
    words = ["-i", str(INVENTORY), "-e", f"@{_variables(stage, tmp_path)}"]
    output = play("ansible-playbook", "gpuaas.slice.parity", *words)
    assert re.search(r"GPUAAS_SLICE_PARITY_SUMMARY status=\w+ checks=\d+ failures=0 ", output)
    assert re.search(r"status=PASS check=vfio_binding detail=4", output)


@pytest.mark.covers("HOST-9")
def test_a_transition_by_kernel_name_shows_who_the_disk_is_and_never_acts(stage: Stage) -> None:
    """Plan and refusals for a disk that carries another owner's files and belongs to no slot."""
    taken = {slot["nvme_eui"] for slot in stage.bundles()}
    (disk,) = (
        row for row in stage.host().devices["data"] if row["shared"] and row["eui64"] not in taken
    )
    by_id, mount = f"/dev/disk/by-id/nvme-eui.{disk['eui64']}", f"/share{disk['index']}"
    name = stage.on_host("readlink", "-f", by_id).strip()
    words = [*byhand.way(stage), "--profile", "lab", "--output", "json", "--devices", name]
    tool = "gpuaas_slice_storage_transition.sh"

    shown = byhand.script(stage, tool, *words)
    assert shown.returncode == 0, shown.stderr
    (plan,) = json.loads(shown.stdout)
    assert (plan["nvme_device"], plan["serial"]) == (by_id, disk["serial"])
    assert (plan["kernel_name"], plan["mounts"]) == (name.removeprefix("/dev/"), [mount])
    assert [step["name"] for step in plan["steps"]] == ["unmount", "erase_disk"]
    assert plan["proof"] is None

    refused = byhand.script(stage, tool, *words, "--apply", "--yes")
    assert (refused.returncode, refused.stdout) == (1, "")
    assert json.loads(refused.stderr)["code"] == "kernel_name_not_allowed"
    unseen = [by_id if word == name else word for word in words]
    refused = byhand.script(stage, tool, *unseen, "--apply", "--yes")
    assert (refused.returncode, refused.stdout) == (1, "")
    assert json.loads(refused.stderr)["code"] == "approval_missing"
    assert disk["serial"] in stage.on_host("cat", f"{mount}/README")


@pytest.mark.covers("HOST-9")
def test_a_disk_is_taken_by_the_plan_that_was_approved(stage: Stage, tmp_path: Path) -> None:
    """A disk without a slot and with another owner's files: planned, approved, wiped."""
    taken = {slot["nvme_eui"] for slot in stage.bundles()}
    (disk,) = (
        disk
        for disk in stage.host().devices["data"]
        if not disk["shared"] and disk["eui64"] not in taken
    )
    by_id, mount = f"/dev/disk/by-id/nvme-eui.{disk['eui64']}", "/test-share"
    tool = "gpuaas_slice_storage_transition.sh"
    words = [*byhand.way(stage), "--profile", "lab", "--output", "json", "--devices", by_id]
    making = f"mkfs.ext4 -q {by_id} && mkdir -p {mount} && mount {by_id} {mount}"
    stage.on_host("sh", "-c", f"'{making} && echo files > {mount}/README && udevadm settle'")
    try:
        planned = byhand.script(stage, tool, *words)
        assert planned.returncode == 0, planned.stderr
        assert stage.on_host("cat", f"{mount}/README") == "files\n"
        approved = tmp_path / "approved.json"
        approved.write_text(planned.stdout)

        acting = [*words, "--apply", "--yes", "--approved", str(approved)]
        done = byhand.script(stage, tool, *acting)
        assert done.returncode == 0, done.stderr
        answer = json.loads(done.stdout)
        (device,) = answer["devices"]
        assert (device["nvme_device"], device["serial"]) == (by_id, disk["serial"])
        assert (device["mounts"], device["filesystems"], device["steps"]) == ([], {}, [])
        assert device["proof"]["verified"]
        assert mount not in stage.on_host("findmnt", "-rno", "TARGET").splitlines()
        (kept,) = json.loads(stage.on_host("cat", answer["manifest"]))["devices"]
        assert kept["proof"]["digest"] == device["proof"]["digest"]
        assert (kept["serial"], kept["mounts"]) == (disk["serial"], [mount])

        again = byhand.script(stage, tool, *acting)
        assert again.returncode == 0, again.stderr
        (same,) = json.loads(again.stdout)["devices"]
        assert same["proof"]["digest"] == device["proof"]["digest"]
    finally:
        stage.on_host("sh", "-c", f"'umount {mount} 2> /dev/null; rmdir {mount}'")


@pytest.mark.covers("HOST-6")
def test_the_runtime_is_prepared_without_a_reboot(stage: Stage) -> None:
    rule = ["POSTROUTING", "-s", stage.profile()["network"]["subnet"], "-j", "MASQUERADE"]
    stage.on_host("iptables", "-t", "nat", "-D", *rule)
    boot = byhand.boot(stage)
    words = [*byhand.way(stage), "--profile", "lab", "--output", "json"]
    done = byhand.script(stage, "gpuaas_slice_host_runtime_prepare.sh", *words)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["network"]
    stage.on_host("iptables", "-t", "nat", "-C", *rule)
    assert byhand.boot(stage) == boot


@pytest.mark.covers("HOST-1")
def test_the_commissioning_script_sees_what_the_firmware_gives(stage: Stage) -> None:
    """Without RACADM, on a bootstrapped host, so that the kernel uses the IOMMU."""
    before = _look(stage)
    rows = byhand.commissioning(stage)
    checks = {row["check"]: row for row in rows["FIRMWARE"]}
    assert checks["bios_settings"]["detail"] == "not_applicable"
    assert checks["firmware_virtualization"]["detail"] in ("svm", "vmx")
    # The NVMe check warns because of disks with foreign files and of the system disk.
    assert {name: row["status"] for name, row in checks.items()} == {
        **dict.fromkeys(checks, "PASS"),
        "nvme": "WARN",
    }
    assert {"kvm", "iommu_groups", "gpu", "fabric", "sriov"} <= set(checks)
    assert checks["iommu_groups"]["detail"].endswith(" IOMMU groups")

    bound = {slot["gpu_pci_address"] for slot in stage.bundles()}
    gpus = {row["address"]: row["driver"] for row in rows["GPU"]}
    assert len(gpus) == stage.profile()["gpu"]["expected"]
    assert {address for address, driver in gpus.items() if driver == "vfio-pci"} == bound
    (card,) = rows["FABRIC"]
    assert card["sriov_numvfs"] == str(stage.profile()["fabric"]["vfs_per_pf"])
    assert int(card["sriov_totalvfs"]) >= int(card["sriov_numvfs"])
    disks = {row["serial"]: row for row in rows["NVME"]}
    data = {disk["serial"]: disk for disk in stage.host().devices["data"]}
    assert set(disks) == {"LABOS", *data}
    assert [serial for serial, disk in disks.items() if disk["os_disk"] == "yes"] == ["LABOS"]
    for serial, disk in data.items():
        assert disks[serial]["by_id"] == f"/dev/disk/by-id/nvme-eui.{disk['eui64']}"
    (summary,) = rows["FIRMWARE_SUMMARY"]
    assert (summary["status"], summary["failures"]) == ("WARN", "0")
    # The script only reads.
    assert changed_lines(before, _look(stage)) == []


@pytest.fixture
def peer(stage: Stage) -> Iterator[tuple[str, str]]:
    """Start ib_write_bw on the host's RDMA device (RoCE in software); yield address and device."""
    try:
        address, device = stage.on_host("sh", "-s", stdin=ROCE).split()
        yield address, device
    finally:
        stage.on_host("sh", "-s", stdin=NO_ROCE)


ROCE = """set -e
modprobe rdma_rxe
modprobe ib_uverbs
link=$(ip -o -4 route show default | sed -n '1s/.* dev \\([^ ]*\\).*/\\1/p')
rdma link add gpuaasrxe0 type rxe netdev "$link" >&2
udevadm settle
device=$(ls /sys/class/infiniband)
# It serves one run and ends.
systemd-run --quiet --collect --unit=gpuaas-test-rdma -p Restart=always -p RestartSec=200ms \
  ib_write_bw -F -d "$device" >&2
ip -o -4 address show dev "$link" | sed -n '1s|.* inet \\([^/]*\\)/.*|\\1|p'
echo "$device"
"""
NO_ROCE = """systemctl stop gpuaas-test-rdma.service 2> /dev/null
systemctl reset-failed gpuaas-test-rdma.service 2> /dev/null
for device in /sys/class/infiniband/*; do
  [ -e "$device" ] && rdma link delete "${device##*/}"
done
modprobe -r rdma_rxe
udevadm settle
true
"""


@pytest.mark.covers("HOST-12")
def test_a_benchmark_measures_what_is_there_and_says_what_is_not(
    stage: Stage, peer: tuple[str, str], tmp_path: Path
) -> None:
    """Make two small captures of the same host; the benchmark writes nothing to the disk that it
    reads."""
    address, device = peer
    disk = stage.bundles()[0]["nvme_device"]
    node = stage.on_host("readlink", "-f", disk).strip()
    written = captures.writes(stage, node)
    targets = ["--fio-target", disk, "--rdma-peer", address, "--rdma-device", device]
    files = [tmp_path / "first.json", tmp_path / "second.json"]
    for file in files:
        capture = captures.of_host(stage, file, *targets)
        assert capture["kind"] == "host"
        assert capture["host"]["hostname"] == stage.on_host("uname", "-n").strip()
        probes = captures.probes(capture)
        assert {name: probe["status"] for name, probe in probes.items()} == {
            **dict.fromkeys(("cpu", "memory", "disk", "rdma"), "ok"),
            **dict.fromkeys(("gpu", "vllm"), "unavailable"),
        }, [probe["reason"] for probe in capture["probes"]]
        assert probes["gpu"]["reason"]["code"] == "cuda_driver_missing"
        assert probes["vllm"]["reason"]["code"] == "tool_missing"
        assert probes["disk"]["subject"] == node
        assert probes["rdma"]["subject"] == f"{device} to {address}"
        assert probes["rdma"]["tool"]["version"].startswith("Version: ")
    assert captures.writes(stage, node) == written
    rows = captures.compared(stage, files, tmp_path / "difference.svg")
    assert {"cpu.integer", "memory.copy", "disk.read", "disk.read_random", "rdma.write"} <= set(
        rows
    )
    # Host and harness are the same, so each pair of figures can be compared.
    assert {cell["direction"] for cell in rows.values()} <= {"better", "worse", "same", "unclear"}


FABRIC = {"interface": "ibp7s0", "address": "10.77.0.5/24", "route": "10.78.0.0/16"}
APPLY = "apply_netplan"


@pytest.mark.covers("HOST-7")
def test_the_hosts_own_address_on_the_fabric_is_applied_and_taken_back(stage: Stage) -> None:
    """By the real netplan and networkd. A dummy interface stands in for InfiniBand."""
    stage.on_host("ip", "link", "add", FABRIC["interface"], "type", "dummy")
    try:
        assert _address_on_fabric(stage, **FABRIC)["done"][-2:] == ["write_netplan", APPLY]
        shown = stage.on_host("ip", "-br", "-4", "address", "show", "dev", FABRIC["interface"])
        assert shown.split()[2:] == [FABRIC["address"]]
        assert FABRIC["interface"] in stage.on_host("ip", "route", "show", FABRIC["route"])
        assert not _address_on_fabric(stage, **FABRIC)["changed"]
        gone = _address_on_fabric(stage, state="absent")
        assert gone["done"][:2] == ["remove_netplan", APPLY]
        shown = stage.on_host("ip", "-br", "-4", "address", "show", "dev", FABRIC["interface"])
        assert shown.split()[2:] == []
    finally:
        stage.on_host("ip", "link", "delete", FABRIC["interface"])
    report = byhand.parity(stage, *byhand.token(stage))
    assert (report.status, report.having("FAIL")) == (0, {})


def _address_on_fabric(stage: Stage, **arguments: Any) -> dict[str, Any]:
    done = stage.module("ipoib_address", arguments)
    assert not done["failed"], done
    return done


@pytest.mark.covers("HOST-10", "HOST-11", "P1", "P2")
def test_disks_whose_names_are_attacks_stay_names(stage: Stage, tmp_path: Path) -> None:
    """Shell, Jinja and forged lines in disk names stay plain text on the way to the operator."""
    assert stage.service is not None
    hostile = (
        Stranger(1, "$(reboot){{1/0}}", "GPUAAS_SLICE_PARITY status=PASS check=x"),
        Stranger(2, "`id` status=PASS", "{{ lookup('pipe', 'reboot') }}"),
    )
    slots = [
        {**slot, "nvme_device": stranger.by_id}
        for slot, stranger in zip(stage.bundles(), hostile, strict=True)
    ]
    file = tmp_path / "slots.json"
    file.write_text(json.dumps(slots))
    before = _look(stage)
    with strangers.present(stage, hostile):
        words = ["--output", "json", "host", "discover", *byhand.way(stage), "--profile", "lab"]
        seen = {disk["by_id"]: disk for disk in json.loads(stage.service.cli(*words))["nvme"]}
        report = byhand.parity(stage, "--profile", "lab", "--slots", str(file))
    for stranger in hostile:
        disk = seen[stranger.by_id]
        assert (disk["serial"], disk["model"]) == (stranger.serial, stranger.model)
        # The disk is reached over a network, so no slot can get a PCI address for it.
        assert disk["pci_address"] == ""
    assert (report.status, set(report.having("FAIL"))) == (1, {"nvme_ownership"})
    detail = report.checks["nvme_ownership"]["detail"]
    assert all(f"serial '{stranger.serial}' and size" in detail for stranger in hostile)
    # The comparison also shows that nothing rebooted.
    assert changed_lines(before, _look(stage)) == []


@pytest.mark.covers("HOST-4", "HOST-6", "HOST-8", "HOST-10")
def test_all_drift_at_once_is_repaired_by_one_run_and_a_second_run_changes_nothing(
    stage: Stage,
) -> None:
    first, second = stage.bundles()
    network = stage.profile()["network"]
    settings = stage.on_host("cat", DNSMASQ)
    drift = DRIFT.format(
        subnet=network["subnet"],
        bridge=network["bridge"],
        unbound=first["fabric_vf_pci_address"],
        rebound=second["gpu_pci_address"],
        argument=stage.profile()["kernel_arguments"][-1],
    )
    stage.on_host("sh", "-s", stdin=drift)
    assert stage.on_host("cat", DNSMASQ) != settings
    looked = byhand.parity(stage, *byhand.token(stage))
    edited = {"dnsmasq_config", "kernel_cmdline", "network_service", "vfio_binding", "vfio_modules"}
    assert edited <= set(looked.having("FAIL")), looked.checks

    report = byhand.parity(stage, *byhand.token(stage), "--remediate")
    assert (report.status, report.having("FAIL")) == (0, {}), report.output
    lines = [line for line in report.output.splitlines() if "repaired: " in line]
    roles = ["boot_configuration", "slice_network", "vfio_binding"]
    assert lines == [f"repaired: {role}" for role in roles]
    # Parity checks the network that a guest sees; this compares the file itself.
    assert stage.on_host("cat", DNSMASQ) == settings

    output = byhand.playbooks(stage, "convert_to_slice")
    assert byhand.changed(output) == {"0"}, output[-6000:]
    stage.on_host("sh", "-c", "'modprobe -r pci-stub || true'")


DRIFT = """set -e
sysctl -q -w net.ipv4.ip_forward=0
iptables -t nat -D POSTROUTING -s {subnet} -j MASQUERADE
ovs-vsctl --timeout=60 del-br {bridge}
systemctl --quiet disable gpuaas-slice-network-baseline.service
echo 'no-dhcp-interface={bridge}' >> /etc/dnsmasq.d/gpuaas-slice.conf
echo '# edited' >> /etc/systemd/system/gpuaas-slice-network-baseline.service
mkdir -p /etc/systemd/system/gpuaas-slice-vfio.service.d
printf '[Service]\\nExecStart=\\nExecStart=/usr/bin/true\\n' \\
  > /etc/systemd/system/gpuaas-slice-vfio.service.d/override.conf
sed -i s/vfio-pci/vfio/ /etc/modprobe.d/gpuaas-vfio.conf
sed -i '/vmlinuz/s/ {argument}//' /boot/grub/grub.cfg
cd /sys/bus/pci
echo > devices/{unbound}/driver_override
echo {unbound} > drivers/vfio-pci/unbind
modprobe pci-stub
echo pci-stub > devices/{rebound}/driver_override
echo {rebound} > drivers/vfio-pci/unbind
echo {rebound} > drivers_probe
[ "$(basename "$(readlink devices/{rebound}/driver)")" = pci-stub ]
"""


@pytest.mark.covers("HOST-10")
def test_the_host_is_as_these_tests_found_it(stage: Stage, state: str) -> None:
    assert changed_lines(state, _look(stage)) == []
    slots = stage.api().get(stage.path("/resource-slots"))["items"]
    assert {slot["status"] for slot in slots} == {"available"}


@pytest.mark.covers("HOST-4", "HOST-6", "HOST-8", "HOST-10", "I16")
def test_what_was_repaired_holds_over_a_reboot(stage: Stage) -> None:
    """Plays last, because a boot renumbers disks. Files, devices and rules are as before."""
    before = _settings(_look(stage))
    byhand.reboot(stage)
    byhand.booted(stage)
    assert changed_lines(before, _settings(_look(stage))) == []
    prove_again(stage)
    output = byhand.playbooks(stage, "convert_to_slice")
    assert byhand.changed(output) == {"0"}, output[-6000:]


def _settings(look: str) -> str:
    """Return the state that no boot may change: files, drivers of PCI devices, NAT rules."""
    kept = ("etc/", "usr/local/", "var/lib/gpuaas/", "sys/bus/pci/", "-")
    return "\n".join(line for line in look.splitlines() if line.startswith(kept))


def _variables(stage: Stage, folder: Path) -> Path:
    """Return the variables that the playbooks need for this host, run by hand."""
    file = folder / "variables.json"
    values: dict[str, Any] = {"slice_profile": stage.profile(), "slice_slots": stage.bundles()}
    file.write_text(json.dumps(values))
    return file


def _look(stage: Stage) -> str:
    return stage.on_host("sh", "-s", stdin=LOOK)

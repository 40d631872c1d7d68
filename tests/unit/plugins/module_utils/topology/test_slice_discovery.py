"""Discovery document of a recorded host, before and after its preparation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from ansible_collections.gpuaas.slice.plugins.module_utils.core import _host_mode, _pci
from ansible_collections.gpuaas.slice.plugins.module_utils.disk import _block, _usage
from ansible_collections.gpuaas.slice.plugins.module_utils.topology import (
    _candidates,
    _nvme_disks,
    _pci_functions,
    _slice_discovery,
)

pytestmark = pytest.mark.covers("HOST-11")

CONTRACTS = Path(__file__).resolve().parents[5] / "contracts"
PROFILE: dict[str, Any] = {
    "name": "lab",
    "gpu": {"ids": ["1234:11e8"], "expected": 2},
    "fabric": {"pf_ids": ["8086:10c9"], "link": "ethernet", "vfs_per_pf": 2, "route": ""},
    "not_applicable": ["fabric_route"],
    "nvme": {"exclude_models": ["Dell BOSS"]},
    "network": {
        "bridge": "ovsbr0",
        "address": "10.100.0.1/24",
        "subnet": "10.100.0.0/24",
        "mac_prefix": "52:54:00:64:00",
        "first_host": 10,
    },
    "kernel_arguments": ["intel_iommu=on", "iommu=pt"],
}
LEFT, RIGHT = "pci0000:20/0000:20:00.0", "pci0000:40/0000:40:00.0"


def disk(number: int, *, model: str = "QEMU NVMe Ctrl", by_id: bool = True) -> _block.Disk:
    name = f"5e0000000000a00{number}"
    return _block.Disk(
        disk_identity=f"eui.{name}",
        by_id=f"/dev/disk/by-id/nvme-eui.{name}" if by_id else "",
        kernel_name=f"nvme{number}n1",
        serial=f"LABNVME{number}",
        eui=name,
        nguid="",
        size_bytes=4 << 30,
        model=model,
        devt=f"259:{number}",
    )


def fill(machine: Any) -> None:
    """Add two nodes, each with a GPU stand-in and a disk; the left node has a card with two
    functions."""
    machine.file("/etc/machine-id", "m1\n")
    machine.file("/proc/cmdline", "root=/dev/x intel_iommu=on iommu=pt\n")
    machine.file("/proc/sys/kernel/random/boot_id", "b1\n")
    machine.file("/proc/meminfo", "MemTotal:  6000000 kB\nMemFree: 1 kB\n")
    for node, cpus in ((0, "0-1"), (1, "2,4")):
        machine.file(f"/sys/devices/system/node/node{node}/cpulist", cpus)
        machine.file(
            f"/sys/devices/system/node/node{node}/meminfo", f"Node {node} MemTotal: 3145728 kB\n"
        )
    for cpu in (2, 4):
        machine.file(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list", "2,4")
    machine.pci("0000:23:00.0", "1234:11e8", above=LEFT, node=0, group=10)
    machine.pci("0000:43:00.0", "1234:11e8", above=RIGHT, node=1, group=11)
    card = {"sriov_totalvfs": "7", "sriov_numvfs": "2", "class": "0x020000"}
    machine.pci("0000:25:00.0", "8086:10c9", above=LEFT, node=0, group=12, driver="igb", **card)
    for index, address in enumerate(("0000:25:10.0", "0000:25:10.2")):
        machine.pci(address, "8086:10ca", above=LEFT, node=0, group=13 + index)
        machine.function("0000:25:00.0", index, address)
    for number, (above, node) in enumerate(((LEFT, 0), (RIGHT, 1))):
        address = f"0000:{21 + number * 20}:00.0"
        machine.pci(address, "1b36:0010", above=above, node=node, group=20 + number, driver="nvme")
        controller = machine.folder(f"/sys/devices/{above}/{address}/nvme/nvme{number}")
        (controller / "address").write_text(f"{address}\n")
        block = machine.folder(f"/sys/devices/{above}/{address}/nvme/nvme{number}/nvme{number}n1")
        (block / "device").symlink_to("..")
        machine.link(f"/sys/class/block/nvme{number}n1", block)
        machine.link(f"/sys/block/nvme{number}n1", block)
        node_file = machine.file(f"/dev/nvme{number}n1")
        machine.link(f"/dev/disk/by-id/nvme-eui.5e0000000000a00{number}", node_file)
    machine.folder("/sys/block/nvme1c1n1")


@pytest.fixture
def disk_usages(monkeypatch: pytest.MonkeyPatch, script: Any) -> dict[str, _block.Usage]:
    """Uses of the disks, by kernel name; tests change them."""
    script.on("devlink", "-j", "dev", "info", out='{"info":{}}')
    usages: dict[str, _block.Usage] = {}
    present = [disk(0), disk(1)]
    monkeypatch.setattr(_block, "disks", lambda: present)
    monkeypatch.setattr(
        _block,
        "usages",
        lambda disks: {d.kernel_name: usages.get(d.kernel_name, _block.Usage()) for d in disks},
    )
    return usages


def prepared(machine: Any, script: Any) -> None:
    rule = "-A POSTROUTING -s 10.100.0.0/24 -j MASQUERADE"
    bridge = {"local": "10.100.0.1", "prefixlen": 24}
    shown = [{"ifname": "ovsbr0", "flags": ["UP"], "addr_info": [bridge]}]
    script.on("ip", "-j", "address", "show", out=json.dumps(shown))
    script.on("iptables", "--wait", "10", "-t", "nat", "-S", "POSTROUTING", out=rule)
    machine.file("/proc/sys/net/ipv4/ip_forward", "1")
    machine.file("/run/dnsmasq/dnsmasq.pid", "7")
    machine.file("/proc/7/comm", "dnsmasq")
    machine.file("/dev/kvm")
    machine.file("/run/libvirt/libvirt-sock")
    machine.file("/run/openvswitch/db.sock")
    machine.file("/etc/gpuaas/slice-mode.json", '{"mode": "slice", "profile": "lab"}')
    for module in ("vfio", "vfio_iommu_type1", "vfio_pci"):
        machine.folder(f"/sys/module/{module}")


def checked(document: dict[str, Any]) -> dict[str, Any]:
    schema = json.loads((CONTRACTS / "discovery.schema.json").read_text())
    jsonschema.Draft202012Validator(schema).validate(document)
    return document


def codes(blockers: list[dict[str, str]]) -> list[str]:
    return [blocker["code"] for blocker in blockers]


def test_a_prepared_host_gives_complete_candidates(
    machine: Any, script: Any, disk_usages: Any
) -> None:
    fill(machine)
    prepared(machine, script)
    document = checked(_slice_discovery.discover(PROFILE))
    assert document["candidate_summary"] == {
        "blockers": [],
        "degraded": [],
        "gpu_devices": 2,
        "fabric_devices": 1,
        "nvme_devices": 2,
        "mounted_nvme_devices": 0,
        "candidate_slots": 2,
    }
    bundle = document["candidates"][1]["bundle"]
    assert bundle["nvme_device"] == "/dev/disk/by-id/nvme-eui.5e0000000000a001"
    assert bundle["fabric_vf_pci_address"] == "0000:25:10.2"
    assert bundle["numa_node"] == 1
    assert document["gpu"][0]["pci_path"] == ["pci0000:20", "0000:20:00.0"]
    assert document["nvme"][1]["aliases"] == [
        "/dev/nvme1n1",
        "/dev/disk/by-id/nvme-eui.5e0000000000a001",
    ]
    assert document["host"]["cpus"] == 4
    assert document["host"]["numa"][1]["memory_mib"] == 3072
    assert [row["threads_per_core"] for row in document["host"]["numa"]] == [1, 2]
    assert document["mode"] == "slice"
    assert document["reboot_required"] is False


def test_before_bootstrap_it_works_and_says_why_not(
    machine: Any, script: Any, disk_usages: Any
) -> None:
    fill(machine)
    machine.file("/proc/cmdline", "root=/dev/x\n")
    script.on("ip", "-j", "address", "show", out="[]")
    script.on("iptables", "--wait", "10", "-t", "nat", "-S", "POSTROUTING", rc=4)
    document = checked(_slice_discovery.discover(PROFILE))
    assert set(document["candidate_summary"]["blockers"]) >= {
        "missing_kernel_argument",
        "missing_kvm",
        "missing_nat",
        "missing_ovsbr0",
        "missing_vfio",
        "reboot_required",
    }
    assert document["reboot_required"] is True
    assert len(document["candidates"]) == 2


def test_a_used_disk_blocks_its_candidate_and_no_other(
    machine: Any, script: Any, disk_usages: dict[str, _block.Usage]
) -> None:
    fill(machine)
    prepared(machine, script)
    disk_usages["nvme0n1"] = _block.Usage(
        mounts=["/share0"], children=["nvme0n1p1"], filesystems={"nvme0n1p1": "ext4"}
    )
    document = checked(_slice_discovery.discover(PROFILE))
    assert codes(document["candidates"][0]["blockers"]) == [
        "mounted_child",
        "unexpected_filesystem",
        "partitions_present",
    ]
    assert document["candidates"][1]["blockers"] == []
    assert document["candidate_summary"]["blockers"] == []
    assert document["candidate_summary"]["candidate_slots"] == 1


@pytest.mark.covers("I13")
def test_a_tenant_with_many_partitions_does_not_hide_the_host(
    machine: Any, script: Any, disk_usages: dict[str, _block.Usage]
) -> None:
    """A discovery that breaks its contract is none, and keeps every slot of the host off sale."""
    fill(machine)
    prepared(machine, script)
    children = [f"nvme0n1p{number}" for number in range(1, 256)]
    for name in children:
        node = machine.file(f"/dev/{name}")
        for kind in ("by-id", "by-partuuid"):
            machine.link(f"/dev/disk/{kind}/{name}", node)
    members = dict.fromkeys(children, "linux_raid_member")
    disk_usages["nvme0n1"] = _block.Usage(children=children, filesystems=members)
    document = checked(_slice_discovery.discover(PROFILE))
    assert document["candidate_summary"]["candidate_slots"] == 1


@pytest.mark.parametrize(
    ("usage", "expected"),
    [
        (_block.Usage(os_disk=True), ["os_disk"]),
        (_block.Usage(mounts=["/data"]), ["mounted"]),
        (
            _block.Usage(swap=["nvme0n1p2"], children=["nvme0n1p2"]),
            ["swap_in_use", "partitions_present"],
        ),
        (_block.Usage(md=["md0"], filesystems={"nvme0n1": "linux_raid_member"}), ["md_member"]),
        (_block.Usage(filesystems={"nvme0n1": "LVM2_member"}), ["lvm_member"]),
        (_block.Usage(dm=["dm-3"]), ["dm_member"]),
        (_block.Usage(holders=["bcache0"], openers=["9:dd"]), ["holder_present"]),
        (_block.Usage(qemu_pids=[12]), ["qemu_in_use"]),
        (_block.Usage(filesystems={"nvme0n1": "gpt"}), ["partitions_present"]),
        (_block.Usage(filesystems={"nvme0n1": "ext4"}), ["unexpected_filesystem"]),
        (_block.Usage(), []),
    ],
)
def test_every_use_has_its_code(usage: _block.Usage, expected: list[str]) -> None:
    assert codes(_nvme_disks.use_blockers(usage)) == expected


def test_who_a_disk_is_can_forbid_it(monkeypatch: pytest.MonkeyPatch, machine: Any) -> None:
    fill(machine)
    twin = disk(1)
    disks = [disk(0, by_id=False, model="Dell BOSS-N1"), twin, twin]
    monkeypatch.setattr(_block, "disks", lambda: disks)
    monkeypatch.setattr(_block, "usages", lambda _disks: {})
    rows = _nvme_disks.disks(["Dell BOSS"])
    assert codes(rows[0]["blockers"]) == ["device_unreadable", "by_id_missing", "excluded_model"]
    assert codes(rows[1]["blockers"]) == ["device_unreadable", "duplicate_identity"]


def test_a_nameless_disk_is_shown_but_never_used(machine: Any) -> None:
    """Under /dev are plain files instead of block devices, and they are read as they are."""
    fill(machine)
    machine.file("/proc/self/mountinfo")
    (machine.root / "dev/nvme1n1").unlink()
    rows = _nvme_disks.disks([])
    assert [row["kernel_name"] for row in rows] == ["nvme0n1", "nvme1n1"]
    assert [codes(row["blockers"]) for row in rows] == [["identity_missing"]] * 2
    details = [row["blockers"][0]["detail"] for row in rows]
    assert details[0] == "/dev/nvme0n1 is a file of mode -rw-r--r--, not a block device"
    assert details[1] == "/dev/nvme1n1: No such file or directory"
    assert rows[0]["pci_address"] == "0000:21:00.0"


def test_a_boot_card_without_identity_is_excluded_by_the_kernels_word(machine: Any) -> None:
    """It is still no slot's disk: neither disk may stand in for the other."""
    fill(machine)
    machine.file("/proc/self/mountinfo")
    models = {0: "ACME Boot 2\n", 1: "Dell BOSS-N1            \n"}
    for number, above in enumerate((LEFT, RIGHT)):
        folder = f"/sys/devices/{above}/0000:{21 + number * 20}:00.0/nvme/nvme{number}"
        machine.file(f"{folder}/model", models[number])
    rows = _nvme_disks.disks(["ACME Boot"])
    expected = ["identity_missing", "excluded_model"]
    assert [codes(row["blockers"]) for row in rows] == [expected, expected]
    assert [row["model"] for row in rows] == ["ACME Boot 2", "Dell BOSS-N1"]
    only_cards = [codes(row["blockers"]) for row in _nvme_disks.disks([])]
    assert only_cards == [["identity_missing"], expected]
    gpus = _pci_functions.gpus(_pci.devices(), ["1234:11e8"])
    bundles = _candidates.candidates(gpus, rows, [], PROFILE["network"], "m1")
    assert len(bundles) == 2
    for bundle in bundles:
        assert bundle["bundle"]["nvme_device"] == "" and "missing_nvme" in codes(bundle["blockers"])


def test_a_disk_behind_a_network_is_shown_without_a_place_on_the_host(
    machine: Any, disk_usages: Any
) -> None:
    """Its controller's address is an address of NVMe over Fabrics."""
    fill(machine)
    controller = machine.root / f"sys/devices/{LEFT}/0000:21:00.0/nvme/nvme0"
    (controller / "address").write_text("traddr=192.0.2.7,trsvcid=4420\n")
    rows = _nvme_disks.disks([])
    assert [row["kernel_name"] for row in rows] == ["nvme0n1", "nvme1n1"]
    assert [row["pci_address"] for row in rows] == ["", "0000:41:00.0"]
    assert (rows[0]["numa_node"], rows[0]["pci_path"]) == (-1, [])


def test_one_unreadable_disk_does_not_hide_the_others(
    monkeypatch: pytest.MonkeyPatch, machine: Any
) -> None:
    fill(machine)

    def usage(requested: _block.Disk) -> _block.Usage:
        if requested.kernel_name == "nvme0n1":
            raise OSError("input/output error")
        return _block.Usage()

    def usages(_disks: Any) -> Any:
        raise OSError("input/output error")

    monkeypatch.setattr(_block, "disks", lambda: [disk(0), disk(1)])
    monkeypatch.setattr(_block, "usages", usages)
    monkeypatch.setattr(_usage, "usage", usage)
    rows = _nvme_disks.disks([])
    assert codes(rows[0]["blockers"]) == ["device_unreadable"]
    assert rows[1]["blockers"] == []


def test_a_live_neighbour_in_the_group_blocks_a_gpu(machine: Any) -> None:
    machine.pci("0000:23:00.0", "1234:11e8", above=LEFT, group=10, driver="nvidia")
    machine.pci("0000:23:00.1", "10de:22a3", above=LEFT, group=10, driver="snd_hda_intel")
    machine.pci("0000:20:00.0", "1b36:000c", group=10, driver="pcieport", **{"class": "0x060400"})
    gpus = _pci_functions.gpus(_pci.devices(), ["1234:11e8"])
    assert codes(gpus[0]["blockers"]) == ["group_not_viable"]
    assert "0000:23:00.1" in gpus[0]["blockers"][0]["detail"]
    assert len(gpus[0]["group_members"]) == 3


def test_a_gpu_outside_every_group_or_with_the_console_is_blocked(machine: Any) -> None:
    machine.pci("0000:23:00.0", "1234:11e8", boot_vga="1")
    gpus = _pci_functions.gpus(_pci.devices(), ["1234:11e8"])
    assert codes(gpus[0]["blockers"]) == ["iommu_group_missing", "boot_vga"]


def test_a_card_without_functions_says_why(machine: Any) -> None:
    card = {"class": "0x020000"}
    machine.pci("0000:25:00.0", "8086:10c9", group=1, sriov_totalvfs="7", sriov_numvfs="0", **card)
    machine.pci("0000:26:00.0", "8086:10c9", group=2, **card)
    rdma = machine.folder("/sys/class/infiniband/rocep37s0")
    (rdma / "device").symlink_to("../../../bus/pci/devices/0000:25:00.0")
    cards = _pci_functions.fabric(_pci.devices(), ["8086:10c9"], "ethernet")
    assert [codes(card["blockers"]) for card in cards] == [["vfs_missing"], ["sriov_unsupported"]]
    assert cards[0]["rdma"] == ["rocep37s0"]


# A vendor's single id for both: InfiniBand beside each GPU, Ethernet of the BlueField-3 elsewhere.
MIXED = {
    "pf_ids": ["15b3:a2dc"], "link": "infiniband", "vfs_per_pf": 1, "route": "",
}  # fmt: skip


@pytest.mark.parametrize("driven", [True, False])
def test_an_ethernet_port_is_no_fabric_of_infiniband(
    machine: Any, script: Any, disk_usages: Any, driven: bool
) -> None:
    """It is nearer to the second GPU, and its function would bypass the bridge's isolation."""
    fill(machine)
    script.on("ip", "-j", "address", "show", out="[]")
    script.on("iptables", "--wait", "10", "-t", "nat", "-S", "POSTROUTING", rc=4)
    guid = "02:a4:79:e9:da:2a:a8:ac"
    shown = [{"vfinfo_list": [{"vf": 0, "node guid": guid, "port guid": guid}]}]
    script.on("ip", "-j", "link", "show", "dev", "port0", out=json.dumps(shown))
    ports = {"0000:1a:00.0": ("0x020700", LEFT, "32"), "0000:bc:00.0": ("0x020000", RIGHT, "1")}
    for number, (address, (class_code, above, kind)) in enumerate(ports.items()):
        card = {"class": class_code, "sriov_totalvfs": "16", "sriov_numvfs": "1"}
        machine.pci(address, "15b3:a2dc", above=above, node=number, group=40 + number, **card)
        function = address.replace("00.0", "00.2")
        machine.pci(function, "15b3:101e", above=above, node=number, group=50 + number)
        machine.function(address, 0, function)
        if driven:
            machine.folder(f"/sys/bus/pci/devices/{address}/net/port{number}")
            machine.file(f"/sys/class/net/port{number}/type", f"{kind}\n")
            script.on("ethtool", "-i", f"port{number}", out="firmware-version: 32.41.1000\n")
    document = checked(_slice_discovery.discover(PROFILE | {"fabric": MIXED}))
    fabric = {card["address"]: card for card in document["fabric"]}
    assert {a: card["link"] for a, card in fabric.items()} == {
        "0000:1a:00.0": "infiniband", "0000:bc:00.0": "ethernet",
    }  # fmt: skip
    why = {"code": "wrong_link", "detail": "0000:bc:00.0 is ethernet, the fabric is infiniband"}
    port = fabric["0000:bc:00.0"]
    assert port["blockers"] == port["vfs"][0]["blockers"] == [why]
    assert fabric["0000:1a:00.0"]["vfs"][0]["identity"] == (guid if driven else "")
    assert fabric["0000:1a:00.0"]["blockers"] == fabric["0000:1a:00.0"]["vfs"][0]["blockers"] == []
    assert document["candidate_summary"]["fabric_devices"] == 1
    given = [candidate["bundle"]["fabric_vf_pci_address"] for candidate in document["candidates"]]
    assert given == ["0000:1a:00.2", ""]
    assert [candidate["complete"] for candidate in document["candidates"]] == [True, False]


def test_a_profile_that_names_no_link_has_no_fabric(
    machine: Any, script: Any, disk_usages: Any
) -> None:
    fill(machine)
    script.on("ip", "-j", "address", "show", out="[]")
    script.on("iptables", "--wait", "10", "-t", "nat", "-S", "POSTROUTING", rc=4)
    fabric = {key: value for key, value in PROFILE["fabric"].items() if key != "link"}
    document = checked(_slice_discovery.discover(PROFILE | {"fabric": fabric}))
    assert codes(document["fabric"][0]["blockers"]) == ["wrong_link"]
    assert document["fabric"][0]["blockers"][0]["detail"].endswith("; the profile names none")
    assert not any(candidate["complete"] for candidate in document["candidates"])


def test_a_broken_mode_file_is_no_mode(machine: Any) -> None:
    machine.file("/etc/gpuaas/slice-mode.json", "not json")
    assert _host_mode.mode() == ""


def test_the_count_of_gpus_is_compared_with_the_profile() -> None:
    document = {
        "bootstrap": {"blockers": []},
        "slice_network": {"blockers": []},
        "fabric": [],
        "nvme": [],
        "candidates": [],
    }
    gpu = {"blockers": []}
    none = _slice_discovery.summary(document | {"gpu": []}, 8)
    assert (none["blockers"], none["degraded"]) == (["no_gpu"], [])
    more = _slice_discovery.summary(document | {"gpu": [gpu] * 9}, 8)
    assert (more["blockers"], more["degraded"]) == (["gpu_count_mismatch"], [])
    fewer = _slice_discovery.summary(document | {"gpu": [gpu] * 7}, 8)
    assert fewer["blockers"] == []
    detail = "7 of 8 GPUs are present"
    assert fewer["degraded"] == [{"code": "gpu_count_mismatch", "detail": detail}]


def test_a_gpu_that_does_not_answer_blocks_its_own_candidate(
    machine: Any, script: Any, disk_usages: Any
) -> None:
    fill(machine)
    prepared(machine, script)
    (machine.root / "sys/bus/pci/devices/0000:43:00.0/config").write_bytes(b"\xff" * 64)
    document = checked(_slice_discovery.discover(PROFILE))
    summary = document["candidate_summary"]
    assert (summary["blockers"], summary["candidate_slots"]) == ([], 1)
    assert codes(summary["degraded"]) == ["device_not_answering"]
    assert document["candidates"][0]["blockers"] == []
    assert codes(document["candidates"][1]["blockers"]) == ["device_not_answering"]


@pytest.mark.parametrize(
    ("name", "complete"), [("lab-discovery", 0), ("lab-discovery-bootstrapped", 4)]
)
def test_the_recorded_lab_host_keeps_to_the_contract(name: str, complete: int) -> None:
    recorded = Path(__file__).resolve().parents[4] / "data" / f"{name}.json"
    document = checked(json.loads(recorded.read_text()))
    assert document["candidate_summary"]["gpu_devices"] == 4
    assert sum(candidate["complete"] for candidate in document["candidates"]) == complete


def test_the_machine_is_named_and_the_serial_number_of_a_virtual_one_is_not_believed(
    machine: Any, script: Any, disk_usages: Any
) -> None:
    fill(machine)
    prepared(machine, script)
    unknown = {"vendor": "", "product": "", "serial": ""}
    assert checked(_slice_discovery.discover(PROFILE))["machine"] == unknown
    for name, text in (
        ("sys_vendor", "Dell Inc."),
        ("product_name", "PowerEdge XE9680L"),
        ("product_serial", "7XK2P43 "),
    ):
        machine.file(f"/sys/class/dmi/id/{name}", f"{text}\n")
    machine.file("/proc/cpuinfo", "flags\t\t: fpu vmx\n")
    identity = {"vendor": "Dell Inc.", "product": "PowerEdge XE9680L", "serial": "7XK2P43"}
    assert checked(_slice_discovery.discover(PROFILE))["machine"] == identity
    machine.file("/proc/cpuinfo", "flags\t\t: fpu vmx hypervisor\n")
    assert checked(_slice_discovery.discover(PROFILE))["machine"] == {**identity, "serial": ""}

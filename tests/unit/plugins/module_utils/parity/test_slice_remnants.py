"""Remnants of slice mode: each trace is detected separately, and the list is the writers' own."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.gpuaas.slice.plugins.module_utils.boot import (
    _apt_source,
    _grub_menu,
    _host_tuning,
    _kernel_arguments,
    _module_cache,
    _vfio_bind,
)
from ansible_collections.gpuaas.slice.plugins.module_utils.core import (
    _boot_files,
    _boot_units,
    _host,
    _host_snapshot,
    _ledger,
    _object_names,
)
from ansible_collections.gpuaas.slice.plugins.module_utils.fabric import _virtual_functions
from ansible_collections.gpuaas.slice.plugins.module_utils.firmware import _preflight_command
from ansible_collections.gpuaas.slice.plugins.module_utils.network import (
    _baseline_files,
    _host_filter,
    _nat,
)
from ansible_collections.gpuaas.slice.plugins.module_utils.parity import (
    _host_facts,
    _slice_remnants,
)
from ansible_collections.gpuaas.slice.plugins.module_utils.slice import _qos, _traces
from ansible_collections.gpuaas.slice.plugins.modules import slice_remnants

bench = runpy.run_path(str(Path(__file__).parents[2] / "storage_bench.py"))["bench"]

pytestmark = pytest.mark.covers("HOST-15")

NAT = ("iptables", "--wait", "10", "-t", "nat", "-S", "POSTROUTING")
FILTER = [("iptables", "--wait", "10", "-S", chain) for chain in _host_filter.CHAINS]
UNITS = "/etc/systemd/system"
ALLOCATION = "23bd713b-6073-4ef7-8a51-2897e902365d"


@pytest.fixture
def host(parity: Any, machine: Any, script: Any) -> Any:
    """A host that never was a slice host, with a GPU and a fabric card."""
    machine.pci("0000:23:00.0", "1234:11e8", driver="nvidia")
    machine.pci("0000:25:00.0", "8086:10c9", driver="igb", sriov_numvfs="0")
    machine.pci("0000:26:00.0", "ffff:0001", driver="vfio-pci")  # the host's own use of VFIO
    machine.file("/etc/initramfs-tools/modules", "# site\nnvme\n")
    machine.file("/etc/netplan/60-ipoib.yaml", "network: {version: 2}\n")
    machine.file("/proc/cmdline", "root=/dev/vda1 iommu=pt")
    machine.file("/etc/default/grub", 'GRUB_CMDLINE_LINUX_DEFAULT="iommu=pt"\n')
    machine.file("/boot/grub/grub.cfg", "\tlinux /boot/vmlinuz root=/dev/vda1 iommu=pt\n")
    parity.shown(("eth0", "192.0.2.5/24"), ("tmfifo_net0", "192.168.7.1/30"))
    script.on(*NAT, out="-A POSTROUTING -s 192.168.122.0/24 -j MASQUERADE")
    for chain in FILTER:
        script.on(*chain, out="-A FORWARD -j DOCKER-USER\n")
    parity.units()
    return parity


def look(parity: Any, scope: str = "host") -> dict[str, Any]:
    params = {"profile": parity.profile, "scope": scope, "require": False}
    return slice_remnants.look(params)


def remnant_items(parity: Any, scope: str = "host") -> list[tuple[str, str, str]]:
    report = look(parity, scope)
    items = [item for item in report["compared"] if not item["ok"]]
    assert report["remnants"] == len(items)
    return [(item["check"], item["name"], item["found"]) for item in items]


def test_a_plain_host_is_compared_in_full_and_clean(host: Any) -> None:
    report = look(host)
    assert [item for item in report["compared"] if not item["ok"]] == []
    assert {item["check"] for item in report["compared"]} == {
        *_slice_remnants.SLICES,
        *_slice_remnants.MODE,
    }
    assert all(item["expected"] and item["found"] for item in report["compared"])


FILES = [
    ("slice_mode", "/etc/gpuaas/slice-mode.json", '{"mode": "slice"}'),
    ("slice_mode", "/etc/gpuaas/slice-mode.json", "not json"),
    ("vfio_binding", "/etc/gpuaas/vfio-binding.json", '{"devices": {"0000:23:00.0": "1234:11e8"}}'),
    ("fabric_vfs", "/etc/gpuaas/fabric.json", "{}"),
    ("fabric_vfs", "/var/lib/gpuaas/before/fabric.json", "{}"),
    ("network_service", "/etc/gpuaas/network-baseline.json", "{}"),
    ("ip_forwarding", "/etc/sysctl.d/60-gpuaas-slice.conf", "net.ipv4.ip_forward = 1"),
    ("dnsmasq", "/etc/dnsmasq.d/gpuaas-slice.conf", "x"),
    ("dnsmasq", "/etc/dnsmasq.d/gpuaas-gpuaas-slice-1.conf", "x"),
    ("kernel_cmdline", "/etc/default/grub.d/60-gpuaas-slice.cfg", "x"),
    ("vfio_modules", "/etc/modules-load.d/gpuaas-vfio.conf", "vfio"),
    ("vfio_modules", "/etc/modprobe.d/gpuaas-vfio.conf", "x"),
    ("vfio_modules", "/etc/initramfs-tools/modules", "# gpuaas.slice: begin\n# gpuaas.slice: end"),
    ("kernel_cmdline", _grub_menu.MENU, "\tlinux /boot/vmlinuz intel_iommu=on iommu=pt\n"),
    ("kernel_cmdline", _grub_menu.MENU, "\tlinux /boot/vmlinuz iommu=pt hugepagesz=1G\n"),
    ("vfio_modules", _kernel_arguments.INITRAMFS_RECORD, '{"inputs": "x", "boot_id": "y"}'),
    ("vfio_binding", "/etc/gpuaas/vfio-binding.json", '{"devices": {}}'),
    ("boot_services", _boot_files.RECORD, "{}"),
    ("boot_services", f"{UNITS}/gpuaas-slice-vfio.service.d/override.conf", "[Service]\n"),
    ("boot_services", f"{UNITS}.control/gpuaas-slice-vfio.service.d/50.conf", "[Service]\n"),
    ("tuning", _host_tuning.MODPROBE, f"{_host_tuning.MARKER}\n"),
    ("tuning", _host_tuning.LIMITS, f"{_host_tuning.MARKER}\n"),
    ("ipoib_netplan", "/etc/netplan/60-ipoib.yaml", f"{_host_tuning.MARKER}\n"),
    ("tuning", _host_tuning.SYSCTL, f"{_host_tuning.MARKER}\n"),
    ("tuning", "/etc/gpuaas/tuning.json", "not json"),
    ("boot_services", f"{UNITS}/gpuaas-slice-anything.service", "x"),
    ("boot_services", f"{UNITS}/multi-user.target.wants/gpuaas-slice-vfio.service", "x"),
    ("boot_services", "/usr/local/sbin/gpuaas-slice-network-baseline.sh", "x"),
    ("boot_services", "/usr/local/lib/gpuaas/x.py", "x"),
    ("boot_services", _object_names.START_HOOK, "x"),
    ("module_cache", _module_cache.PROGRAM, "x"),
    ("module_cache", f"{_module_cache.CODE}/code", "x"),
    ("gpu_services_quiesced", "/var/lib/gpuaas/before/gpu-services.json", "{}"),
    ("gpu_services_quiesced", f"{UNITS}/a.service.d/90-gpuaas-slice.conf", "[Unit]\n"),
    ("network_service", "/var/lib/gpuaas/before/network.json", "{}"),
    ("libvirt_service", "/var/lib/gpuaas/before/libvirt.json", "{}"),
    ("libvirt", "/etc/libvirt/qemu/gpuaas-slice-1.xml", "<domain/>"),
    ("slice_reservations", "/var/lib/gpuaas/dnsmasq/hosts.d/1", "x"),
    ("slice_files", _object_names.seed_path(ALLOCATION), "x"),
    ("slice_files", _object_names.channel_path(ALLOCATION, "readiness"), "x"),
    ("slice_files", _object_names.nvram_path(ALLOCATION), "x"),
    ("slice_files", f"{_object_names.console_path(ALLOCATION)}.0", "x"),
]  # fmt: skip


@pytest.mark.parametrize(("check", "path", "text"), FILES)
def test_each_file_is_found_by_itself(
    host: Any, machine: Any, check: str, path: str, text: str
) -> None:
    machine.file(path, text)
    items = remnant_items(host)
    # A reservation also means a folder that must be gone.
    assert {item[0] for item in items} - {"dnsmasq"} <= {check}
    assert check in {item[0] for item in items}


def test_a_dangling_link_of_enable_is_found(host: Any, machine: Any) -> None:
    wants = machine.folder(f"{UNITS}/multi-user.target.wants")
    (wants / "gpuaas-slice-host-net-baseline.service").symlink_to("/nowhere")
    assert [item[0] for item in remnant_items(host)] == ["boot_services"]


def test_what_only_the_running_kernel_knows(host: Any, machine: Any, script: Any) -> None:
    for address in ("0000:23:00.0", "0000:25:00.0"):
        folder = (machine.root / "sys/bus/pci/devices" / address).resolve()
        (folder / "driver_override").write_text("vfio-pci\n")
    (folder / "sriov_numvfs").write_text("2\n")
    machine.pci("0000:25:10.0", "8086:10ca", driver="vfio-pci")
    machine.function("0000:25:00.0", 0, "0000:25:10.0")
    machine.file("/proc/cmdline", "root=/dev/vda1 iommu=pt intel_iommu=on hugepagesz=1G")
    script.answers.clear()
    host.shown(("ovsbr0", "10.100.0.1/24"), ("tmfifo_net0", "192.168.100.1/30"))
    translating = _nat.rules(host.profile["network"])
    script.on(*NAT, out="\n".join(translating))
    admitted, *forwarded = _host_filter.rules("ovsbr0")
    for chain, rules in zip(FILTER, ([admitted], forwarded), strict=True):
        script.on(*chain, out="\n".join(rules))
    host.units(
        baseline="loaded/active/enabled/success",
        old="loaded/failed/enabled/exit-code",
        fabric="loaded/active/enabled/success",
        binding="loaded/inactive/disabled/success",
        claim="loaded/active/enabled/success",
    )
    assert remnant_items(host) == [
        ("vfio_binding", "0000:23:00.0", "is on vfio-pci"),
        ("vfio_binding", "0000:25:10.0", "is on vfio-pci"),
        ("vfio_binding", "gpuaas-slice-vfio.service", "is inactive"),
        ("vfio_binding", "gpuaas-slice-vfio-claim.service", "is active"),
        ("fabric_vfs", "0000:25:00.0", "2 virtual functions, not given back"),
        ("fabric_vfs", "gpuaas-slice-fabric.service", "is active"),
        ("ovs_bridge", "bridge ovsbr0", "is there"),
        ("nat", "rules for 10.100.0.0/24", ", ".join(translating)),
        ("nat", "rules of the host's filter", ", ".join([admitted, *forwarded])),
        ("network_service", "gpuaas-slice-network-baseline.service", "is active"),
        ("historical_network_service", "gpuaas-slice-host-net-baseline.service", "is failed"),
        ("tmfifo", "192.168.100.1/30 on tmfifo_net0", "is there"),
        (
            "reboot_required",
            "the running kernel",
            "still booted with intel_iommu=on, still booted with hugepagesz=1G",
        ),
    ]


def test_a_sites_own_functions_are_told_from_ours(host: Any, machine: Any, script: Any) -> None:
    card, ip = "0000:25:00.0", ("ip", "-j", "link", "show", "dev", "ens30")
    folder = (machine.root / "sys/bus/pci/devices" / card).resolve()
    (folder / "sriov_numvfs").write_text("1\n")
    machine.pci("0000:25:10.0", "8086:10ca")
    machine.function(card, 0, "0000:25:10.0")
    assert [item[2] for item in remnant_items(host)] == [
        "1 virtual functions, which nothing can name"
    ]

    machine.folder(f"/sys/devices/pci0000:00/{card}/net/ens30")
    machine.file("/sys/class/net/ens30/address", "52:54:00:00:fa:01\n")

    def named(identity: str) -> None:
        script.answers.pop(ip, None)
        script.on(*ip, out=json.dumps([{"vfinfo_list": [{"vf": 0, "address": identity}]}]))

    named("0e:11:22:33:44:55")
    assert remnant_items(host) == []
    shown = {item["found"] for item in look(host)["compared"] if item["name"] == card}
    assert shown == {"1 virtual functions of the site's own"}
    (name,) = _virtual_functions.card_at(card).desired_identities({}, 1)
    named(name)
    ours = ("fabric_vfs", card, "1 virtual functions with identities of ours")
    assert remnant_items(host) == [ours]
    named("0e:11:22:33:44:55")
    machine.file(_host_snapshot.file_of(_virtual_functions.RECORD), "{}")
    assert [item[1] for item in remnant_items(host)] == [card, "fabric as before"]


def test_every_kind_of_trace_is_looked_for() -> None:
    kinds = [kind for kinds in _slice_remnants.TRACES.values() for kind in kinds]
    # Domains are read from libvirt's files; ports, flows and ingress end with the bridge.
    otherwise = {"domain", "ovs_port", "flows", "ingress"}
    assert {*kinds, *otherwise} == set(_traces.looks("ovsbr0"))
    assert {*_slice_remnants.TRACES} <= {*_slice_remnants.SLICES, *_slice_remnants.MODE}


def test_a_rate_limit_outlives_its_bridge(
    host: Any, machine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_qos, "rows", lambda: {"row-1": ALLOCATION})
    assert remnant_items(host) == [], "nobody can be asked"
    machine.file("/run/openvswitch/db.sock")
    assert remnant_items(host) == [("slice_limits", "rate limits of slices", "row-1")]


def test_slices_are_told_from_slice_mode(bench: Any, host: Any, machine: Any) -> None:
    bench.disk(eui="5e00000000000002")
    machine.file("/etc/gpuaas/slice-mode.json", '{"mode": "slice"}')
    _ledger.raise_fence("slot-0", fence=3)
    assert remnant_items(host, "slices") == []
    _ledger.hold("slot-0", fence=4, allocation_id="alloc-1", disk_identity="eui.1")
    _ledger.mark_dirty("slot-1", fence=1, disk_identity="eui.5e00000000000002")
    machine.file("/run/libvirt/qemu/gpuaas-slice-2.xml", "<domstatus/>")
    machine.file("/proc/77/cmdline", "/usr/bin/qemu-system-x86_64\0-name\0guest=gpuaas-slice-3\0")
    assert remnant_items(host, "slices") == [
        ("libvirt", "domains of slices", "gpuaas-slice-2"),
        ("libvirt", "QEMU of slices", "process 77"),
        ("nvme_ownership", "slot slot-0", "is leased by alloc-1"),
        ("nvme_ownership", "slot slot-1", "waits for the wipe of eui.5e00000000000002"),
    ]
    refused = slice_remnants.refusal("slices", look(host, "slices")["compared"])
    assert refused.code == "slices_present" and "alloc-1" in refused.found
    assert slice_remnants.refusal("host", look(host)["compared"]).code == "remnants_found"


@pytest.mark.covers("HOST-15", "I12")
def test_a_disk_that_was_written_off_is_left_only_while_it_is_there(bench: Any, host: Any) -> None:
    eui = "5e0000000000dead"
    _ledger.hold(f"disk-{eui}", fence=1, allocation_id="alloc-1", disk_identity=f"eui.{eui}")
    _ledger.mark_dirty(f"disk-{eui}", fence=1, disk_identity=f"eui.{eui}")
    bench.disk("nvme1n1")
    leased = f"is leased by alloc-1, waits for the wipe of eui.{eui}"
    assert remnant_items(host) == [("nvme_ownership", f"slot disk-{eui}", leased)]

    _ledger.release(f"disk-{eui}", fence=1)
    assert remnant_items(host) == []
    report = look(host)
    assert report["kept"]["disks_gone"] == [f"eui.{eui}"]
    assert f"eui.{eui}" in str([item["found"] for item in report["compared"]])

    waits = [("nvme_ownership", f"slot disk-{eui}", f"waits for the wipe of eui.{eui}")]
    silent = bench.disk("nvme2n1", eui="", nguid="", minor=2)
    assert remnant_items(host) == waits, "a namespace that does not say who it is may be this disk"
    silent.eui = eui
    assert remnant_items(host) == waits
    assert look(host)["kept"]["disks_gone"] == []
    silent.eui = "5e0000000000beef"
    assert remnant_items(host) == []


def test_the_mark_of_the_whole_machine_is_left_without_a_disk(host: Any) -> None:
    _ledger.mark_dirty(_ledger.MACHINE, fence=1, disk_identity="")
    assert [item[:2] for item in remnant_items(host)] == [("nvme_ownership", "slot machine")]


def test_unknown_is_not_absent(host: Any, machine: Any, script: Any) -> None:
    script.answers[NAT] = []
    script.on(*NAT, rc=4, err="another app is holding the xtables lock")
    machine.file("/var/lib/gpuaas/ledger/slot-0.json", "{broken")
    items = _slice_remnants.compare(
        _host_facts.Facts(_host_facts.Request(profile=host.profile, intent="baremetal"))
    )
    unknown = {item.check: item.found for item in items if not item.ok}
    assert set(unknown) == {"nat", "nvme_ownership"}
    assert all(text.startswith("unknown: ") for text in unknown.values())


def test_what_stays_on_purpose_is_said(host: Any, machine: Any) -> None:
    _ledger.raise_fence("slot-0", fence=3)
    machine.file("/etc/fstab", "# gpuaas-slice-storage-disabled LABEL=a /share1 xfs\n")
    machine.file("/var/lib/gpuaas/images/abc.raw", "x")
    _host.write(_host_snapshot.file_of("packages"), json.dumps({"dnsmasq": "installed"}))
    machine.file(_slice_remnants.RACADM_SOURCE, "Types: deb\n")
    assert look(host)["kept"] == {
        "ledger": ["slot-0"],
        "disks_gone": [],
        "fstab_disabled": ["LABEL=a /share1 xfs"],
        "images": ["abc.raw"],
        "packages": ["dnsmasq"],
        "apt_sources": ["/etc/apt/sources.list.d/dell-openmanage.sources"],
    }
    assert remnant_items(host) == []


def test_the_names_are_the_writers(tree: Path) -> None:
    racadm = _preflight_command._Settings(dict.fromkeys(_preflight_command._INSTALL.values(), "x"))
    assert _apt_source.source_path(racadm.install) == _slice_remnants.RACADM_SOURCE
    for unit in (_boot_units.BINDING, _boot_units.CLAIM):
        assert unit.settings_path == _vfio_bind.SETTINGS
    assert _boot_units.FABRIC.settings_path == _virtual_functions.SETTINGS
    assert _boot_units.NETWORK.settings_path == _baseline_files.SETTINGS
    assert _kernel_arguments.DROP_IN in [path for _check, path, _text in FILES]

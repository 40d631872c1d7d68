"""Recorded hosts: a small /sys, /proc and /dev in a folder, linked as a kernel links them."""

from __future__ import annotations

import base64
import ctypes
import dataclasses
import json
import os
import struct
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.gpuaas.slice.plugins.module_utils.boot import _kernel_arguments
from ansible_collections.gpuaas.slice.plugins.module_utils.core import _boot_service, _ledger
from ansible_collections.gpuaas.slice.plugins.module_utils.parity import _host_facts
from ansible_collections.gpuaas.slice.plugins.module_utils.topology import _host_resources

UNITS = (
    "systemctl",
    "show",
    "--property=Id,LoadState,ActiveState,SubState,UnitFileState,Result",
    "--",
    "gpuaas-slice-network-baseline.service",
    "gpuaas-slice-host-net-baseline.service",
    "gpuaas-slice-fabric.service",
    "gpuaas-slice-vfio.service",
    "gpuaas-slice-vfio-claim.service",
    "nvidia-persistenced.service",
)
PROFILE: dict[str, Any] = {
    "name": "test",
    "gpu": {"ids": ["1234:11e8"], "expected": 1},
    "fabric": {
        "pf_ids": ["8086:10c9"],
        "link": "ethernet",
        "vlans": [3000, 3099],
        "vfs_per_pf": 1,
        "site_address": "10.20.0.7/16",
        "route": "10.20.0.0/16",
    },
    "nvme": {"exclude_models": []},
    "network": {
        "bridge": "ovsbr0",
        "address": "10.100.0.1/24",
        "subnet": "10.100.0.0/24",
        "egress_probe": "10.0.2.2",
    },
    "kernel_arguments": ["intel_iommu=on", "iommu=pt"],
    "gpu_services": ["nvidia-persistenced.service"],
    "vm": {"hugepages": False, "memory_mib_per_gpu": 2048},
    "not_applicable": [],
}
SLOT: dict[str, Any] = {
    "slot_id": "slot-0",
    "slot_index": 0,
    "gpu_pci_address": "0000:23:00.0",
    "nvme_device": "/dev/disk/by-id/nvme-eui.5e0000000000a000",
    "nvme_serial": "LABNVME0",
    "nvme_eui": "5e0000000000a000",
    "nvme_size_bytes": 4 << 30,
    "management_mac": "52:54:00:64:00:0a",
    "private_ip": "10.100.0.10",
    "fabric_vf_pci_address": "0000:25:10.0",
    "numa_node": 0,
}


@dataclass
class Machine:
    """Builder of a host's tree; every method returns nothing and writes files."""

    root: Path

    def file(self, absolute: str, text: str = "") -> Path:
        target = self.root / absolute.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
        return target

    def folder(self, absolute: str) -> Path:
        target = self.root / absolute.lstrip("/")
        target.mkdir(parents=True, exist_ok=True)
        return target

    def link(self, absolute: str, target: Path) -> None:
        """Make a relative link, so that it stays inside the tree."""
        place = self.root / absolute.lstrip("/")
        place.parent.mkdir(parents=True, exist_ok=True)
        place.symlink_to(os.path.relpath(target, place.parent))

    def pci(
        self,
        address: str,
        id_: str,
        *,
        above: str = "pci0000:00",
        node: int = -1,
        group: int | None = None,
        driver: str = "",
        **attributes: str,
    ) -> None:
        """Add a PCI function below `above` (`pci0000:40/0000:40:00.0`), by default class other."""
        vendor, _, device = id_.partition(":")
        real = self.folder(f"/sys/devices/{above}/{address}")
        values = {"vendor": f"0x{vendor}", "device": f"0x{device}", "class": "0x00ff00"}
        values |= {"numa_node": str(node), "driver_override": "(null)", "config": "\x34\x12"}
        values |= attributes
        for name, value in values.items():
            (real / name).write_text(f"{value}\n")
        self.link(f"/sys/bus/pci/devices/{address}", real)
        if group is not None:
            home = self.folder(f"/sys/kernel/iommu_groups/{group}")
            self.link(f"/sys/kernel/iommu_groups/{group}/devices/{address}", real)
            (real / "iommu_group").symlink_to(os.path.relpath(home, real))
        if driver:
            place = self.folder(f"/sys/bus/pci/drivers/{driver}")
            (real / "driver").symlink_to(os.path.relpath(place, real))

    def function(self, physical: str, index: int, address: str) -> None:
        """Make `address` the virtual function `index` of `physical`; both exist."""
        devices = self.root / "sys/bus/pci/devices"
        parent, child = (devices / physical).resolve(), (devices / address).resolve()
        (parent / f"virtfn{index}").symlink_to(os.path.relpath(child, parent))
        (child / "physfn").symlink_to(os.path.relpath(parent, child))


@pytest.fixture
def machine(tree: Path) -> Machine:
    """An empty host to be filled."""
    return Machine(tree)


class ParityHost:
    """Host for parity checks: its machine, its programs, its profile and a slot."""

    profile = PROFILE
    slot = SLOT
    # Slice mode derives this MAC for the first function of the card with `identified`'s address.
    mac = "02:a4:79:e9:da:2a"

    def __init__(self, machine: Machine, script: Any) -> None:
        self.machine = machine
        self.script = script

    def facts(self, *slots: dict[str, Any], **profile: Any) -> _host_facts.Facts:
        request = _host_facts.Request(profile=PROFILE | profile, slots=slots)
        return _host_facts.Facts(request)

    def reset(self, slot: dict[str, Any]) -> None:
        """Record that the slot's GPU was reset since its last use."""
        evidence: dict[str, object] = {"address": slot["gpu_pci_address"], "finished_at": "2026"}
        _ledger.mark_gpu_reset(str(slot["slot_id"]), fence=0, evidence=evidence)

    def installed(self, unit: _boot_service.Unit, **settings: Any) -> None:
        """Install a boot service as bootstrap or the binding does."""
        _boot_service.install(dataclasses.replace(unit, settings=settings or unit.settings))

    def identified(self, *functions: dict[str, str]) -> None:
        """Set the fabric card's functions as iproute2 shows them, by index."""
        self.machine.folder("/sys/bus/pci/devices/0000:25:00.0/net/ens30")
        self.machine.file("/sys/class/net/ens30/address", "52:54:00:00:fa:01\n")
        listed = [{"vf": index, **shown} for index, shown in enumerate(functions)]
        argv = ("ip", "-j", "link", "show", "dev", "ens30")
        self.script.answers[argv] = []
        self.script.on(*argv, out=json.dumps([{"vfinfo_list": listed}]))

    def boots(self) -> None:
        """Set the boot as bootstrap does: files, and a menu and initramfs made from them."""
        params = _host_resources.boot_params(PROFILE)
        files = _kernel_arguments.desired_files(params, _kernel_arguments.observe(params))
        for path, text in files.items():
            if text is not None:
                self.machine.file(path, text)
        menu = "menuentry 'Linux' {\n\tlinux /boot/vmlinuz root=x intel_iommu=on iommu=pt\n}\n"
        self.machine.file("/boot/grub/grub.cfg", menu)
        record = json.dumps(
            {"inputs": _kernel_arguments.inputs(files), "boot_id": "an earlier one"}
        )
        self.machine.file(_kernel_arguments.INITRAMFS_RECORD, record)

    def enrolled(self, *, before: int, key: bytes = b"k" * 32, **more: Any) -> None:
        public = base64.b64encode(self._string(b"ssh-ed25519") + self._string(b"k" * 32)).decode()
        self.machine.file(
            "/etc/gpuaas/enrolment.env", "# node\nGPUAAS_API_URL='https://api.lab:8443'\n"
        )
        self.machine.file("/etc/ssh/ssh_host_ed25519_key.pub", f"ssh-ed25519 {public} root@host\n")
        self.machine.file(
            "/etc/ssh/ssh_host_ed25519_key-cert.pub", self.certificate(key, before=before, **more)
        )
        self.machine.file(
            "/etc/ssh/sshd_config.d/60-gpuaas.conf",
            "HostCertificate /etc/ssh/ssh_host_ed25519_key-cert.pub\n",
        )

    def certificate(self, key: bytes, *, before: int, after: int = 0, kind: int = 2) -> str:
        name = b"ssh-ed25519-cert-v01@openssh.com"
        body = (
            self._string(name)
            + self._string(b"nonce")
            + self._string(key)
            + struct.pack(">QI", 1, kind)
        )
        body += self._string(b"node-1") + self._string(b"") + struct.pack(">QQ", after, before)
        # Critical options, extensions, reserved, the authority's key.
        body += self._string(b"") * 3 + self._string(b"authority")
        return f"{name.decode()} {base64.b64encode(body).decode()} node-1\n"

    @staticmethod
    def _string(data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + data

    def units(self, **states: str) -> None:
        """Set systemctl's answers; a state is load/active/file/result."""
        blocks = []
        for name in ("baseline", "old", "fabric", "binding", "claim", "nvidia"):
            load, active, file, result = states.get(name, "not-found/inactive//").split("/")
            blocks.append(
                f"Id=x\nLoadState={load}\nActiveState={active}\nSubState=exited\n"
                f"UnitFileState={file}\nResult={result}\n"
            )
        self.script.answers[UNITS] = []
        self.script.on(*UNITS, out="\n".join(blocks))

    def shown(self, *interfaces: tuple[str, str]) -> None:
        listed = []
        for name, address in interfaces:
            local, _, length = address.partition("/")
            info = [{"local": local, "prefixlen": int(length)}]
            listed.append({"ifname": name, "flags": ["UP"], "addr_info": info})
        self.script.on("ip", "-j", "address", "show", out=json.dumps(listed))


@pytest.fixture
def parity(machine: Machine, script: Any) -> ParityHost:
    host = ParityHost(machine, script)
    host.reset(SLOT)
    return host


@pytest.fixture
def silent_mount(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A file system whose server takes requests and never answers, such as NFS without a network.

    The kernel then ends no process that waits for it.
    """
    place = tmp_path_factory.mktemp("silent")
    library = ctypes.CDLL(None, use_errno=True)
    try:
        server = os.open("/dev/fuse", os.O_RDWR)
    except OSError as error:
        pytest.skip(f"needs /dev/fuse: {error}")
    try:
        options = f"fd={server},rootmode=40000,user_id=0,group_id=0".encode()
        if library.mount(b"silent", bytes(place), b"fuse", 0, options):
            pytest.skip("needs the right to mount")
        try:
            _length, _kind, number = struct.unpack_from("<IIQ", os.read(server, 1 << 17))
            # <linux/fuse.h>: fuse_init_out of version 7.31.
            answer = struct.pack("<4I2H2I2H7I", 7, 31, 0, 0, 1, 1, 4096, 1, 0, 0, *[0] * 7)
            os.write(server, struct.pack("<IiQ", 16 + len(answer), 0, number) + answer)
            # Requests that were read count as being worked on.
            with subprocess.Popen(["cat"], stdin=server, stdout=subprocess.DEVNULL) as reader:
                yield place
                reader.kill()
        finally:
            library.umount2(bytes(place), 2)
    finally:
        os.close(server)

"""libvirt definition of a slice VM: written from checked values, parsed, compared.

Nothing here runs a program. `describe` returns the required content of a definition, `parse` the
actual content. They are equal only when the definition contains these devices and no others.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from xml.etree import ElementTree as ET

from ansible_collections.gpuaas.slice.plugins.module_utils.core._object_names import (
    SEEDS,
    check_mac,
    check_pci,
    console_path,
    domain_name,
    hexadecimal,
    invalid,
    match,
    nvram_path,
    port_name,
)

Description = dict[str, Any]

QEMU_NAMESPACE = "http://libvirt.org/schemas/domain/qemu/1.0"
ET.register_namespace("qemu", QEMU_NAMESPACE)

OVMF_CODE = "/usr/share/OVMF/OVMF_CODE_4M.fd"
OVMF_VARIABLES = "/usr/share/OVMF/OVMF_VARS_4M.fd"

# Devices that libvirt adds by itself to a q35 machine; any other in <devices> counts as a
# difference.
_IMPLIED = frozenset({"emulator", "controller", "input", "audio", "watchdog", "console"})

# Virtualization extensions of Intel and AMD; a host lacks one of them, and libvirt accepts both.
_NESTED = ("vmx", "svm")

_INTERFACE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,14}")
_DISK = re.compile(r"/dev/disk/by-id/[A-Za-z0-9][A-Za-z0-9._:+-]*")
_SEED = re.compile(rf"{SEEDS}/[A-Za-z0-9-]+\.iso")
# No control characters: XML cannot carry them, and no QEMU argument needs them.
_ARGUMENT = re.compile(r"[\x20-\x7e]+")


@dataclass(frozen=True, kw_only=True)
class Domain:
    """Parameters of a slice VM; every value has been checked.

    cpus: host CPUs to which the virtual CPUs are pinned, one each; empty leaves them to the kernel.
    numa_node: source of all memory; None when the slots span nodes or have no node. disks: by-id
    paths; the first disk boots. nested: whether the guest may itself run virtual machines.
    """

    allocation_id: str
    vcpus: int
    memory_mib: int
    mac: str
    bridge: str
    disks: tuple[str, ...]
    gpus: tuple[str, ...]
    fabric_vfs: tuple[str, ...] = ()
    cpus: tuple[int, ...] = ()
    numa_node: int | None = None
    firmware: str = "bios"
    hugepages: bool = False
    nested: bool = False
    seed_path: str = ""
    qemu_arguments: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return domain_name(self.allocation_id)

    @property
    def port(self) -> str:
        return port_name(self.allocation_id)


def check(domain: Domain) -> Domain:
    """The same domain, or a refusal that names the field."""
    hexadecimal(domain.allocation_id)
    check_mac(domain.mac)
    match("bridge", _INTERFACE, domain.bridge, "an interface name")
    if domain.seed_path:
        match("seed_path", _SEED, domain.seed_path, f"an ISO in {SEEDS}")
    for disk in domain.disks:
        match("disks", _DISK, disk, "/dev/disk/by-id/…")
    for address in (*domain.gpus, *domain.fabric_vfs):
        check_pci(address)
    for argument in domain.qemu_arguments:
        match("qemu_arguments", _ARGUMENT, argument, "printable ASCII")
    devices = (*domain.disks, *domain.gpus, *domain.fabric_vfs)
    if len(set(devices)) != len(devices):
        raise invalid("devices", "each device once", ", ".join(devices))
    if not domain.disks or not domain.gpus:
        raise invalid("devices", "at least one disk and one GPU", ", ".join(devices) or "none")
    if domain.vcpus < 1 or domain.memory_mib < 128:
        size = f"{domain.vcpus} vCPUs, {domain.memory_mib} MiB"
        raise invalid("size", "at least 1 vCPU and 128 MiB", size)
    if domain.cpus and len(set(domain.cpus)) != domain.vcpus:
        raise invalid("cpus", f"{domain.vcpus} different host CPUs", str(domain.cpus))
    if domain.firmware not in ("bios", "uefi"):
        raise invalid("firmware", "bios or uefi", domain.firmware)
    return domain


def describe(domain: Domain) -> Description:
    """The required content of this domain's definition; comparable to `parse`."""
    uefi = domain.firmware == "uefi"
    return {
        "name": domain.name,
        "uuid": domain.allocation_id,
        "vcpus": domain.vcpus,
        "memory_mib": domain.memory_mib,
        "pins": [str(cpu) for cpu in domain.cpus],
        "memory_nodes": "" if domain.numa_node is None else str(domain.numa_node),
        "firmware": OVMF_CODE if uefi else "",
        "nvram": nvram_path(domain.allocation_id) if uefi else "",
        "hugepages": domain.hugepages,
        "nested": domain.nested,
        "hostdevs": [*domain.gpus, *domain.fabric_vfs],
        "option_roms": [],
        "disks": list(domain.disks),
        "seed": domain.seed_path,
        "nics": [[domain.mac, domain.bridge, domain.port]],
        "console": [console_path(domain.allocation_id)],
        "qemu_arguments": list(domain.qemu_arguments),
        "other_devices": [],
    }


def render(domain: Domain) -> str:
    """The definition as libvirt reads it."""
    check(domain)
    root = ET.Element("domain", {"type": "kvm"})
    _add(root, "name", domain.name)
    _add(root, "uuid", domain.allocation_id)
    _resources(root, domain)
    _firmware(root, domain)
    features = _add(root, "features")
    _add(features, "acpi")
    _add(features, "apic")
    cpu = _add(root, "cpu", mode="host-passthrough")
    _add(cpu, "topology", sockets="1", dies="1", cores=str(domain.vcpus), threads="1")
    for feature in () if domain.nested else _NESTED:
        _add(cpu, "feature", policy="disable", name=feature)
    clock = _add(root, "clock", offset="utc")
    _add(clock, "timer", name="pit", tickpolicy="discard")
    _add(clock, "timer", name="hpet", present="no")
    _add(root, "on_poweroff", "destroy")
    _add(root, "on_reboot", "restart")
    _add(root, "on_crash", "destroy")
    _devices(_add(root, "devices"), domain)
    if domain.qemu_arguments:
        line = ET.SubElement(root, f"{{{QEMU_NAMESPACE}}}commandline")
        for argument in domain.qemu_arguments:
            ET.SubElement(line, f"{{{QEMU_NAMESPACE}}}arg", {"value": argument})
    ET.indent(root)
    return ET.tostring(root, encoding="unicode") + "\n"


def _resources(root: ET.Element, domain: Domain) -> None:
    _add(root, "memory", str(domain.memory_mib), unit="MiB")
    # VFIO pins the guest's memory. The limit also bounds QEMU's cgroup, so it leaves room for QEMU
    # itself. With a lower limit the VM is killed while it starts.
    limit = domain.memory_mib * 5 // 4 + 1024
    _add(_add(root, "memtune"), "hard_limit", str(limit), unit="MiB")
    if domain.hugepages:
        pages = _add(_add(root, "memoryBacking"), "hugepages")
        _add(pages, "page", size="1", unit="GiB")
    cpuset = {"cpuset": ",".join(map(str, domain.cpus))} if domain.cpus else {}
    _add(root, "vcpu", str(domain.vcpus), placement="static", **cpuset)
    if domain.cpus:
        tune = _add(root, "cputune")
        for number, cpu in enumerate(domain.cpus):
            _add(tune, "vcpupin", vcpu=str(number), cpuset=str(cpu))
        _add(tune, "emulatorpin", **cpuset)
    if domain.numa_node is not None:
        numa = _add(root, "numatune")
        _add(numa, "memory", mode="strict", nodeset=str(domain.numa_node))


def _firmware(root: ET.Element, domain: Domain) -> None:
    system = _add(root, "os")
    _add(system, "type", "hvm", arch="x86_64", machine="q35")
    if domain.firmware == "uefi":
        _add(system, "loader", OVMF_CODE, readonly="yes", secure="no", type="pflash")
        _add(system, "nvram", nvram_path(domain.allocation_id), template=OVMF_VARIABLES)


def _devices(devices: ET.Element, domain: Domain) -> None:
    passed = (*domain.gpus, *domain.fabric_vfs)
    _add(devices, "controller", type="usb", index="0", model="none")
    _add(devices, "controller", type="pci", index="0", model="pcie-root")
    for index in range(1, len(passed) + 1):
        _add(devices, "controller", type="pci", index=str(index), model="pcie-root-port")
    for number, disk in enumerate(domain.disks):
        _disk(devices, disk, number)
    if domain.seed_path:
        _seed(devices, domain.seed_path, len(domain.disks))
    nic = _add(devices, "interface", type="bridge")
    _add(nic, "mac", address=domain.mac)
    _add(nic, "source", bridge=domain.bridge)
    _add(nic, "virtualport", type="openvswitch")
    _add(nic, "target", dev=domain.port)
    _add(nic, "model", type="virtio")
    _add(nic, "rom", enabled="no")
    for index, address in enumerate(passed, start=1):
        _hostdev(devices, address, index)
    serial = _add(devices, "serial", type="file")
    _add(serial, "source", path=console_path(domain.allocation_id))
    _add(serial, "target", port="0")
    _add(devices, "memballoon", model="none")
    _add(_add(devices, "rng", model="virtio"), "backend", "/dev/urandom", model="random")


def _disk(devices: ET.Element, path: str, number: int) -> None:
    disk = _add(devices, "disk", type="block", device="disk")
    _add(disk, "driver", name="qemu", type="raw", cache="none", io="native", discard="unmap")
    _add(disk, "source", dev=path)
    _add(disk, "target", dev=_virtio(number), bus="virtio")
    if number == 0:
        _add(disk, "boot", order="1")


def _seed(devices: ET.Element, path: str, number: int) -> None:
    """The seed as a virtio disk, because guests with a cloud kernel have no AHCI driver
    for a CD.
    """
    disk = _add(devices, "disk", type="file", device="disk")
    _add(disk, "driver", name="qemu", type="raw")
    _add(disk, "source", file=path)
    _add(disk, "target", dev=_virtio(number), bus="virtio")
    _add(disk, "readonly")


def _hostdev(devices: ET.Element, address: str, port: int) -> None:
    """managed='no': the host has bound the device permanently, and libvirt must not rebind it."""
    device = _add(devices, "hostdev", mode="subsystem", type="pci", managed="no")
    _add(device, "driver", name="vfio")
    domain, bus, rest = address.split(":")
    slot, function = rest.split(".")
    source = {
        "domain": f"0x{domain}",
        "bus": f"0x{bus}",
        "slot": f"0x{slot}",
        "function": f"0x{function}",
    }
    _add(_add(device, "source"), "address", **source)
    # A former tenant may have changed the ROM of a card, and the guest's firmware would run it.
    _add(device, "rom", bar="off")
    place = {"domain": "0x0000", "bus": f"0x{port:02x}", "slot": "0x00", "function": "0x0"}
    _add(device, "address", type="pci", **place)


def parse(xml: str) -> Description:
    """The content of a definition (rendered here or returned by libvirt); comparable to
    `describe`.
    """
    # Trusted text: libvirtd wrote it, as root on this host.
    root = ET.XML(xml)
    devices = root.find("devices")
    disks, seeds, hostdevs, nics, console, other = [], [], [], [], [], []
    roms = []
    for device in devices if devices is not None else ():
        kind, flavour = device.tag, device.get("type", "")
        if kind == "disk" and flavour == "block":
            disks.append(_attribute(device, "source", "dev"))
        elif kind == "disk" and flavour == "file" and device.find("readonly") is not None:
            seeds.append(_attribute(device, "source", "file"))
        elif kind == "hostdev" and flavour == "pci":
            address = _address(device.find("source/address"))
            hostdevs.append(address)
            if _attribute(device, "rom", "bar") != "off" or device.find("rom[@file]") is not None:
                roms.append(address)
        elif kind == "interface" and flavour == "bridge":
            paths = (("mac", "address"), ("source", "bridge"), ("target", "dev"))
            nics.append([_attribute(device, tag, name) for tag, name in paths])
        elif kind == "serial" and flavour == "file":
            console.append(_attribute(device, "source", "path"))
        elif kind not in _IMPLIED and not _harmless(device):
            other.append(f"{kind}:{flavour or device.get('model', '')}")
    features = root.findall("cpu/feature[@policy='disable']")
    lines = root.findall(f"{{{QEMU_NAMESPACE}}}commandline/{{{QEMU_NAMESPACE}}}arg")
    return {
        "name": root.findtext("name", ""),
        "uuid": root.findtext("uuid", ""),
        "vcpus": int(root.findtext("vcpu", "0")),
        "memory_mib": _mebibytes(root.find("memory")),
        "pins": [pin.get("cpuset", "") for pin in root.findall("cputune/vcpupin")],
        "memory_nodes": _attribute(root, "numatune/memory", "nodeset"),
        "firmware": root.findtext("os/loader", ""),
        "nvram": root.findtext("os/nvram", ""),
        "hugepages": root.find("memoryBacking/hugepages") is not None,
        "nested": not set(_NESTED) <= {feature.get("name") for feature in features},
        "hostdevs": hostdevs,
        "option_roms": roms,
        "disks": disks,
        "seed": " ".join(seeds),
        "nics": nics,
        "console": console,
        "qemu_arguments": [line.get("value", "") for line in lines],
        "other_devices": other,
    }


def differences(want: Description, actual: Description) -> dict[str, tuple[Any, Any]]:
    """Required and actual value of each different field."""
    return {key: (want[key], actual[key]) for key in want if want[key] != actual[key]}


def _harmless(device: ET.Element) -> bool:
    if device.tag == "memballoon":
        return device.get("model") == "none"
    return device.tag == "rng" and device.findtext("backend") == "/dev/urandom"


def _address(element: ET.Element | None) -> str:
    if element is None:
        return ""
    parts = [int(element.get(key, "0"), 16) for key in ("domain", "bus", "slot", "function")]
    return "{:04x}:{:02x}:{:02x}.{:x}".format(*parts)


def _mebibytes(element: ET.Element | None) -> int:
    if element is None:
        return 0
    scale = {"KiB": 1024, "MiB": 1024**2, "GiB": 1024**3, "bytes": 1, "b": 1}
    return int(element.text or "0") * scale[element.get("unit", "KiB")] // 1024**2


def _attribute(parent: ET.Element, path: str, name: str) -> str:
    element = parent.find(path)
    return "" if element is None else element.get(name, "")


def _virtio(number: int) -> str:
    return f"vd{chr(ord('a') + number)}"


def _add(parent: ET.Element, tag: str, text: str = "", **attributes: str) -> ET.Element:
    element = ET.SubElement(parent, tag, attributes)
    element.text = text or None
    return element


def from_options(allocation_id: str, options: Mapping[str, Any]) -> Domain:
    """The domain for a module's `spec` option."""

    def listed(key: str) -> Sequence[Any]:
        return options.get(key) or ()

    node = options.get("numa_node")
    return check(
        Domain(
            allocation_id=allocation_id,
            vcpus=options["vcpus"],
            memory_mib=options["memory_mib"],
            mac=options["mac"],
            bridge=options["bridge"],
            disks=tuple(listed("disks")),
            gpus=tuple(listed("gpus")),
            fabric_vfs=tuple(listed("fabric_vfs")),
            cpus=tuple(listed("cpus")),
            numa_node=None if node is None or node < 0 else node,
            firmware=options.get("firmware") or "bios",
            hugepages=bool(options.get("hugepages")),
            nested=bool(options.get("nested")),
            seed_path=options.get("seed_path") or "",
            qemu_arguments=tuple(listed("qemu_arguments")),
        )
    )

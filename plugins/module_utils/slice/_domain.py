"""libvirt definition of a slice VM: written from checked values, parsed, compared.

Nothing here runs a program. `describe` returns the required content of a definition, `parse` the
actual content. They are equal only when the definition contains these devices and no others.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, zip_longest
from typing import Any
from xml.etree import ElementTree as ET

from ansible_collections.gpuaas.slice.plugins.module_utils.core import _host
from ansible_collections.gpuaas.slice.plugins.module_utils.core._object_names import (
    SEEDS,
    channel_path,
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

# Virtio-serial channels between guest and host, which use no network. The guest has a port
# /dev/virtio-ports/org.gpuaas.<name>.0, the host a socket that QEMU listens on.
CHANNELS = ("readiness", "telemetry")

# Virtualization extensions of Intel and AMD; a host lacks one of them, and libvirt accepts both.
_NESTED = ("vmx", "svm")
# Flag of processors whose system reads the threads of a core from AMD's own tables.
TOPOEXT = "topoext"

_INTERFACE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,14}")
_DISK = re.compile(r"/dev/disk/by-id/[A-Za-z0-9][A-Za-z0-9._:+-]*")
_SEED = re.compile(rf"{SEEDS}/[A-Za-z0-9-]+\.iso")
# No control characters: XML cannot carry them, and no QEMU argument needs them.
_ARGUMENT = re.compile(r"[\x20-\x7e]+")


@dataclass(frozen=True, kw_only=True)
class Cell:
    """Part of a guest on one NUMA node of the host. cpus: host CPUs, one for each virtual CPU."""

    numa_node: int
    vcpus: int
    memory_mib: int
    cpus: tuple[int, ...]
    devices: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Domain:
    """Parameters of a slice VM; every value has been checked.

    cpus: host CPUs to which the virtual CPUs are pinned, one each; empty leaves them to the kernel.
    numa_node: source of all memory; None when the slots span nodes or have no node. disks: by-id
    paths; the first disk boots. nested: whether the guest may itself run virtual machines.
    cells: parts on several NUMA nodes of the host, each a NUMA node of the guest; () for one part.
    threads: of each core that the guest sees. topoext: whether an AMD host must show them, without
    which its guests see cores. emulator_cpus: for QEMU's own threads; empty for the CPUs of the
    guest. switches: devices below one PCIe switch of the host.
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
    cells: tuple[Cell, ...] = ()
    threads: int = 1
    topoext: bool = False
    emulator_cpus: tuple[int, ...] = ()
    switches: tuple[tuple[str, ...], ...] = ()
    disk_io: str = "native"
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
    if domain.hugepages and any(size % 1024 for size in _memory_sizes(domain)):
        raise invalid("memory_mib", "whole pages of 1 GiB", str(_memory_sizes(domain)))
    if domain.disk_io not in ("native", "io_uring"):
        raise invalid("disk_io", "native or io_uring", domain.disk_io)
    _check_layout(domain)
    return domain


def _memory_sizes(domain: Domain) -> list[int]:
    return [cell.memory_mib for cell in domain.cells] or [domain.memory_mib]


def _check_layout(domain: Domain) -> None:
    """Refuse parts that are not the whole, and devices in two places."""
    if domain.threads < 1 or any(size % domain.threads for size in _sizes(domain)):
        raise invalid("threads", "cores of equal threads", str(domain.threads))
    passed = {*domain.gpus, *domain.fabric_vfs}
    for name, groups in (
        ("switches", domain.switches),
        ("cells", tuple(cell.devices for cell in domain.cells)),
    ):
        placed = [address for group in groups for address in group]
        if len(set(placed)) != len(placed) or not passed.issuperset(placed):
            raise invalid(name, "each device once", ", ".join(placed))
    cells = domain.cells
    if not cells:
        return
    nodes = [cell.numa_node for cell in cells]
    if len(set(nodes)) != len(nodes) or len(nodes) < 2 or min(nodes) < 0:
        raise invalid("cells", "several NUMA nodes, each once", str(nodes))
    whole = (domain.vcpus, domain.memory_mib, domain.cpus, passed)
    parts = (
        sum(cell.vcpus for cell in cells),
        sum(cell.memory_mib for cell in cells),
        tuple(cpu for cell in cells for cpu in cell.cpus),
        {address for cell in cells for address in cell.devices},
    )
    if parts != whole or min(cell.vcpus for cell in cells) < 1:
        raise invalid("cells", f"parts of {whole}", str(parts))
    for group in domain.switches:
        if not any(set(group) <= set(cell.devices) for cell in cells):
            raise invalid("switches", "devices of one NUMA node", ", ".join(group))


def _sizes(domain: Domain) -> list[int]:
    return [cell.vcpus for cell in domain.cells] or [domain.vcpus]


def describe(domain: Domain) -> Description:
    """The required content of this domain's definition; comparable to `parse`."""
    uefi = domain.firmware == "uefi"
    return {
        "name": domain.name,
        "uuid": domain.allocation_id,
        "vcpus": domain.vcpus,
        "memory_mib": domain.memory_mib,
        "pins": [str(cpu) for cpu in domain.cpus],
        "memory_nodes": _nodeset(domain),
        "topology": _topology(domain),
        "topoext": domain.topoext,
        "cells": [
            [_numbers(cpus), cell.memory_mib, str(cell.numa_node)]
            for cpus, cell in zip(_guest_cpus(domain), domain.cells, strict=True)
        ],
        "emulator_cpus": list(domain.emulator_cpus or domain.cpus),
        "firmware": OVMF_CODE if uefi else "",
        "nvram": nvram_path(domain.allocation_id) if uefi else "",
        "hugepages": domain.hugepages,
        "nested": domain.nested,
        "hostdevs": [*domain.gpus, *domain.fabric_vfs],
        "buses": [bus for _address, bus in _tree(domain).places],
        "option_roms": [],
        "disks": list(domain.disks),
        "disk_io": [domain.disk_io] * len(domain.disks),
        "seed": domain.seed_path,
        "nics": [[domain.mac, domain.bridge, domain.port]],
        "console": [console_path(domain.allocation_id)],
        "channels": [
            [channel_path(domain.allocation_id, name), _channel_name(name)] for name in CHANNELS
        ],
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
    sockets, cores, threads = map(str, _topology(domain))
    _add(cpu, "topology", sockets=sockets, dies="1", cores=cores, threads=threads)
    for feature in () if domain.nested else _NESTED:
        _add(cpu, "feature", policy="disable", name=feature)
    if domain.topoext:
        # QEMU passes every feature of the host on but this.
        _add(cpu, "feature", policy="require", name=TOPOEXT)
    if domain.cells:
        numa = _add(cpu, "numa")
        for number, cpus in enumerate(_guest_cpus(domain)):
            size = {"memory": str(domain.cells[number].memory_mib), "unit": "MiB"}
            _add(numa, "cell", id=str(number), cpus=_numbers(cpus), **size)
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
    cpuset = {"cpuset": _numbers(domain.cpus)} if domain.cpus else {}
    _add(root, "vcpu", str(domain.vcpus), placement="static", **cpuset)
    # A disk has a thread of its own, so that its guest does not wait for QEMU's main loop.
    _add(root, "iothreads", str(len(domain.disks)))
    if domain.cpus:
        tune = _add(root, "cputune")
        for number, cpu in enumerate(domain.cpus):
            _add(tune, "vcpupin", vcpu=str(number), cpuset=str(cpu))
        emulator = {"cpuset": _numbers(domain.emulator_cpus or domain.cpus)}
        _add(tune, "emulatorpin", **emulator)
        for number in range(1, len(domain.disks) + 1):
            _add(tune, "iothreadpin", iothread=str(number), **emulator)
    if nodes := _nodeset(domain):
        numa = _add(root, "numatune")
        _add(numa, "memory", mode="strict", nodeset=nodes)
        for number, cell in enumerate(domain.cells):
            node = str(cell.numa_node)
            _add(numa, "memnode", cellid=str(number), mode="strict", nodeset=node)


def _firmware(root: ET.Element, domain: Domain) -> None:
    system = _add(root, "os")
    _add(system, "type", "hvm", arch="x86_64", machine="q35")
    if domain.firmware == "uefi":
        _add(system, "loader", OVMF_CODE, readonly="yes", secure="no", type="pflash")
        _add(system, "nvram", nvram_path(domain.allocation_id), template=OVMF_VARIABLES)


def _devices(devices: ET.Element, domain: Domain) -> None:
    tree = _tree(domain)
    _add(devices, "controller", type="usb", index="0", model="none")
    _add(devices, "controller", type="pci", index="0", model="pcie-root")
    for index, bridge in enumerate(tree.bridges, start=1):
        _bridge(devices, index, bridge)
    for number, disk in enumerate(domain.disks):
        _disk(devices, disk, number, domain.disk_io)
    if domain.seed_path:
        _seed(devices, domain.seed_path, len(domain.disks))
    nic = _add(devices, "interface", type="bridge")
    _add(nic, "mac", address=domain.mac)
    _add(nic, "source", bridge=domain.bridge)
    _add(nic, "virtualport", type="openvswitch")
    _add(nic, "target", dev=domain.port)
    _add(nic, "model", type="virtio")
    _add(nic, "rom", enabled="no")
    for address, bus in tree.places:
        _hostdev(devices, address, bus)
    serial = _add(devices, "serial", type="file")
    _add(serial, "source", path=console_path(domain.allocation_id))
    _add(serial, "target", port="0")
    for name in CHANNELS:
        channel = _add(devices, "channel", type="unix")
        _add(channel, "source", mode="bind", path=channel_path(domain.allocation_id, name))
        _add(channel, "target", type="virtio", name=_channel_name(name))
    _add(devices, "memballoon", model="none")
    _add(_add(devices, "rng", model="virtio"), "backend", "/dev/urandom", model="random")


@dataclass(frozen=True)
class Bridge:
    """A PCIe bridge of the guest. bus: where it is, None for a place that libvirt chooses.

    cell: NUMA node of an expander bus of the guest.
    """

    model: str
    bus: int | None = None
    slot: int = 0
    cell: int | None = None


@dataclass(frozen=True)
class Tree:
    """The guest's PCIe bridges, by index from 1, and the bus of each passed device."""

    bridges: list[Bridge]
    places: list[tuple[str, int]]


def _tree(domain: Domain) -> Tree:
    """The host's tree, as far as it says how near devices are.

    Each part on a NUMA node has an expander bus. Each switch of the host with several devices is a
    switch. Every other device has a root port of its own.
    """
    passed = (*domain.gpus, *domain.fabric_vfs)
    bridges: list[Bridge] = []
    place: dict[str, int] = {}

    def bridge(*arguments: Any, **more: Any) -> int:
        bridges.append(Bridge(*arguments, **more))
        return len(bridges)

    homes: list[tuple[int | None, tuple[str, ...]]] = [(None, passed)]
    if domain.cells:
        homes = [
            (bridge("pcie-expander-bus", cell=number), cell.devices)
            for number, cell in enumerate(domain.cells)
        ]
    for home, devices in homes:
        ports = 0
        for address in (address for address in passed if address in devices):
            if address in place:
                continue
            port = bridge("pcie-root-port", home, ports)
            ports += 1
            group = next((group for group in domain.switches if address in group), ())
            if len(group) < 2:
                place[address] = port
                continue
            switch = bridge("pcie-switch-upstream-port", port)
            for number, member in enumerate(group):
                place[member] = bridge("pcie-switch-downstream-port", switch, number)
    return Tree(bridges, [(address, place[address]) for address in passed])


def _bridge(devices: ET.Element, index: int, bridge: Bridge) -> None:
    controller = _add(devices, "controller", type="pci", index=str(index), model=bridge.model)
    if bridge.cell is not None:
        # Bus numbers from here to the next expander bus are for what is below this one.
        target = _add(controller, "target", busNr=str(64 + 24 * bridge.cell))
        _add(target, "node", str(bridge.cell))
    if bridge.bus is not None:
        place = {"bus": f"0x{bridge.bus:02x}", "slot": f"0x{bridge.slot:02x}"}
        _add(controller, "address", type="pci", domain="0x0000", **place, function="0x0")


def _topology(domain: Domain) -> list[int]:
    """Sockets, cores and threads. Parts of equal size on NUMA nodes are sockets of their own."""
    sizes = _sizes(domain)
    sockets = len(sizes) if len(set(sizes)) == 1 else 1
    return [sockets, domain.vcpus // sockets // domain.threads, domain.threads]


def _guest_cpus(domain: Domain) -> list[range]:
    """The virtual CPUs of each part, in the order of the pins."""
    ends = [sum(_sizes(domain)[:end]) for end in range(len(domain.cells) + 1)]
    return [range(start, end) for start, end in pairwise(ends)]


def _nodeset(domain: Domain) -> str:
    if domain.cells:
        return _numbers(sorted(cell.numa_node for cell in domain.cells))
    return "" if domain.numa_node is None else str(domain.numa_node)


def _numbers(values: Iterable[int]) -> str:
    return ",".join(map(str, values))


def _disk(devices: ET.Element, path: str, number: int, io: str) -> None:
    """A raw disk. The guest knows it by its role, which no restart changes: root, data1, data2."""
    disk = _add(devices, "disk", type="block", device="disk")
    driver = _add(disk, "driver", name="qemu", type="raw", cache="none", io=io, discard="unmap")
    driver.set("iothread", str(number + 1))
    _add(disk, "source", dev=path)
    _add(disk, "target", dev=_virtio(number), bus="virtio")
    _add(disk, "serial", f"data{number}" if number else "root")
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


def _hostdev(devices: ET.Element, address: str, guest_bus: int) -> None:
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
    place = {"domain": "0x0000", "bus": f"0x{guest_bus:02x}", "slot": "0x00", "function": "0x0"}
    _add(device, "address", type="pci", **place)


def parse(xml: str) -> Description:
    """The content of a definition (rendered here or returned by libvirt); comparable to
    `describe`.
    """
    # Trusted text: libvirtd wrote it, as root on this host.
    root = ET.XML(xml)
    devices = root.find("devices")
    disks, seeds, hostdevs, nics, console, other = [], [], [], [], [], []
    roms, channels, buses, disk_io = [], [], [], []
    for device in devices if devices is not None else ():
        kind, flavour = device.tag, device.get("type", "")
        if kind == "disk" and flavour == "block":
            disks.append(_attribute(device, "source", "dev"))
            disk_io.append(_attribute(device, "driver", "io"))
        elif kind == "disk" and flavour == "file" and device.find("readonly") is not None:
            seeds.append(_attribute(device, "source", "file"))
        elif kind == "hostdev" and flavour == "pci":
            address = _address(device.find("source/address"))
            hostdevs.append(address)
            buses.append(int(_attribute(device, "address", "bus") or "0", 16))
            if _attribute(device, "rom", "bar") != "off" or device.find("rom[@file]") is not None:
                roms.append(address)
        elif kind == "interface" and flavour == "bridge":
            paths = (("mac", "address"), ("source", "bridge"), ("target", "dev"))
            nics.append([_attribute(device, tag, name) for tag, name in paths])
        elif kind == "serial" and flavour == "file":
            console.append(_attribute(device, "source", "path"))
        elif kind == "channel" and flavour == "unix":
            ends = (("source", "path"), ("target", "name"))
            channels.append([_attribute(device, tag, name) for tag, name in ends])
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
        "memory_nodes": _numbers(_host.numbers(_attribute(root, "numatune/memory", "nodeset"))),
        "topology": [
            int(_attribute(root, "cpu/topology", name) or "0")
            for name in ("sockets", "cores", "threads")
        ],
        "topoext": root.find(f"cpu/feature[@policy='require'][@name='{TOPOEXT}']") is not None,
        "cells": [
            [
                _numbers(_host.numbers(_attribute(cell, ".", "cpus"))),
                _mebibytes(cell, "memory"),
                node,
            ]
            for cell, node in zip_longest(
                root.findall("cpu/numa/cell"),
                [_attribute(memory, ".", "nodeset") for memory in root.findall("numatune/memnode")],
                fillvalue=ET.Element("missing"),
            )
        ],
        "emulator_cpus": _host.numbers(_attribute(root, "cputune/emulatorpin", "cpuset")),
        "firmware": root.findtext("os/loader", ""),
        "nvram": root.findtext("os/nvram", ""),
        "hugepages": root.find("memoryBacking/hugepages") is not None,
        "nested": not set(_NESTED) <= {feature.get("name") for feature in features},
        "hostdevs": hostdevs,
        "buses": buses,
        "option_roms": roms,
        "disks": disks,
        "disk_io": disk_io,
        "seed": " ".join(seeds),
        "nics": nics,
        "console": console,
        "channels": channels,
        "qemu_arguments": [line.get("value", "") for line in lines],
        "other_devices": other,
    }


def differences(want: Description, actual: Description) -> dict[str, tuple[Any, Any]]:
    """Required and actual value of each different field."""
    return {key: (want[key], actual[key]) for key in want if want[key] != actual[key]}


def _channel_name(name: str) -> str:
    return f"org.gpuaas.{name}.0"


def _harmless(device: ET.Element) -> bool:
    if device.tag == "memballoon":
        return device.get("model") == "none"
    return device.tag == "rng" and device.findtext("backend") == "/dev/urandom"


def _address(element: ET.Element | None) -> str:
    if element is None:
        return ""
    parts = [int(element.get(key, "0"), 16) for key in ("domain", "bus", "slot", "function")]
    return "{:04x}:{:02x}:{:02x}.{:x}".format(*parts)


def _mebibytes(element: ET.Element | None, attribute: str = "") -> int:
    if element is None:
        return 0
    scale = {"KiB": 1024, "MiB": 1024**2, "GiB": 1024**3, "bytes": 1, "b": 1}
    text = element.get(attribute) if attribute else element.text
    return int(text or "0") * scale[element.get("unit", "KiB")] // 1024**2


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
    layout = options.get("layout") or {}
    cells = [
        Cell(
            numa_node=cell["numa_node"],
            vcpus=cell["vcpus"],
            memory_mib=cell["memory_mib"],
            cpus=tuple(cell["cpus"]),
            devices=tuple(cell["devices"]),
        )
        for cell in listed("cells")
    ]
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
            # A single part needs no NUMA node of its own in the guest.
            cells=tuple(cells) if len(cells) > 1 else (),
            threads=layout.get("threads") or 1,
            topoext=bool(layout.get("topoext")),
            emulator_cpus=tuple(layout.get("emulator_cpus") or ()),
            switches=tuple(map(tuple, layout.get("switches") or ())),
            disk_io=layout.get("disk_io") or "native",
            seed_path=options.get("seed_path") or "",
            qemu_arguments=tuple(listed("qemu_arguments")),
        )
    )

"""Firmware of this machine and its settings, to be compared before and after a tenancy.

A tenant with root can change all of it, and a new installation repairs none of it. Each part is a
section of names and values. A value that cannot be read is named with the reason, and does not
count as unchanged.
"""

from __future__ import annotations

import csv
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ansible_collections.gpuaas.slice.plugins.module_utils.core import _command, _host, _pci
from ansible_collections.gpuaas.slice.plugins.module_utils.core._errors import Refusal
from ansible_collections.gpuaas.slice.plugins.module_utils.disk import (
    _content,
    _disk,
    _partitions,
    _usage,
)
from ansible_collections.gpuaas.slice.plugins.module_utils.topology import _efi_variables

Section = dict[str, str]
Unreadable = dict[str, str]

# Most entries of a section, and characters of a name or value: a machine has far fewer.
MOST, LONGEST = 256, 300
_DMI = "/sys/class/dmi/id"
_BIOS = (
    *("bios_vendor", "bios_version", "bios_date", "bios_release", "ec_firmware_release"),
    *("product_name", "board_name", "board_version"),
)
_NETWORK_CLASS = "02"
_NVIDIA, _NVIDIA_DRIVER = "10de:", "/proc/driver/nvidia/version"
# BlueField-2 and BlueField-3, whose Arm cores a host can take over.
_DPUS = ("15b3:a2d6", "15b3:a2dc", "15b3:a2df")
_DPU_SETTINGS = (
    *("INTERNAL_CPU_MODEL", "INTERNAL_CPU_OFFLOAD_ENGINE", "INTERNAL_CPU_PAGE_SUPPLIER"),
    *("INTERNAL_CPU_ESWITCH_MANAGER", "INTERNAL_CPU_IB_VPORT0", "SECURE_BOOT"),
)
_DPU_TOOLS = ("mlxconfig", "mstconfig")
_IPMI = "/dev/ipmi0"
_GPU_FIELDS = "uuid,vbios_version,inforom.image,inforom.ecc,ecc.mode.current,mig.mode.current"


def take(profile: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """sections: values by section and name. unreadable: reasons by section, or `section name`.

    A section is left out when the profile calls `firmware_<section>` not applicable.
    """
    sections: dict[str, Section] = {}
    unreadable: Unreadable = {}
    devices = _pci.devices()
    readers: dict[str, Callable[[], tuple[Section, Unreadable]]] = {
        "bios": _bios,
        "uefi": _uefi,
        "nvme": _nvme,
        "adapters": lambda: _adapters(devices),
        "dpu": lambda: _dpus(devices),
        "gpu": lambda: _gpus(profile["gpu"]["ids"]),
        "bmc": _bmc,
    }
    for name, reader in readers.items():
        if f"firmware_{name}" in profile.get("not_applicable", ()):
            continue
        try:
            section, failed = reader()
        except Refusal as refusal:
            unreadable[name] = _cut(refusal.found)
        except (OSError, ValueError) as broken:
            unreadable[name] = _cut(str(broken) or type(broken).__name__)
        else:
            kept = dict(sorted(section.items())[:MOST])
            sections[name] = {_cut(key): _cut(text) for key, text in kept.items()}
            if len(section) > MOST:
                failed = {**failed, "": f"{len(section) - MOST} more entries"}
            for key, reason in list(failed.items())[:MOST]:
                unreadable[_cut(f"{name} {key}".strip())] = _cut(reason)
    return {"sections": sections, "unreadable": unreadable}


def own_partition() -> str:
    """GUID of the partition with the host's boot loader; "" when it is not on a plain partition."""
    mounts = {mount.point: mount for mount in _usage.mounts()}
    mount = next((mounts[at] for at in ("/boot/efi", "/efi") if at in mounts), None)
    name = _usage.node_name(mount.source) if mount is not None else ""
    number = _content.attribute(name, "partition") if name else None
    if number is None:
        return ""
    whole = _host.path(f"/sys/class/block/{name}").resolve().parent.name
    size = int(_content.attribute(whole, "size") or 0) * 512
    by_number = dict(partition_guids(whole, size))
    return by_number.get(int(number), "")


def partition_guids(kernel_name: str, size: int) -> set[tuple[int, str]]:
    """Number and GUID of the partitions in the tables on a disk."""
    descriptor = os.open(_disk.node(kernel_name), os.O_RDONLY | os.O_CLOEXEC)
    try:
        return _partitions.guids(descriptor, size)
    finally:
        os.close(descriptor)


def _bios() -> tuple[Section, Unreadable]:
    values = {name: _host.read(f"{_DMI}/{name}") for name in _BIOS}
    section = {name: text for name, text in values.items() if text is not None}
    if "bios_version" not in section:
        raise ValueError(f"no bios_version in {_DMI}")
    return section, {}


def _uefi() -> tuple[Section, Unreadable]:
    data, unreadable = _efi_variables.variables()
    esp = own_partition()
    return {name: _efi_variables.describe(name, raw, esp) for name, raw in data.items()}, unreadable


def _nvme() -> tuple[Section, Unreadable]:
    section: Section = {}
    unreadable: Unreadable = {}
    for name in _host.listed("/sys/class/nvme"):
        serial, model, firmware = (
            _host.read(f"/sys/class/nvme/{name}/{field}")
            for field in ("serial", "model", "firmware_rev")
        )
        if not serial or firmware is None:
            unreadable[name] = "no serial number or firmware revision"
            continue
        # Two controllers may claim the same serial number.
        section[serial if serial not in section else f"{serial} {name}"] = f"{model} {firmware}"
    return section, unreadable


def _adapters(devices: list[_pci.Device]) -> tuple[Section, Unreadable]:
    """Firmware and identity of each network function, by devlink; by its driver without devlink."""
    cards = [d for d in devices if d.class_code.startswith(_NETWORK_CLASS) and not d.physfn]
    if not cards:
        return {}, {}
    shown = json.loads(_command.run(["devlink", "-j", "dev", "info"]).out or "{}")
    infos = shown.get("info", {}) if isinstance(shown, dict) else {}
    section: Section = {}
    unreadable: Unreadable = {}
    for card in cards:
        info = infos.get(f"pci/{card.address}") if isinstance(infos, dict) else None
        values = dict(_flat(info)) if isinstance(info, dict) else _by_driver(card.address)
        if not values:
            unreadable[card.address] = f"driver {card.driver or 'none'} shows no firmware"
        section |= {f"{card.address} {key}": text for key, text in values.items()}
    return section, unreadable


def _flat(info: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, str]]:
    for key, value in info.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{before}{key}.")
        elif key != "driver":
            yield f"{before}{key}", str(value)


def _by_driver(address: str) -> Section:
    function = f"{_pci.DEVICES}/{address}"
    # A virtio function has its interface a level below.
    folders = [function, *(f"{function}/{name}" for name in _host.matching(function, "virtio*"))]
    for interface in sorted(name for at in folders for name in _host.listed(f"{at}/net")):
        rows = _command.run(["ethtool", "-i", interface]).out.splitlines()
        fields = {key: text.strip() for key, _colon, text in (row.partition(":") for row in rows)}
        return {
            key: fields[key]
            for key in ("firmware-version", "expansion-rom-version")
            if key in fields
        }
    return {}


def _dpus(devices: list[_pci.Device]) -> tuple[Section, Unreadable]:
    """Settings that decide whether the Arm cores of a BlueField own its switch."""
    section: Section = {}
    unreadable: Unreadable = {}
    for card in (device for device in devices if device.id in _DPUS and not device.physfn):
        tool = next((name for name in _DPU_TOOLS if _installed(name)), "")
        if not tool:
            raise ValueError(f"none of {', '.join(_DPU_TOOLS)} is installed")
        out = _command.run([tool, "-d", card.address, "query"], timeout=120).out
        fields = (line.split() for line in out.splitlines())
        values = {row[0]: row[-1] for row in fields if len(row) > 1 and row[0] in _DPU_SETTINGS}
        if not values:
            unreadable[card.address] = f"{tool} shows none of its settings"
        section |= {f"{card.address} {key}": text for key, text in values.items()}
    return section, unreadable


def _installed(program: str) -> bool:
    return any(_host.path(f"{place}/{program}").exists() for place in ("/usr/bin", "/usr/sbin"))


def _gpus(ids: list[str]) -> tuple[Section, Unreadable]:
    """Firmware of NVIDIA GPUs by their driver, which a slice host does not load."""
    if not any(gpu.startswith(_NVIDIA) for gpu in ids):
        return {}, {}
    # If the driver is not loaded, nvidia-smi would load it, and it may take GPUs of slices.
    if not _host.path(_NVIDIA_DRIVER).exists():
        raise ValueError("the NVIDIA driver is not loaded")
    names = _GPU_FIELDS.split(",")
    query = f"--query-gpu=pci.bus_id,{_GPU_FIELDS}"
    out = _command.run(["nvidia-smi", query, "--format=csv,noheader"], timeout=120).out
    section: Section = {}
    for row in csv.reader(out.splitlines(), skipinitialspace=True):
        if len(row) == len(names) + 1:
            values = zip(names, row[1:], strict=True)
            section |= {f"{row[0]} {key}": text for key, text in values}
    if not section:
        raise ValueError("nvidia-smi lists no GPU")
    return section, {}


def _bmc() -> tuple[Section, Unreadable]:
    """Firmware, users and boot override of the BMC, through the host's own interface to it."""
    if not _host.path(_IPMI).exists():
        raise ValueError(f"no {_IPMI}")
    section: Section = {}
    for line in _command.run(["ipmitool", "mc", "info"]).out.splitlines():
        key, _colon, text = line.partition(":")
        if key.strip() in ("Firmware Revision", "Manufacturer ID", "Product ID"):
            section[key.strip()] = text.strip()
    for row in csv.reader(_command.run(["ipmitool", "-c", "user", "list", "1"]).out.splitlines()):
        if len(row) >= 6 and row[0].isdigit():
            section[f"user {row[0]}"] = ",".join(row[1:])
    override = _command.run(["ipmitool", "chassis", "bootparam", "get", "5"]).out
    parameter = re.search(r"Boot parameter data:\s*([0-9a-fA-F]+)", override)
    if not section or parameter is None:
        raise ValueError("ipmitool shows no firmware revision or no boot parameter")
    return {**section, "boot override": parameter[1]}, {}


def _cut(text: str) -> str:
    return _host.abridged(text, LONGEST)

"""PCI functions of this host, from sysfs: identity, driver and IOMMU group.

Entries of /sys/bus/pci/devices are symbolic links on every real kernel; the code does not depend on
it.
"""

from __future__ import annotations

import errno
import os
import re
import socket
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ansible_collections.gpuaas.slice.plugins.module_utils.core import _bounded, _host
from ansible_collections.gpuaas.slice.plugins.module_utils.core._errors import Refusal

DEVICES = "/sys/bus/pci/devices"
GROUPS = "/sys/kernel/iommu_groups"
VFIO = "vfio-pci"

_ADDRESS = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[01][0-9a-f]\.[0-7]")
_STEP = re.compile(r"pci[0-9a-f]{4,8}:[0-9a-f]{2}|[0-9a-f]{4,8}:[0-9a-f]{2}:[01][0-9a-f]\.[0-7]")
_BRIDGE_CLASS = "0604"
LINKS = INFINIBAND, ETHERNET = "infiniband", "ethernet"
# PCI classes, and ARPHRD_ETHER and ARPHRD_INFINIBAND as /sys/class/net/*/type shows them.
_LINK_CLASSES = {"0200": ETHERNET, "0207": INFINIBAND}
_LINK_TYPES = {"1": ETHERNET, "32": INFINIBAND}
# A device that is well answers within microseconds.
ANSWER_S = 5.0


@dataclass(frozen=True)
class Device:
    """A PCI function.

    vendor, device: four hex digits. class_code: six hex digits. driver, driver_override, physfn: ""
    when absent. iommu_group: None without an IOMMU. numa_node: -1 when the platform does not report
    it.
    """

    address: str
    vendor: str
    device: str
    class_code: str
    driver: str
    iommu_group: int | None
    numa_node: int
    physfn: str
    sriov_totalvfs: int
    sriov_numvfs: int
    driver_override: str

    @property
    def id(self) -> str:
        """`vendor:device`, as profiles and lspci write it."""
        return f"{self.vendor}:{self.device}"

    @property
    def is_bridge(self) -> bool:
        """PCI-to-PCI bridges stay with their driver: VFIO allows them in a group."""
        return self.class_code.startswith(_BRIDGE_CLASS)

    @property
    def slot(self) -> str:
        """Domain, bus and device, which all functions of a card share."""
        return self.address.rpartition(".")[0]


def devices() -> list[Device]:
    """Every PCI function, by address."""
    folder = _host.path(DEVICES)
    if not folder.is_dir():
        return []
    names = sorted(entry.name for entry in folder.iterdir())
    return [_load(name) for name in names if _ADDRESS.fullmatch(name)]


def is_address(text: str) -> bool:
    """Whether the text is a PCI address; a disk of NVMe over Fabrics has another kind."""
    return _ADDRESS.fullmatch(text) is not None


def present(address: str) -> bool:
    return _host.path(f"{DEVICES}/{_checked(address)}").is_dir()


def read(address: str) -> Device:
    """The function at `address`; refused with `device_missing` when it does not exist."""
    if not present(address):
        raise Refusal(
            "device_missing",
            expected=f"a PCI function at {address}",
            found="none",
            remedy="rediscover the node: the card moved or failed, or its functions are not made",
        )
    return _load(address)


def path(address: str) -> list[str]:
    """The bridges above a function, from the root complex down; shows how close two devices are."""
    real = _host.path(f"{DEVICES}/{address}").resolve()
    return [part for part in real.parent.parts if _STEP.fullmatch(part)]


def group(address: str) -> list[Device]:
    """Every function of the IOMMU group of `address`, itself included; [] without a group."""
    number = read(address).iommu_group
    if number is None:
        return []
    folder = _host.path(f"{GROUPS}/{number}/devices")
    names = sorted(entry.name for entry in folder.iterdir()) if folder.is_dir() else []
    return [_load(name) for name in names if _ADDRESS.fullmatch(name)]


def group_blockers(address: str) -> list[str]:
    """Reasons why a guest cannot get the group of `address`, a sentence each; [] when it can."""
    members = group(address)
    if not members:
        return [f"{address} is in no IOMMU group"]
    return [
        f"{member.address} ({member.id}) of IOMMU group {member.iommu_group}"
        f" is driven by {member.driver}"
        for member in members
        if not member.is_bridge and member.driver not in ("", VFIO)
    ]


def functions(address: str) -> list[str]:
    """Addresses of the virtual functions of a physical function, by index."""
    folder = f"{DEVICES}/{_checked(address)}"
    links = {
        int(name.removeprefix("virtfn")): _target(_host.path(f"{folder}/{name}"))
        for name in _host.matching(folder, "virtfn*")
        if name.removeprefix("virtfn").isdigit()
    }
    return [links[index] for index in sorted(links)]


def interfaces(address: str) -> list[str]:
    """Network interfaces of the function. Names change between boots, so read them every time."""
    folder = _host.path(f"{DEVICES}/{_checked(address)}/net")
    return sorted(entry.name for entry in folder.iterdir()) if folder.is_dir() else []


def link(address: str) -> str:
    """Link type of the function: `infiniband`, `ethernet`, or "" if unknown.

    Vendors use the same id for both, so the kernel's interface type counts. Before a driver has
    bound the function, its PCI class counts, which the card's firmware sets by the port's
    configuration.
    """
    for name in interfaces(address):
        kind = _LINK_TYPES.get(_host.read(f"/sys/class/net/{name}/type") or "")
        if kind:
            return kind
    return _LINK_CLASSES.get(read(address).class_code[:4], "")


def unlike_link(address: str, expected: str) -> str:
    """Reason why the function does not fit a fabric with link `expected`; "" when it may fit."""
    has = link(address)
    if has and has == expected:
        return ""
    shown = f"{address} is {has}" if has else f"{address} shows no link"
    return f"{shown}, the fabric is {expected}" if expected else f"{shown}; the profile names none"


def answers(address: str) -> bool:
    """Whether configuration space is readable: all ones mean a lost or sleeping (D3cold) device.

    The identity alone proves nothing: by the SR-IOV specification a virtual function has ones
    there, so command, status and class are read too. While a reset hangs, the kernel blocks every
    read of the device, so a read that takes longer than ANSWER_S counts as no answer.
    """
    name = _checked(address)
    try:
        head = _bounded.call(lambda: _head(name), deadline=ANSWER_S)
    except (OSError, _bounded.Overdue):
        return False
    return _is_answer(head)


def silent(addresses: Iterable[str]) -> set[str]:
    """Those of the functions that do not answer (`answers`), by one child process for all of them,
    because a child takes longer than all the reads.
    """
    names = sorted(map(_checked, addresses))
    try:
        heads = _bounded.call(lambda: {name: _head(name) for name in names}, deadline=ANSWER_S)
    except (OSError, _bounded.Overdue):
        # The others of a function that fails or hangs may answer.
        return {name for name in names if not answers(name)}
    return {name for name in names if not _is_answer(heads[name])}


def _is_answer(head: str) -> bool:
    return bool(bytes.fromhex(head).strip(b"\xff"))


def _head(address: str) -> str:
    """The first 16 bytes. Runs in a child process; for each device, one child reads at a time.

    A child that hangs in the read cannot be killed. Later children wait for its socket name, where
    they can be killed.
    """
    with socket.socket(socket.AF_UNIX) as turn:
        while True:
            try:
                turn.bind(f"\0gpuaas-pci-{address}")
                return configuration(address)[:16].hex()
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
            time.sleep(0.01)


def configuration(address: str) -> bytes:
    """The standard header of the configuration space. May hang: call it within `_bounded`."""
    with _host.path(f"{DEVICES}/{_checked(address)}/config").open("rb") as config:
        return config.read(64)


def pcie_link(address: str) -> dict[str, str]:
    """Current speed and width of the function's PCIe link; {} for conventional PCI."""
    folder = f"{DEVICES}/{_checked(address)}"
    speed, width = (_host.read(f"{folder}/current_link_{name}") for name in ("speed", "width"))
    return {"speed": speed, "width": width} if speed and width else {}


def override(address: str, driver: str) -> None:
    """Set the only driver that may take the function; "" removes the override. Binds nothing."""
    # The kernel clears the override on an empty line, not on an empty write.
    store(f"{DEVICES}/{_checked(address)}/driver_override", f"{driver}\n")


def unbind(address: str) -> None:
    """Unbind the function from its driver, if any. The caller has verified that it is
    not in use.
    """
    folder = f"{DEVICES}/{_checked(address)}/driver"
    if _host.path(folder).exists():
        store(f"{folder}/unbind", address)


def probe(address: str) -> None:
    """Let the kernel look for a driver of the function; it respects the override."""
    store("/sys/bus/pci/drivers_probe", _checked(address))


def store(absolute: str, value: str) -> None:
    """Write an attribute of sysfs or procfs in place, because those files cannot be replaced."""
    try:
        descriptor = os.open(_host.path(absolute), os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.write(descriptor, value.encode())
        finally:
            os.close(descriptor)
    except OSError as error:
        raise Refusal(
            "kernel_refused",
            expected=f"the kernel to take {value.strip()!r} in {absolute}",
            found=error.strerror or str(error),
            remedy="see the kernel log of the host for the reason",
        ) from error


def _load(address: str) -> Device:
    folder = f"{DEVICES}/{address}"
    number = _target(_host.path(f"{folder}/iommu_group"))
    return Device(
        address=address,
        vendor=_hex(folder, "vendor", 4),
        device=_hex(folder, "device", 4),
        class_code=_hex(folder, "class", 6),
        driver=_target(_host.path(f"{folder}/driver")),
        iommu_group=int(number) if number.isdigit() else None,
        numa_node=_number(folder, "numa_node", -1),
        physfn=_target(_host.path(f"{folder}/physfn")),
        sriov_totalvfs=_number(folder, "sriov_totalvfs", 0),
        sriov_numvfs=_number(folder, "sriov_numvfs", 0),
        driver_override=_override(folder),
    )


def _checked(address: str) -> str:
    # Addresses come from requests and become paths, so only valid addresses are accepted.
    if not _ADDRESS.fullmatch(address):
        raise Refusal(
            "pci_address_invalid",
            expected="a PCI address like 0000:43:00.0, in lower case",
            found=repr(address),
            remedy="pass the address that discovery shows",
        )
    return address


def _target(link: Path) -> str:
    """The last path component of the target of `link`, or ""; the target need not exist."""
    try:
        return link.readlink().name
    except OSError:
        return ""


def _hex(folder: str, name: str, digits: int) -> str:
    text = (_host.read(f"{folder}/{name}") or "").removeprefix("0x")
    return text.lower().zfill(digits)


def _number(folder: str, name: str, default: int) -> int:
    try:
        return int(_host.read(f"{folder}/{name}") or default)
    except ValueError:
        return default


def _override(folder: str) -> str:
    text = _host.read(f"{folder}/driver_override") or ""
    return "" if text == "(null)" else text

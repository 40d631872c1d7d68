"""Whole NVMe namespaces of this host, by an identity that survives reboots.

A disk's identity is `eui.<hex>`: its NGUID, or its EUI64 when it has no NGUID. The kernel uses the
same value in /dev/disk/by-id/nvme-eui.*. Kernel names change between boots and identify nothing.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ansible_collections.gpuaas.slice.plugins.module_utils.core import _host
from ansible_collections.gpuaas.slice.plugins.module_utils.core._errors import Refusal
from ansible_collections.gpuaas.slice.plugins.module_utils.disk import _device, _nvme_admin

BY_ID = "/dev/disk/by-id/nvme-eui."
# nvme0n1, but neither the partition nvme0n1p1 nor nvme0c1n1, a single path of a multipath
# namespace.
WHOLE = re.compile(r"nvme\d+n\d+")
# Boot RAID controllers (BOSS) appear as NVMe disks. Treat them as OS disks even when nothing on
# them is mounted.
BOOT_CARDS = ("DELLBOSS",)
_PATH_MEMBER = re.compile(r"nvme\d+c\d+n\d+")


def disk_identity(identifier: str) -> str:
    """The only spelling of a disk's identity: `eui.` and lower-case hexadecimal digits.

    identifier: the digits, with or without `eui.`, or a /dev/disk/by-id/nvme-eui.* path.
    """
    return f"eui.{identifier.removeprefix(BY_ID).lower().removeprefix('eui.')}"


def by_id_of(identity: str) -> str:
    """The disk's path below /dev/disk/by-id."""
    return f"{BY_ID}{identity.removeprefix('eui.')}"


@dataclass(frozen=True)
class Disk:
    """An NVMe namespace. by_id: its /dev/disk/by-id/nvme-eui.* path or "". devt: `major:minor`."""

    disk_identity: str
    by_id: str
    kernel_name: str
    serial: str
    eui: str
    nguid: str
    size_bytes: int
    model: str
    devt: str

    @property
    def label(self) -> str:
        """The disk in a message: its path and its identity."""
        return f"{self.by_id or self.kernel_name} ({self.disk_identity})"

    def is_known_as(self, identifier: str) -> bool:
        """Whether `identifier` (hex, with or without `eui.`) belongs to the disk."""
        identifiers = [self.disk_identity, self.eui, self.nguid]
        return disk_identity(identifier) in {disk_identity(name) for name in identifiers if name}


def disks() -> list[Disk]:
    """Every whole namespace, by kernel name, without the single paths of a multipath namespace."""
    links = _links()
    present = []
    for name in sorted(_names()):
        try:
            disk = _identified(name)
        except (OSError, Refusal):
            continue  # gone, silent or not a device: unusable
        by_id = next((link for link in links.get(name, []) if disk.is_known_as(link)), "")
        present.append(replace(disk, by_id=by_id))
    return present


def why_unknown(name: str) -> str:
    """Reason why the namespace with a kernel name is not in `disks()`; "" when it is."""
    try:
        _identified(name)
    except Refusal as refusal:
        return f"/dev/{name} is {refusal.found}, not {refusal.expected}"
    except OSError as silent:
        return f"/dev/{name}: {silent.strerror or silent}"
    return ""


def resolve(path: str) -> Disk:
    """The disk behind a by-id path or kernel name, identified by the device and not by the link."""
    name = _target(path)
    if _PATH_MEMBER.fullmatch(name):
        raise Refusal(
            "multipath_member",
            expected="a namespace such as nvme1n1",
            found=f"{path}, which is one path to a multipath namespace",
            remedy="use the /dev/disk/by-id/nvme-eui.* path",
        )
    if not WHOLE.fullmatch(name):
        raise Refusal(
            "not_a_whole_disk",
            expected="a whole NVMe namespace",
            found=f"{path} is {name}",
            remedy="use the /dev/disk/by-id/nvme-eui.* path of the whole disk",
        )
    disk = _answering(name, path)
    require_single(disk)
    if path.startswith(BY_ID):
        if not disk.is_known_as(path):
            raise mismatch(path, _digits(path), _digits(disk.disk_identity), "identifier")
        return replace(disk, by_id=path)
    by_id = next((link for link in _links().get(name, []) if disk.is_known_as(link)), "")
    return replace(disk, by_id=by_id)


def require_single(disk: Disk) -> None:
    """Refuse a disk whose identity another namespace of the host has too.

    Both may be the same namespace, reached through two controllers without the kernel's multipath.
    The kernel then keeps mounts, holders and exclusive opens for each of them alone, so a disk that
    looks unused may be the root disk. With multipath the paths are hidden behind one namespace.
    """
    twins = [name for name in sorted(_names()) if name != disk.kernel_name and _is_twin(name, disk)]
    if twins:
        raise Refusal(
            "duplicate_identity",
            expected=f"{disk.disk_identity} on {disk.kernel_name} alone",
            found=f"also on {', '.join(twins)}",
            remedy="load nvme_core with multipath=Y if these are paths to one namespace, or take"
            " the other disk out; nothing was changed",
        )


def _is_twin(name: str, disk: Disk) -> bool:
    """Whether another namespace is, or claims to be, the disk.

    The kernel's record decides, because it also exists for a path that no longer answers. Only a
    namespace without identifiers there is asked; if it is silent, the serial number and the
    namespace's number within its controllers decide.
    """
    nguid, eui = (_recorded(name, field) for field in ("nguid", "eui"))
    if nguid or eui:
        return _same(disk, nguid, eui)
    try:
        other = _identified(name)
    except (OSError, Refusal):
        place = _place(name)
        return all(place) and place == (disk.serial, _place(disk.kernel_name)[1])
    return _same(disk, other.nguid, other.eui)


def _same(disk: Disk, nguid: str, eui: str) -> bool:
    """Whether identifiers are the disk's. The EUI64 decides only if one of them has no NGUID."""
    if nguid and disk.nguid:
        return nguid == disk.nguid
    return bool(eui) and eui == disk.eui


def _recorded(name: str, field: str) -> str:
    """An identifier of a namespace in sysfs as hexadecimal digits; "" when absent or all zero."""
    text = _host.read(f"/sys/class/block/{name}/{field}") or ""
    digits = re.sub(r"[^0-9a-f]", "", text.lower())
    return digits if digits.strip("0") else ""


def _place(name: str) -> tuple[str, str]:
    """Serial number of a namespace's controller, and its number there; "" for what is unknown."""
    folder = f"/sys/class/block/{name}"
    return _host.read(f"{folder}/device/serial") or "", _host.read(f"{folder}/nsid") or ""


def _answering(name: str, path: str) -> Disk:
    """The disk of a kernel name; a Refusal if it does not identify itself."""
    try:
        return _identified(name)
    except FileNotFoundError as missing:
        raise _not_found(path) from missing
    except OSError as silent:
        raise Refusal(
            "device_not_answering",
            expected=f"{path} to open and identify itself",
            found=str(silent),
            remedy="look at the controller in the kernel log; replace the disk if it is dead",
        ) from silent


def of_slot(slot: Mapping[str, Any]) -> Disk:
    """The disk of a slot bundle; refused unless the device itself has the bundle's identity."""
    disk = resolve(str(slot["nvme_device"]))
    identifier, serial = str(slot.get("nvme_eui") or ""), str(slot.get("nvme_serial") or "")
    size = int(slot.get("nvme_size_bytes") or 0)
    require(disk, identifier=identifier, serial=serial, size=size)
    return disk


def require(disk: Disk, *, identifier: str = "", serial: str = "", size: int = 0) -> None:
    """Refuse a disk other than the approved disk; empty values are not compared."""
    named = disk.by_id or disk.kernel_name
    if identifier and not disk.is_known_as(identifier):
        raise mismatch(named, identifier, _digits(disk.disk_identity), "identifier")
    if serial and serial != disk.serial:
        raise mismatch(named, serial, disk.serial, "serial")
    if size and size != disk.size_bytes:
        raise mismatch(named, str(size), str(disk.size_bytes), "size")


def require_stable(path: str) -> None:
    """Refuse a name that may lead to another disk after the next boot."""
    if not path.startswith(BY_ID):
        raise Refusal(
            "kernel_name_not_allowed",
            expected=f"a path that starts with {BY_ID}",
            found=path,
            remedy="kernel names move between boots; name the disk by its identity",
        )


def excluded(disk: Disk, models: Iterable[str] = ()) -> list[Refusal]:
    """Reasons that exclude a disk of this model from slots: a boot card, or the profile's setting.

    models: parts of model names in addition to the known boot cards.
    """
    model = re.sub(r"[\s_-]", "", disk.model).upper()
    card = any(boot_card in model for boot_card in BOOT_CARDS)
    if not card and not any(named and named in disk.model for named in models):
        return []
    return [
        Refusal(
            "excluded_model",
            expected=f"a data disk as {disk.label}",
            found=f"model {disk.model!r}, {'a boot card' if card else 'excluded by the profile'}",
            remedy="choose another disk; the operating system lives on disks of this model",
        )
    ]


def mismatch(named: str, expected: str, found: str, what: str) -> Refusal:
    """The refusal of a device that is not the approved disk."""
    return Refusal(
        "identity_mismatch",
        expected=f"{what} {expected!r} on {named}",
        found=f"{found!r}, read from the device",
        remedy="discover the node again and approve the new device; do not use this disk",
    )


def of_descriptor(descriptor: int) -> Disk:
    """The disk behind an open descriptor, as the device identifies itself; by_id is left empty."""
    devt = _device.number(descriptor)
    identity = _nvme_admin.identify(descriptor)
    identifier = identity.nguid or identity.eui
    if not identifier:
        raise OSError("the namespace has neither NGUID nor EUI64")
    return Disk(
        disk_identity=disk_identity(identifier),
        by_id="",
        kernel_name=name_of(devt),
        serial=identity.serial,
        eui=identity.eui,
        nguid=identity.nguid,
        size_bytes=_device.size(descriptor),
        model=identity.model,
        devt=devt,
    )


def name_of(devt: str) -> str:
    """The kernel name of a device number, "" when sysfs does not have it."""
    link = _host.path(f"/sys/dev/block/{devt}")
    return link.readlink().name if link.is_symlink() else ""


def node(name: str) -> Path:
    """The device node of a kernel name."""
    return _host.path(f"/dev/{name}")


def pci_addresses(disk: Disk) -> list[str]:
    """The disk's PCI function, or several behind a multipath name."""
    parent = _host.path(f"/sys/class/block/{disk.kernel_name}/device").resolve()
    controllers = [parent]
    if not (parent / "address").is_file():
        entries = sorted(parent.iterdir()) if parent.is_dir() else []
        controllers = [entry for entry in entries if entry.name.startswith("nvme")]
    files = (controller / "address" for controller in controllers if controller.is_dir())
    return [address.read_text().strip() for address in files if address.is_file()]


def _identified(name: str) -> Disk:
    """Identify the device. Raises OSError when it does not answer, Refusal when it is no disk."""
    with _opened(name) as descriptor:
        return of_descriptor(descriptor)


@contextlib.contextmanager
def _opened(name: str) -> Iterator[int]:
    descriptor = os.open(node(name), os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _names() -> list[str]:
    folder = _host.path("/sys/block")
    names = [entry.name for entry in folder.iterdir()] if folder.is_dir() else []
    return [name for name in names if WHOLE.fullmatch(name)]


def _links() -> dict[str, list[str]]:
    """by-id paths by kernel name."""
    links: dict[str, list[str]] = {}
    for name in _host.matching("/dev/disk/by-id", "nvme-eui.*"):
        link = f"/dev/disk/by-id/{name}"
        if _host.path(link).is_symlink():
            links.setdefault(_host.path(link).readlink().name, []).append(link)
    return links


def _target(path: str) -> str:
    """The kernel name that a path leads to; follows links without leaving the host's root."""
    name = path if path.startswith("/") else f"/dev/{path}"
    for _level in range(8):
        link = _host.path(name)
        if not link.is_symlink():
            break
        name = os.path.normpath(Path(name).parent / link.readlink())
    if not _host.path(name).exists():
        raise _not_found(path)
    return Path(name).name


def _digits(identifier: str) -> str:
    return disk_identity(identifier).removeprefix("eui.")


def _not_found(path: str) -> Refusal:
    return Refusal(
        "device_not_found",
        expected=f"the NVMe namespace {path}",
        found="no such device",
        remedy="discover the node again; the disk may have been pulled or renamed",
    )

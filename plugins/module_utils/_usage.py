"""Who uses a disk: mounts, swap, holders, open files, and what is written on it.

Asking whether the *disk* is mounted says no while its partition is mounted, so every look goes over
the disk, its partitions and what is stacked on them.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from ansible_collections.gpuaas.slice.plugins.module_utils import _disk, _host, _signature

# A disk that carries one of these is the host's own, whatever else is on it.
SYSTEM_MOUNTS = frozenset(
    {"/", "/boot", "/boot/efi", "/efi", "/usr", "/etc", "/var", "/var/log", "/var/lib", "/home"}
    | {"/opt", "/root"}
)
# udev opens a disk for a moment after every writer closed it.
_PASSING = ("systemd-udevd", "(udev-worker)", "udevd")


@dataclass(frozen=True)
class Mount:
    point: str
    devt: str
    source: str
    type: str


@dataclass(frozen=True)
class Usage:
    """What makes a disk unfit for destruction, by kind; all empty for a raw, unused disk.

    children: its partitions; they are no use by themselves. filesystems: type of signature by
    kernel name. openers: `pid:name` of programs other than QEMU that hold it open.
    """

    os_disk: bool = False
    mounts: list[str] = field(default_factory=list)
    children: list[str] = field(default_factory=list)
    swap: list[str] = field(default_factory=list)
    md: list[str] = field(default_factory=list)
    dm: list[str] = field(default_factory=list)
    lvm: list[str] = field(default_factory=list)
    holders: list[str] = field(default_factory=list)
    filesystems: dict[str, str] = field(default_factory=dict)
    qemu_pids: list[int] = field(default_factory=list)
    openers: list[str] = field(default_factory=list)

    def findings(self) -> list[tuple[str, str]]:
        """Every use as (refusal code, what was found); the gravest first."""
        kinds: tuple[tuple[str, str, Collection[object]], ...] = (
            ("os_disk", "a disk of the", ["operating system"] if self.os_disk else ()),
            ("qemu_holds_disk", "open in QEMU, process", self.qemu_pids),
            ("swap_in_use", "swap on", self.swap),
            ("md_member", "md array", self.md),
            ("lvm_member", "logical volume", self.lvm),
            ("dm_holder", "device-mapper device", self.dm),
            ("held", "holder", self.holders),
            ("mounted", "mounted on", self.mounts),
            ("held_open", "held open by", self.openers),
        )
        return [
            (code, f"{what} {', '.join(map(str, subjects))}")
            for code, what, subjects in kinds
            if subjects
        ]


@dataclass(frozen=True)
class Opener:
    pid: int
    name: str


def usage(disk: _disk.Disk) -> Usage:
    """The use of one disk."""
    return usages([disk])[disk.kernel_name]


def usages(disks: Sequence[_disk.Disk]) -> dict[str, Usage]:
    """The use of several disks by kernel name, with one look at mounts, swap and processes."""
    found = _claims(disks)
    return {
        disk.kernel_name: replace(found[disk.kernel_name], filesystems=signatures(disk))
        for disk in disks
    }


def claims(disk: _disk.Disk) -> Usage:
    """The same without what is written on the disk, so that nothing is opened to be asked."""
    return _claims([disk])[disk.kernel_name]


def written(filesystems: Mapping[str, str]) -> list[str]:
    """Signatures as plans and refusals name them."""
    return [f"{kind} on {name}" for name, kind in sorted(filesystems.items())]


def _claims(disks: Sequence[_disk.Disk]) -> dict[str, Usage]:
    family = {disk.kernel_name: [disk.kernel_name, *partitions(disk)] for disk in disks}
    numbers = {name: _number(name) for names in family.values() for name in names}
    table, swaps = mounts(), _swaps()
    held = openers({number for number in numbers.values() if number})
    system = _system_devices(table)
    found = {}
    for disk in disks:
        names = family[disk.kernel_name]
        own = {numbers[name] for name in names}
        stacked = {name: holders(name) for name in names}
        above = [holder for name in names for holder in stacked[name]]
        processes = [opener for number in own for opener in held.get(number, [])]
        found[disk.kernel_name] = Usage(
            os_disk=bool(system & set(names)),
            mounts=[m.point for m in table if m.devt in own or node_name(m.source) in names],
            children=names[1:],
            swap=[name for name in swaps if name in names],
            md=[name for name in above if name.startswith("md")],
            dm=[name for name in above if name.startswith("dm-") and not _is_lvm(name)],
            lvm=[name for name in above if name.startswith("dm-") and _is_lvm(name)],
            holders=[name for name in above if not name.startswith(("md", "dm-"))],
            qemu_pids=sorted({one.pid for one in processes if one.name.startswith("qemu")}),
            openers=sorted(
                {
                    f"{one.pid}:{one.name}"
                    for one in processes
                    if not one.name.startswith(("qemu", *_PASSING))
                }
            ),
        )
    return found


def partitions(disk: _disk.Disk) -> list[str]:
    """Kernel names of the disk's partitions, as the kernel sees them now."""
    folder = _host.path(f"/sys/class/block/{disk.kernel_name}")
    return sorted(entry.parent.name for entry in folder.glob("*/partition"))


def extents(disk: _disk.Disk) -> dict[str, tuple[int, int]]:
    """Start and length in bytes of the disk and of each partition, by kernel name."""
    found = {disk.kernel_name: (0, disk.size_bytes)}
    for name in partitions(disk):
        start = int(_host.read(f"/sys/class/block/{name}/start") or 0) * 512
        found[name] = (start, int(_host.read(f"/sys/class/block/{name}/size") or 0) * 512)
    return found


def signatures(disk: _disk.Disk, descriptor: int | None = None) -> dict[str, str]:
    """Type of what is written on the disk and on each partition, read past the page cache."""
    return {name: found[0].type for name, found in marks(disk, descriptor).items()}


def marks(disk: _disk.Disk, descriptor: int | None = None) -> dict[str, list[_signature.Signature]]:
    """Every signature of the disk and of each partition that has one, the telling one first.

    descriptor: the disk as it is held for direct I/O; without one its path is opened.
    """
    if descriptor is None:
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT
        opened = os.open(_disk.node(disk.kernel_name), flags)
        try:
            return marks(disk, opened)
        finally:
            os.close(opened)
    found = {
        name: _signature.found(descriptor, start, length)
        for name, (start, length) in extents(disk).items()
    }
    return {name: signs for name, signs in found.items() if signs}


def mounts() -> list[Mount]:
    """The host's mounts; the last one mounted last."""
    found = []
    for line in (_host.read("/proc/self/mountinfo") or "").splitlines():
        fields, _sep, rest = line.partition(" - ")
        _id, _parent, devt, _root, point, *_options = fields.split(" ")
        kind, source, *_options = rest.split(" ")
        found.append(Mount(unescape(point), devt, unescape(source), kind))
    return found


def holders(name: str) -> list[str]:
    """What is stacked on a device: kernel names, the layers above them included."""
    folder = _host.path(f"/sys/class/block/{name}/holders")
    direct = sorted(entry.name for entry in folder.iterdir()) if folder.is_dir() else []
    return [*direct, *(upper for one in direct for upper in holders(one))]


def openers(numbers: Collection[str]) -> dict[str, list[Opener]]:
    """Processes, other than this one, with an open file of these device numbers.

    By device number, because libvirt gives QEMU a /dev of its own: neither names nor file locks
    show through it.
    """
    wanted = {os.makedev(*map(int, number.split(":"))): number for number in numbers}
    found: dict[str, list[Opener]] = {}
    for process in _host.path("/proc").glob("[0-9]*"):
        if int(process.name) == os.getpid():
            continue
        for number in _open_devices(process, wanted):
            name = (_host.read(f"/proc/{process.name}/comm") or "?").strip()
            found.setdefault(number, []).append(Opener(int(process.name), name))
    return found


def node_name(source: str) -> str:
    """The kernel name behind /dev/…, followed through links; "" for anything else."""
    if not source.startswith("/dev/"):
        return ""
    for _level in range(8):
        link = _host.path(source)
        if not link.is_symlink():
            break
        source = os.path.normpath(Path(source).parent / link.readlink())
    return Path(source).name


def unescape(text: str) -> str:
    """Mount tables write space, tab, newline and backslash as three octal digits."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)


def _open_devices(process: Path, wanted: dict[int, str]) -> set[str]:
    found: set[str] = set()
    try:
        entries = list(os.scandir(process / "fd"))
    except OSError:
        return found  # The process ended, or is a kernel thread.
    for entry in entries:
        try:
            status = entry.stat()
        except OSError:
            continue
        if stat.S_ISBLK(status.st_mode) and status.st_rdev in wanted:
            found.add(wanted[status.st_rdev])
    return found


def _system_devices(table: Sequence[Mount]) -> set[str]:
    """Kernel names of everything below the host's own mounts."""
    found: set[str] = set()
    for mount in table:
        if mount.point in SYSTEM_MOUNTS:
            found |= _below(_disk.name_of(mount.devt) or node_name(mount.source))
    return found


def _below(name: str) -> set[str]:
    folder = _host.path(f"/sys/class/block/{name}/slaves")
    lower = [entry.name for entry in folder.iterdir()] if name and folder.is_dir() else []
    return {name, *(deeper for one in lower for deeper in _below(one))} if name else set()


def _swaps() -> list[str]:
    lines = (_host.read("/proc/swaps") or "").splitlines()[1:]
    return [node_name(unescape(line.split()[0])) for line in lines if line.strip()]


def _number(name: str) -> str:
    return _host.read(f"/sys/class/block/{name}/dev") or ""


def _is_lvm(name: str) -> bool:
    return (_host.read(f"/sys/class/block/{name}/dm/uuid") or "").startswith("LVM-")

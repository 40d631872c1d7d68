"""Usage of a disk: mounts, swap, holders, open files, and its content.

The *disk* itself is not mounted while its partition is. Every check therefore covers the disk, its
partitions and the devices stacked on them.
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
import stat
import struct
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from ansible_collections.gpuaas.slice.plugins.module_utils.core import _host
from ansible_collections.gpuaas.slice.plugins.module_utils.core._errors import Refusal
from ansible_collections.gpuaas.slice.plugins.module_utils.disk import _content, _disk

partitions = _content.partitions
extents = _content.extents
known_extents = _content.known_extents
signatures = _content.signatures
marks = _content.marks

# A disk with one of these mount points, or a mount point below, is the host's own, whatever else is
# on it: /var holds this collection's ledger, libvirt's images and other services' data.
_SYSTEM_TREES = (
    *("/bin", "/boot", "/dev", "/efi", "/etc", "/lib", "/lib64", "/opt", "/proc", "/root", "/run"),
    *("/sbin", "/sys", "/usr", "/var"),
)
_SYSTEM_POINTS = frozenset({"/", *(f"/{name}" for name in ("home", "srv", "tmp")), *_SYSTEM_TREES})
# Mount points that a machine boots and runs from.
BOOT_POINTS = frozenset({"/", "/boot", "/boot/efi", "/boot/firmware", "/efi"})
# Folders with the state of this collection and of libvirt. Links in their place are followed.
_OWN_STATE = (
    *(_host.STATE_DIRECTORY, "/etc/gpuaas", "/var/log/gpuaas"),
    *("/etc/libvirt", "/var/lib/libvirt"),
)
_MOUNTS = "/proc/self/mountinfo"
# <fcntl.h>, and struct statx of <linux/stat.h>: the mode is at byte 28, the device at byte 128.
_AT_FDCWD, _AT_STATX_DONT_SYNC, _STATX_BYTES = -100, 0x4000, 256
_LIBC = ctypes.CDLL(None)
# udev opens a disk for a moment after every writer closed it.
_PASSING = ("systemd-udevd", "(udev-worker)", "udevd")


@dataclass(frozen=True)
class Mount:
    """point, source, root: printable forms. place, origin: exact bytes of point and source, for
    `umount` and `mount`. options: kernel options only.
    """

    point: str
    devt: str
    source: str
    type: str
    root: str
    options: str
    place: str
    origin: str


@dataclass(frozen=True)
class Usage:
    """Uses that make a disk unfit for destruction, by kind; all empty for a raw, unused disk.

    system: operating system mounts from it. children: its partitions; they are no use by
    themselves. swap: kernel names, or paths of swap files. btrfs: other devices of a mounted
    volume. zfs: imported pools. filesystems: type of signature by kernel name. signatures: as an
    approval names them. openers: `pid:name` of programs other than QEMU that hold it open.
    """

    os_disk: bool = False
    system: list[str] = field(default_factory=list)
    mounts: list[str] = field(default_factory=list)
    children: list[str] = field(default_factory=list)
    swap: list[str] = field(default_factory=list)
    md: list[str] = field(default_factory=list)
    dm: list[str] = field(default_factory=list)
    lvm: list[str] = field(default_factory=list)
    btrfs: list[str] = field(default_factory=list)
    zfs: list[str] = field(default_factory=list)
    holders: list[str] = field(default_factory=list)
    filesystems: dict[str, str] = field(default_factory=dict)
    signatures: list[str] = field(default_factory=list)
    qemu_pids: list[int] = field(default_factory=list)
    openers: list[str] = field(default_factory=list)

    def findings(self) -> list[tuple[str, str]]:
        """Every use as (refusal code, description); the gravest first."""
        system = ["operating system", *(f"mounted on {point}" for point in self.system)]
        kinds: tuple[tuple[str, str, Collection[object]], ...] = (
            ("os_disk", "a disk of the", system if self.os_disk else ()),
            ("qemu_holds_disk", "open in QEMU, process", self.qemu_pids),
            ("swap_in_use", "swap on", self.swap),
            ("md_member", "md array", self.md),
            ("lvm_member", "logical volume", self.lvm),
            ("dm_holder", "device-mapper device", self.dm),
            ("btrfs_member", "part of a mounted btrfs volume, with", self.btrfs),
            ("zfs_pool", "in an imported ZFS pool (`zpool export` it):", self.zfs),
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
    """The use of a disk."""
    return usages([disk])[disk.kernel_name]


def usages(disks: Sequence[_disk.Disk]) -> dict[str, Usage]:
    """The use of several disks by kernel name, with a single read of mounts, swap and processes."""
    by_name = _claims(disks)
    for disk in disks:
        kinds, named = _content.both(disk)
        used = replace(by_name[disk.kernel_name], filesystems=kinds, signatures=named)
        by_name[disk.kernel_name] = _pooled(disk, used) if "zfs_member" in kinds.values() else used
    return by_name


def claims(disk: _disk.Disk) -> Usage:
    """As `usage`, without the disk's signatures, so that no device is opened."""
    return _claims([disk])[disk.kernel_name]


def written(filesystems: Mapping[str, str]) -> list[str]:
    """Signatures as plans and refusals name them."""
    return [f"{kind} on {name}" for name, kind in sorted(filesystems.items())]


def _claims(disks: Sequence[_disk.Disk]) -> dict[str, Usage]:
    family = {disk.kernel_name: [disk.kernel_name, *partitions(disk)] for disk in disks}
    numbers = {name: _number(name) for names in family.values() for name in names}
    table, swaps, volumes = mounts(), _swaps(), _volumes()
    held = openers({number for number in numbers.values() if number})
    system = system_devices(table, volumes)
    by_name = {}
    for disk in disks:
        names = family[disk.kernel_name]
        disk_numbers = {numbers[name] for name in names}
        stacked = {name: holders(name) for name in names}
        above = [holder for name in names for holder in stacked[name]]
        processes = [opener for number in disk_numbers for opener in held.get(number, [])]
        spanned = {member for volume in volumes if volume & set(names) for member in volume}
        points = [mount.point for mount in mounted({*names, *spanned}, table)]
        by_name[disk.kernel_name] = Usage(
            os_disk=bool(set(system) & set(names)),
            system=sorted({point for name in names for point in system.get(name, ())}),
            mounts=points,
            children=names[1:],
            swap=[name for name in swaps if name in {*names, *above} or _on(name, points)],
            md=[name for name in above if name.startswith("md")],
            dm=[name for name in above if name.startswith("dm-") and not _is_lvm(name)],
            lvm=[name for name in above if name.startswith("dm-") and _is_lvm(name)],
            btrfs=sorted(spanned - set(names)),
            holders=[name for name in above if not name.startswith(("md", "dm-"))],
            qemu_pids=sorted(
                {opener.pid for opener in processes if opener.name.startswith("qemu")}
            ),
            openers=sorted(
                {
                    f"{opener.pid}:{opener.name}"
                    for opener in processes
                    if not opener.name.startswith(("qemu", *_PASSING))
                }
            ),
        )
    return by_name


def is_system(point: str) -> bool:
    """Whether a mount on `point` is the host's own."""
    trees = tuple(f"{tree}/" for tree in _SYSTEM_TREES)
    return point in _SYSTEM_POINTS or point.startswith(trees)


def system_devices(
    table: Sequence[Mount],
    volumes: Sequence[set[str]],
    points: Collection[str] | None = None,
) -> dict[str, set[str]]:
    """Kernel names of all devices below the host's own mounts, and the mounts from each.

    points: count only these mounts. By default, count all mounts of the host's own and those under
    the state of this collection or libvirt.
    """
    own_devices = _own_devices() if points is None else set()
    by_name: dict[str, set[str]] = {}
    for mount in table:
        counts = is_system(mount.point) if points is None else mount.point in points
        if counts or mount.devt in own_devices:
            for name in _below(_disk.name_of(mount.devt) or node_name(mount.source), volumes):
                by_name.setdefault(name, set()).add(mount.point)
    return by_name


def carries(disk: _disk.Disk, points: Collection[str]) -> list[str]:
    """The `points` that are mounted from the disk, through any intermediate devices."""
    by_name = system_devices(mounts(), _volumes(), points)
    names = [disk.kernel_name, *partitions(disk)]
    return sorted({point for name in names for point in by_name.get(name, ())})


def mounts() -> list[Mount]:
    """The host's mounts in mount order. Raises without the table, because every disk would look
    unmounted.

    A malformed row is skipped: otherwise any user who may mount could block the check of every
    disk. A mount hidden that way is still claimed in the kernel.
    """
    rows, parsed = _rows(_MOUNTS), []
    if rows is None:
        raise Refusal(
            "file_unreadable",
            expected=f"the kernel's table of mounts in {_MOUNTS}",
            found=f"{_MOUNTS}: No such file or directory",
            remedy="mount /proc on the host, then run again; nothing was changed",
        )
    for line in rows:
        fields, _sep, rest = line.partition(" - ")
        first, last = fields.split(" "), rest.split(" ")
        if len(first) < 6 or len(last) < 2:
            continue
        (devt, root, point, options), (kind, source) = first[2:6], last[:2]
        place, origin, inside = (unescape(name) for name in (point, source, root))
        parsed.append(
            Mount(
                point=_host.shown(place),
                devt=devt,
                source=_host.shown(origin),
                type=kind,
                root=_host.shown(inside),
                options=_host.shown(options),
                place=place,
                origin=origin,
            )
        )
    return parsed


def mounted(names: Collection[str], table: Sequence[Mount]) -> list[Mount]:
    """The mounts from the devices `names`, by device number or by source."""
    numbers = {number for name in names if (number := _number(name))}
    return [mount for mount in table if mount.devt in numbers or node_name(mount.source) in names]


def uppermost(table: Sequence[Mount], place: str) -> Mount | None:
    """The mount that a path to `place` reaches, and that `umount` would take."""
    return next((mount for mount in reversed(table) if mount.place == place), None)


def holders(name: str) -> list[str]:
    """Devices stacked on a device: kernel names of all layers above."""
    direct = _host.listed(f"/sys/class/block/{name}/holders")
    return [*direct, *(upper for holder in direct for upper in holders(holder))]


def openers(numbers: Collection[str]) -> dict[str, list[Opener]]:
    """Processes, other than this one, with an open file of these device numbers.

    By device number, because libvirt gives QEMU its own /dev, through which neither names nor file
    locks are visible.
    """
    by_rdev = {os.makedev(*map(int, number.split(":"))): number for number in numbers}
    buffer, own_pid = ctypes.create_string_buffer(_STATX_BYTES), os.getpid()
    held = {
        (pid, number)
        for pid, link in _host.descriptors()
        if pid != own_pid and (number := by_rdev.get(_device_of(link, buffer)))
    }
    by_number: dict[str, list[Opener]] = {}
    for pid, number in sorted(held):
        name = (_host.read(f"/proc/{pid}/comm") or "?").strip()
        by_number.setdefault(number, []).append(Opener(pid, name))
    return by_number


def node_name(source: str) -> str:
    """The kernel name behind /dev/…, followed through links; "" for anything else."""
    if not source.startswith("/dev/"):
        return ""
    try:
        for _level in range(8):
            link = _host.path(source)
            if not link.is_symlink():
                break
            source = os.path.normpath(Path(source).parent / link.readlink())
    except OSError:
        # A tenant can mount a tmpfs under any name, even a name too long for a path.
        return ""
    return Path(source).name


def unescape(text: str) -> str:
    """Mount tables write space, tab, newline and backslash as three octal digits."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)


def _device_of(link: str, buffer: ctypes.Array[ctypes.c_char]) -> int:
    """Number of the block device that is open there; -1 for any other file."""
    # stat(2) would ask the server of a network file system, and wait for one that is gone.
    if _LIBC.statx(_AT_FDCWD, os.fsencode(link), _AT_STATX_DONT_SYNC, 0, buffer):
        return -1
    (mode,) = struct.unpack_from("=H", buffer, 28)
    return os.makedev(*struct.unpack_from("=II", buffer, 128)) if stat.S_ISBLK(mode) else -1


def _below(name: str, volumes: Sequence[set[str]]) -> set[str]:
    """The device, the devices below it, and all devices that share a volume with them."""
    if not name:
        return set()
    members = {name, *(member for volume in volumes if name in volume for member in volume)}
    for slave in [deeper for peer in members for deeper in slaves(peer)]:
        members |= _below(slave, volumes)
    return members


def slaves(name: str) -> list[str]:
    """Devices directly below a device."""
    return _host.listed(f"/sys/class/block/{name}/slaves")


def _volumes() -> list[set[str]]:
    """Devices of each mounted btrfs volume: a mount names one of them, and none has a holder."""
    places = [f"/sys/fs/btrfs/{name}/devices" for name in _host.listed("/sys/fs/btrfs")]
    # A folder without devices is no volume, or was unmounted since the listing.
    return [volume for place in places if (volume := set(_host.listed(place)))]


def _pooled(disk: _disk.Disk, used: Usage) -> Usage:
    """The usage with the disk's imported ZFS pools, which neither mounts nor holders show.

    Any earlier user of the disk may have written the label, with any name in it. A label counts
    only if the device cannot be claimed, because ZFS claims every device of an imported pool.
    """
    folder = "/proc/spl/kstat/zfs"
    imported = {name for name in _host.listed(folder) if _host.path(f"{folder}/{name}").is_dir()}
    if not imported:
        return used
    pools = {pool for name, pool in _content.pools(disk).items() if is_claimed(name)}
    mine = sorted(imported if "?" in pools else imported & pools)
    points = sorted(
        mount.point
        for mount in mounts()
        if mount.type == "zfs" and is_system(mount.point) and mount.source.split("/")[0] in mine
    )
    return replace(
        used, zfs=mine, os_disk=used.os_disk or bool(points), system=[*used.system, *points]
    )


def is_claimed(name: str) -> bool:
    """Whether the kernel or an exclusive descriptor holds the device.

    An absent device is not held; an answer other than yes or no is an OSError.
    """
    try:
        os.close(os.open(_disk.node(name), os.O_RDONLY | os.O_EXCL | os.O_CLOEXEC))
    except OSError as refused:
        if refused.errno not in (errno.EBUSY, errno.ENOENT, errno.ENXIO):
            raise
        return refused.errno == errno.EBUSY
    return False


def _own_devices() -> set[str]:
    """Device numbers of the filesystems with the state of this collection and of libvirt."""
    devices = set()
    for place in _OWN_STATE:
        try:
            number = _host.path(place).stat().st_dev
        except FileNotFoundError:
            continue
        except OSError as broken:
            raise _host.unreadable(place, broken) from broken
        devices.add(f"{os.major(number)}:{os.minor(number)}")
    return devices


def _on(path: str, points: Collection[str]) -> bool:
    """Whether a file lies on any of the mounts."""
    return path.startswith(tuple(f"{point}/" for point in points))


def swap_place(path: str) -> str:
    """Exact bytes of a swap path from its printable form: for `swapoff`."""
    return next((place for place in _swap_places() if _host.shown(place) == path), path)


def _swaps() -> list[str]:
    return [node_name(place) or _host.shown(place) for place in _swap_places()]


def _swap_places() -> list[str]:
    # A kernel without swap has no such table.
    rows = _rows("/proc/swaps") or []
    return [unescape(re.split("[ \t]", line)[0]) for line in rows[1:]]


def _rows(absolute: str) -> list[str] | None:
    """Rows of a kernel table, which escapes newlines in names and no other line ends.

    Every byte is kept. None only if the table does not exist; an unreadable table is a Refusal.
    """
    table = _host.content(absolute)
    if table is None:
        return None
    return [row for row in table.decode(errors="surrogateescape").split("\n") if row]


def _number(name: str) -> str:
    return _content.attribute(name, "dev") or ""


def _is_lvm(name: str) -> bool:
    return (_host.read(f"/sys/class/block/{name}/dm/uuid") or "").startswith("LVM-")

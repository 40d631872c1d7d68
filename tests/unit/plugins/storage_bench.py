"""Disks for tests of storage code: files that answer as NVMe namespaces, and real loop devices."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import re
import struct
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.gpuaas.slice.plugins.module_utils.disk import (
    _device,
    _disk,
    _nvme_access,
    _nvme_admin,
    _usage,
)

MIB = 1 << 20


@dataclass
class Namespace:
    """Answers of a namespace, and its honesty.

    active, allocated: the controller's lists of namespaces; it refuses a list that is None.
    leaves: a discard or format reports success and leaves the bytes. refuses: NVMe status of a
    format. unsupported: ioctls that the driver does not know.
    """

    node: Path
    devt: str
    serial: str = "LABNVME0"
    eui: str = "5e0000000000a000"
    nguid: str = ""
    model: str = "QEMU NVMe Ctrl"
    oacs: int = 0x2
    fna: int = 0x0
    active: tuple[int, ...] = (1,)
    allocated: tuple[int, ...] | None = None
    leaves: set[str] = field(default_factory=set)
    refuses: int = 0
    unsupported: set[int] = field(default_factory=set)
    # Answers to a Reservation Report and to the Level 0 discovery of TCG devices, as recorded.
    reservations: bytes = b""
    security: bytes = b""
    formats: list[int] = field(default_factory=list)

    def identify(self, structure: int) -> bytes:
        data = bytearray(4096)
        if structure == 0:
            data[26], data[29] = 0x01, 0x00
            data[104:120] = bytes.fromhex(self.nguid or "00" * 16)
            data[120:128] = bytes.fromhex(self.eui or "00" * 8)
        elif structure == 1:
            data[4:24] = self.serial.encode().ljust(20)
            data[24:64] = self.model.encode().ljust(40)
            struct.pack_into("<H", data, 256, self.oacs)
            data[524] = self.fna
        else:
            listed = self.active if structure == 2 else self.allocated or ()
            struct.pack_into(f"<{len(listed)}I", data, 0, *listed)
        return bytes(data)


class Bench:
    """Host root with disks under /dev, /sys and /proc as on a host."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.namespaces: dict[tuple[int, int], Namespace] = {}
        self.mounts: list[str] = []
        for folder in ("dev/disk/by-id", "sys/block", "sys/class/block", "sys/dev/block", "proc"):
            (root / folder).mkdir(parents=True)
        self.swaps: list[str] = []
        # Kernel names of disks that ZFS or another part of the kernel has claimed.
        self.claimed: set[str] = set()
        self.mount("8:1", "/", "/dev/sda1")

    def disk(
        self, name: str = "nvme1n1", *, size: int = 48 * MIB, minor: int = 1, **identity: Any
    ) -> Namespace:
        node = self.root / "dev" / name
        node.touch()
        os.truncate(node, size)
        namespace = Namespace(node, f"259:{minor}", **identity)
        self._remember(namespace)
        self._sysfs(name, f"devices/virtual/{name}", namespace.devt, size)
        (self.root / "sys/block" / name).symlink_to(f"../devices/virtual/{name}")
        self.link(name, f"nvme-eui.{namespace.nguid or namespace.eui}")
        return namespace

    def partition(self, disk: str, start: int, size: int, *, minor: int, number: int = 1) -> str:
        name = f"{disk}p{number}"
        (self.root / "dev" / name).touch()
        self._sysfs(name, f"devices/virtual/{disk}/{name}", f"259:{minor}", size)
        folder = self.root / f"sys/devices/virtual/{disk}/{name}"
        (folder / "partition").write_text(f"{number}\n")
        (folder / "start").write_text(f"{start // 512}\n")
        return name

    def link(self, name: str, alias: str, folder: str = "by-id") -> str:
        place = self.root / "dev/disk" / folder / alias
        place.parent.mkdir(parents=True, exist_ok=True)
        place.unlink(missing_ok=True)
        place.symlink_to(f"../../{name}")
        return f"/dev/disk/{folder}/{alias}"

    def hold(self, name: str, holder: str, *, uuid: str = "") -> None:
        """Stack a device such as dm-0 or md127 on another."""
        self._sysfs(holder, f"devices/virtual/{holder}", f"253:{len(holder)}", MIB)
        (self.root / f"sys/class/block/{name}/holders/{holder}").mkdir(parents=True)
        (self.root / f"sys/class/block/{holder}/slaves/{name}").mkdir(parents=True)
        (self.root / f"sys/class/block/{holder}/dm").mkdir()
        (self.root / f"sys/class/block/{holder}/dm/uuid").write_text(uuid + "\n")

    def mount(self, devt: str, point: str, source: str, kind: str = "ext4") -> None:
        self.mounts.append(f"36 35 {devt} / {point} rw,noatime shared:1 - {kind} {source} rw")
        self._tables()

    def unmount(self, point: str) -> None:
        self.mounts = [line for line in self.mounts if line.split(" ")[4] != point]
        self._tables()

    def swap(self, path: str) -> None:
        self.swaps.append(f"{path} partition 1024 0 -2")
        self._tables()

    def write(self, name: str, offset: int, data: bytes) -> None:
        with (self.root / "dev" / name).open("r+b") as handle:
            handle.seek(offset)
            handle.write(data)

    def read(self, name: str, offset: int, length: int) -> bytes:
        with (self.root / "dev" / name).open("rb") as handle:
            handle.seek(offset)
            return handle.read(length)

    def namespace_of(self, descriptor: int) -> Namespace:
        status = os.fstat(descriptor)
        return self.namespaces[status.st_dev, status.st_ino]

    def call(self, descriptor: int, request: int, buffer: bytearray) -> int:
        """Answer an ioctl as kernel and device would."""
        namespace = self.namespace_of(descriptor)
        if request in namespace.unsupported:
            raise OSError(errno.EOPNOTSUPP, "not supported")
        if request == _device.BLKGETSIZE64:
            buffer[:] = struct.pack("=Q", namespace.node.stat().st_size)
        elif request in (_device.BLKDISCARD, _device.BLKZEROOUT):
            if request == _device.BLKZEROOUT or "discard" not in namespace.leaves:
                _erase(descriptor, *struct.unpack("=QQ", buffer))
        elif request == _nvme_admin.NVME_IOCTL_ID:
            return 1
        elif request == _nvme_admin.NVME_IOCTL_ADMIN_CMD:
            return admin(namespace, buffer, lambda: _erase(descriptor, 0, 0))
        elif request == _nvme_access.NVME_IOCTL_IO_CMD:
            assert buffer[0] == 0x0E, f"unscripted command {buffer[0]:#x}"
            return _answer(buffer, namespace.reservations)
        return 0

    def _remember(self, namespace: Namespace) -> None:
        status = namespace.node.stat()
        self.namespaces[status.st_dev, status.st_ino] = namespace

    def _sysfs(self, name: str, place: str, devt: str, size: int) -> None:
        folder = self.root / "sys" / place
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "holders").mkdir()
        (folder / "dev").write_text(devt + "\n")
        (folder / "size").write_text(f"{size // 512}\n")
        (self.root / "sys/class/block" / name).symlink_to(f"../../{place}")
        number = self.root / "sys/dev/block" / devt
        number.unlink(missing_ok=True)
        number.symlink_to(f"../../{place}")

    def _tables(self) -> None:
        tables = self.root / "proc/self"
        tables.mkdir(exist_ok=True)
        self._table("proc/self/mountinfo", self.mounts)
        self._table("proc/swaps", ["Filename Type Size Used Priority", *self.swaps])

    def _table(self, name: str, rows: list[str]) -> None:
        text = "".join(f"{row}\n" for row in rows)
        (self.root / name).write_bytes(text.encode(errors="surrogateescape"))


def admin(namespace: Namespace, buffer: bytearray, erase: Callable[[], None]) -> int:
    """Answer as the controller: Identify and Format NVM."""
    fields = struct.unpack("<BBHIIIQQIIIIIIIIII", buffer)
    opcode, address, length, cdw10 = fields[0], fields[7], fields[9], fields[10]
    if opcode == 0x06:
        if cdw10 == 0x10 and namespace.allocated is None:
            return 0x4002  # Invalid Field in Command
        ctypes.memmove(address, namespace.identify(cdw10), length)
        return 0
    if opcode == 0x82:
        return _answer(buffer, namespace.security)
    assert opcode == 0x80, f"unscripted admin command {opcode:#x}"
    namespace.formats.append(cdw10)
    if namespace.refuses:
        return namespace.refuses
    # Without a secure-erase setting a format erases nothing.
    if cdw10 >> 9 & 7 and "format" not in namespace.leaves:
        erase()
    return 0


def _answer(buffer: bytearray, data: bytes) -> int:
    """Copy an answer to the command's buffer; without one, the status Invalid Command Opcode."""
    fields = struct.unpack("<BBHIIIQQIIIIIIIIII", buffer)
    ctypes.memmove(fields[7], data, min(len(data), fields[9]))
    return 0 if data else 0x4001


def _erase(descriptor: int, start: int, length: int) -> None:
    status = os.fstat(descriptor)
    length = length or status.st_size
    # A second descriptor, because the descriptor under test is for aligned direct I/O only.
    with Path(f"/proc/self/fd/{descriptor}").open("r+b") as handle:
        handle.seek(start)
        while length > 0:
            length -= handle.write(bytes(min(length, 4 * MIB)))


@pytest.fixture
def bench(tree: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    """An empty host for disks that are files."""
    made = Bench(tree)
    real = _device.number

    def number(descriptor: int) -> str:
        status = os.fstat(descriptor)
        device = made.namespaces.get((status.st_dev, status.st_ino))
        return device.devt if device else real(descriptor)

    monkeypatch.setattr(_device, "call", made.call)
    monkeypatch.setattr(_device, "number", number)
    monkeypatch.setattr(_usage, "is_claimed", lambda name: name in made.claimed)
    return made


@dataclass
class Loop:
    """Real block device that reports itself as an NVMe namespace."""

    name: str
    device: Path
    namespace: Namespace

    def run(self, *argv: str) -> str:
        return subprocess.run(argv, check=True, capture_output=True, text=True).stdout


@pytest.fixture
def loop(tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Loop]:
    """A loop device of 64 MiB with a partition; kernel, locks and mounts are the real ones."""
    if not Path("/dev/loop-control").exists() or os.geteuid() != 0:
        pytest.fail("these tests attach a loop device: run them as root, after `modprobe loop`")
    image = tmp_path / "disk.img"
    image.touch()
    os.truncate(image, 64 * MIB)
    attach = ["losetup", "--find", "--show", "--partscan", str(image)]
    device = Path(subprocess.run(attach, check=True, capture_output=True, text=True).stdout.strip())
    namespace = Namespace(device, "")
    (tree / "dev").mkdir()
    for real in ("proc", "sys"):
        (tree / real).symlink_to(f"/{real}")
    os.mknod(tree / "dev" / device.name, 0o600 | 0o060000, device.stat().st_rdev)

    def call(descriptor: int, request: int, buffer: bytearray) -> int:
        if request == _nvme_admin.NVME_IOCTL_ID:
            return 1
        if request == _nvme_admin.NVME_IOCTL_ADMIN_CMD:
            return admin(namespace, buffer, lambda: None)
        return int(fcntl.ioctl(descriptor, request, buffer))

    monkeypatch.setattr(_device, "call", call)
    monkeypatch.setattr(_disk, "WHOLE", re.compile(r"loop\d+"))
    try:
        # BLKPG, because a kernel may lack a reader of partition tables.
        subprocess.run(["addpart", str(device), "1", "2048", "65536"], check=True)
        yield Loop(device.name, device, namespace)
    finally:
        subprocess.run(["losetup", "--detach", str(device)], check=True)

"""Proof, run inside a slice VM, that the passed-through GPU stand-in (QEMU's edu) works.

Run it as root. It prints a JSON document and exits 0 only if every part holds: nothing of an
earlier user is in the device, the registers answer (BAR), the device reads and writes memory (DMA),
and the kernel receives its interrupt message. It leaves data in the device, which its next user
must not find. `--remains ADDRESS` looks for such data on the host, in a device that no guest has.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import mmap
import os
import struct
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

DEVICES = Path("/sys/bus/pci/devices")
VENDOR, DEVICE = "0x1234", "0x11e8"

# Registers of the edu device (QEMU: docs/specs/edu.rst).
IDENTIFICATION, LIVENESS, FACTORIAL, STATUS = 0x00, 0x04, 0x08, 0x20
INTERRUPT_STATUS, INTERRUPT_RAISE, INTERRUPT_ACK = 0x24, 0x60, 0x64
DMA_SOURCE, DMA_TARGET, DMA_COUNT, DMA_COMMAND = 0x80, 0x88, 0x90, 0x98
DMA_RUN, DMA_TO_MEMORY = 0x1, 0x2
BUFFER = 0x40000
# Copies go half a page up, then half a page down, so that both ends of a copy lie in one page.
LENGTH = 2048
PAGE = 4096

COMPUTING = 0x1
# PCI configuration space: the command register, its bus-master bit, and the MSI capability.
COMMAND, BUS_MASTER = 0x04, 0x4
MSI, MSI_ENABLE = 0x05, 0x1
# A message to the first CPU, with a vector above those that Linux gives to devices first.
LOCAL_APIC, VECTOR = 0xFEE00000, 0xDB
# Even emulated twice over, the device answers within a second; 20 seconds mean a fault.
TIMEOUT = 20.0


class Edu:
    """The device's registers, through its first BAR. Each access has the register's full width."""

    def __init__(self, device: Path) -> None:
        descriptor = os.open(device / "resource0", os.O_RDWR | os.O_SYNC)
        self._map = mmap.mmap(descriptor, PAGE)
        os.close(descriptor)
        # struct would move single bytes, which the device ignores.
        self._words = memoryview(self._map).cast("I")
        self._longs = memoryview(self._map).cast("Q")

    def read(self, offset: int) -> int:
        """Read a 32-bit register."""
        return int(self._words[offset // 4])

    def write(self, offset: int, value: int) -> None:
        """Write a 32-bit register."""
        self._words[offset // 4] = value

    def write_long(self, offset: int, value: int) -> None:
        """Write a 64-bit register."""
        self._longs[offset // 8] = value


def wait(condition: Callable[[], bool], what: str) -> None:
    """Wait for the condition; raise RuntimeError after the time limit."""
    deadline = time.monotonic() + TIMEOUT
    while not condition():
        if time.monotonic() > deadline:
            raise RuntimeError(f"{what}: nothing within {TIMEOUT:.0f} s")
        time.sleep(0.01)


def bar(edu: Edu) -> dict[str, Any]:
    """Check that the device identifies itself, inverts a value and computes 10!."""
    identification = edu.read(IDENTIFICATION)
    edu.write(LIVENESS, 0x12345678)
    liveness = edu.read(LIVENESS)
    edu.write(FACTORIAL, 10)
    wait(lambda: not edu.read(STATUS) & COMPUTING, "factorial")
    factorial = edu.read(FACTORIAL)
    return {
        "ok": identification & 0xFF == 0xED and liveness == 0xEDCBA987 and factorial == 3628800,
        "identification": f"{identification:#010x}",
        "liveness": f"{liveness:#010x}",
        "factorial_of_10": factorial,
    }


def physical_address(virtual: int) -> int:
    """Return the page's physical address, which is the bus address because the VM has no IOMMU."""
    with Path("/proc/self/pagemap").open("rb", buffering=0) as pagemap:
        pagemap.seek(virtual // PAGE * 8)
        entry = int(struct.unpack("<Q", pagemap.read(8))[0])
    frame = entry & ((1 << 55) - 1)
    if not entry >> 63 or not frame:
        raise RuntimeError("the DMA page has no known physical address: run as root")
    return frame * PAGE


@contextlib.contextmanager
def locked_page() -> Iterator[tuple[mmap.mmap, int]]:
    """Return a page that stays in memory, and its virtual address."""
    page = mmap.mmap(-1, PAGE)
    anchor = ctypes.c_char.from_buffer(page)
    address = ctypes.addressof(anchor)
    page[:] = bytes(PAGE)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mlock(ctypes.c_void_p(address), ctypes.c_size_t(PAGE)):
        raise OSError(ctypes.get_errno(), "mlock")
    yield page, address


def copy(edu: Edu, source: int, target: int, command: int) -> None:
    """Run a DMA transfer."""
    edu.write_long(DMA_SOURCE, source)
    edu.write_long(DMA_TARGET, target)
    edu.write_long(DMA_COUNT, LENGTH)
    edu.write_long(DMA_COMMAND, command | DMA_RUN)
    wait(lambda: not edu.read(DMA_COMMAND) & DMA_RUN, "DMA")


def remains(edu: Edu) -> dict[str, Any]:
    """Look for data of an earlier user in the registers and in the whole buffer."""
    liveness, factorial = edu.read(LIVENESS), edu.read(FACTORIAL)
    with locked_page() as (page, address):
        page[:] = b"\xa5" * PAGE
        base = physical_address(address)
        for half in (0, LENGTH):
            copy(edu, BUFFER + half, base + half, DMA_TO_MEMORY)
        left = PAGE - bytes(page).count(0)
    return {
        # A device that computed 0! shows 1.
        "ok": left == 0 and liveness == 0 and factorial in (0, 1),
        "buffer_bytes": left,
        "liveness": f"{liveness:#010x}",
        "factorial": factorial,
    }


def dma(edu: Edu) -> dict[str, Any]:
    """Send random bytes to the device's buffer and check that they come back unchanged."""
    pattern = os.urandom(LENGTH)
    with locked_page() as (page, address):
        page[:LENGTH] = pattern
        base = physical_address(address)
        copy(edu, base, BUFFER, 0)
        copy(edu, base, BUFFER + LENGTH, 0)
        copy(edu, BUFFER, base + LENGTH, DMA_TO_MEMORY)
        back = bytes(page[LENGTH : 2 * LENGTH])
        stayed = physical_address(address) == base
    return {"ok": stayed and back == pattern, "bytes": LENGTH, "equal": back == pattern}


@contextlib.contextmanager
def configuration(device: Path) -> Iterator[BinaryIO]:
    """Open the device's configuration space."""
    with (device / "config").open("r+b", buffering=0) as config:
        yield config


def word(config: BinaryIO, offset: int) -> int:
    """Read a 16-bit word of configuration space."""
    config.seek(offset)
    return int(struct.unpack("<H", config.read(2))[0])


def store(config: BinaryIO, offset: int, layout: str, value: int) -> None:
    config.seek(offset)
    config.write(struct.pack(layout, value))


def capability(config: BinaryIO, identifier: int) -> int:
    """Return the offset of a PCI capability."""
    offset = word(config, 0x34) & 0xFC
    while offset:
        header = word(config, offset)
        if header & 0xFF == identifier:
            return offset
        offset = header >> 8 & 0xFC
    raise RuntimeError(f"the device has no capability {identifier:#x}")


def kernel_logged(messages: int, text: str) -> bool:
    """Return whether the kernel logged a line with `text` since `messages` was opened."""
    while True:
        try:
            if text in os.read(messages, 8192).decode(errors="replace"):
                return True
        except BlockingIOError:
            return False


def interrupt(edu: Edu, device: Path) -> dict[str, Any]:
    """Let the device send a message-signalled interrupt, and check that the VM's kernel receives
    it.

    The device has no driver, so the message carries an unused vector, and the kernel logs the
    arrival of exactly that vector. Pin interrupts are not used, because no real GPU uses them.
    """
    messages = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK)
    os.lseek(messages, 0, os.SEEK_END)
    line = f".{VECTOR} No irq handler for vector"
    with configuration(device) as config:
        msi = capability(config, MSI)
        store(config, msi + 4, "<I", LOCAL_APIC)
        store(config, msi + 8, "<I", 0)
        store(config, msi + 12, "<H", VECTOR)
        store(config, msi + 2, "<H", word(config, msi + 2) | MSI_ENABLE)
        before = kernel_logged(messages, line)
        edu.write(INTERRUPT_RAISE, 0x5E)
        status = edu.read(INTERRUPT_STATUS)
        deadline = time.monotonic() + TIMEOUT
        arrived = False
        while not arrived and time.monotonic() < deadline:
            arrived = kernel_logged(messages, line)
            time.sleep(0.05)
        edu.write(INTERRUPT_ACK, status)
        store(config, msi + 2, "<H", word(config, msi + 2) & ~MSI_ENABLE)
    os.close(messages)
    return {
        "ok": arrived and not before and status == 0x5E,
        "kind": "msi",
        "vector": VECTOR,
        "arrived": arrived,
        "status": f"{status:#x}",
    }


def started(device: Path) -> Edu:
    """Return the device with its memory and its DMA switched on."""
    (device / "enable").write_text("1")
    with configuration(device) as config:
        store(config, COMMAND, "<H", word(config, COMMAND) | BUS_MASTER)
    return Edu(device)


def look(device: Path) -> dict[str, Any]:
    """Look for remains on the host: without its driver, the device reaches memory as in a guest."""
    driver = (device / "driver").resolve()
    (driver / "unbind").write_text(device.name)
    try:
        return remains(started(device))
    finally:
        (device / "enable").write_text("0")
        (driver / "bind").write_text(device.name)


def prove(device: Path) -> dict[str, Any]:
    """Prove all parts for a device."""
    edu = started(device)
    parts: dict[str, Any] = {
        "remains": remains(edu),
        "bar": bar(edu),
        "dma": dma(edu),
        "interrupt": interrupt(edu, device),
    }
    ok = all(part["ok"] for part in parts.values())
    return {"address": device.name, "ok": ok, **parts}


def main() -> int:
    """Prove every stand-in of this machine; it is a failure if there is none."""
    if sys.argv[1:2] == ["--remains"]:
        print(json.dumps(look(DEVICES / sys.argv[2])))
        return 0
    devices = [
        device
        for device in sorted(DEVICES.iterdir())
        if (device / "vendor").read_text().strip() == VENDOR
        and (device / "device").read_text().strip() == DEVICE
    ]
    document: dict[str, Any] = {"gpus": []}
    try:
        document["gpus"] = [prove(device) for device in devices]
    except (OSError, RuntimeError) as error:
        document["error"] = str(error)
    gpus = document["gpus"]
    document["ok"] = bool(gpus) and all(gpu["ok"] for gpu in gpus)
    print(json.dumps(document))
    return 0 if document["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())

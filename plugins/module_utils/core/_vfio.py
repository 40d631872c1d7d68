"""Client of VFIO: the registers of a PCI function that is bound to vfio-pci, and DMA for it.

The kernel gives an IOMMU group to one process at a time. While it is open here, no guest has the
device, and none can get it. Opening enables the device's memory, which is off when it is read
through sysfs.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass

from ansible_collections.gpuaas.slice.plugins.module_utils.core import _host, _pci
from ansible_collections.gpuaas.slice.plugins.module_utils.core._errors import Refusal

# Requests of <linux/vfio.h>.
_SET_IOMMU, _GROUP_STATUS = 0x3B66, 0x3B67
_SET_CONTAINER, _DEVICE_FD, _REGION_INFO = 0x3B68, 0x3B6A, 0x3B6C
_MAP_DMA = 0x3B71
_TYPE1V2, _VIABLE, _READ_WRITE = 3, 1, 3
_BAR0, _CONFIG = 0, 7
_COMMAND, _MEMORY, _BUS_MASTER = 0x04, 0x2, 0x4


@dataclass(frozen=True)
class Function:
    """An open PCI function. id: `vendor:device`. offset: of its first BAR in the descriptor."""

    id: str
    container: int
    descriptor: int
    offset: int

    def read(self, register: int) -> int:
        """Read a 32-bit register of the first BAR."""
        return int(struct.unpack("<I", os.pread(self.descriptor, 4, self.offset + register))[0])

    def write(self, register: int, value: int) -> None:
        """Write a 32-bit register of the first BAR."""
        os.pwrite(self.descriptor, struct.pack("<I", value), self.offset + register)

    @contextlib.contextmanager
    def memory(self, address: int) -> Iterator[mmap.mmap]:
        """A page of this process that the device reaches by DMA at `address` while it is open."""
        _command(self.descriptor, _BUS_MASTER)
        page = mmap.mmap(-1, mmap.PAGESIZE)
        anchor = ctypes.c_char.from_buffer(page)
        virtual = ctypes.addressof(anchor)
        mapping = struct.pack("<IIQQQ", 32, _READ_WRITE, virtual, address, mmap.PAGESIZE)
        fcntl.ioctl(self.container, _MAP_DMA, mapping)
        yield page


@contextlib.contextmanager
def opened(address: str) -> Iterator[Function]:
    """The function at `address`, held by this process alone; refused while a guest has it."""
    device = _pci.read(address)
    with contextlib.ExitStack() as stack:
        container = _open("/dev/vfio/vfio", address, stack)
        group = _open(f"/dev/vfio/{device.iommu_group}", address, stack)
        status = bytearray(struct.pack("<II", 8, 0))
        fcntl.ioctl(group, _GROUP_STATUS, status)
        if not struct.unpack("<II", status)[1] & _VIABLE:
            raise _refuse(
                "group_not_viable", address, "an IOMMU group on vfio-pci alone", "another"
            )
        fcntl.ioctl(group, _SET_CONTAINER, bytearray(struct.pack("<i", container)))
        fcntl.ioctl(container, _SET_IOMMU, _TYPE1V2)
        # With a writable buffer the answer is the call's value, which is the new descriptor.
        descriptor = fcntl.ioctl(group, _DEVICE_FD, bytearray(f"{address}\0".encode()))
        stack.callback(os.close, descriptor)
        _command(descriptor, _MEMORY)
        yield Function(device.id, container, descriptor, _region(descriptor, _BAR0))


def _command(descriptor: int, bit: int) -> None:
    """Set a bit of the function's command register."""
    at = _region(descriptor, _CONFIG) + _COMMAND
    command = struct.unpack("<H", os.pread(descriptor, 2, at))[0]
    os.pwrite(descriptor, struct.pack("<H", command | bit), at)


def _region(descriptor: int, index: int) -> int:
    info = bytearray(struct.pack("<IIIIQQ", 32, 0, index, 0, 0, 0))
    fcntl.ioctl(descriptor, _REGION_INFO, info)
    return int(struct.unpack("<IIIIQQ", info)[5])


def _open(path: str, address: str, stack: contextlib.ExitStack) -> int:
    try:
        descriptor = os.open(_host.path(path), os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        if error.errno == errno.EBUSY:
            raise _refuse("device_in_use", address, "free", f"{path} is open elsewhere") from error
        raise _refuse("not_bound", address, f"in {path}", error.strerror or str(error)) from error
    stack.callback(os.close, descriptor)
    return descriptor


def _refuse(code: str, address: str, expected: str, found: str) -> Refusal:
    remedy = "verify that no machine has the device, then run bind_topology for this node"
    return Refusal(code, expected=f"{address} {expected}", found=found, remedy=remedy)

"""CUDA driver API through ctypes. It needs the driver only, no toolkit.

Not run on hardware yet; the kernel of `gpu.py` was assembled with NVIDIA's ptxas.
"""

from __future__ import annotations

import ctypes
from ctypes import byref, c_char_p, c_float, c_int, c_size_t, c_uint, c_ulonglong, c_void_p
from typing import Any

from reconciler.benchmark.harness.reasons import Failed, Unavailable

_NO_DEVICE = 100
_SYSTEM_NOT_READY = 802
_MULTIPROCESSORS = 16  # CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT
_STREAM = c_void_p(0)


class Gpu:
    """The first visible device with its primary context, as a context manager."""

    def __init__(self) -> None:
        try:
            self._library: Any = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise Unavailable(
                "cuda_driver_missing",
                expected="NVIDIA's driver library libcuda.so.1",
                found=str(error),
                remedy="install the NVIDIA driver on the machine that has the GPU",
            ) from error
        self._init()
        self._device = c_int()
        self.call("cuDeviceGet", byref(self._device), c_int(0))
        context = c_void_p()
        self.call("cuDevicePrimaryCtxRetain", byref(context), self._device)
        self.call("cuCtxSetCurrent", context)

    def __enter__(self) -> Gpu:
        return self

    def __exit__(self, *_error: object) -> None:
        self._library.cuDevicePrimaryCtxRelease_v2(self._device)

    def call(self, name: str, *arguments: Any) -> None:
        """Call a function of the driver; Failed `cuda_failed` for an error."""
        result = getattr(self._library, name)(*arguments)
        if result:
            raise Failed(
                "cuda_failed",
                expected=f"{name} to succeed",
                found=self._text(result),
                remedy="check the kernel log for Xid messages",
            )

    @property
    def name(self) -> str:
        text = ctypes.create_string_buffer(256)
        self.call("cuDeviceGetName", text, c_int(256), self._device)
        return text.value.decode(errors="replace")

    @property
    def driver(self) -> str:
        """The CUDA version that the driver supports."""
        number = c_int()
        self.call("cuDriverGetVersion", byref(number))
        return f"{number.value // 1000}.{number.value % 1000 // 10}"

    @property
    def multiprocessors(self) -> int:
        number = c_int()
        self.call("cuDeviceGetAttribute", byref(number), c_int(_MULTIPROCESSORS), self._device)
        return number.value

    def allocate(self, size: int) -> c_ulonglong:
        """Allocate device memory, which is freed with the process."""
        address = c_ulonglong()
        self.call("cuMemAlloc_v2", byref(address), c_size_t(size))
        return address

    def fill(self, address: c_ulonglong, value: int, size: int) -> None:
        self.call("cuMemsetD8_v2", address, ctypes.c_ubyte(value), c_size_t(size))

    def copy(self, target: c_ulonglong, source: c_ulonglong, size: int) -> None:
        """Queue a copy within the device."""
        self.call("cuMemcpyDtoDAsync_v2", target, source, c_size_t(size), _STREAM)

    def read(self, address: c_ulonglong, offset: int, size: int) -> bytes:
        text = ctypes.create_string_buffer(size)
        self.call("cuMemcpyDtoH_v2", text, c_ulonglong(address.value + offset), c_size_t(size))
        return text.raw

    def kernel(self, ptx: str, name: str) -> c_void_p:
        """Compile for this device."""
        module, function = c_void_p(), c_void_p()
        self.call("cuModuleLoadData", byref(module), c_char_p(ptx.encode()))
        self.call("cuModuleGetFunction", byref(function), module, c_char_p(name.encode()))
        return function

    def launch(self, kernel: c_void_p, blocks: int, threads: int, *arguments: Any) -> None:
        """Queue a kernel on a one-dimensional grid."""
        pointers = (c_void_p * len(arguments))(*(ctypes.addressof(each) for each in arguments))
        shape = [c_uint(each) for each in (blocks, 1, 1, threads, 1, 1, 0)]
        self.call("cuLaunchKernel", kernel, *shape, _STREAM, pointers, c_void_p(0))

    def seconds(self, queue: Any) -> float:
        """Duration of the operations that `queue()` queues, by the device's clock."""
        marks = [c_void_p(), c_void_p()]
        for mark in marks:
            self.call("cuEventCreate", byref(mark), c_uint(0))
        self.call("cuEventRecord", marks[0], _STREAM)
        queue()
        self.call("cuEventRecord", marks[1], _STREAM)
        self.call("cuEventSynchronize", marks[1])
        elapsed = c_float()
        self.call("cuEventElapsedTime", byref(elapsed), *marks)
        for mark in marks:
            self.call("cuEventDestroy_v2", mark)
        return elapsed.value / 1e3

    def _init(self) -> None:
        result = self._library.cuInit(c_uint(0))
        if result == _NO_DEVICE:
            raise Unavailable(
                "gpu_missing",
                expected="a GPU that the driver can use",
                found=self._text(result),
                remedy="on a slice host GPUs belong to vfio-pci; capture inside the VM",
            )
        if result == _SYSTEM_NOT_READY:
            raise Failed(
                "cuda_system_not_ready",
                expected="cuInit to succeed",
                found=self._text(result),
                remedy="start Fabric Manager, or load the driver with NVLink disabled in a VM",
            )
        if result:
            raise Failed(
                "cuda_failed",
                expected="cuInit to succeed",
                found=self._text(result),
                remedy="compare the versions of driver library and kernel module",
            )

    def _text(self, result: int) -> str:
        name = c_char_p()
        self._library.cuGetErrorName(c_int(result), byref(name))
        return f"error {result} {(name.value or b'unknown').decode(errors='replace')}"

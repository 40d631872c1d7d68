"""Scrub of a GPU's memory and registers after its reset, by the method that the profile names.

A method returns evidence or refuses; it works on the open function, before a guest can have it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from ansible_collections.gpuaas.slice.plugins.module_utils.core._errors import Refusal
from ansible_collections.gpuaas.slice.plugins.module_utils.core._vfio import Function

# Each wait of a method, in seconds. NVIDIA's tool allows five for each of its two.
WAIT_S = 15.0

# Registers and device ids of a GH100 chip (H100, H200), from --clear-memory of NVIDIA's
# gpu-admin-tools.
_NVIDIA, _GH100 = "10de", range(0x22F0, 0x2380)
_BOOT_COMPLETE, _BOOTED = 0x200BC, 0xFF
_MEMORY_CLEAR, _CLEARED = 0x100B20, 0x1

# Registers of QEMU's edu device, and its buffer (QEMU: docs/specs/edu.rst).
_EDU = "1234:11e8"
_EDU_LIVENESS, _EDU_FACTORIAL, _EDU_STATUS = 0x04, 0x08, 0x20
_EDU_INTERRUPTS, _EDU_ACKNOWLEDGE = 0x24, 0x64
_EDU_SOURCE, _EDU_TARGET, _EDU_COUNT, _EDU_COMMAND = 0x80, 0x88, 0x90, 0x98
_EDU_RUN, _EDU_TO_MEMORY, _EDU_COMPUTING = 0x1, 0x2, 0x1
_EDU_BUFFER, _EDU_BUFFER_BYTES = 0x40000, 4096
# Half of the buffer for each transfer, because QEMU before 9.0 refuses one that fills it.
_EDU_PIECE = _EDU_BUFFER_BYTES // 2
_EDU_MEMORY = 0x1000000


def _none(_function: Function) -> dict[str, Any]:
    """No scrub. The evidence says so, and proves nothing about the memory."""
    return {}


def _nvidia(function: Function) -> dict[str, Any]:
    """Wait until the chip reports that its boot has cleared the memory.

    NVIDIA states that a chip that was reset through its bus clears its memory while it boots. The
    register is the chip's own report; the content is not read.
    """
    vendor, device = function.id.split(":")
    if vendor != _NVIDIA or int(device, 16) not in _GH100:
        raise _refuse("gpu_scrub_unsupported", "a GPU with a GH100 chip", function.id)
    _await(function, _BOOT_COMPLETE, _BOOTED, "the chip to have booted")
    _await(function, _MEMORY_CLEAR, _CLEARED, "the memory to be cleared")
    return {"boot_complete": True, "memory_clear_finished": True}


def _edu(function: Function) -> dict[str, Any]:
    """Overwrite buffer and registers of QEMU's edu device, which keeps them over every reset."""
    if function.id != _EDU:
        raise _refuse("gpu_scrub_unsupported", "an edu device", function.id)
    # While it computes, the device takes no other number.
    _await(function, _EDU_STATUS, 0, "the factorial to be computed", mask=_EDU_COMPUTING)
    # The register shows the inverse of what is written.
    function.write(_EDU_LIVENESS, 0xFFFFFFFF)
    function.write(_EDU_STATUS, 0)
    function.write(_EDU_FACTORIAL, 0)
    function.write(_EDU_ACKNOWLEDGE, function.read(_EDU_INTERRUPTS))
    with function.memory(_EDU_MEMORY) as page:
        page[:] = bytes(len(page))
        for at in range(0, _EDU_BUFFER_BYTES, _EDU_PIECE):
            _transfer(function, _EDU_MEMORY + at, _EDU_BUFFER + at, 0)
        # The read-back must overwrite this pattern with zeros.
        page[:] = b"\xa5" * len(page)
        for at in range(0, _EDU_BUFFER_BYTES, _EDU_PIECE):
            _transfer(function, _EDU_BUFFER + at, _EDU_MEMORY + at, _EDU_TO_MEMORY)
        left = _EDU_BUFFER_BYTES - bytes(page[:_EDU_BUFFER_BYTES]).count(0)
    for register in (_EDU_SOURCE, _EDU_TARGET, _EDU_COUNT):
        function.write(register, 0)
    _await(function, _EDU_STATUS, 0, "the factorial to be computed", mask=_EDU_COMPUTING)
    kept = {
        f"{register:#x}": value
        for register, clean in (
            (_EDU_LIVENESS, 0), (_EDU_FACTORIAL, 1), (_EDU_INTERRUPTS, 0),
            (_EDU_SOURCE, 0), (_EDU_TARGET, 0), (_EDU_COUNT, 0),
        )
        if (value := function.read(register)) != clean
    }  # fmt: skip
    if left or kept:
        actual = f"{left} bytes of the buffer and registers {kept}"
        raise _refuse("gpu_scrub_failed", "nothing of the last user in the device", actual)
    return {"buffer_bytes": _EDU_BUFFER_BYTES, "read_back": "zeros"}


def _transfer(function: Function, source: int, target: int, command: int) -> None:
    for register, value in (
        (_EDU_SOURCE, source),
        (_EDU_TARGET, target),
        (_EDU_COUNT, _EDU_PIECE),
        (_EDU_COMMAND, command | _EDU_RUN),
    ):
        function.write(register, value)
    _await(function, _EDU_COMMAND, 0, "the transfer to end", mask=_EDU_RUN)


def _await(
    function: Function, register: int, expected: int, purpose: str, mask: int = 0xFFFFFFFF
) -> None:
    end = time.monotonic() + WAIT_S
    while (value := function.read(register)) & mask != expected:
        if time.monotonic() > end:
            actual = f"register {register:#x} is {value:#010x} after {WAIT_S:g} s"
            raise _refuse("gpu_scrub_failed", purpose, actual)
        time.sleep(0.01)


def _refuse(code: str, expected: str, found: str) -> Refusal:
    remedy = "keep the slot blocked; correct gpu.scrub of the profile, or repair the GPU"
    return Refusal(code, expected=expected, found=found, remedy=remedy)


METHODS: Mapping[str, Callable[[Function], dict[str, Any]]] = {
    "none": _none,
    "nvidia": _nvidia,
    "edu": _edu,
}

"""Reset of a slot's GPU between tenants: its scope, the read-back, the scrub and the evidence.

Works while VFIO holds the device for this process, so that no guest can have it. Everything that
touches the device runs in a child process with a deadline.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ansible_collections.gpuaas.slice.plugins.module_utils.core import (
    _bounded,
    _host,
    _pci,
    _vfio,
)
from ansible_collections.gpuaas.slice.plugins.module_utils.core._errors import Refusal
from ansible_collections.gpuaas.slice.plugins.module_utils.slice import _gpu_scrub

# `flr` resets the function alone, `bus` everything below the bridge above it.
METHODS = ("flr", "bus")
# The kernel waits up to 60 seconds for a device after its reset; a scrub waits twice.
DEADLINE_S = 120.0
_ERRORS = {"fatal": "FATAL", "nonfatal": "NONFATAL", "correctable": "COR"}
_BOOT = 0x0
# An NVIDIA chip gives it in the upper half of a register that it cannot read.
_NO_ANSWER = 0xBADF


def method(address: str, methods: Sequence[str]) -> str:
    """The first of `methods` that the kernel offers and that reaches no device of another slot."""
    offered = (_host.read(f"{_pci.DEVICES}/{address}/reset_method") or "").split()
    others = _beside(address)
    reasons = []
    for name in methods:
        if name not in offered:
            reasons.append(f"{name} is not offered by the kernel")
        elif name == "bus" and others:
            reasons.append(f"bus would also reset {', '.join(others)}")
        else:
            return name
    raise _refuse(
        "gpu_reset_unsupported",
        f"a reset of {address} alone by {' or '.join(methods)}",
        "; ".join(reasons),
        "correct gpu.reset of the profile; a GPU without a reset of its own cannot be sold",
    )


def _beside(address: str) -> list[str]:
    """Functions of other cards that a reset of the bus above `address` would reach."""
    bridge = _real(address).parent
    card = _pci.read(address).slot
    return [
        device.address
        for device in _pci.devices()
        if bridge in _real(device.address).parents and device.slot != card
    ]


def _real(address: str) -> Path:
    return _host.path(f"{_pci.DEVICES}/{address}").resolve()


def clear(
    address: str, methods: Sequence[str], scrub: str, recorded: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Reset, verify and scrub the GPU at `address`; returns the evidence.

    recorded: evidence of an earlier reset of this GPU, whose identity it must still have.
    """
    chosen = method(address, methods)
    order = _host.read(f"{_pci.DEVICES}/{address}/reset_method") or ""
    started = _host.now()
    try:
        seen = _bounded.call(lambda: _clear(address, chosen, scrub), deadline=DEADLINE_S)
    except _bounded.Overdue as hanging:
        # The killed child cannot restore the order, and this may have to wait for the device too.
        with contextlib.suppress(_bounded.Overdue, OSError, Refusal):
            _bounded.call(lambda: _set_order(address, order), deadline=_pci.ANSWER_S)
        raise _refuse(
            "gpu_reset_hangs",
            f"the reset of {address} by {chosen} to end within {DEADLINE_S:g} s",
            "still waiting for the device; its state is unknown",
            "restart the host once its tenants are gone; replace the GPU if it happens again",
        ) from hanging
    except OSError as error:
        raise _refuse(
            "gpu_reset_failed", f"a reset of {address} by {chosen}", str(error), _REPAIR
        ) from error
    evidence = {"address": address, "id": _pci.read(address).id, "method": chosen, **seen}
    _compare(evidence, recorded)
    return {**evidence, "started_at": started, "finished_at": _host.now(), "verified": True}


_REPAIR = "see the kernel log of the host; repair or replace the GPU, then recover the slot"


def _clear(address: str, chosen: str, scrub: str) -> dict[str, Any]:
    with _vfio.opened(address) as function:
        _reset(address, chosen)
        boot = function.read(_BOOT)
        scrubbed = _gpu_scrub.METHODS[scrub](function)
        link = _pci.pcie_link(address)
    # The kernel closes the device with a reset of its own, so the final state is read after it.
    _read_back(address, boot)
    evidence = {"boot": f"{boot:#010x}", "link": link, "errors": _errors(address)}
    return {**evidence, "scrub": {"method": scrub, **scrubbed}}


def _reset(address: str, chosen: str) -> None:
    """Reset by exactly this method; the kernel's order of methods is restored."""
    folder = f"{_pci.DEVICES}/{address}"
    order = _host.read(f"{folder}/reset_method") or ""
    _set_order(address, chosen)
    try:
        _pci.store(f"{folder}/reset", "1")
    finally:
        _set_order(address, order)


def _set_order(address: str, methods: str) -> None:
    """Set the methods by which the kernel resets the device, the first that works."""
    _pci.store(f"{_pci.DEVICES}/{address}/reset_method", methods)


def _read_back(address: str, boot: int) -> None:
    """Refuse a device that did not come back as the kernel knows it."""
    device = _pci.read(address)
    header = _pci.configuration(address)
    power = _host.read(f"{_pci.DEVICES}/{address}/power_state") or ""
    identity = f"{_word(header, 0, 2):04x}:{_word(header, 2, 2):04x}"
    problems = [
        text
        for wrong, text in (
            (identity != device.id, f"identity {identity}, not {device.id}"),
            (
                boot in (0, 0xFFFFFFFF) or boot >> 16 == _NO_ANSWER,
                f"boot register {boot:#010x}",
            ),
            (power in ("D3cold", "error"), f"power state {power}"),
            (device.driver != _pci.VFIO, f"driver {device.driver or 'none'}"),
        )
        if wrong
    ]
    problems += _wrong_bars(address, header)
    if problems:
        raise _refuse(
            "gpu_not_restored",
            f"{address} as it was before its reset",
            "; ".join(problems),
            _REPAIR,
        )


def _wrong_bars(address: str, header: bytes) -> list[str]:
    """Base addresses that differ from those that the kernel has assigned."""
    rows = (_host.read(f"{_pci.DEVICES}/{address}/resource") or "").splitlines()[:6]
    problems, above = [], False
    for index, row in enumerate(rows):
        start, _end, flags = (int(word, 16) for word in row.split())
        at = 0x10 + 4 * index
        # The second half of a 64-bit address is read with the first.
        if above or not flags:
            above = False
            continue
        above = bool(flags & 0x100000)
        value = _word(header, at, 8 if above else 4) & (~0x3 if flags & 0x100 else ~0xF)
        if value != start:
            problems.append(f"BAR {index} at {value:#x}, not {start:#x}")
    return problems


def _word(header: bytes, at: int, size: int) -> int:
    return int.from_bytes(header[at : at + size], "little")


def _errors(address: str) -> dict[str, int]:
    """Error counts of the PCIe link since boot (AER); {} when the kernel keeps none.

    Refused when a fatal error was counted: the device is not to be trusted before it is repaired.
    """
    counts = {}
    for name, total in _ERRORS.items():
        text = _host.read(f"{_pci.DEVICES}/{address}/aer_dev_{name}") or ""
        rows = dict(row.rpartition(" ")[::2] for row in text.splitlines())
        if (value := rows.get(f"TOTAL_ERR_{total}", "")).isdigit():
            counts[name] = int(value)
    if counts.get("fatal"):
        actual = f"{counts['fatal']} since the host started"
        raise _refuse("gpu_errors", f"no fatal PCIe error of {address}", actual, _REPAIR)
    return counts


def _compare(evidence: Mapping[str, Any], recorded: Mapping[str, Any] | None) -> None:
    """Refuse a chip other than the recorded one at the same address."""
    names = ("id", "boot")
    if recorded and recorded.get("address") == evidence["address"]:
        before, now = ([str(seen.get(name)) for name in names] for seen in (recorded, evidence))
        if before != now:
            raise _refuse(
                "gpu_changed",
                f"{evidence['address']} with id and boot register {' '.join(before)}",
                " ".join(now),
                "withdraw the slot and approve it again with the new GPU",
            )


def _refuse(code: str, expected: str, found: str, remedy: str) -> Refusal:
    return Refusal(code, expected=expected, found=found, remedy=remedy)

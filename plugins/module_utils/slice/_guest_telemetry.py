"""Telemetry of a guest, run inside it: a line of JSON to its host over a virtio-serial port.

The cloud seed carries this file into the guest, so it imports the standard library only. It listens
on no port and holds no credentials. The tenant may stop it; the host still has its own
measurements.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

PORT = "/dev/virtio-ports/org.gpuaas.telemetry.0"
_EVERY_S, _SMI_S, _CUDA_S = 15.0, 30.0, 120.0
# Initialising CUDA loads the state of every GPU, so it is tried every five minutes only.
_CUDA_EVERY = 20
_MIB = 1 << 20
# Columns of nvidia-smi, with their name here and the factor to its unit.
GPU_COLUMNS = (
    ("index", "index", 1),
    ("utilization.gpu", "utilisation_percent", 1),
    ("memory.used", "memory_used_bytes", _MIB),
    ("memory.total", "memory_total_bytes", _MIB),
    ("temperature.gpu", "temperature_c", 1),
    ("power.draw", "power_w", 1),
    ("ecc.errors.corrected.volatile.total", "ecc_corrected", 1),
    ("ecc.errors.uncorrected.volatile.total", "ecc_uncorrected", 1),
)
_ABSENT = 3
_CUDA = f"""\
import ctypes, sys
try:
    library = ctypes.CDLL("libcuda.so.1")
except OSError:
    sys.exit({_ABSENT})
sys.exit(1 if library.cuInit(0) else 0)
"""
_XID = re.compile(rb"NVRM: Xid \([^)]{1,40}\): (\d{1,6})\b")

Values = dict[str, Any]

# The newest process of each program.
_held: dict[str, subprocess.Popen[str]] = {}


def machine() -> Values:
    """Load, memory and file systems."""
    minute, five, fifteen = os.getloadavg()
    memory = dict(re.findall(r"^(\w+):\s+(\d+) kB$", _read("/proc/meminfo"), re.MULTILINE))
    total, free = disks(_read("/proc/mounts"))
    return {
        "uptime_s": float(_read("/proc/uptime").split()[0]),
        "cpus": os.cpu_count(),
        "load_1": minute,
        "load_5": five,
        "load_15": fifteen,
        "memory_total_bytes": int(memory["MemTotal"]) * 1024,
        "memory_available_bytes": int(memory["MemAvailable"]) * 1024,
        "disk_total_bytes": total,
        "disk_free_bytes": free,
    }


def disks(mounts: str) -> tuple[int, int]:
    """Size and free space of all file systems on devices, each counted once."""
    places: dict[str, str] = {}
    for line in mounts.splitlines():
        device, place = line.split(" ")[:2]
        if device.startswith("/dev/"):
            places.setdefault(device, place)
    total = free = 0
    for place in places.values():
        # The kernel writes a space in a name as \040.
        with contextlib.suppress(OSError):
            status = os.statvfs(re.sub(r"\\(\d{3})", lambda code: chr(int(code[1], 8)), place))
            total += status.f_blocks * status.f_frsize
            free += status.f_bavail * status.f_frsize
    return total, free


def gpus() -> list[Values]:
    """Every GPU by nvidia-smi; [] without a driver that answers."""
    query = ",".join(column for column, _name, _factor in GPU_COLUMNS)
    argv = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader,nounits"]
    code, out = _run(argv, _SMI_S)
    return parse_gpus(out) if code == 0 else []


def parse_gpus(text: str) -> list[Values]:
    rows = []
    for line in text.splitlines():
        row: Values = {}
        for (_column, name, factor), field in zip(GPU_COLUMNS, line.split(","), strict=False):
            # [N/A] and the like: this GPU does not have the value.
            with contextlib.suppress(ValueError):
                number = field.strip()
                row[name] = (int if number.isdigit() else float)(number) * factor
        if "index" in row:
            rows.append(row)
    return rows


def cuda() -> str:
    """Whether CUDA initialises, in a process of its own, because a broken driver may hang it."""
    code, _out = _run([sys.executable, "-I", "-c", _CUDA], _CUDA_S)
    return {0: "ready", _ABSENT: "absent"}.get(code, "failed")


def _run(argv: list[str], seconds: float) -> tuple[int, str]:
    """Exit code and output of a program; -1 when it did not start, or not end within `seconds`.

    A broken driver may hold the program in the kernel, where it cannot be killed. It is then left
    behind, and not started again until it has ended.
    """
    held = _held.get(argv[0])
    if held is not None and held.poll() is None:
        return -1, ""
    pipe, null = subprocess.PIPE, subprocess.DEVNULL
    try:
        process = subprocess.Popen(argv, stdout=pipe, stderr=null, text=True, errors="replace")
    except OSError:
        return -1, ""
    _held[argv[0]] = process
    try:
        out, _err = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        if process.stdout:
            process.stdout.close()
        return -1, ""
    return process.returncode, out


def last_xid(log: int, before: int | None) -> int | None:
    """The number of the newest error in the kernel's log. log: its descriptor, read to the end."""
    while True:
        try:
            match = _XID.search(os.read(log, 8192))
        except BrokenPipeError:
            continue  # the kernel dropped old lines meanwhile
        except OSError:
            return before
        before = int(match[1]) if match else before


def main() -> int:
    port = os.open(PORT, os.O_WRONLY | os.O_NONBLOCK)
    log = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK)
    xid, state, turn = None, None, 0
    while True:
        xid = last_xid(log, xid)
        values = {**machine(), "gpus": gpus(), "cuda": state, "xid": xid}
        readings = {name: value for name, value in values.items() if value is not None}
        # While the host does not read, the line is dropped.
        with contextlib.suppress(BlockingIOError):
            os.write(port, (json.dumps(readings) + "\n").encode())
        if turn % _CUDA_EVERY == 0:
            state = cuda()
        turn += 1
        time.sleep(_EVERY_S)


def _read(path: str) -> str:
    return Path(path).read_text(encoding="utf-8", errors="replace")


if __name__ == "__main__":
    raise SystemExit(main())

"""Memory of workers and of their host: groups of the kernel's memory controller, or samples.

The memory controller, version 1 or 2, limits a worker where this process may make groups. Elsewhere
the memory of its processes is sampled.
"""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from reconciler.runs import lock

_PAGE = os.sysconf("SC_PAGE_SIZE")
_MIB = 1 << 20
_SMI_S = 10
# The last nvidia-smi. A hanging driver can make it impossible to kill, and would block every caller
# that waits for its end.
_smi: list[subprocess.Popen[bytes]] = []


@dataclass(frozen=True)
class Group:
    """A group of the memory controller in which workers get groups of their own."""

    version: int
    path: Path


@dataclass(frozen=True)
class Usage:
    """Memory without what the kernel can take back at once, and processes that it has killed."""

    bytes: int
    oom_kills: int = 0


def own_group(proc: Path = Path("/proc/self")) -> Group | None:
    """The group of this process; None without a memory controller."""
    mounts = _mounts(proc)
    for line in (proc / "cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            version, mount = 1, mounts.get("memory")
        elif controllers == "":
            version, mount = 2, mounts.get("cgroup2")
        else:
            continue
        if mount is None:
            continue
        root, point = mount
        group = Group(version, point / path.removeprefix(root.rstrip("/")).lstrip("/"))
        if version == 1 or (group.path / "memory.current").is_file():
            return group
    return None


def parent_group(group: Group | None) -> Group | None:
    """The group in which workers get theirs; None if this process may not make any.

    In version 2 it is the parent of this process's own, because a group with processes has no
    groups with limits below it.
    """
    if group is None:
        return None
    path = group.path if group.version == 1 else group.path.parent
    if group.version == 2:
        try:
            control = (path / "cgroup.subtree_control").read_text().split()
        except OSError:
            return None
        if "memory" not in control or not os.access(path / "cgroup.procs", os.W_OK):
            return None
    return Group(group.version, path) if os.access(path, os.W_OK) else None


def make(parent: Group, worker_id: str, memory_bytes: int) -> str:
    """Make a worker's group; "" if the kernel refuses."""
    path = parent.path / f"gpuaas-pool-{worker_id}"
    limit, swap = (
        ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes")
        if parent.version == 1
        else ("memory.max", "memory.swap.max")
    )
    try:
        path.mkdir(exist_ok=True)
        (path / limit).write_text(str(memory_bytes))
        with suppress(OSError):  # Without swap there is no such file.
            (path / swap).write_text(str(memory_bytes) if parent.version == 1 else "0")
    except OSError:
        remove(str(path))
        return ""
    return str(path)


def members(group: str) -> list[int]:
    """Ids of the processes in a worker's group; none when it is gone."""
    pids: list[int] = []
    for folder, _folders, _files in os.walk(group, onerror=_unless_empty):
        try:
            pids += map(int, Path(folder, "cgroup.procs").read_text().split())
        except OSError as broken:
            _unless_empty(broken)
    return pids


def _unless_empty(broken: OSError) -> None:
    # ENODEV: the group was removed while the file was open. EOPNOTSUPP: code in a worker made a
    # group of threads below it. The group above lists their processes; a worker's group cannot
    # become one, because the memory controller is none of threads.
    if broken.errno not in (errno.ENOENT, errno.ENODEV, errno.EOPNOTSUPP):
        raise broken


def kill(group: str) -> None:
    """Kill the processes of a group. Their ids cannot be reused while they are in it."""
    for member in members(group):
        lock.send(member, partial(_is_member, group, member))


def _is_member(group: str, pid: int) -> bool:
    return pid in members(group)


def remove(group: str) -> None:
    """Remove a group without processes."""
    if group:
        with suppress(OSError):
            Path(group).rmdir()


def of_group(group: str) -> Usage:
    """Memory of a worker's group, and the kernel's own count of processes that it killed there."""
    path = Path(group)
    if (path / "memory.current").is_file():
        used = int((path / "memory.current").read_text())
        cache, events = _fields(path / "memory.stat").get("inactive_file", 0), "memory.events"
    else:
        used = int((path / "memory.usage_in_bytes").read_text())
        cache = _fields(path / "memory.stat").get("total_inactive_file", 0)
        events = "memory.oom_control"
    return Usage(max(0, used - cache), _fields(path / events).get("oom_kill", 0))


def of_processes(pids: Iterable[int]) -> dict[int, int]:
    """Resident memory by process."""
    sizes = {}
    for pid in pids:
        with suppress(OSError, IndexError):
            sizes[pid] = int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE
    return sizes


def of_host(group: Group | None) -> tuple[int, int]:
    """Bytes of memory and those in use: of the machine, or of the group with the lowest limit among
    this process's own and, in version 2, those above it, such as the unit of the service.
    """
    words = _fields(Path("/proc/meminfo"))
    total = words["MemTotal:"] * 1024
    used = total - words["MemAvailable:"] * 1024
    if group is None:
        return total, used
    name = "memory.limit_in_bytes" if group.version == 1 else "memory.max"
    for path in (group.path,) if group.version == 1 else (group.path, *group.path.parents):
        with suppress(OSError, ValueError):  # "max", or no file at the root.
            limit = int((path / name).read_text())
            if limit < total:
                total, used = limit, of_group(str(path)).bytes
    return total, used


def gpus() -> list[dict[str, Any]]:
    """GPUs with their memory, by nvidia-smi; none without it, or while it hangs."""
    if any(process.poll() is None for process in _smi) or shutil.which("nvidia-smi") is None:
        return []
    _smi.clear()
    fields = "uuid,memory.total,memory.used"
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
    with tempfile.TemporaryFile("w+") as output:
        try:
            process = subprocess.Popen(command, stdout=output, stderr=subprocess.DEVNULL)
            _smi.append(process)
            code = process.wait(_SMI_S)
            output.seek(0)
            text = output.read()
        except subprocess.TimeoutExpired:
            process.kill()
            return []
        except (OSError, ValueError):
            return []
    if code:
        return []
    # A GPU whose memory cannot be read ("[N/A]", or 0) is not given to a pool.
    parts = [[word.strip() for word in line.split(",")] for line in text.splitlines()]
    return [
        {
            "id": each[0],
            "memory_bytes": int(each[1]) * _MIB,
            "memory_used_bytes": int(each[2]) * _MIB,
        }
        for each in parts
        if len(each) == 3 and each[1].isdecimal() and each[2].isdecimal() and int(each[1])
    ]


def _fields(file: Path) -> dict[str, int]:
    """Numbers by name: the first of each line."""
    lines = [line.split() for line in file.read_text().splitlines()]
    return {line[0]: int(line[1]) for line in lines if len(line) > 1 and line[1].isdigit()}


def _mounts(proc: Path) -> dict[str, tuple[str, Path]]:
    """Root and place of the mounts of controllers."""
    mounts = {}
    for line in (proc / "mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        _, _, _, root, place, *_ = before.split()
        kind, _, options = after.split(" ", 2)
        if kind == "cgroup2":
            mounts[kind] = (root, Path(place))
        elif kind == "cgroup" and "memory" in options.split(","):
            mounts["memory"] = (root, Path(place))
    return mounts

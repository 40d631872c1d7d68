"""Facts of the machine that influence a measurement. An unreadable fact is empty."""

from __future__ import annotations

import os
import platform
import re
import resource
from pathlib import Path
from typing import Any

ROOT = Path("/")

# Settings that tuning profiles change, to check a label against the machine.
_SETTINGS = {
    "net.core.rmem_max": "proc/sys/net/core/rmem_max",
    "net.core.wmem_max": "proc/sys/net/core/wmem_max",
    "net.core.netdev_max_backlog": "proc/sys/net/core/netdev_max_backlog",
    "net.ipv4.tcp_rmem": "proc/sys/net/ipv4/tcp_rmem",
    "net.ipv4.tcp_wmem": "proc/sys/net/ipv4/tcp_wmem",
    "vm.nr_hugepages": "proc/sys/vm/nr_hugepages",
    "ib_ipoib.recv_queue_size": "sys/module/ib_ipoib/parameters/recv_queue_size",
    "ib_ipoib.send_queue_size": "sys/module/ib_ipoib/parameters/send_queue_size",
}
# Other arguments have no influence on speed, and a kernel command line may contain secrets.
_ARGUMENTS = re.compile(
    r"(default_hugepagesz|hugepagesz|hugepages|transparent_hugepage|intel_iommu|amd_iommu|iommu"
    r"|isolcpus|nohz_full|rcu_nocbs|mitigations|intel_pstate|amd_pstate|idle|numa_balancing"
    r"|processor\.max_cstate|intel_idle\.max_cstate)(=.*)?"
)


def collect() -> dict[str, Any]:
    """The `host` part of a capture."""
    info = _read("proc/cpuinfo")
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    usable = len(os.sched_getaffinity(0))
    arguments = [word for word in _read("proc/cmdline").split() if _ARGUMENTS.fullmatch(word)]
    siblings = re.findall(
        r"(\d+)(?:-(\d+))?", _read("sys/devices/system/cpu/cpu0/topology/thread_siblings_list")
    )
    return {
        "hostname": platform.node()[:253],
        "machine": platform.machine(),
        "kernel": platform.release(),
        "kernel_arguments": " ".join(arguments)[:4000],
        "system": _value(_read("etc/os-release"), r'^PRETTY_NAME="?([^"\n]*)'),
        "cpu_model": _value(info, r"^model name\s*:\s*(.*)"),
        "cpus": os.cpu_count() or usable,
        "cpus_usable": usable,
        "sockets": len(set(re.findall(r"^physical id\s*:\s*(\d+)", info, re.MULTILINE))),
        # Of the first core; 0 if the kernel does not report them.
        "threads_per_core": sum(int(last or first) - int(first) + 1 for first, last in siblings),
        "governor": _read("sys/devices/system/cpu/cpu0/cpufreq/scaling_governor"),
        "hypervisor": bool(re.search(r"^flags\s*:.*\bhypervisor\b", info, re.MULTILINE)),
        "numa_nodes": [
            {
                "node": int(path.name[4:]),
                "cpus": _read(path / "cpulist"),
                "memory_bytes": _memory_bytes(path / "meminfo"),
            }
            for path in _sorted("sys/devices/system/node/node[0-9]*")
        ],
        "memory_bytes": _memory_bytes("proc/meminfo"),
        "hugepages": [
            {
                "size_kib": int(path.name.partition("-")[2].rstrip("kB")),
                "total": _number(path / "nr_hugepages"),
                "free": _number(path / "free_hugepages"),
            }
            for path in _sorted("sys/kernel/mm/hugepages/hugepages-*")
        ],
        "transparent_hugepages": _value(
            _read("sys/kernel/mm/transparent_hugepage/enabled"), r"\[(\w+)\]"
        ),
        "tuned_profile": _read("etc/tuned/active_profile"),
        "memlock_bytes": None if limit == resource.RLIM_INFINITY else limit,
        "sysctls": {name: " ".join(_read(path).split()) for name, path in _SETTINGS.items()},
    }


def _read(path: str | Path) -> str:
    """Text of a file, by its path below the root or its whole path."""
    try:
        return (ROOT / path).read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def _sorted(pattern: str) -> list[Path]:
    return sorted(ROOT.glob(pattern), key=lambda path: (len(path.name), path.name))


def _value(text: str, pattern: str) -> str:
    match = re.search(pattern, text, re.MULTILINE)
    return match.group(1).strip()[:500] if match else ""


def _memory_bytes(path: str | Path) -> int:
    match = re.search(r"\bMemTotal:\s+(\d+) kB", _read(path))
    return int(match.group(1)) * 1024 if match else 0


def _number(path: Path) -> int:
    text = _read(path)
    return int(text) if text.isdigit() else 0

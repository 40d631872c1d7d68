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
SYSCTLS = (
    "net/core/rmem_max",
    "net/core/wmem_max",
    "net/core/netdev_max_backlog",
    "net/ipv4/tcp_rmem",
    "net/ipv4/tcp_wmem",
    "vm/nr_hugepages",
)
QUEUES = ("recv_queue_size", "send_queue_size")
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
    return {
        "hostname": platform.node()[:253],
        "machine": platform.machine(),
        "kernel": platform.release(),
        "kernel_arguments": _arguments(_read("proc/cmdline")),
        "system": _value(_read("etc/os-release"), r'^PRETTY_NAME="?([^"\n]*)'),
        "cpu_model": _value(info, r"^model name\s*:\s*(.*)"),
        "cpus": os.cpu_count() or usable,
        "cpus_usable": usable,
        "sockets": len(set(re.findall(r"^physical id\s*:\s*(\d+)", info, re.MULTILINE))),
        "threads_per_core": _threads(),
        "governor": _read("sys/devices/system/cpu/cpu0/cpufreq/scaling_governor"),
        "hypervisor": bool(re.search(r"^flags\s*:.*\bhypervisor\b", info, re.MULTILINE)),
        "numa_nodes": [_node(path) for path in _sorted("sys/devices/system/node/node[0-9]*")],
        "memory_bytes": _kib(_read("proc/meminfo"), "MemTotal"),
        "hugepages": [_pages(path) for path in _sorted("sys/kernel/mm/hugepages/hugepages-*")],
        "transparent_hugepages": _value(
            _read("sys/kernel/mm/transparent_hugepage/enabled"), r"\[(\w+)\]"
        ),
        "tuned_profile": _read("etc/tuned/active_profile"),
        "memlock_bytes": None if limit == resource.RLIM_INFINITY else limit,
        "sysctls": {
            **{name.replace("/", "."): _words(f"proc/sys/{name}") for name in SYSCTLS},
            **{
                f"ib_ipoib.{name}": _words(f"sys/module/ib_ipoib/parameters/{name}")
                for name in QUEUES
            },
        },
    }


def _read(path: str) -> str:
    try:
        return (ROOT / path).read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def _words(path: str) -> str:
    return " ".join(_read(path).split())


def _sorted(pattern: str) -> list[Path]:
    return sorted(ROOT.glob(pattern), key=lambda path: (len(path.name), path.name))


def _value(text: str, pattern: str) -> str:
    match = re.search(pattern, text, re.MULTILINE)
    return match.group(1).strip()[:500] if match else ""


def _kib(text: str, name: str) -> int:
    match = re.search(rf"\b{name}:\s+(\d+) kB", text)
    return int(match.group(1)) * 1024 if match else 0


def _number(path: Path) -> int:
    text = _read(str(path.relative_to(ROOT)))
    return int(text) if text.isdigit() else 0


def _arguments(line: str) -> str:
    return " ".join(word for word in line.split() if _ARGUMENTS.fullmatch(word))[:4000]


def _threads() -> int:
    """Hardware threads of the first core; 0 if the kernel does not report them."""
    text = _read("sys/devices/system/cpu/cpu0/topology/thread_siblings_list")
    count = 0
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        count += int(last or first) - int(first) + 1
    return count


def _node(path: Path) -> dict[str, Any]:
    return {
        "node": int(path.name[4:]),
        "cpus": _read(str(path.relative_to(ROOT) / "cpulist")),
        "memory_bytes": _kib(_read(str(path.relative_to(ROOT) / "meminfo")), "MemTotal"),
    }


def _pages(path: Path) -> dict[str, int]:
    """Huge pages of a size."""
    return {
        "size_kib": int(path.name.partition("-")[2].rstrip("kB")),
        "total": _number(path / "nr_hugepages"),
        "free": _number(path / "free_hugepages"),
    }

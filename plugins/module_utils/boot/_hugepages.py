"""Pages of 1 GiB for guest memory: the number on each NUMA node, and the memory that stays free.

They are reserved at boot, node by node, because later no node has enough contiguous memory.
`hugepages=512` alone would let the kernel spread them, and 8 x 64 GiB out of 512 leave no page
spare.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ansible_collections.gpuaas.slice.plugins.module_utils.core import _host
from ansible_collections.gpuaas.slice.plugins.module_utils.core._errors import Refusal

PROFILE = "hugepages-1g"
# Eight guests of 64 GiB. The reserve on each node is for the host, QEMU itself and the page tables.
# With less, the kernel ends host processes while guests start.
PAGES = 512
RESERVE_MIB = 16384

_OPT_IN = "the profile's tuning or GPUAAS_SLICE_TUNING, whichever names it"
# The first kernel that understands `hugepages=<node>:<pages>`; an older kernel reserves no page for
# it.
_PER_NODE = (5, 16)
_RELEASE = "/proc/sys/kernel/osrelease"
_NODES = "/sys/devices/system/node"
_PAGE_MIB = 1024


@dataclass(frozen=True)
class Request:
    """pages: on the whole host. reserve_mib: memory that every node keeps for the host."""

    pages: int
    reserve_mib: int


def request(profiles: Sequence[str], settings: Mapping[str, Any] | None) -> Request | None:
    """The page request of the tuned profiles; None when they need no pages."""
    if PROFILE not in profiles:
        return None
    given = settings or {}
    pages, reserve = given.get("pages"), given.get("reserve_mib")
    return Request(PAGES if pages is None else pages, RESERVE_MIB if reserve is None else reserve)


def shares(request: Request) -> dict[int, int]:
    """Pages per node, spread evenly, because guests are placed on the node of their GPU."""
    nodes = sorted(_memory())
    each, rest = divmod(request.pages, max(len(nodes), 1))
    return {node: each + (place < rest) for place, node in enumerate(nodes)}


def arguments(request: Request | None) -> list[str]:
    """Kernel arguments, in the order that the kernel requires."""
    if request is None:
        return []
    share = ",".join(f"{node}:{pages}" for node, pages in shares(request).items())
    return ["default_hugepagesz=1G", "hugepagesz=1G", f"hugepages={share or request.pages}"]


def refusals(request: Request | None) -> list[Refusal]:
    """Reasons why this machine cannot provide the pages."""
    if request is None:
        return []
    blockers = []
    if "pdpe1gb" not in (_host.read("/proc/cpuinfo") or "").split():
        blockers.append(
            Refusal(
                "hugepages_unsupported",
                expected="processors with pages of 1 GiB (pdpe1gb)",
                found="no such flag in /proc/cpuinfo",
                remedy=f"take {PROFILE} out of {_OPT_IN}",
            )
        )
    release = _host.read(_RELEASE) or ""
    if _version(release) < _PER_NODE:
        blockers.append(
            Refusal(
                "hugepages_unsupported",
                expected="a kernel that shares pages out by node (5.16 or newer)",
                found=f"Linux {release}" if release else f"no release in {_RELEASE}",
                remedy="boot a newer kernel (Ubuntu 22.04: linux-generic-hwe-22.04), or take"
                f" {PROFILE} out of {_OPT_IN}",
            )
        )
    memory = _memory()
    for node, pages in shares(request).items():
        left = memory[node] - pages * _PAGE_MIB
        if left < request.reserve_mib:
            blockers.append(
                Refusal(
                    "hugepages_leave_no_reserve",
                    expected=f"{request.reserve_mib} MiB of node {node} left for the host",
                    found=f"{pages} pages of 1 GiB leave {left} of {memory[node]} MiB",
                    remedy="lower hugepages_1g.pages in the hardware profile",
                )
            )
    return blockers


def problems(request: Request) -> list[str]:
    """Pages that the running kernel does not provide, node by node; [] when it has all."""
    return [
        f"node {node} has {have(node)} pages of 1 GiB, not {pages}"
        for node, pages in shares(request).items()
        if have(node) < pages
    ]


def have(node: int) -> int:
    """Pages of 1 GiB that the node has now, in use or free."""
    pages = f"{_NODES}/node{node}/hugepages/hugepages-1048576kB/nr_hugepages"
    return int(_host.read(pages) or 0)


def _version(release: str) -> tuple[int, int]:
    """(6, 8) for `6.8.0-51-generic`; an unknown form counts as an old kernel."""
    match = re.match(r"(\d+)\.(\d+)", release)
    return (int(match[1]), int(match[2])) if match else (0, 0)


def _memory() -> dict[int, int]:
    """MiB by NUMA node. A node without memory of its own gives no pages."""
    mib = {}
    for name in _host.matching(_NODES, "node[0-9]*"):
        for row in (_host.read(f"{_NODES}/{name}/meminfo") or "").splitlines():
            words = row.split()
            if words[2:3] == ["MemTotal:"] and int(words[3]):
                mib[int(name[4:])] = int(words[3]) // 1024
    return mib

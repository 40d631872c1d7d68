"""Host resources for slices: processors, memory, and the state of bootstrap."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ansible_collections.gpuaas.slice.plugins.module_utils.boot import (
    _host_tuning,
    _hugepages,
    _kernel_arguments,
)
from ansible_collections.gpuaas.slice.plugins.module_utils.core import _host
from ansible_collections.gpuaas.slice.plugins.module_utils.core._errors import Blocker, blocker
from ansible_collections.gpuaas.slice.plugins.module_utils.slice import _pinning

NODES = "/sys/devices/system/node"
_DMI = "/sys/class/dmi/id"


@dataclass(frozen=True)
class Kernel:
    """State of the kernel arguments: the profile's for this machine, and whether the running kernel
    has them.
    """

    arguments: Mapping[str, bool]
    missing_modules: tuple[str, ...]
    iommu_groups: int
    reboot_reasons: tuple[str, ...]


def boot_params(profile: Mapping[str, Any], intent: str = "slice") -> dict[str, Any]:
    """The profile's boot settings as parameters of the module kernel_arguments."""
    slices = intent == "slice"
    return {
        "arguments": profile["kernel_arguments"],
        # A bare-metal machine has no record; a record that is left is a remnant.
        "tuning": _host_tuning.requested_profiles(profile)
        if slices
        else profile.get("tuning") or [],
        "hugepages_1g": profile.get("hugepages_1g"),
        "state": "present" if slices else "absent",
        "in_effect": False,
    }


def kernel(params: Mapping[str, Any], state: _kernel_arguments.State) -> Kernel:
    """The running kernel's arguments, compared with the requested arguments."""
    lacking = set(_kernel_arguments.lacking(state.arguments, state.running))
    return Kernel(
        arguments={word: word not in lacking for word in state.arguments},
        missing_modules=tuple(
            name for name in _kernel_arguments.MODULES if name not in state.modules
        ),
        iommu_groups=state.iommu_groups,
        reboot_reasons=tuple(_kernel_arguments.reboot_reasons(params, state)),
    )


def resources(profile: Mapping[str, Any]) -> dict[str, Any]:
    """The `host` part of the discovery document.

    tuning: profiles that are completely in force, including those opted in to on this host.
    """
    return {
        "tuning": [name for name, left in _host_tuning.problems(profile).items() if not left],
        "kernel": _host.read("/proc/sys/kernel/osrelease") or "",
        "cpus": sum(len(_host.numbers(_host.read(f"{path}/cpulist") or "")) for path in _nodes()),
        "memory_mib": _mib(_host.read("/proc/meminfo"), "MemTotal"),
        "numa": [_node(path) for path in _nodes()],
    }


def machine() -> dict[str, str]:
    """The `machine` part of the discovery document, as the firmware reports it; "" for unknown.

    A hypervisor can give its guests any serial number, so that of a virtual machine is unknown.
    """
    names = {"vendor": "sys_vendor", "product": "product_name", "serial": "product_serial"}
    # Only root may read the serial number.
    values = {key: (_host.read(f"{_DMI}/{name}") or "")[:200] for key, name in names.items()}
    virtual = "hypervisor" in (_host.read("/proc/cpuinfo") or "").split()
    return {**values, **({"serial": ""} if virtual else {})}


def observe(kernel_state: Kernel) -> dict[str, Any]:
    """The `bootstrap` part of the discovery document."""
    state: dict[str, Any] = {
        "kernel_arguments": dict(kernel_state.arguments),
        "iommu_groups": kernel_state.iommu_groups,
        "kvm": _host.path("/dev/kvm").exists(),
        "vfio_modules": {
            name: name not in kernel_state.missing_modules for name in _kernel_arguments.MODULES
        },
        "libvirt": _host.path("/run/libvirt/libvirt-sock").exists(),
        "openvswitch": _host.path("/run/openvswitch/db.sock").exists(),
    }
    state["blockers"] = _blockers(state, kernel_state.reboot_reasons)
    return state


def _blockers(state: Mapping[str, Any], reboot_reasons: Sequence[str]) -> list[Blocker]:
    blockers = [
        blocker("missing_kernel_argument", f"{word} is not in /proc/cmdline")
        for word, there in state["kernel_arguments"].items()
        if not there
    ]
    if not state["iommu_groups"]:
        blockers.append(blocker("missing_iommu", "the kernel has made no IOMMU group"))
    if not state["kvm"]:
        blockers.append(blocker("missing_kvm", "/dev/kvm is missing"))
    absent = [name for name, there in state["vfio_modules"].items() if not there]
    if absent:
        blockers.append(blocker("missing_vfio", f"not loaded: {', '.join(absent)}"))
    if not state["libvirt"]:
        blockers.append(blocker("missing_libvirt", "libvirt has no socket"))
    if not state["openvswitch"]:
        blockers.append(blocker("missing_openvswitch", "Open vSwitch's database has no socket"))
    if reboot_reasons:
        blockers.append(blocker("reboot_required", "; ".join(reboot_reasons)))
    return blockers


def _nodes() -> list[str]:
    names = _host.matching(NODES, "node[0-9]*")
    return [f"{NODES}/{name}" for name in sorted(names, key=lambda name: int(name[4:]))]


def _node(path: str) -> dict[str, Any]:
    free = _host.read(f"{path}/hugepages/hugepages-1048576kB/free_hugepages") or "0"
    node = int(path.removeprefix(f"{NODES}/node"))
    return {
        "node": node,
        "cpus": _host.read(f"{path}/cpulist") or "",
        "threads_per_core": max(map(len, _pinning.cores(node)), default=1),
        "memory_mib": _mib(_host.read(f"{path}/meminfo"), "MemTotal"),
        "hugepages_1g": _hugepages.have(node),
        "hugepages_1g_free": int(free),
    }


def _mib(meminfo: str | None, name: str) -> int:
    for row in (meminfo or "").splitlines():
        words = row.replace(":", " ").split()
        # Rows of a node's own table begin with `Node 0`; the value stands before the unit.
        if name in words and words[-1] == "kB":
            return int(words[-2]) // 1024
    return 0

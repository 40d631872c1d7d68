"""Proof that nothing of a slice is left on its host: invariants I13, I17 and I18.

Every trace is checked independently of libvirt's report. A failed check proves nothing: its result
is *unknown*, which is not *absent*.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from ansible_collections.gpuaas.slice.plugins.module_utils.core._errors import Refusal
from ansible_collections.gpuaas.slice.plugins.module_utils.disk import _block
from ansible_collections.gpuaas.slice.plugins.module_utils.fabric import _slice_fabric
from ansible_collections.gpuaas.slice.plugins.module_utils.network import _host_connections
from ansible_collections.gpuaas.slice.plugins.module_utils.slice import (
    _dnsmasq,
    _libvirt,
    _slots,
    _traces,
)

# Description of the remaining trace; "" without a trace.
Check = Callable[[], str]


def look(allocation_id: str, slots: Collection[_slots.Slot], bridge: str) -> dict[str, Any]:
    """Every check by name: `{absent, known, detail}`."""
    checks: dict[str, Check] = {
        kind: _traces_of(allocation_id, traces) for kind, traces in _traces.looks(bridge).items()
    }
    of_name = checks["qemu_process"]
    checks |= {
        "qemu_process": lambda: of_name() or _processes(allocation_id),
        "lease": lambda: _leases(allocation_id, slots),
        "connections": lambda: _connections(slots),
        "disk_holders": lambda: _disks(slots),
        "vfio_bound": lambda: _devices(slots),
        "fabric_isolation": lambda: _functions(slots),
    }
    return {name: _answer(check) for name, check in checks.items()}


def _answer(check: Check) -> dict[str, Any]:
    try:
        left = check()
    except Refusal as refusal:
        return {"absent": False, "known": False, "detail": f"unknown: {refusal}"}
    except (OSError, ValueError) as error:
        return {"absent": False, "known": False, "detail": f"unknown: {error}"}
    return {"absent": not left, "known": True, "detail": left or "nothing found"}


def _traces_of(allocation_id: str, traces: _traces.Look) -> Check:
    return lambda: ", ".join(trace.text for trace in traces() if trace.belongs_to(allocation_id))


def _processes(allocation_id: str) -> str:
    """A QEMU that was started without libvirt may carry the id without the name."""
    programs = sorted(_libvirt.processes(allocation_id).items())
    return ", ".join(f"{program} {pid}" for pid, program in programs)


def _leases(allocation_id: str, slots: Collection[_slots.Slot]) -> str:
    """DHCP leases of the slots' addresses, unless another allocation has reserved the address."""
    others = [e for e in _dnsmasq.reservations() if e.name != allocation_id]
    macs = {str(slot.get("management_mac", "")) for slot in slots} - {e.mac for e in others}
    ips = {str(slot.get("private_ip", "")) for slot in slots} - {e.ip for e in others}
    left = [entry for entry in _dnsmasq.leases() if entry.mac in macs or entry.ip in ips]
    return ", ".join(f"{entry.ip} to {entry.mac}" for entry in left)


def _connections(slots: Collection[_slots.Slot]) -> str:
    counts = {ip: _host_connections.number(ip) for slot in slots if (ip := slot.get("private_ip"))}
    return ", ".join(f"{count} of {ip}" for ip, count in counts.items() if count)


def _disks(slots: Collection[_slots.Slot]) -> str:
    users = []
    for slot in slots:
        disk, problems = _block.judged(slot)
        if disk is None:
            raise problems[0]  # absent or a different device: nothing is known about its users
        users += [f"{disk.disk_identity}: {problem.found}" for problem in problems]
    return "; ".join(users)


def _devices(slots: Collection[_slots.Slot]) -> str:
    problems = _slots.passthrough([a for slot in slots for a in _slots.addresses(slot)])
    return "; ".join(f"{problem.code}: {problem.expected}, {problem.found}" for problem in problems)


def _functions(slots: Collection[_slots.Slot]) -> str:
    """Fabric functions that are still in the tenant's VLAN, or that their card does not isolate."""
    addresses = [str(slot.get("fabric_vf_pci_address") or "") for slot in slots]
    problems = [p for a in addresses if a for p in _slice_fabric.unguarded(a)]
    return "; ".join(f"{problem.expected}, {problem.found}" for problem in problems)

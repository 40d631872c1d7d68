"""Proof that nothing of a slice is left on its host: invariants I13, I17 and I18.

Every trace is looked for by itself, whatever libvirt says, and a look that fails proves nothing:
then the answer is *unknown*, which is not *absent*.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from ansible_collections.gpuaas.slice.plugins.module_utils.core import _host
from ansible_collections.gpuaas.slice.plugins.module_utils.core._errors import Refusal
from ansible_collections.gpuaas.slice.plugins.module_utils.slice import (
    _dnsmasq,
    _flows,
    _libvirt,
    _object_names,
    _qos,
    _slots,
)

# A finding: "" is nothing found, text is what is still there.
Look = Callable[[], str]


def look(allocation_id: str, slots: Collection[_slots.Slot], bridge: str) -> dict[str, Any]:
    """Every trace by name: `{absent, known, detail}`."""
    name = _object_names.domain_name(allocation_id)
    port = _object_names.port_name(allocation_id)
    looks: dict[str, Look] = {
        "domain": lambda: _domain(name),
        "qemu_process": lambda: _processes(name, allocation_id),
        "nvram": lambda: _file(_object_names.nvram_path(allocation_id)),
        "seed": lambda: _file(_object_names.seed_path(allocation_id)),
        "console": lambda: ", ".join(_object_names.console_files(allocation_id)),
        "reservation": lambda: _file(_dnsmasq.file_of(allocation_id)),
        "lease": lambda: _leases(allocation_id, slots),
        "connections": lambda: _connections(slots),
        "ovs_port": lambda: _port(port),
        "flows": lambda: _guard(bridge, allocation_id),
        "qos": lambda: ", ".join(_qos.observe(allocation_id).rows),
        "disk_holders": lambda: _disks(slots),
        "vfio_bound": lambda: _devices(slots),
    }
    return {key: _answer(act) for key, act in looks.items()}


def _answer(act: Look) -> dict[str, Any]:
    try:
        found = act()
    except Refusal as refusal:
        return {"absent": False, "known": False, "detail": f"unknown: {refusal}"}
    except OSError as error:
        return {"absent": False, "known": False, "detail": f"unknown: {error}"}
    return {"absent": not found, "known": True, "detail": found or "nothing found"}


def _domain(name: str) -> str:
    state = _libvirt.states().get(name)
    return f"{name} is {state.name}" if state else ""


def _processes(name: str, allocation_id: str) -> str:
    # By name and by id: a QEMU started past libvirt may carry only one of them.
    found = {**_libvirt.processes(name), **_libvirt.processes(allocation_id)}
    return ", ".join(f"{program} {pid}" for pid, program in sorted(found.items()))


def _file(path: str) -> str:
    return path if _host.path(path).exists() else ""


def _leases(allocation_id: str, slots: Collection[_slots.Slot]) -> str:
    others = [e for e in _dnsmasq.reservations() if e.name != allocation_id]
    macs = {str(slot.get("management_mac", "")) for slot in slots} - {e.mac for e in others}
    ips = {str(slot.get("private_ip", "")) for slot in slots} - {e.ip for e in others}
    left = [entry for entry in _dnsmasq.leases() if entry.mac in macs or entry.ip in ips]
    return ", ".join(f"{entry.ip} to {entry.mac}" for entry in left)


def _connections(slots: Collection[_slots.Slot]) -> str:
    counts = {ip: _dnsmasq.connections(ip) for slot in slots if (ip := slot.get("private_ip"))}
    return ", ".join(f"{count} of {ip}" for ip, count in counts.items() if count)


def _port(port: str) -> str:
    number = _flows.port_number(port)
    return "" if number is None else f"{port}, number {number}"


def _guard(bridge: str, allocation_id: str) -> str:
    count = len(_flows.installed(bridge, allocation_id))
    return f"{count} flows" if count else ""


def _disks(slots: Collection[_slots.Slot]) -> str:
    found = []
    for slot in slots:
        disk, problems = _slots.disk(slot)
        if disk is None:
            raise problems[0]  # not there or another one: nothing is known about its users
        found += [f"{disk.disk_identity}: {problem.found}" for problem in problems]
    return "; ".join(found)


def _devices(slots: Collection[_slots.Slot]) -> str:
    problems = _slots.passthrough([a for slot in slots for a in _slots.addresses(slot)])
    return "; ".join(f"{problem.code}: {problem.expected}, {problem.found}" for problem in problems)

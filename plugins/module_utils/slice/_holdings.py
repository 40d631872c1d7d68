"""Everything of slices that this host holds, whoever it belongs to, as facts without a verdict.

Looked for by name and place, not by a list of what should be there: what nobody remembers is what
this is for. Each part is looked at by itself; a look that fails is *unknown*, never *nothing*.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from typing import Any

from ansible_collections.gpuaas.slice.plugins.module_utils.core import _host, _ledger
from ansible_collections.gpuaas.slice.plugins.module_utils.core._errors import Refusal
from ansible_collections.gpuaas.slice.plugins.module_utils.network import _bridge
from ansible_collections.gpuaas.slice.plugins.module_utils.slice import (
    _dnsmasq,
    _domain,
    _flows,
    _libvirt,
    _object_names,
    _slots,
)

Found = list[dict[str, Any]]

_DOMAIN = "gpuaas-slice-"
_ID = re.compile(_DOMAIN + "".join(f"([0-9a-f]{{{size}}})" for size in (8, 4, 4, 4, 12)))
_PORT = re.compile(r"gs[0-9a-f]{12}")
_FOLDERS = (_object_names.SEEDS, "/var/lib/libvirt/qemu/nvram")
_ENDS = (".iso", "_VARS.fd")


def look(slots: Collection[_slots.Slot], bridge: str) -> dict[str, Any]:
    """By part: `{known, detail, found}`. slots: approved bundles, whose devices are looked at."""
    parts: dict[str, Callable[[], Found]] = {
        "domains": _domains,
        "processes": _processes,
        "leases": _leases,
        "reservations": _reservations,
        "addresses": _addresses,
        "ports": lambda: _ports(bridge),
        "guards": lambda: _guards(bridge),
        "files": _files,
        "devices": lambda: _devices(slots),
    }
    return {name: _answer(act) for name, act in parts.items()}


def _answer(act: Callable[[], Found]) -> dict[str, Any]:
    try:
        return {"known": True, "detail": "", "found": act()}
    except (Refusal, OSError, ValueError) as why:
        return {"known": False, "detail": f"unknown: {why}"[:2000], "found": []}


def _domains() -> Found:
    return [
        {
            "name": name,
            "allocation_id": _allocation(name),
            "state": state.name,
            "active": state.active,
            **_parts(name),
        }
        for name, state in sorted(_libvirt.states().items())
    ]


def _parts(name: str) -> dict[str, list[str]]:
    """Also of domains that are not ours: a stranger may have been given a slot's devices."""
    description = _domain.parse(_libvirt.definition(name))
    return {"devices": list(description["hostdevs"]), "disks": list(description["disks"])}


def _processes() -> Found:
    """Every QEMU of a slice, also one that libvirt has lost."""
    return [
        {"pid": pid, "allocation_id": _allocation(_host.read(f"/proc/{pid}/cmdline") or "")}
        for pid in sorted(_libvirt.processes(_DOMAIN))
    ]


def _leases() -> Found:
    return [
        {
            "slot_id": entry.slot_id,
            "allocation_id": entry.allocation_id,
            "fence": entry.fence,
            "disk": entry.disk_identity,
            "dirty": entry.dirty,
        }
        for entry in _ledger.entries()
    ]


def _reservations() -> Found:
    return [
        {"allocation_id": entry.name, "mac": entry.mac, "ip": entry.ip}
        for entry in _dnsmasq.reservations()
    ]


def _addresses() -> Found:
    return [{"mac": entry.mac, "ip": entry.ip} for entry in _dnsmasq.leases()]


def _ports(bridge: str) -> Found:
    return [{"port": name} for name in _bridge.ports(bridge) if _PORT.fullmatch(name)]


def _guards(bridge: str) -> Found:
    return [{"cookie": cookie} for cookie in _flows.cookies(bridge)]


def _files() -> Found:
    return [
        {"allocation_id": _allocation(file.name), "path": f"{folder}/{file.name}"}
        for folder in _FOLDERS
        for file in sorted(_host.path(folder).glob(f"{_DOMAIN}*"))
        if file.name.endswith(_ENDS)
    ]


def _devices(slots: Collection[_slots.Slot]) -> Found:
    """What speaks against giving a slot's devices to a guest. A slice's own use of them does not:
    whose use it is, the domains and processes say.
    """
    own = list(_libvirt.processes(_DOMAIN))
    found: Found = []
    for slot in slots:
        _disk, problems = _slots.disk(slot, own_pids=own)
        problems = [*problems, *_slots.passthrough(_slots.addresses(slot), own_pids=own)]
        found += [{"slot_id": slot["slot_id"], **_problem(one)} for one in problems]
    return found


def _problem(refusal: Refusal) -> dict[str, str]:
    return {"code": refusal.code, "expected": refusal.expected, "found": refusal.found[:2000]}


def _allocation(text: str) -> str:
    """The allocation id in a name; "" when there is none."""
    found = _ID.search(text)
    return "-".join(found.groups()) if found else ""

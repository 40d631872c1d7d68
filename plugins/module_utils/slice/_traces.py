"""Traces of slices on a host: every object with an allocation id in its name, by kind.

The table has three readers: slice_absence selects the traces of one allocation, slice_holdings
lists all, and slice_remnants expects none. Objects are found by name and place, so a trace without
a record is found too. A failed read raises, because it proves nothing.

Not in the table: DHCP leases and connections, which belong to an address, and the entries of the
ledger, which outlive every allocation. The readers have their own rules for these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from ansible_collections.gpuaas.slice.plugins.module_utils.core import _host, _object_names
from ansible_collections.gpuaas.slice.plugins.module_utils.network import _firewall, _flows
from ansible_collections.gpuaas.slice.plugins.module_utils.slice import (
    _dnsmasq,
    _libvirt,
    _qos,
    _relay,
)

# Kinds of traces that are files, with their names in `_object_names`.
FILES = {
    **{kind: kind for kind in ("nvram", "seed", "console", "guard", "fabric_guard", "channel")},
    "ingress_file": "ingress",
    "nvlink_file": "nvlink",
}
# A port's name has room for 12 digits of the id, a cookie for 16. Fewer identify nothing.
_LEAST_DIGITS = 12


@dataclass(frozen=True)
class Trace:
    """An object of a slice.

    owner: the allocation id, or its first hexadecimal digits if the name has no room for more; ""
    when the name does not contain it. text: the object in a message. row: its entry in
    slice_holdings.
    """

    owner: str
    text: str
    row: Mapping[str, Any]

    def belongs_to(self, allocation_id: str) -> bool:
        digits = self.owner.replace("-", "")
        return len(digits) >= _LEAST_DIGITS and allocation_id.replace("-", "").startswith(digits)


Look = Callable[[], list[Trace]]


def looks(bridge: str) -> dict[str, Look]:
    """A reader for each kind of trace. bridge: the Open vSwitch bridge whose flows are read."""
    return {
        "domain": lambda: list(_domains()),
        "qemu_process": lambda: list(_processes()),
        **{kind: partial(_files, name) for kind, name in FILES.items()},
        "reservation": lambda: list(_reservations()),
        "ovs_port": lambda: list(_ports()),
        "flows": lambda: list(_guards(bridge)),
        "ingress": lambda: list(_forwards()),
        "qos": lambda: list(_limits()),
        "relay": lambda: list(_relays()),
    }


def _domains() -> Iterator[Trace]:
    """Every domain, including foreign domains, because they may have been given the devices of a
    slot.
    """
    for name, state in sorted(_libvirt.states().items()):
        owner = _object_names.owner(name)
        row = {"name": name, "state": state.name, "active": state.active}
        row["off_by_guest"] = state.off_by_guest
        row["stops"] = state.active and _libvirt.stops(name)
        yield Trace(owner, f"{name} is {state.name}", {"allocation_id": owner, **row})


def _processes() -> Iterator[Trace]:
    """Every QEMU of a slice, including those that libvirt has lost."""
    for pid, program in sorted(_libvirt.processes(_object_names.PREFIX).items()):
        owner = _object_names.owner(_host.of_process(pid, "cmdline"))
        yield Trace(owner, f"{program} {pid}", {"allocation_id": owner, "pid": pid})


def _files(name: str) -> list[Trace]:
    owners = {path: _object_names.owner(path) for path in _object_names.files(name)}
    return [
        Trace(owner, path, {"allocation_id": owner, "path": path}) for path, owner in owners.items()
    ]


def _reservations() -> Iterator[Trace]:
    for entry in _dnsmasq.reservations():
        row = {"allocation_id": entry.name, "mac": entry.mac, "ip": entry.ip}
        yield Trace(entry.name, f"{_dnsmasq.DIRECTORY}/{entry.name}", row)


def _ports() -> Iterator[Trace]:
    """Ports of any bridge, because a slice's port on another bridge is a trace as well."""
    for name, number in sorted(_flows.ports().items()):
        owner = _object_names.port_owner(name)
        if owner:
            yield Trace(owner, f"{name}, number {number}", {"port": name, "owner": owner})


def _guards(bridge: str) -> Iterator[Trace]:
    for cookie, count in sorted(_flows.guards(bridge).items()):
        owner = _object_names.cookie_owner(cookie)
        yield Trace(owner, f"{count} flows", {"cookie": cookie, "owner": owner})


def _forwards() -> Iterator[Trace]:
    """Rules of managed ingress in the kernel."""
    for owner, rule_id in _firewall.forwarded():
        row = {"allocation_id": owner, "rule_id": rule_id}
        yield Trace(owner, f"ingress rule {rule_id}", row)


def _limits() -> Iterator[Trace]:
    for row, owner in sorted(_qos.rows().items()):
        yield Trace(owner, row, {"row": row, "allocation_id": owner})


def _relays() -> Iterator[Trace]:
    """Lines of the relay account; a line that is not ours has no owner."""
    for text in _relay.lines():
        owner = _relay.owner(text)
        yield Trace(owner, f"relay line {text}", {"allocation_id": owner, "path": text})

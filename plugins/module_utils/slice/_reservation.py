"""DHCP address of one allocation: reserved, or released with its DHCP lease and its connections.

All reservations are checked together by `dnsmasq --test` first, because one duplicate stops dnsmasq
for all guests.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ansible_collections.gpuaas.slice.plugins.module_utils.core import (
    _change,
    _ledger,
    _object_names,
)
from ansible_collections.gpuaas.slice.plugins.module_utils.core._errors import Refusal
from ansible_collections.gpuaas.slice.plugins.module_utils.network import (
    _host_connections,
    _slice_network,
)
from ansible_collections.gpuaas.slice.plugins.module_utils.slice import _dnsmasq


@dataclass(frozen=True)
class State:
    """reservation: the allocation's. others: of other allocations. leases: of this MAC or address.
    tracked: connections to forget.
    """

    reservation: _dnsmasq.Reservation | None
    others: tuple[_dnsmasq.Reservation, ...]
    leases: tuple[_dnsmasq.Lease, ...]
    tracked: int
    running: bool


def observe(params: _change.Params) -> State:
    _object_names.hexadecimal(params["allocation_id"])
    _not_late(params)
    everyone = _dnsmasq.reservations()
    reservations = [entry for entry in everyone if entry.name == params["allocation_id"]]
    address = (params["mac"], params["ip"])
    return State(
        reservation=reservations[0] if reservations else None,
        others=tuple(entry for entry in everyone if entry not in reservations),
        leases=tuple(x for x in _dnsmasq.leases() if x.mac == address[0] or x.ip == address[1]),
        tracked=_host_connections.number(params["ip"]) if params["state"] == "absent" else 0,
        running=bool(_slice_network.dnsmasq_pid()),
    )


def plan(params: _change.Params, state: State) -> _change.Plan:
    if params["state"] == "absent":
        return _plan_absent(params, state)
    reservation = _requested(params)
    blockers = _conflicts(reservation, state)
    if not state.running:
        blockers.append(
            Refusal(
                "dnsmasq_down",
                expected="dnsmasq of the slice network running",
                found="no such process",
                remedy="read `journalctl -u dnsmasq`; run the bootstrap playbook to repair it",
            )
        )
    steps = []
    if state.reservation != reservation:
        before = state.reservation.line() if state.reservation else None
        steps.append(_change.Step("reserve_address", reservation.ip, before, reservation.line()))
    return _change.Plan(tuple(steps), tuple(blockers))


def _plan_absent(params: _change.Params, state: State) -> _change.Plan:
    steps = []
    if state.reservation is not None:
        steps.append(
            _change.Step("remove_reservation", state.reservation.ip, state.reservation.line(), None)
        )
    if not _taken_over(params, state):
        for lease in state.leases:
            steps.append(_change.Step("release_lease", f"lease {lease.ip}", lease.mac, None))
        if state.tracked:
            subject = f"connections of {params['ip']}"
            steps.append(_change.Step("forget_connections", subject, state.tracked, 0))
    return _change.Plan(tuple(steps))


def _taken_over(params: _change.Params, state: State) -> bool:
    """Whether the address belongs to another allocation by now: a late release leaves it alone."""
    return any(e.mac == params["mac"] or e.ip == params["ip"] for e in state.others)


def _conflicts(reservation: _dnsmasq.Reservation, state: State) -> list[Refusal]:
    blockers = []
    for other in state.others:
        if other.mac == reservation.mac:
            blockers.append(
                _in_use("mac", reservation.mac, f"reserved for allocation {other.name}")
            )
        if other.ip == reservation.ip:
            blockers.append(_in_use("ip", reservation.ip, f"reserved for allocation {other.name}"))
    for lease in state.leases:
        if lease.ip == reservation.ip and lease.mac != reservation.mac:
            blockers.append(_in_use("ip", reservation.ip, f"leased to {lease.mac}"))
    return blockers


def apply(params: _change.Params, step: _change.Step) -> dict[str, Any] | None:
    _not_late(params)
    if step.name == "reserve_address":
        reservation = _requested(params)
        others = [e for e in _dnsmasq.reservations() if e.name != reservation.name]
        _dnsmasq.test([*others, reservation])
        _dnsmasq.write(reservation)
    elif step.name == "remove_reservation":
        _dnsmasq.remove(params["allocation_id"])
    elif step.name == "release_lease":
        leases = [lease for lease in _dnsmasq.leases() if lease.mac == step.before]
        return {lease.ip: _dnsmasq.release(params["bridge"], lease) for lease in leases}
    elif step.name == "forget_connections":
        _host_connections.forget(params["ip"])
    return None


def _not_late(params: _change.Params) -> None:
    # A reservation left by a late run would block the address of the slot's next tenant.
    if params["state"] == "present":
        _ledger.check_each(params.get("slots") or ())


def facts(_params: _change.Params, state: State) -> dict[str, Any]:
    reservation = state.reservation
    return {
        "reservation": {
            "mac": reservation.mac if reservation else "",
            "ip": reservation.ip if reservation else "",
            "lease_ip": state.leases[0].ip if state.leases else "",
            "connections": state.tracked,
        }
    }


def _requested(params: _change.Params) -> _dnsmasq.Reservation:
    return _dnsmasq.check(
        _dnsmasq.Reservation(
            name=params["allocation_id"],
            mac=params["mac"],
            ip=params["ip"],
        )
    )


def _in_use(what: str, value: str, found: str) -> Refusal:
    return Refusal(
        f"{what}_in_use",
        expected=f"{value} free on this host",
        found=found,
        remedy="verify the absence of that allocation and release its address first",
    )


SUBJECT = _change.Subject(observe, plan, apply, facts)

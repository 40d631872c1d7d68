"""DHCP server of the slice network: reservations and DHCP leases.

Each allocation has a file in the directory that the network baseline gives dnsmasq as
`dhcp-hostsdir`. dnsmasq reads new files by itself, and keeps their content until a SIGHUP.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import re
import signal
import time
from dataclasses import dataclass

from ansible_collections.gpuaas.slice.plugins.module_utils.core import (
    _command,
    _host,
    _object_names,
)
from ansible_collections.gpuaas.slice.plugins.module_utils.core._errors import Refusal
from ansible_collections.gpuaas.slice.plugins.module_utils.network import (
    _baseline_files,
    _slice_network,
)

DIRECTORY, LEASES = _baseline_files.RESERVATIONS, _baseline_files.LEASES


@dataclass(frozen=True)
class Reservation:
    """An address reserved for a MAC. name: file name, which is the allocation id.

    It has no host name, which dnsmasq would answer to every guest. A guest gets its name from its
    seed.
    """

    name: str
    mac: str
    ip: str

    def line(self) -> str:
        """`id:*`: a reinstalled guest shows another client id and must still get its address."""
        return f"{self.mac},id:*,{self.ip},12h"


@dataclass(frozen=True)
class Lease:
    """A DHCP lease, as a line of dnsmasq's file. expires: seconds since the epoch, 0 is never."""

    expires: int
    mac: str
    ip: str
    hostname: str


def check(reservation: Reservation) -> Reservation:
    """The same reservation, or a refusal that names the field."""
    _object_names.hexadecimal(reservation.name)
    _object_names.check_mac(reservation.mac)
    try:
        ipaddress.IPv4Address(reservation.ip)
    except ValueError as error:
        raise _object_names.invalid("ip", "an IPv4 address", reservation.ip) from error
    return reservation


def parse(name: str, text: str) -> Reservation:
    """A reservation file; fields are distinguished by their form, as in dnsmasq."""
    mac = ip = ""
    for field in (part.strip() for part in text.strip().split(",")):
        if re.fullmatch(r"([0-9A-Fa-f]{2}:){5}[0-9A-Fa-f]{2}", field):
            mac = field.lower()
        elif re.fullmatch(r"[0-9.]{7,15}", field):
            ip = field
    return Reservation(name, mac, ip)


def reservations() -> list[Reservation]:
    """Every reservation on this host, by name."""
    # Another run may replace or remove its file meanwhile. Drafts begin with a dot.
    names = (name for name in _host.listed(DIRECTORY) if not name.startswith("."))
    texts = ((name, _host.kept(f"{DIRECTORY}/{name}")) for name in names)
    return [parse(name, text) for name, text in texts if text is not None]


def leases() -> list[Lease]:
    """Current DHCP leases of the lease file; IPv6 and malformed lines are skipped."""
    parsed = []
    for line in (_host.kept(LEASES) or "").splitlines():
        fields = line.split()
        if len(fields) >= 4 and fields[0].isdigit() and fields[2].count(".") == 3:
            parsed.append(Lease(int(fields[0]), fields[1].lower(), fields[2], fields[3]))
    return parsed


def test(all_of_them: list[Reservation]) -> None:
    """Let dnsmasq check all reservations together, including those that bootstrap wrote. A single
    duplicate would stop it for all guests.
    """
    written = (_host.kept(_baseline_files.DNSMASQ) or "").splitlines()
    fixed = [line for line in written if line.startswith("dhcp-host=")]
    entries = [f"dhcp-host={entry.line()}" for entry in all_of_them]
    lines = "".join(f"{line}\n" for line in (*fixed, *entries))
    _command.run(["dnsmasq", "--test", "--conf-file=-"], stdin=lines)


def file_of(allocation_id: str) -> str:
    """Path of the allocation's reservation."""
    _object_names.hexadecimal(allocation_id)
    return f"{DIRECTORY}/{allocation_id}"


def write(reservation: Reservation) -> None:
    """Add or replace the reservation's file and have dnsmasq read it."""
    check(reservation)
    _host.write(file_of(reservation.name), reservation.line() + "\n")
    reload()


def remove(allocation_id: str) -> None:
    _host.remove(file_of(allocation_id))
    reload()


def reload() -> None:
    """Make dnsmasq read its host files again; no action when it does not run."""
    if process := _slice_network.dnsmasq_pid():
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGHUP)


def release(interface: str, lease: Lease, *, deadline: float = 5) -> str:
    """Make dnsmasq give up a DHCP lease; returns the method.

    `dhcp_release` sends the client's own message, which dnsmasq may not receive. In that case the
    DHCP lease is deleted from the file while dnsmasq is stopped, because dnsmasq keeps the file's
    content in memory.
    """
    try:
        _command.run(["dhcp_release", interface, lease.ip, lease.mac])
    except Refusal as refusal:
        if refusal.code != "command_missing":
            raise
    else:
        end = time.monotonic() + deadline
        while time.monotonic() < end:
            if lease.ip not in {entry.ip for entry in leases()}:
                return "released"
            time.sleep(0.5)
    with _baseline_files.dhcp_lock():
        _forget_while_stopped(lease)
    return "removed while stopped"


def _forget_while_stopped(lease: Lease) -> None:
    _command.run(["systemctl", "stop", "dnsmasq.service"])
    try:
        kept = [
            line
            for line in (_host.kept(LEASES) or "").splitlines()
            if line.split()[2:3] != [lease.ip]
        ]
        owner = _host.path(LEASES)
        before = owner.stat() if owner.exists() else None
        _host.write(LEASES, "".join(f"{line}\n" for line in kept))
        if before is not None:
            os.chown(owner, before.st_uid, before.st_gid)
    finally:
        _command.run(["systemctl", "start", "dnsmasq.service"])


def neighbour(interface: str, ip: str) -> str:
    """The MAC that answered for `ip` on `interface`, from the kernel's ARP table; "" without an
    entry.
    """
    for line in (_host.read("/proc/net/arp") or "").splitlines()[1:]:
        fields = line.split()
        # Flag 0x2: the entry is complete.
        if len(fields) >= 6 and fields[0] == ip and fields[5] == interface:
            return fields[3].lower() if int(fields[2], 16) & 2 else ""
    return ""

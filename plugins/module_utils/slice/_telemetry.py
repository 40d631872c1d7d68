"""Telemetry of the slices of a host: this host's own measurements, and what guests report.

The body of a boot service. It writes a snapshot, which an account without rights prints over SSH
(`_telemetry_service`), so that a sample needs no Ansible and no open port.
"""

from __future__ import annotations

import json
import os
import pwd
import re
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ansible_collections.gpuaas.slice.plugins.module_utils.core import (
    _boot_service,
    _command,
    _host,
    _object_names,
)
from ansible_collections.gpuaas.slice.plugins.module_utils.core._errors import Refusal
from ansible_collections.gpuaas.slice.plugins.module_utils.network import _refusals
from ansible_collections.gpuaas.slice.plugins.module_utils.slice import (
    _dnsmasq,
    _guest_values,
    _libvirt,
)

# Reads the snapshot; the service runs as root.
ACCOUNT = "gpuaas-telemetry"
FOLDER = "/run/gpuaas-telemetry"
SNAPSHOT = f"{FOLDER}/snapshot.json"
CHANNEL = "telemetry"
# A guest is read in every round of the service, this host is measured in every n-th.
EVERY = 15
# A guest that has been silent for longer has stopped its telemetry.
SILENT_S = 300.0
# Less than the unit's watchdog, so that a libvirtd that hangs is reported and not only restarted.
_LIMIT_S = 30.0

_GROUPS = ("--state", "--cpu-total", "--balloon", "--vcpu", "--block")
# Suffixes of libvirt's counters, which are summed over all disks.
_DISKS = {
    r"rd\.bytes": "disk_read_bytes",
    r"wr\.bytes": "disk_written_bytes",
    r"rd\.reqs": "disk_reads",
    r"wr\.reqs": "disk_writes",
}
# The switch's names of a port's counters. It receives what the guest sends.
_PORT = {
    "rx_bytes": "sent_bytes",
    "rx_packets": "sent_packets",
    "tx_bytes": "received_bytes",
    "tx_packets": "received_packets",
    "tx_dropped": "received_dropped_packets",
}

Values = dict[str, Any]


class Collector:
    """The channels of all running slices, and the snapshot of the newest round."""

    def __init__(self) -> None:
        self._channels: dict[str, _guest_values.Channel] = {}

    def round(self, settings: Mapping[str, Any], turn: int) -> Iterable[list[str]]:
        """One round of the service. It restores nothing, so it has no steps."""
        for channel in self._channels.values():
            channel.read()
        if turn % EVERY == 0:
            problems: list[str] = []
            slices = measure(settings, problems)
            self._follow({key for key, values in slices.items() if values["state"] == "running"})
            self._write(slices, problems)
        return ()

    def _follow(self, running: set[str]) -> None:
        """Read the channels of these slices and no others."""
        for key in self._channels.keys() - running:
            self._channels.pop(key).close()
        for key in running - self._channels.keys():
            path = _object_names.channel_path(key, CHANNEL)
            self._channels[key] = _guest_values.Channel(path)

    def _write(self, slices: Mapping[str, Values], problems: list[str]) -> None:
        now = time.time()
        rows = []
        for key, values in sorted(slices.items()):
            channel, guest = self._channels.get(key), None
            if channel and channel.values is not None:
                age_s = round(now - channel.received_at, 1)
                if 0 <= age_s <= SILENT_S:
                    guest = {**channel.values, "age_s": age_s}
            rows.append({"allocation_id": key, "host": values, "guest": guest})
        document = {"version": 1, "problems": problems, "slices": rows}
        _host.write(SNAPSHOT, json.dumps(document, sort_keys=True) + "\n")


def measure(settings: Mapping[str, Any], problems: list[str]) -> dict[str, Values]:
    """Measurements of this host for each slice, without its guest, by allocation id.

    problems: gets the name of each source that does not answer; the others are still read.
    """
    slices: dict[str, Values] = {}

    def ask(source: str, read: Callable[[], Mapping[str, Values]]) -> None:
        try:
            for key, values in read().items():
                # libvirt comes first and decides which slices there are.
                if source == "libvirt":
                    slices[key] = values
                elif key in slices:
                    slices[key].update(values)
        except (Refusal, OSError, ValueError, KeyError, TypeError):
            problems.append(source)

    ask("libvirt", _domains)
    ask("switch", lambda: _ports(slices))
    ask("guards", lambda: _refused(settings))
    ask("dhcp", _leases)
    return slices


def _domains() -> dict[str, Values]:
    return {
        owner: _domain(values)
        for name, values in _libvirt.statistics(*_GROUPS, timeout=_LIMIT_S).items()
        if (owner := _object_names.owner(name))
    }


def _domain(numbers: Mapping[str, int]) -> Values:
    state = numbers.get("state.state", 0)
    values: Values = {"state": _libvirt.STATES[state if 0 <= state < len(_libvirt.STATES) else 0]}
    if "cpu.time" in numbers:
        values["cpu_s"] = numbers["cpu.time"] / 1e9
    if "vcpu.current" in numbers:
        values["vcpus"] = numbers["vcpu.current"]
    # libvirt counts in KiB.
    if "balloon.current" in numbers:
        values["memory_bytes"] = numbers["balloon.current"] * 1024
    for end, name in _DISKS.items():
        counters = [n for key, n in numbers.items() if re.fullmatch(rf"block\.\d+\.{end}", key)]
        if counters:
            values[name] = sum(counters)
    return values


def _ports(slices: Iterable[str]) -> dict[str, Values]:
    argv = ["ovs-vsctl", "--timeout=10", "--format=json", "--columns=name,statistics"]
    rows = json.loads(_command.run([*argv, "list", "Interface"]).out)["data"]
    by_port = {name: dict(statistics[1]) for name, statistics in rows}
    return {
        key: {
            name: counters[counter]
            for counter, name in _PORT.items()
            if counters.get(counter, -1) >= 0
        }
        for key in slices
        if (counters := by_port.get(_object_names.port_name(key)))
    }


def _refused(settings: Mapping[str, Any]) -> dict[str, Values]:
    """Packets that the guard refused, by kind, since the guard was loaded."""
    return {
        row["allocation_id"]: {"refused_packets": row["refused"]}
        for row in _refusals.rows(settings)
    }


def _leases() -> dict[str, Values]:
    """Whether the guest has the address that is reserved for it."""
    now = time.time()
    held = {(lease.mac, lease.ip) for lease in _dnsmasq.leases() if not 0 < lease.expires < now}
    return {
        entry.name: {"address_leased": (entry.mac, entry.ip) in held}
        for entry in _dnsmasq.reservations()
    }


def boot(settings_path: str) -> int:
    """Body of the boot service."""
    folder = _host.path(FOLDER)
    folder.mkdir(exist_ok=True)
    folder.chmod(0o750)
    os.chown(folder, 0, pwd.getpwnam(ACCOUNT).pw_gid)
    collector = Collector()
    _boot_service.notify("READY=1")
    return _boot_service.watch(settings_path, collector.round, trouble="no telemetry")

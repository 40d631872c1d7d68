"""Telemetry of the slices of a host: this host's own measurements, and what guests report.

The body of a boot service. It writes a snapshot, which an account without rights prints over SSH
(`_telemetry_service`), so that a sample needs no Ansible and no open port. The snapshot also names
what drift detection would repair and no guardian does, so that it need not wait for its next turn.
"""

from __future__ import annotations

import contextlib
import json
import os
import pwd
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ansible_collections.gpuaas.slice.plugins.module_utils.core import (
    _accounts,
    _boot_service,
    _boot_units,
    _file_edits,
    _free_space,
    _host,
    _host_snapshot,
    _object_names,
)
from ansible_collections.gpuaas.slice.plugins.module_utils.core._errors import Refusal
from ansible_collections.gpuaas.slice.plugins.module_utils.network import (
    _baseline_files,
    _refusals,
    _switch,
)
from ansible_collections.gpuaas.slice.plugins.module_utils.slice import (
    _dnsmasq,
    _guest_values,
    _libvirt,
)

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
# Rows of a control group's memory that a guest's can be in, apart from large pages.
_MEMORY = ("anon", "shmem")
# The service takes no more.
_NUMA_NODES = 16

Values = dict[str, Any]


class Collector:
    """The channels of all running slices, and the snapshot of the newest round."""

    def __init__(self) -> None:
        self._channels: dict[str, _guest_values.Channel] = {}
        self._limited: set[str] = set()

    def round(self, settings: Mapping[str, Any], turn: int) -> Iterable[str]:
        """One round of the service. It restores nothing, so it has no steps."""
        for channel in self._channels.values():
            channel.read()
        if turn % EVERY == 0:
            problems: list[str] = []
            slices = measure(settings, problems)
            running = {key for key, values in slices.items() if values["state"] == "running"}
            differs = _differing(settings, problems)
            # Without an answer, as while libvirt starts another slice, nothing is known of any.
            if "libvirt" not in problems:
                self._follow(running)
                if self._lost_limits(slices, running):
                    differs.append("limit_missing")
            self._write(slices, problems, differs)
        return ()

    def _lost_limits(self, slices: Mapping[str, Values], running: set[str]) -> set[str]:
        """Running slices whose port had a rate limit, and has none now."""
        # A switch that did not answer says nothing of any.
        limited = {key: slices[key].pop("limited", None) for key in slices}
        lost = {key for key in self._limited & running if limited[key] is False}
        self._limited = (self._limited & running) | {key for key in limited if limited[key]}
        return lost

    def _follow(self, running: set[str]) -> None:
        """Read the channels of these slices and no others."""
        for key in self._channels.keys() - running:
            self._channels.pop(key).close()
        for key in running - self._channels.keys():
            path = _object_names.channel_path(key, CHANNEL)
            self._channels[key] = _guest_values.Channel(path)

    def _write(self, slices: Mapping[str, Values], problems: list[str], differs: list[str]) -> None:
        now = time.time()
        rows = []
        for key, values in sorted(slices.items()):
            channel, guest = self._channels.get(key), None
            if channel and channel.values is not None:
                age_s = round(now - channel.received_at, 1)
                if 0 <= age_s <= SILENT_S:
                    guest = {**channel.values, "age_s": age_s}
            rows.append({"allocation_id": key, "host": values, "guest": guest})
        document = {"version": 1, "problems": problems, "differs": differs, "slices": rows}
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
    ask("memory", lambda: _memory(slices))
    ask("switch", lambda: _ports(slices))
    ask("guards", lambda: _refused(settings))
    ask("dhcp", _leases)
    return slices


def _differing(settings: Mapping[str, Any], problems: list[str]) -> list[str]:
    """Names of parts of the host's baseline that differ, by what costs no probe of the network.

    settings: of the network; {} if they are lost, because the network is installed before this.
    """
    differs: list[str] = []
    try:
        guardians = _boot_service.present(_boot_units.NETWORK, _boot_units.FABRIC)
        services = [unit.service for unit in guardians]
        quiesced = [*(_host_snapshot.recall(_host_snapshot.GPU_SERVICES) or {})]
        names = [*services, *quiesced]
        states = _boot_service.services(names) if names else {}
        if not all(states[name].active for name in services):
            differs.append("guardian_stopped")
        if any(states[name].active for name in quiesced):
            differs.append("gpu_service_active")
        files = {_baseline_files.SYSCTL: _baseline_files.SYSCTLS}
        if settings:
            files[_baseline_files.DNSMASQ] = _baseline_files.dnsmasq(settings)
        lost = not all(_is_recorded(unit.settings_path) for unit in guardians)
        edited = any(_file_edits.unlike(path, text) for path, text in files.items())
        if not settings or lost or edited:
            differs.append("network_file")
        differs += sorted({refusal.code for refusal in _free_space.full()})
    except (Refusal, OSError, ValueError, KeyError, TypeError):
        problems.append("baseline")
    return differs


def _is_recorded(settings_path: str) -> bool:
    """Whether a guardian has its settings: a file that a power cut has emptied is there, too."""
    with contextlib.suppress(Refusal):
        _boot_service.settings(settings_path)
        return True
    return False


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


def _memory(slices: Iterable[str]) -> dict[str, Values]:
    """Memory of each running slice by NUMA node of the host, and how much is on large pages."""
    values = {}
    for key in slices:
        if pid := _libvirt.qemu_pid(_object_names.domain_name(key)):
            large = _large_pages(pid)
            nodes = large + _ordinary_pages(pid)
            by_node = [nodes[node] for node in range(max(nodes, default=-1) + 1)][:_NUMA_NODES]
            values[key] = {"large_pages_bytes": large.total(), "node_memory_bytes": by_node}
    return values


def _large_pages(pid: int) -> Counter[int]:
    """Bytes by NUMA node. They are in no control group, because systemd does not use that of large
    pages.
    """
    nodes: Counter[int] = Counter()
    if not re.search(r"^HugetlbPages:\s+[1-9]", _host.read(f"/proc/{pid}/status") or "", re.M):
        # The list of a guest on small pages would be counted page by page.
        return nodes
    for row in (_host.read(f"/proc/{pid}/numa_maps") or "").splitlines():
        if " huge " in row and (size := re.search(r" kernelpagesize_kB=(\d+)", row)):
            for node, pages in re.findall(r" N(\d+)=(\d+)", row):
                nodes[int(node)] += int(pages) * int(size[1]) * 1024
    return nodes


def _ordinary_pages(pid: int) -> Counter[int]:
    """Bytes by NUMA node, as the kernel has counted them for the guest's control group."""
    nodes: Counter[int] = Counter()
    group = re.search(r"^0::(/\S+?\.scope)\b", _host.read(f"/proc/{pid}/cgroup") or "", re.M)
    rows = _host.read(f"/sys/fs/cgroup{group[1]}/memory.numa_stat") if group else None
    for row in (rows or "").splitlines():
        if row.startswith(tuple(f"{name} " for name in _MEMORY)):
            for node, count in re.findall(r" N(\d+)=(\d+)", row):
                nodes[int(node)] += int(count)
    return nodes


def _ports(slices: Iterable[str]) -> dict[str, Values]:
    """Counters of each port, and whether it has a rate limit (`_qos`)."""
    interfaces, ports = _switch.rows(
        ("Interface", "name,statistics,ingress_policing_rate", ""), ("Port", "name,qos", "")
    )
    # OVSDB writes an absent value as ["set", []].
    shaped = {name for name, qos in ports if qos[0] == "uuid"}
    by_port = {name: (dict(statistics[1]), rate) for name, statistics, rate in interfaces}
    values: dict[str, Values] = {}
    for key in slices:
        port = _object_names.port_name(key)
        counters, rate = by_port.get(port, ({}, 0))
        if counters:
            shown = {name: counters[c] for c, name in _PORT.items() if counters.get(c, -1) >= 0}
            values[key] = {**shown, "limited": rate > 0 and port in shaped}
    return values


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
    os.chown(folder, 0, pwd.getpwnam(_accounts.TELEMETRY).pw_gid)
    collector = Collector()
    _boot_service.notify("READY=1")
    return _boot_service.watch(settings_path, collector.round, trouble="no telemetry")

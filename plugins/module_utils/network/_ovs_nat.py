"""Network baseline of a slice host: dnsmasq's configuration, forwarding, the boot service.

The live part is `_bridge`, which also runs at boot. `_ovs_nat_removal` removes the baseline.
"""

from __future__ import annotations

import dataclasses
import re
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from ansible_collections.gpuaas.slice.plugins.module_utils.core import (
    _boot_service,
    _boot_units,
    _change,
    _command,
    _host,
    _host_snapshot,
)
from ansible_collections.gpuaas.slice.plugins.module_utils.core._errors import Refusal
from ansible_collections.gpuaas.slice.plugins.module_utils.network import (
    _baseline_files,
    _bridge,
    _guards,
    _slice_network,
    _start_hook,
)

DNSMASQ, RESERVATIONS = _baseline_files.DNSMASQ, _baseline_files.RESERVATIONS
_READABLE = 0o055
# Down to the reservations.
_FOLDERS = (_host.STATE_DIRECTORY, str(PurePosixPath(RESERVATIONS).parent), RESERVATIONS)
SYSCTL = _baseline_files.SYSCTL

RECORD = "network"
SWITCH, DHCP, RSHIM = _bridge.SWITCH, _bridge.DHCP, "rshim.service"

_OLD_SERVICE = "gpuaas-slice-host-net-baseline"
_UNITS = "/etc/systemd/system"
_UNIT_FOLDERS = (_UNITS, "/usr/lib/systemd/system", "/lib/systemd/system")
_OLD_FILES = (
    f"{_UNITS}/{_OLD_SERVICE}.service",
    f"{_UNITS}/{_OLD_SERVICE}.service.d",
    f"/usr/local/sbin/{_OLD_SERVICE}",
    f"/usr/local/sbin/{_OLD_SERVICE}.sh",
    "/usr/local/sbin/gpuaas-slice-network-baseline.sh",
)
_COMMANDS = {
    "start_switch": ["systemctl", "enable", "--now", SWITCH],
    "enable_dnsmasq": ["systemctl", "enable", DHCP],
}
_BRIDGE_NAME = re.compile(r"[a-z][a-z0-9_.-]{0,14}")

Params = Mapping[str, Any]


@dataclass(frozen=True)
class State:
    """dnsmasq_changed: last change of its files, in seconds since the epoch.

    before: host state recorded before its first baseline; None without a record. unhooked: daemons
    of libvirt that run without having seen the start hook. bridge: the one that the host was given
    before, or "".
    """

    live: _bridge.State
    installed: _boot_service.Installed
    files: Mapping[str, str | None]
    reservations: bool
    stale: tuple[str, ...]
    old: tuple[str, ...]
    dnsmasq: _boot_service.Service
    dnsmasq_changed: int
    switch: _boot_service.Service
    rshim: _boot_service.Service
    rshim_installed: bool
    before: Mapping[str, Any] | None = None
    unhooked: Sequence[str] = ()
    bridge: str = ""

    @property
    def ours(self) -> bool:
        """Whether a managed baseline is on this host, completely or partly."""
        return self.files[DNSMASQ] is not None or bool(self.installed.present)


def unit(params: Params) -> _boot_service.Unit:
    return dataclasses.replace(_boot_units.NETWORK, settings=_baseline_files.settings(params))


def observe(params: Params) -> State:
    services = _boot_service.services([DHCP, SWITCH, RSHIM])
    return State(
        live=_bridge.observe(params),
        installed=_boot_service.observe(unit(params)),
        files={path: _host.read(path) for path in (DNSMASQ, SYSCTL)},
        reservations=all(_is_open(folder) for folder in _FOLDERS),
        stale=tuple(_slice_network.stale_reservations()),
        old=tuple(_old()),
        dnsmasq=services[DHCP],
        dnsmasq_changed=changed_at(_host.path("/etc/dnsmasq.d")),
        switch=services[SWITCH],
        rshim=services[RSHIM],
        rshim_installed=any(_host.path(f"{folder}/{RSHIM}").exists() for folder in _UNIT_FOLDERS),
        before=_host_snapshot.recall(RECORD),
        unhooked=_start_hook.unnoticed(),
        bridge=str(_guards.recorded().get("bridge", "")),
    )


def plan(params: Params, state: State) -> _change.Plan:
    live = _bridge.plan(params, state.live)
    # This run starts the switch, if an interface of the bridge's name can only be our bridge.
    starts = state.ours or params["bridge"] not in state.live.interfaces
    blockers = [*_unsafe(params), *renamed(params, state), *_resolver(state)]
    blockers += [b for b in live.blockers if not (starts and b.code == _bridge.STOPPED)]
    if not blockers:
        # Not at boot: an address that the host got since would take the network from its guests.
        # Their guards refuse it, and parity names it.
        blockers += _guards.problems(params, list(state.live.local))
    runs = state.rshim.active and state.rshim.enabled
    start_rshim = params["tmfifo"] and state.rshim_installed and not runs
    steps = []
    if state.before is None and not state.ours:
        steps += _host_snapshot.remember_steps(RECORD, None, _was(state))
    steps += outdated(state)
    if not state.reservations:
        steps.append(_change.Step("make_folder", RESERVATIONS, None, "folder"))
    files = {} if blockers else _texts(params)
    steps += [
        _change.Step("write_file", path, state.files[path], text.strip())
        for path, text in files.items()
        if state.files[path] != text.strip()
    ]
    if state.live.switch_problem or not (state.switch.active and state.switch.enabled):
        steps.append(_change.Step("start_switch", SWITCH, "inactive", "active at every boot"))
    steps += [step for step in live.steps if not step.soft]
    steps += _boot_service.plan(unit(params), state.installed)
    steps += [
        _change.Step("restart_libvirt", f"{name}.service", "without the start hook", "with it")
        for name in state.unhooked
    ]
    steps += _dnsmasq_steps(state, {step.name for step in steps})
    soft, doubts = [step for step in live.steps if step.soft], live.doubts
    if start_rshim:
        before = "active until the next boot" if state.rshim.active else "inactive"
        after = "active at every boot"
        start = _change.Step("start_rshim", RSHIM, before, after, soft=True)
        # The interface appears with the service.
        soft, doubts = [start, *_bridge.link_steps(state.live)], ()
    return _change.Plan((*steps, *soft), tuple(blockers), doubts)


def apply(params: Params, step: _change.Step) -> dict[str, Any] | None:
    if step.name in _host_snapshot.STEPS:
        _host_snapshot.apply(step)
    elif step.name in _boot_service.STEPS:
        _boot_service.apply(unit(params), step)
    elif step.name == "remove_old_service":
        _remove_old(step.before)
    elif step.name == "remove_stale_reservation":
        _host.remove(step.subject)
    elif step.name == "make_folder":
        _make_folders()
    elif step.name == "write_file":
        if step.subject == DNSMASQ:
            _command.run(["dnsmasq", "--test", "--conf-file=-"], stdin=f"{step.after}\n")
        _host.write(step.subject, f"{step.after}\n")
    elif step.name == "restart_dnsmasq":
        with _baseline_files.dhcp_lock():
            _command.run(["systemctl", "restart", DHCP])
    elif step.name == "restart_libvirt":
        # Running guests are not touched.
        _command.run(["systemctl", "try-restart", step.subject])
    elif step.name == "start_rshim":
        _start_rshim()
    elif step.name in _COMMANDS:
        # systemd gives the start of a unit 90 s.
        _command.run(_COMMANDS[step.name], timeout=120)
    else:
        return _bridge.apply(params, step)
    return None


def facts(params: Params, state: State) -> dict[str, Any]:
    with_tmfifo = params["tmfifo"]
    return {
        "network": {
            "bridge": params["bridge"],
            "address": params["address"],
            "nat": state.live.nat,
            "forwarding": state.live.forwarding,
            "uplink": state.live.uplink,
            "dnsmasq": state.dnsmasq.active,
            "tmfifo": _bridge.link_shown(state.live) if with_tmfifo else "not asked for",
        }
    }


SUBJECT = _change.Subject(observe, plan, apply, facts)


def _texts(params: Params) -> dict[str, str]:
    return {SYSCTL: _baseline_files.SYSCTLS, DNSMASQ: _baseline_files.dnsmasq(params)}


def outdated(state: State) -> list[_change.Step]:
    """Leftovers of earlier releases: the service under its first name, one reservation file per
    slice.
    """
    steps = []
    if state.old:
        steps.append(_change.Step("remove_old_service", _OLD_SERVICE, list(state.old), []))
    return steps + [
        _change.Step("remove_stale_reservation", f"/etc/dnsmasq.d/{name}", "present", None)
        for name in state.stale
    ]


def _old() -> list[str]:
    """Files of the first service; `enable` links remain when only its unit was removed."""
    folders = _host.matching(_UNITS, "*.wants")
    links = [f"{_UNITS}/{folder}/{_OLD_SERVICE}.service" for folder in folders]
    # `exists` returns False for a link to a unit that is gone.
    old_links = [path for path in links if _host.path(path).is_symlink()]
    return [path for path in _OLD_FILES if _host.path(path).exists()] + old_links


def _remove_old(paths: Sequence[str]) -> None:
    if _OLD_FILES[0] in paths:
        _command.run(["systemctl", "disable", "--now", f"{_OLD_SERVICE}.service"])
    for path in paths:
        if _host.path(path).is_dir():
            shutil.rmtree(_host.path(path))
        else:
            _host.remove(path)
    _command.run(["systemctl", "daemon-reload"])


def _was(state: State) -> dict[str, Any]:
    """The host's original state. A service from a package that this collection installed did not
    exist.
    """
    ours = _host_snapshot.recall(_host_snapshot.PACKAGES) or {}
    services = (("dnsmasq", state.dnsmasq), ("openvswitch-switch", state.switch))
    snapshot: dict[str, Any] = {
        package: {
            "active": service.active and package not in ours,
            "enabled": service.enabled and package not in ours,
        }
        for package, service in (*services, ("rshim", state.rshim))
    }
    kernel = {"forwarding": state.live.forwarding, "neighbours": dict(state.live.neighbours)}
    return {**kernel, **snapshot}


def changed_at(folder: Path) -> int:
    """When a file was last added to a folder, removed from it or replaced; 0 without the folder.

    A time in the future, from before a change of the clock, would be later than any start.
    """
    at = folder.stat().st_mtime if folder.is_dir() else 0
    return int(at) if at <= time.time() else 0


def _is_open(folder: str) -> bool:
    """Whether dnsmasq's user can read the folder."""
    path = _host.path(folder)
    return path.is_dir() and path.stat().st_mode & _READABLE == _READABLE


def _make_folders() -> None:
    for folder in map(_host.path, _FOLDERS):
        folder.mkdir(exist_ok=True, parents=True)
        folder.chmod(folder.stat().st_mode | _READABLE)


def _dnsmasq_steps(state: State, planned: set[str]) -> list[_change.Step]:
    steps = []
    if not state.dnsmasq.enabled:
        steps.append(_change.Step("enable_dnsmasq", "dnsmasq at boot", "disabled", "enabled"))
    stale = state.dnsmasq.started_at < state.dnsmasq_changed
    rewritten = planned & {"write_file", "remove_stale_reservation", "add_bridge"}
    # The boot service restarts dnsmasq and does not wait for it, so it is waited for here.
    restarting = "start_service" in planned
    if not state.dnsmasq.active or stale or rewritten or restarting:
        before = "old configuration" if state.dnsmasq.active else "inactive"
        steps.append(_change.Step("restart_dnsmasq", DHCP, before, "restarted"))
    return steps


def _resolver(state: State) -> list[Refusal]:
    """Refusal of a host that resolves names by the dnsmasq that is to serve guests only."""
    if state.files[DNSMASQ] is not None or not state.dnsmasq.active:
        return []
    local = [name for name in _baseline_files.name_servers() if name.startswith("127.")]
    if not local or local[0].startswith(_baseline_files.STUBS):
        return []
    return [
        Refusal(
            "resolver_in_use",
            expected="a host that resolves names without its dnsmasq, which serves guests from now",
            found=f"nameserver {local[0]} in /etc/resolv.conf, and dnsmasq.service is active",
            remedy="put the site's name servers into /etc/resolv.conf, or let systemd-resolved "
            "serve the host, then stop dnsmasq.service and run again",
        )
    ]


def renamed(params: Params, state: State) -> list[Refusal]:
    """Refusal of another bridge than the host's own, which would stay beside it with its guests."""
    if state.bridge in ("", params["bridge"]):
        return []
    return [
        Refusal(
            "bridge_renamed",
            expected=f"the bridge {state.bridge}, which this host has",
            found=f"{params['bridge']} in network.bridge of the hardware profile",
            remedy=f"set network.bridge to {state.bridge}; to rename it, restore the host to bare "
            "metal first",
        )
    ]


def _unsafe(params: Params) -> list[Refusal]:
    if _BRIDGE_NAME.fullmatch(params["bridge"]):
        return []
    return [
        Refusal(
            "network_invalid",
            expected="a bridge name of at most 15 lower case letters, digits and _ . -",
            found=repr(params["bridge"]),
            remedy="correct network.bridge of the hardware profile",
        )
    ]


def _start_rshim() -> None:
    _command.run(["systemctl", "enable", "--now", RSHIM])
    # The driver needs some seconds to create its interface; after 30 it will not appear.
    deadline = time.monotonic() + 30
    while not _bridge.link_there() and time.monotonic() < deadline:
        time.sleep(1)

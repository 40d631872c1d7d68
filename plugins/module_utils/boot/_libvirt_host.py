"""libvirt service of a slice host, now and after a reboot, with QEMU's access to its directory.

libvirt's own network is stopped: no slice uses it, and its bridge brings a DHCP and a DNS server.

A return to bare metal restores libvirt's recorded state; without a record libvirt is left alone.
QEMU's logs of slices are removed in any case: the next tenant of the machine may be root.
"""

from __future__ import annotations

import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ansible_collections.gpuaas.slice.plugins.module_utils.boot import (
    _confinement,
    _host_packages,
)
from ansible_collections.gpuaas.slice.plugins.module_utils.core import (
    _boot_service,
    _change,
    _command,
    _host,
    _host_snapshot,
    _managed_block,
    _object_names,
)

RECORD = "libvirt"

# The daemon stops when idle, so its socket must always be active.
_DAEMON, _SOCKET = "libvirtd.service", "libvirtd.socket"
# Any of these sockets starts the daemon again.
_SOCKETS = (_SOCKET, "libvirtd-ro.socket", "libvirtd-admin.socket")
_OPEN = 0o755
_NETWORK, _NETWORKS = "default", "/etc/libvirt/qemu/networks"
_BRIDGE = re.compile(r"<bridge\s[^>]*name=['\"]([\w.-]{1,15})['\"]")
_STOPPED = {"active": False, "autostart": False}

Params = Mapping[str, Any]


@dataclass(frozen=True)
class State:
    """mode: of the directory, None when it is missing. before: None without a record. qemu: the
    settings of QEMU, "" without the file. access: the site's rules of AppArmor for guests.
    compiler: settings of AppArmor's compiler. logs: QEMU's of slices. network: whether libvirt's
    own one is `active` and starts with libvirt. network_used: whether a machine of the site is on
    it.
    """

    mode: int | None
    daemon: _boot_service.Service
    socket: _boot_service.Service
    before: Mapping[str, Any] | None
    qemu: str
    access: str
    compiler: str
    logs: tuple[str, ...] = ()
    network: Mapping[str, bool] = field(default_factory=_STOPPED.copy)
    network_used: bool = False


def observe(params: Params) -> State:
    folder = _host.path(params["directory"])
    services = _boot_service.services([_DAEMON, _SOCKET])
    named = _BRIDGE.search(_text(f"{_NETWORKS}/{_NETWORK}.xml"))
    link = f"/sys/class/net/{named[1] if named else 'virbr0'}"
    members = _host.path(f"{link}/brif")
    return State(
        mode=stat.S_IMODE(folder.stat().st_mode) if folder.is_dir() else None,
        daemon=services[_DAEMON],
        socket=services[_SOCKET],
        before=_host_snapshot.recall(RECORD),
        qemu=_text(_confinement.QEMU),
        access=_text(_confinement.APPARMOR),
        compiler=_text(_confinement.COMPILER),
        logs=tuple(_object_names.qemu_logs()),
        network={
            "active": _host.path(f"{link}/bridge").is_dir(),
            "autostart": _host.path(f"{_NETWORKS}/autostart/{_NETWORK}.xml").is_file(),
        },
        # Earlier versions of libvirt put an interface of their own on the bridge.
        network_used=members.is_dir()
        and any(not port.name.endswith("-nic") for port in members.iterdir()),
    )


def _text(path: str) -> str:
    file = _host.path(path)
    return file.read_text(errors="surrogateescape") if file.is_file() else ""


def plan(params: Params, state: State) -> _change.Plan:
    if params.get("state") == "absent":
        return _change.Plan(tuple(_back(params, state)))
    # Recorded even if nothing else changes; otherwise a later repair would record drift as the
    # original state.
    record = (
        [] if state.before is not None else _host_snapshot.remember_steps(RECORD, None, _was(state))
    )
    return _change.Plan((*record, *_steps(params, state)))


def _steps(params: Params, state: State) -> list[_change.Step]:
    steps = []
    if state.mode != _OPEN:
        before = None if state.mode is None else f"{state.mode:04o}"
        steps.append(_change.Step("open_directory", params["directory"], before, f"{_OPEN:04o}"))
    if not state.daemon.enabled:
        steps.append(_change.Step("enable_libvirt", _DAEMON, "disabled", "enabled"))
    if state.qemu and state.qemu != (confined := _confinement.with_settings(state.qemu)):
        steps.append(_configure("confine_guests", _confinement.QEMU, state.qemu, confined))
    if state.access != (admitted := _confinement.with_access(state.access)):
        steps.append(_configure("show_numa", _confinement.APPARMOR, state.access, admitted))
    if state.compiler != (quick := _confinement.with_compiler(state.compiler)):
        steps.append(_configure("tune_apparmor", _confinement.COMPILER, state.compiler, quick))
    if not (state.socket.active and state.socket.enabled):
        steps.append(_change.Step("start_socket", _SOCKET, "inactive", "active at every boot"))
    if state.network != _STOPPED and not state.network_used:
        steps.append(_change.Step("stop_network", _NETWORK, state.network, _STOPPED))
    return steps


def _back(params: Params, state: State) -> list[_change.Step]:
    was = state.before
    logs = list(state.logs)
    steps = [_change.Step("remove_logs", "QEMU's logs of slices", logs, [])] if logs else []
    if was is None:
        return steps
    for name, path, text in (
        ("restore_qemu_settings", _confinement.QEMU, state.qemu),
        ("restore_apparmor", _confinement.APPARMOR, state.access),
        ("restore_compiler", _confinement.COMPILER, state.compiler),
    ):
        if _managed_block.block_of(text):
            steps.append(_configure(name, path, text, _managed_block.without_block(text)))
    running = state.socket.active or state.socket.enabled or state.daemon.enabled
    # Records of earlier releases have no network.
    network = was.get("network", state.network)
    if not (was["socket"] or was["daemon"]) and running:
        steps.append(_change.Step("stop_libvirt", _DAEMON, "active at every boot", "stopped"))
    elif state.network != network:
        steps.append(_change.Step("restore_network", _NETWORK, state.network, network))
    mode = None if state.mode is None else f"{state.mode:04o}"
    if was["mode"] and mode and was["mode"] != mode:
        steps.append(_change.Step("close_directory", params["directory"], mode, was["mode"]))
    return [*steps, *_host_snapshot.forget_steps(RECORD, was)]


def _configure(name: str, path: str, before: str, after: str) -> _change.Step:
    blocks = (_managed_block.block_of(before), _managed_block.block_of(after))
    return _change.Step(name, path, *blocks)


def _was(state: State) -> dict[str, Any]:
    """libvirt's original state; if it came with this collection's packages, it did not exist."""
    ours = "libvirt-daemon-system" in (_host_snapshot.recall(_host_packages.RECORD) or {})
    return {
        "mode": None if state.mode is None or ours else f"{state.mode:04o}",
        "daemon": state.daemon.enabled and not ours,
        "socket": (state.socket.enabled or state.socket.active) and not ours,
        "network": _STOPPED if ours else state.network,
    }


def apply(params: Params, step: _change.Step) -> dict[str, Any] | None:
    if step.name in _host_snapshot.STEPS:
        _host_snapshot.apply(step)
    elif step.name == "remove_logs":
        for path in step.before:
            _host.remove(path)
    elif step.subject in (_confinement.QEMU, _confinement.APPARMOR, _confinement.COMPILER):
        file = _host.path(step.subject)
        mode = stat.S_IMODE(file.stat().st_mode) if file.is_file() else 0o644
        site = _managed_block.without_block(_text(step.subject))
        text = _managed_block.with_block(site, step.after) if step.after else site
        _host.write(step.subject, text, mode)
        if step.subject == _confinement.QEMU:
            # libvirt reads the file at its start. Running guests are not touched.
            _command.run(["systemctl", "try-restart", _DAEMON], timeout=120)
    elif step.subject == _NETWORK:
        _switch_network(step.before, step.after)
    elif step.name == "stop_libvirt":
        _command.run(["systemctl", "disable", "--now", *_SOCKETS, _DAEMON], timeout=120)
    elif step.name == "close_directory":
        _host.path(params["directory"]).chmod(int(step.after, 8))
    elif step.name == "open_directory":
        folder = _host.path(params["directory"])
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(_OPEN)
    elif step.name == "enable_libvirt":
        _command.run(["systemctl", "enable", _DAEMON], timeout=120)
    else:
        _command.run(["systemctl", "enable", "--now", _SOCKET], timeout=120)
    return None


def _switch_network(before: Mapping[str, bool], after: Mapping[str, bool]) -> None:
    if before["autostart"] != after["autostart"]:
        _virsh("net-autostart", _NETWORK, *(() if after["autostart"] else ("--disable",)))
    if before["active"] != after["active"]:
        _virsh("net-start" if after["active"] else "net-destroy", _NETWORK)


def _virsh(*words: str) -> None:
    _command.run(["virsh", "-q", "-c", "qemu:///system", *words], timeout=120)


SUBJECT = _change.Subject(observe, plan, apply)

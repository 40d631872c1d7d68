"""DHCP and DNS of the slice network: dnsmasq's configuration, its reservations, its service.

Bootstrap establishes it as a part of the network (`_ovs_nat`), and the host's upkeep restores it.
Open vSwitch and libvirt are not asked, so that one that hangs does not stop the upkeep.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ansible_collections.gpuaas.slice.plugins.module_utils.core import (
    _boot_service,
    _change,
    _command,
    _host,
)
from ansible_collections.gpuaas.slice.plugins.module_utils.network import _baseline_files

FILE, RESERVATIONS = _baseline_files.DNSMASQ, _baseline_files.RESERVATIONS
SERVICE = "dnsmasq.service"
# dnsmasq reads all files of it.
FOLDER = "/etc/dnsmasq.d"
STEPS = (
    *("remove_stale_reservation", "make_folder", "write_configuration", "enable_dnsmasq"),
    "restart_dnsmasq",
)

Params = Mapping[str, Any]


@dataclass(frozen=True)
class State:
    """text: of the configuration, None without it. stale: reservations of earlier releases, a file
    for each slice. changed: last change of the files, in seconds since the epoch.
    """

    text: str | None
    reservations: bool
    stale: tuple[str, ...]
    service: _boot_service.Service
    changed: int


def observe(_params: Params) -> State:
    folder = _host.path(FOLDER)
    stale = folder.glob("gpuaas-gpuaas-slice-*.conf") if folder.is_dir() else ()
    return State(
        text=_host.read(FILE),
        reservations=_host.path(RESERVATIONS).is_dir(),
        stale=tuple(sorted(file.name for file in stale)),
        service=_boot_service.services([SERVICE])[SERVICE],
        # Adding, removing or replacing a file changes the folder's time.
        changed=int(folder.stat().st_mtime) if folder.is_dir() else 0,
    )


def plan(params: Params, state: State) -> _change.Plan:
    steps = [*outdated(state), *files(params, state)]
    return _change.Plan((*steps, *serve(state, rewritten=bool(steps))))


def outdated(state: State) -> list[_change.Step]:
    return [
        _change.Step("remove_stale_reservation", f"{FOLDER}/{name}", "present", None)
        for name in state.stale
    ]


def files(params: Params, state: State) -> list[_change.Step]:
    steps = []
    if not state.reservations:
        steps.append(_change.Step("make_folder", RESERVATIONS, None, "folder"))
    text = _baseline_files.dnsmasq(params).strip()
    if state.text != text:
        steps.append(_change.Step("write_configuration", FILE, state.text, text))
    return steps


def serve(state: State, *, rewritten: bool) -> list[_change.Step]:
    """Steps to a service that runs with the files. rewritten: whether earlier steps change them."""
    steps = []
    if not state.service.enabled:
        steps.append(_change.Step("enable_dnsmasq", "dnsmasq at boot", "disabled", "enabled"))
    stale = state.service.started_at < state.changed
    if not state.service.active or stale or rewritten:
        before = "old configuration" if state.service.active else "inactive"
        steps.append(_change.Step("restart_dnsmasq", SERVICE, before, "restarted"))
    return steps


def apply(_params: Params, step: _change.Step) -> None:
    """Do one of STEPS."""
    if step.name == "remove_stale_reservation":
        _host.remove(step.subject)
    elif step.name == "make_folder":
        _host.path(RESERVATIONS).mkdir(parents=True, exist_ok=True)
    elif step.name == "write_configuration":
        _command.run(["dnsmasq", "--test", "--conf-file=-"], stdin=f"{step.after}\n")
        _host.write(step.subject, f"{step.after}\n")
    elif step.name == "enable_dnsmasq":
        _command.run(["systemctl", "enable", SERVICE])
    elif step.name == "restart_dnsmasq":
        _command.run(["systemctl", "restart", SERVICE])


SUBJECT = _change.Subject(observe, plan, apply)

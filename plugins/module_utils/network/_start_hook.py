"""libvirt's start hook: a slice's domain starts only with its guard in force, whoever starts it.

libvirt calls it when the domain's port is on the bridge and before QEMU runs, and gives up the
start when it fails. Guard and NVLink partition come from files that slice_vm kept, so they hold for
a start by hand and after a power loss too. The hook must not call libvirt, which waits for it.
"""

from __future__ import annotations

import sys
import time
from xml.etree import ElementTree

from ansible_collections.gpuaas.slice.plugins.module_utils.core import _host, _object_names
from ansible_collections.gpuaas.slice.plugins.module_utils.core._errors import Refusal
from ansible_collections.gpuaas.slice.plugins.module_utils.network import (
    _flows,
    _guards,
    _host_connections,
    _nvlink,
)

_RETRY_S, _DEADLINE_S = 0.2, 20.0
# Daemons of libvirt that start guests: the one for all drivers, and that of a modular libvirt. Each
# writes its file of this name in /run when it starts.
_DAEMONS = ("libvirtd", "virtqemud")


def unnoticed() -> list[str]:
    """Running daemons of libvirt that are older than the hook. They look for hooks only when they
    start. A time of the hook in the future, from before a change of the clock, shows nothing.
    """
    hook = _host.path(_object_names.START_HOOK)
    written = hook.stat().st_mtime if hook.exists() else None
    return [name for name in _DAEMONS if _older(name, written)]


def _older(daemon: str, written: float | None) -> bool:
    try:
        started = _host.path(f"/run/{daemon}.pid").stat().st_mtime
    except FileNotFoundError:
        return False
    return written is None or started < written <= time.time()


def start(domain: str, definition: str) -> int:
    """Body of the hook: 0 lets libvirt start the domain. The reason goes to libvirt's error."""
    try:
        admit(domain, definition)
    except (Refusal, OSError, ValueError, KeyError) as broken:
        sys.stderr.write(f"gpuaas: {domain} is not started: {broken}\n")
        return 1
    return 0


def admit(domain: str, definition: str) -> None:
    """Bring the domain's guard and NVLink partition in force, or refuse."""
    guard = _guards.saved(_object_names.owner(domain))
    settings = _guards.recorded()
    if guard is None or _object_names.domain_name(guard.allocation_id) != domain:
        raise _refuse("guard_missing", "a guard of this domain in /var/lib/gpuaas/guards", "none")
    if not settings:
        raise _refuse("not_bootstrapped", "the network that bootstrap recorded", "no record")
    interfaces = _interfaces(definition)
    if interfaces != [(guard.bridge, guard.port, guard.mac)]:
        expected = f"one interface: {guard.port} on {guard.bridge} with {guard.mac}"
        raise _refuse("domain_differs", expected, str(interfaces))
    partition = _nvlink.saved(guard.allocation_id)
    if partition is not None:
        _nvlink.change(partition, active=True)
    end = time.monotonic() + _DEADLINE_S
    while True:
        # Again each time, because a switch that has restarted gives another number.
        number = _flows.await_port(guard.port, deadline=max(end - time.monotonic(), 0.1))
        left = _restored(settings, guard, number)
        if not left:
            return
        if time.monotonic() > end:
            raise _refuse("guard_not_in_force", "the guard in the switch and the firewall", left)
        time.sleep(_RETRY_S)


def _restored(settings: _guards.Params, guard: _flows.Guard, number: int) -> str:
    """Restore the isolation; returns the difference that a look at all of it has shown, or the
    reason. A neighbour's port that fails keeps no domain from its start.
    """
    if guard.bridge != settings["bridge"]:
        return f"{guard.port} is not on {settings['bridge']}"
    reason = ""
    try:
        # Without a look before, because a tap that was just made has no filter. The guardian may do
        # the same at the same time.
        _guards.install(settings, guard, number)
        state = _guards.observe(settings)
        if state is None or guard.cookie not in state.expected:
            return f"{guard.port} is not on {settings['bridge']}"
        steps = _guards.plan(settings, state)
        try:
            list(_guards.carrying_out(settings, steps))
        except Refusal as refusal:
            reason = str(refusal)
        if steps := _guards.without_neighbours(steps, guard.port):
            return reason or ", ".join(f"{step.name} {step.subject}" for step in steps)
        # A domain that starts has no connection of its own; the number may have been another's.
        _flows.forget_connections(number)
        _host_connections.forget(guard.ip)
    except Refusal as refusal:
        return str(refusal)
    return ""


def _interfaces(definition: str) -> list[tuple[str, str, str]]:
    """Bridge, port and MAC of every interface; "" for what an interface does not have."""
    return [
        (
            _attribute(interface, "source", "bridge"),
            _attribute(interface, "target", "dev"),
            _attribute(interface, "mac", "address"),
        )
        # From libvirt, which has parsed it itself.
        for interface in ElementTree.fromstring(definition).iterfind("./devices/interface")  # noqa: S314
    ]


def _attribute(interface: ElementTree.Element, name: str, attribute: str) -> str:
    element = interface.find(name)
    return "" if element is None else element.get(attribute, "")


def _refuse(code: str, expected: str, found: str) -> Refusal:
    remedy = "run the playbook that starts the slice, or release it; see `ovs-vsctl show`"
    return Refusal(code, expected=expected, found=found, remedy=remedy)

"""Removal of the network baseline: restores the host's original network.

Without a record, a host with a managed baseline is treated as freshly deployed, with neither Open
vSwitch nor dnsmasq running. A host without a baseline is left alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ansible_collections.gpuaas.slice.plugins.module_utils.core import (
    _boot_service,
    _change,
    _command,
    _host,
    _host_snapshot,
)
from ansible_collections.gpuaas.slice.plugins.module_utils.core._errors import Refusal
from ansible_collections.gpuaas.slice.plugins.module_utils.network import (
    _bridge,
    _firewall,
    _flows,
    _host_connections,
    _host_filter,
    _nat,
    _ovs_nat,
    _port_filter,
    _slice_network,
)

_OFF = {"active": False, "enabled": False}
_SERVICES = {
    "dnsmasq": _ovs_nat.DHCP,
    "openvswitch-switch": _ovs_nat.SWITCH,
    "rshim": _ovs_nat.RSHIM,
}

Params = Mapping[str, Any]


@dataclass(frozen=True)
class State:
    """ports: of slices on the bridge. reserved: files of slices in the reservations.

    translating: our rules of NAT. admitted: our rules in the host's filter.
    """

    baseline: _ovs_nat.State
    ports: tuple[str, ...]
    reserved: tuple[str, ...]
    firewall: bool = False
    translating: tuple[str, ...] = ()
    admitted: tuple[str, ...] = ()

    @property
    def concerned(self) -> bool:
        """Whether this host has or had a managed baseline."""
        return self.baseline.ours or self.baseline.before is not None


def observe(params: Params) -> State:
    baseline = _ovs_nat.observe(params)
    bridge = params["bridge"]
    there = _slice_network.ports(bridge) if bridge in baseline.live.bridges else []
    # A parity run that was killed leaves its port, which survives a restart of the host.
    there = [name for name in there if name != _flows.PROBE_PORT]
    names = _host.listed(_ovs_nat.RESERVATIONS)
    reserved = tuple(name for name in names if not name.startswith("."))
    return State(
        baseline,
        tuple(there),
        reserved,
        firewall=_firewall.installed() is not None or _host_connections.installed() is not None,
        translating=tuple(_nat.installed(params)),
        admitted=tuple(_host_filter.installed()),
    )


def plan(params: Params, state: State) -> _change.Plan:
    baseline, bridge = state.baseline, params["bridge"]
    blockers = [*_ovs_nat.renamed(params, baseline), *_in_use(params, state)]
    # After a boot its database alone may still have the bridge, which would come back with it.
    may_have_it = bridge in baseline.live.interfaces or baseline.switch.enabled
    if state.concerned and baseline.live.switch_problem and may_have_it:
        blockers.append(_bridge.switch_stopped(baseline.live.switch_problem))
    steps = _ovs_nat.outdated(baseline)
    steps += _boot_service.plan_removal(_ovs_nat.unit(params), baseline.installed)
    steps += [
        _change.Step("remove_file", path, text, None)
        for path, text in baseline.files.items()
        if text is not None
    ]
    if baseline.reservations:
        steps.append(_change.Step("remove_folder", _ovs_nat.RESERVATIONS, "folder", None))
    if state.translating:
        steps.append(_change.Step("remove_nat", "nat rule", list(state.translating), []))
    card = baseline.live.interfaces.get(_bridge.TMFIFO)
    if state.concerned and card and _bridge.TMFIFO_ADDRESS in card.addresses:
        before = list(card.addresses)
        steps.append(_change.Step("remove_address", _bridge.TMFIFO, before, []))
    if bridge in baseline.live.bridges:
        steps.append(_change.Step("remove_bridge", bridge, "OVS bridge", None))
    if state.admitted:
        step = _change.Step("remove_admission", "host's filter", list(state.admitted), [])
        steps.append(step)
    if state.firewall:
        steps.append(_change.Step("remove_firewall", "firewall of the guests", "loaded", None))
    # An unknown earlier state is left to the next boot, which has no managed setting.
    if baseline.live.forwarding and (baseline.before or {}).get("forwarding") is False:
        steps.append(_change.Step("stop_forwarding", "net.ipv4.ip_forward", 1, 0))
    sizes = (baseline.before or {}).get("neighbours") or {}
    steps += [
        _change.Step("restore_neighbours", key, size, sizes[key])
        for key, size in baseline.live.neighbours.items()
        if sizes.get(key, size) != size
    ]
    if state.concerned:
        steps += _services(baseline, rewritten=any(step.name == "remove_file" for step in steps))
    steps += _host_snapshot.forget_steps(_ovs_nat.RECORD, baseline.before)
    return _change.Plan(tuple(steps), tuple(blockers))


def apply(params: Params, step: _change.Step) -> dict[str, Any] | None:
    if step.name == "remove_file":
        _host.remove(step.subject)
    elif step.name == "remove_folder":
        _remove_folder(_host.path(step.subject))
    elif step.name == "remove_nat":
        _nat.remove(params)
    elif step.name == "remove_address":
        _command.run(["ip", "address", "del", _bridge.TMFIFO_ADDRESS, "dev", step.subject])
    elif step.name == "remove_bridge":
        _command.run(["ovs-vsctl", "--timeout=60", "--if-exists", "del-br", step.subject])
    elif step.name == "remove_firewall":
        for port in _port_filter.installed():
            _port_filter.remove(port)
        _firewall.remove()
        _host_connections.remove()
    elif step.name == "remove_admission":
        _host_filter.establish("")
    elif step.name in ("stop_forwarding", "restore_neighbours"):
        _command.run(["sysctl", "-q", "-w", f"{step.subject}={step.after}"])
    elif step.name == "stop_service":
        _command.run(_stopping(step), timeout=120)
    elif step.name == "restart_service":
        _command.run(["systemctl", "restart", step.subject])
    else:
        return _ovs_nat.apply(params, step)
    return None


def _remove_folder(folder: Path) -> None:
    """Remove the folder, and drafts of writes that were cut off. A reservation that was added after
    the scan stops it.
    """
    for entry in folder.iterdir():
        if entry.name.startswith("."):
            entry.unlink()
    folder.rmdir()


def facts(params: Params, state: State) -> dict[str, Any]:
    return _ovs_nat.facts(params, state.baseline)


SUBJECT = _change.Subject(observe, plan, apply, facts)


def _services(baseline: _ovs_nat.State, *, rewritten: bool) -> list[_change.Step]:
    """Services return to their recorded state, now and at the next boot, without the managed
    settings.
    """
    steps = []
    now = {
        "dnsmasq": baseline.dnsmasq,
        "openvswitch-switch": baseline.switch,
        "rshim": baseline.rshim,
    }
    for package, service in now.items():
        was = (baseline.before or {}).get(package, _OFF)
        name = _SERVICES[package]
        before = {"active": service.active, "enabled": service.enabled}
        # A service that another program has stopped since stays stopped.
        after = {key: now_so and was[key] for key, now_so in before.items()}
        if before != after:
            steps.append(_change.Step("stop_service", name, before, after))
        # A killed run may have removed the file.
        stale = rewritten or baseline.dnsmasq.started_at < baseline.dnsmasq_changed
        if package == "dnsmasq" and after["active"] and stale:
            steps.append(_change.Step("restart_service", name, "our settings", "without them"))
    return steps


def _stopping(step: _change.Step) -> list[str]:
    if step.before["enabled"] == step.after["enabled"]:
        return ["systemctl", "stop", step.subject]
    now = ["--now"] if step.before["active"] and not step.after["active"] else []
    return ["systemctl", "disable", *now, step.subject]


def _in_use(params: Params, state: State) -> list[Refusal]:
    left = [f"port {name}" for name in state.ports]
    left += [f"reservation {name}" for name in state.reserved]
    if not left:
        return []
    return [
        Refusal(
            "network_in_use",
            expected=f"no slice on {params['bridge']}",
            found=", ".join(left),
            remedy="release or recover the slices of this host first",
        )
    ]

"""Live slice network: bridge, address, forwarding, NAT, filters, and the link of the card.

The same code runs in a playbook and in gpuaas-slice-network-baseline.service at boot, which then
restores what is lost. It never waits for dnsmasq: a start of dnsmasq from inside its own ordering
dependency once hung a host. The card's link is optional and comes last, because the card's BMC or
another host may own its rshim, and guests do not need it.
"""

from __future__ import annotations

import ipaddress
import json
import os
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ansible_collections.gpuaas.slice.plugins.module_utils.core import (
    _boot_service,
    _change,
    _command,
    _host,
)
from ansible_collections.gpuaas.slice.plugins.module_utils.core._errors import Refusal
from ansible_collections.gpuaas.slice.plugins.module_utils.network import (
    _baseline_files,
    _flows,
    _guards,
    _host_filter,
    _nat,
    _slice_network,
    _switch,
)

# Code of the refusal of an Open vSwitch that does not answer.
STOPPED = "switch_stopped"
TMFIFO, TMFIFO_ADDRESS = _slice_network.TMFIFO, _slice_network.TMFIFO_ADDRESS
SWITCH, DHCP = "openvswitch-switch.service", "dnsmasq.service"
# The kernel's connection table, for the whole host. A guest's connection to another machine has an
# entry in its slice's zone and one in the host's own, each with its limit (`_host_connections`).
# With this size eight slices fill half of the table, and the host can still be reached.
_TABLE, LEAST_ENTRIES = "net.netfilter.nf_conntrack_max", 2 * 8 * 2 * _flows.CONNECTIONS

Params = Mapping[str, Any]


@dataclass(frozen=True)
class Interface:
    """addresses: IPv4 with prefix length, of global scope."""

    up: bool
    addresses: tuple[str, ...]


@dataclass(frozen=True)
class State:
    """interfaces: existing interfaces of the bridge and the card's link. nat: whether all rules are
    in place. uplink: "" without one.

    isolation: None without the bridge. lacking: features that its datapath does not have. local:
    the host's own addresses. entries: size of the kernel's connection table, None where it cannot
    be set. neighbours: sizes of its table of neighbours by key, as far as they can be set.
    filtering: missing commands for the host's filter. switch_problem: why Open vSwitch does not
    answer, or "". Its bridges are unknown then, and stay in the kernel.
    """

    bridges: tuple[str, ...]
    interfaces: Mapping[str, Interface]
    forwarding: bool
    nat: bool
    uplink: str
    isolation: _guards.State | None = None
    lacking: tuple[Refusal, ...] = ()
    local: tuple[str, ...] = ()
    entries: int | None = None
    neighbours: Mapping[str, int] = field(default_factory=dict)
    filtering: tuple[str, ...] = ()
    switch_problem: str = ""


def _entries() -> int | None:
    file = _host.path(f"/proc/sys/{_TABLE.replace('.', '/')}")
    # In a container the table is its host's, and cannot be written.
    return int(file.read_text()) if os.access(file, os.W_OK) else None


def uplink() -> str:
    """The interface of the default route, or ""."""
    for line in (_host.read("/proc/net/route") or "").splitlines()[1:]:
        fields = line.split()
        if len(fields) > 2 and fields[1] == "00000000":
            return fields[0]
    return ""


def observe(params: Params) -> State:
    bridges, switch_problem = _bridges()
    there = params["bridge"] in bridges
    return State(
        bridges=tuple(bridges),
        interfaces=_interfaces(),
        forwarding=_slice_network.forwarding(),
        nat=_nat.is_established(params),
        uplink=uplink(),
        isolation=_guards.observe(params) if there and not _invalid(params) else None,
        lacking=tuple(_guards.lacking(params["bridge"])) if there else (),
        local=tuple(_flows.local_addresses()),
        entries=_entries(),
        neighbours=_slice_network.neighbours(),
        filtering=tuple(_host_filter.changes(params["bridge"])),
        switch_problem=switch_problem,
    )


def _bridges() -> tuple[list[str], str]:
    """Names of Open vSwitch's bridges, and why it does not answer, or ""."""
    if not _slice_network.switch_runs():
        return [], "it does not run"
    try:
        # The database answers for the bridges, and the other daemon has their flows.
        _switch.appctl("version")
        return _slice_network.bridges(), ""
    except Refusal as refusal:
        return [], refusal.found


def plan(params: Params, state: State) -> _change.Plan:
    bridge = params["bridge"]
    blockers = [*_invalid(params), *state.lacking]
    if state.switch_problem:
        blockers.append(switch_stopped(state.switch_problem))
    elif bridge in state.interfaces and bridge not in state.bridges:
        blockers.append(_not_ours(bridge))
    steps = []
    if bridge not in state.bridges:
        steps.append(_change.Step("add_bridge", bridge, None, "OVS bridge"))
    # The isolation comes before the address and the way out.
    steps.extend(_guards.plan(params, state.isolation))
    steps.extend(_addressing(bridge, params["address"], state))
    if not state.forwarding:
        steps.append(_change.Step("forward_ipv4", "net.ipv4.ip_forward", 0, 1))
    if _is_small(state.entries):
        steps.append(_change.Step("enlarge_table", _TABLE, state.entries, LEAST_ENTRIES))
    for key, size in _slice_network.small_neighbours(state.neighbours).items():
        steps.append(_change.Step("enlarge_neighbours", key, state.neighbours[key], size))
    if not state.nat:
        steps.append(_change.Step("add_nat", "nat rule", None, _nat.rules(params)))
    if state.filtering:
        steps.append(_change.Step("admit_guests", "host's filter", None, list(state.filtering)))
    doubts = []
    if params.get("tmfifo"):
        if TMFIFO in state.interfaces:
            steps.extend(link_steps(state))
        else:
            doubts.append(_no_tmfifo())
    return _change.Plan(tuple(steps), tuple(blockers), tuple(doubts))


def link_steps(state: State) -> list[_change.Step]:
    """Steps that give the card's link its address, for a link that exists or is about to appear."""
    return [replace(step, soft=True) for step in _addressing(TMFIFO, TMFIFO_ADDRESS, state)]


def apply(params: Params, step: _change.Step) -> dict[str, Any] | None:
    if step.name == "add_bridge":
        _add_bridge(params, step.subject)
    elif step.name in _guards.STEPS:
        _guards.apply(params, step)
    elif step.name == "address_interface":
        if step.subject == TMFIFO and not link_there():
            raise _no_tmfifo()
        _command.run(["ip", "address", "replace", step.after["address"], "dev", step.subject])
        _command.run(["ip", "link", "set", "dev", step.subject, "up"])
    elif step.name == "forward_ipv4":
        _command.run(["sysctl", "-q", "-w", "net.ipv4.ip_forward=1"])
    elif step.name == "enlarge_neighbours":
        _command.run(["sysctl", "-q", "-w", f"{step.subject}={step.after}"])
    elif step.name == "enlarge_table":
        _enlarge_table()
    elif step.name == "add_nat":
        _nat.establish(params)
    elif step.name == "admit_guests":
        _host_filter.establish(params["bridge"])
    return None


def _add_bridge(params: Params, bridge: str) -> None:
    exists = ["ovs-vsctl", "--timeout=60", "br-exists", bridge]
    is_new = _command.run(exists, ok=(0, 2)).rc == 2
    secure = ["--", "set-fail-mode", bridge, "secure"]
    _command.run(["ovs-vsctl", "--timeout=60", "--may-exist", "add-br", bridge, *secure])
    # Only a bridge shows the features of its datapath.
    for problem in _guards.lacking(bridge):
        # Any other bridge may have the ports of guests.
        if is_new:
            _command.run(["ovs-vsctl", "--timeout=60", "--if-exists", "del-br", bridge])
        raise problem
    # The bridge has loaded the kernel's connection tracking.
    _enlarge_table()
    if not is_new:
        # It was not seen, because the switch did not run, and may have guests.
        _guards.restore(params, with_firewall=True)


def _is_small(entries: int | None) -> bool:
    return entries is not None and entries < LEAST_ENTRIES


def _enlarge_table() -> None:
    if _is_small(_entries()):
        _command.run(["sysctl", "-q", "-w", f"{_TABLE}={LEAST_ENTRIES}"])


LIVE = _change.Subject(observe, plan, apply)


def boot(settings_path: str) -> int:
    """Set up the slice network at boot, before dnsmasq, then watch over its isolation.

    The card's link may appear later.
    """
    waiting = ("tmfifo_missing", STOPPED, "command_failed", "command_timeout")
    failed = _boot_service.boot(LIVE, settings_path, wait_for=waiting, required=True)
    return failed or watch(settings_path)


def watch(settings_path: str, *, sleep: Callable[[float], None] = time.sleep) -> int:
    """Body of the boot service after the boot: restore the network for ever, the isolation of the
    slices in each round.
    """

    def rounds(settings: Params, turn: int) -> Iterator[str]:
        if turn % _guards.SELDOM == _guards.SELDOM - 1:
            # First, because without it the guards cannot be compared.
            yield from _start_switch()
            yield from restore(settings)
        else:
            yield from _guards.restoring(settings, with_firewall=turn % _guards.SELDOM == 0)

    # The bridge fails closed until the switch answers.
    return _boot_service.watch(
        settings_path,
        rounds,
        trouble="cannot restore the network",
        required=True,
        period_s=_guards.PERIOD_S,
        sleep=sleep,
    )


def restore(params: Params) -> Iterator[str]:
    """Bring back the isolation, and what carries the guests' traffic: bridge, address, forwarding,
    NAT, filter, DHCP.

    Gives each step that was needed once it is done.
    """
    failures = yield from restore_live(params)
    if _is_down(DHCP):
        try:
            with _baseline_files.dhcp_lock(wait_s=1):
                if _is_down(DHCP):
                    # Not waited for, because at boot dnsmasq waits for this service.
                    _command.run(["systemctl", "--no-block", "start", DHCP])
                    yield f"start {DHCP}"
        except Refusal as refusal:
            # A run that stops dnsmasq starts it again.
            if refusal.code != "lock_held":
                raise
    for failure in failures:
        raise failure


def _start_switch() -> Iterator[str]:
    """Start Open vSwitch if it was stopped. The bridge fails closed, so no frame of a guest passes
    before the guards are loaded.
    """
    if _is_down(SWITCH):
        # Not waited for, because a start may take longer than systemd waits for a sign of this.
        _command.run(["systemctl", "--no-block", "start", SWITCH])
        yield f"start {SWITCH}"


def _is_down(name: str) -> bool:
    service = _boot_service.services([name])[name]
    return service.enabled and not service.active


def restore_live(params: Params) -> Generator[str, None, list[Refusal]]:
    """As `restore`, without DHCP. Returns the refusals of ports whose guard failed."""
    planned = plan(params, observe(params))
    for blocker in planned.blockers:
        raise blocker
    steps = [step for step in planned.steps if not step.soft]
    return (yield from _guards.doing(apply, params, steps))


def link_there() -> bool:
    return _host.path(f"/sys/class/net/{TMFIFO}").exists()


def link_shown(state: State) -> str:
    """Short description of the card's link."""
    if TMFIFO not in state.interfaces:
        return "missing"
    return ", ".join(state.interfaces[TMFIFO].addresses) or "no address"


def _addressing(name: str, address: str, state: State) -> list[_change.Step]:
    interface = state.interfaces.get(name, Interface(up=False, addresses=()))
    if interface.up and address in interface.addresses:
        return []
    before = {"up": interface.up, "addresses": list(interface.addresses)}
    return [_change.Step("address_interface", name, before, {"up": True, "address": address})]


def _interfaces() -> dict[str, Interface]:
    shown = json.loads(_command.run(["ip", "-j", "-4", "address", "show"]).out or "[]")
    there = {entry["ifname"]: entry for entry in shown if entry.get("ifname")}
    folder = _host.path("/sys/class/net")
    # `ip -4` omits interfaces without an IPv4 address, so the list comes from sysfs.
    names = {entry.name for entry in folder.iterdir()} if folder.is_dir() else set()
    return {name: _interface(there.get(name, {}), name) for name in {*names, *there}}


def _interface(entry: Mapping[str, Any], name: str) -> Interface:
    flags = _host.read(f"/sys/class/net/{name}/flags") or "0"
    return Interface(
        up=bool(int(flags, 16) & 0x1),  # IFF_UP
        addresses=tuple(
            f"{info.get('local')}/{info.get('prefixlen')}"
            for info in entry.get("addr_info", [])
            if info.get("scope") == "global"
        ),
    )


def _invalid(params: Params) -> list[Refusal]:
    """Reasons against the profile's network that hold on any host."""
    return _mismatch(params) or _guards.problems(params, [])


def _mismatch(params: Params) -> list[Refusal]:
    try:
        subnet = ipaddress.IPv4Network(params["subnet"])
        if ipaddress.IPv4Interface(params["address"]).network == subnet:
            return []
        text = f"{params['address']} and {params['subnet']}"
    except ValueError as error:
        text = str(error)
    return [
        Refusal(
            "network_invalid",
            expected="a bridge address inside the slice subnet, both with the same prefix length",
            found=text,
            remedy="correct network.address and network.subnet of the hardware profile",
        )
    ]


def _not_ours(bridge: str) -> Refusal:
    return Refusal(
        "bridge_name_taken",
        expected=f"{bridge} to be an Open vSwitch bridge or not to exist",
        found="an interface of another kind with this name",
        remedy="rename or remove that interface, or choose another bridge in the profile",
    )


def switch_stopped(problem: str) -> Refusal:
    return Refusal(
        STOPPED,
        expected="Open vSwitch to answer, which alone knows its bridges",
        found=problem,
        remedy="run `systemctl start openvswitch-switch`; if it fails, see "
        "`journalctl -u ovsdb-server -u ovs-vswitchd`",
    )


def _no_tmfifo() -> Refusal:
    return Refusal(
        "tmfifo_missing",
        expected=f"the interface {TMFIFO} of the card's rshim driver",
        found="no such interface",
        remedy="guests do not need it; see `journalctl -u rshim` and whether the card's BMC or "
        "another host owns rshim, or set network.tmfifo to false in the profile",
    )

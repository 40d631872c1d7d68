"""Isolation of the slices of a host: the bridge's fail mode, all guards, and the firewall.

Guards are OpenFlow state in the memory of ovs-vswitchd, and a restart of the switch loses them. The
guard of each slice is therefore kept in a file, and the network's boot service compares the whole
set with the switch every few seconds and restores it. In between the bridge forwards nothing,
because it fails closed. A VM that is started by hand gets its guard in the same way.

Restoring only takes rights away from guests, or returns those of a recorded guard.
"""

from __future__ import annotations

import dataclasses
import ipaddress
import json
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from ansible_collections.gpuaas.slice.plugins.module_utils.core import (
    _change,
    _command,
    _host,
    _object_names,
)
from ansible_collections.gpuaas.slice.plugins.module_utils.core._errors import Refusal
from ansible_collections.gpuaas.slice.plugins.module_utils.network import (
    _baseline_files,
    _firewall,
    _flows,
    _host_connections,
    _ingress,
    _nft,
    _packet_limit,
    _port_filter,
    _slice_network,
    _switch,
)

STEPS = (
    *("secure_bridge", "guard_bridge", "guard_port", "remove_flows", "remove_filter"),
    *("load_firewall", "limit_connections"),
)
# Those of one port.
_OF_A_PORT = ("guard_port", "remove_filter")

# Seconds between two rounds of the network's boot service. Firewall, NAT and the like are compared
# in every n-th round only, because nothing but a person changes them.
PERIOD_S, SELDOM = 2.0, 5
# It has compared everything at least once in this time.
ROUND_S = PERIOD_S * (SELDOM + 1)

# Limits of packets_per_second, as in the schema of profiles. A guest with fewer could not be used.
LEAST_RATE, HIGHEST_RATE = 1_000, 100_000_000

Params = Mapping[str, Any]
Tables = tuple[bool, Mapping[str, str], bool]


@dataclass(frozen=True)
class State:
    """Isolation as the host has it.

    ports: OpenFlow number by port. limits: packets per second by that number. connections: that
    each port may have open, by number; None when they were not looked at. flows: by cookie.
    expected: the guards that must be loaded, and their flows, by cookie. filters: text of each
    filter before the switch, by port; None when they were not looked at. firewall, limited: whether
    the table of the firewall, and that of the guests' connections, is as it must be, or was not
    looked at.
    """

    secure: bool
    ports: Mapping[str, int]
    limits: Mapping[int, int]
    flows: Mapping[str, frozenset[_flows.Flow]]
    guards: Mapping[str, _flows.Guard]
    expected: Mapping[str, frozenset[_flows.Flow]]
    firewall: bool
    filters: Mapping[str, str] | None
    connections: Mapping[int, int] | None
    limited: bool = True


def save(guard: _flows.Guard) -> None:
    """Keep the guard for the time after a restart of the switch."""
    text = json.dumps(dataclasses.asdict(guard), indent=2, sort_keys=True) + "\n"
    _host.write(_object_names.guard_path(guard.allocation_id), text, 0o600)


def forget(allocation_id: str) -> None:
    _host.remove(_object_names.guard_path(allocation_id))
    _port_filter.remove(_object_names.port_name(allocation_id))


def saved(allocation_id: str) -> _flows.Guard | None:
    """The guard in the allocation's file; None without a valid one."""
    try:
        options = json.loads(_host.kept(_object_names.guard_path(allocation_id)) or "")
        guard = _flows.check(_flows.Guard(**options))
    except (ValueError, TypeError, Refusal):
        return None
    # A file under another allocation's name guards nothing.
    return guard if guard.allocation_id == allocation_id else None


def load() -> dict[str, _flows.Guard]:
    """All kept guards by cookie. An invalid file is no guard, so its port stays shut."""
    guards = (saved(_object_names.owner(path)) for path in _object_names.files("guard"))
    return {guard.cookie: guard for guard in guards if guard is not None}


def egress_of(params: Params, guard: _flows.Guard) -> _flows.Egress:
    """The site's rule for destinations of this guest. Parity's probe may reach its targets too."""
    rule = _firewall.egress_of(params)
    targets = probe_targets(params) if guard.allocation_id == _flows.PROBE_ID else ()
    return dataclasses.replace(rule, allowed=(*rule.allowed, *targets))


def recorded() -> dict[str, Any]:
    """The network's settings, as bootstrap recorded them on this host; {} without valid ones."""
    try:
        settings = json.loads(_host.read(_baseline_files.SETTINGS) or "{}")
    except ValueError:
        return {}
    return settings if isinstance(settings, dict) else {}


def observe(
    params: Params, *, with_firewall: bool = True, read: Tables | None = None
) -> State | None:
    """None without the bridge. read: the tables of nft, if the caller has just read them."""
    bridge = params["bridge"]
    modes, ports = _switch.rows(("Bridge", "fail_mode", bridge), ("Interface", "name,ofport", ""))
    if not modes:
        return None
    numbers = {name: _flows.number(str(value)) for name, value in ports}
    guards = _with_probe(params)
    local = _flows.local_addresses()
    expected = {
        cookie: rules_of(params, guard, numbers[guard.port], local)
        for cookie, guard in guards.items()
        if numbers.get(guard.port) and guard.bridge == bridge
    }
    with ThreadPoolExecutor(1) as beside:
        # Both take several programs, and no table of nft depends on the switch.
        unread = with_firewall and read is None
        reading = beside.submit(tables, params, guards) if unread else None
        limits, flows = _packet_limit.installed(bridge), _flows.every(bridge)
        connections = _flows.connection_limits() if with_firewall else None
    limited, filters, firewall = reading.result() if reading else read or (True, None, True)
    return State(
        secure=modes[0][0] == "secure",
        ports=numbers,
        limits=limits,
        flows=flows,
        guards=guards,
        expected={_flows.BASE_COOKIE: _flows.BASE, **expected},
        firewall=firewall,
        filters=filters,
        connections=connections,
        limited=limited,
    )


def tables(params: Params, guards: Mapping[str, _flows.Guard] | None = None) -> Tables:
    """Whether the connections are limited, text of each filter, whether the firewall is loaded.

    guards: those that may be loaded, if the caller has read them.
    """
    bridge, guards = params["bridge"], guards or _with_probe(params)
    firewall = _rules(params, guards)
    guests = [guard for guard in guards.values() if guard.allocation_id != _flows.PROBE_ID]
    own = (_host_connections.table(bridge), _firewall.table(firewall))
    _nft.prepare([*own, *map(_port_filter.table, guests)])
    # First, because it names a kernel that cannot count connections, as the firewall does too.
    limited = _host_connections.normalized(bridge) == _host_connections.installed()
    filters = {port: text for port, (text, _counters) in _port_filter.installed().items()}
    return limited, filters, _firewall.installed() == _firewall.normalized(firewall)


def plan(params: Params, state: State | None) -> list[_change.Step]:
    """Steps to the exact set of flows. state: None for a bridge that is about to be made."""
    bridge = params["bridge"]
    if state is None:
        return [
            _change.Step("guard_bridge", f"{bridge} flows", None, _texts(_flows.BASE)),
            _change.Step("load_firewall", "firewall of the guests", None, "loaded"),
            _change.Step("limit_connections", "connections of the guests", None, "limited"),
        ]
    steps = []
    if not state.secure:
        steps.append(_change.Step("secure_bridge", f"{bridge} fail mode", "open", "secure"))
    # Before guards are loaded, because port numbers are reused.
    steps += [
        _change.Step("remove_flows", f"flows {cookie}", _texts(flows), [])
        for cookie, flows in sorted(state.flows.items())
        if cookie not in state.expected and cookie != _flows.BASE_COOKIE
    ]
    # Without its own flows the switch has usually just started, and lacks those of the ports too.
    loads_all = state.flows.get(_flows.BASE_COOKIE, frozenset()) != _flows.BASE
    if loads_all:
        installed = [state.flows.get(cookie, frozenset()) for cookie in state.expected]
        steps.append(
            _change.Step(
                "guard_bridge",
                f"{bridge} flows",
                _texts(frozenset().union(*installed)),
                _texts(frozenset().union(*state.expected.values())),
            )
        )
    guarded = {guard.port for cookie, guard in state.guards.items() if cookie in state.expected}
    steps += [
        _change.Step("remove_filter", port, text, None)
        for port, text in sorted((state.filters or {}).items())
        if port not in guarded
    ]
    for cookie, guard in sorted(state.guards.items()):
        expected = state.expected.get(cookie)
        flows = state.flows.get(cookie, frozenset())
        if expected is None or (loads_all and flows != expected):
            continue
        number = state.ports[guard.port]
        rates = _shown(state.limits.get(number, 0), state.connections, number)
        rate = egress_of(params, guard).packets_per_second
        needed = None if state.connections is None else {number: _flows.CONNECTIONS}
        limits = _shown(rate, needed, number)
        chain = filtered = ""
        if state.filters is not None:
            chain, filtered = state.filters.get(guard.port, ""), _filter_of(guard)
        if (flows, rates, chain) != (expected, limits, filtered):
            before = [*_texts(flows), *rates, chain]
            after = [*_texts(expected), *limits, filtered]
            steps.append(_change.Step("guard_port", guard.port, before, after))
    if not state.firewall:
        steps.append(_change.Step("load_firewall", "firewall of the guests", "differs", "loaded"))
    if not state.limited:
        subject = "connections of the guests"
        steps.append(_change.Step("limit_connections", subject, "differs", "limited"))
    return steps


def apply(params: Params, step: _change.Step) -> None:
    """Do one of STEPS."""
    bridge = params["bridge"]
    if step.name == "secure_bridge":
        _command.run(["ovs-vsctl", "--timeout=10", "set-fail-mode", bridge, "secure"])
    elif step.name == "guard_bridge":
        _guard_bridge(params)
    elif step.name == "remove_flows":
        cookie = step.subject.removeprefix("flows ")
        with _one_writer():
            if cookie not in _on_bridge(params):
                _flows.remove(bridge, cookie)
                if guard := load().get(cookie):
                    # Of a slice that was stopped. A release, which removes its file, has done so.
                    _host_connections.forget(guard.ip)
    elif step.name == "remove_filter":
        with _one_writer():
            if step.subject not in _on_bridge(params):
                _port_filter.remove(step.subject)
    elif step.name == "guard_port":
        guards = {guard.port: guard for guard in _with_probe(params).values()}
        guard, number = guards.get(step.subject), _flows.port_number(step.subject)
        # A slice that ended meanwhile needs no guard.
        if guard and number:
            install(params, guard, number)
    elif step.name == "load_firewall":
        with _one_writer():
            _nft.load(_rules(params, _with_probe(params)))
    elif step.name == "limit_connections":
        _host_connections.install(bridge)


def _guard_bridge(params: Params) -> None:
    """Load the flows of the bridge and of its guarded ports in one transaction. A port whose flows
    are as they must be keeps them, because a load begins their counters anew.

    A port that fails is shut and keeps no other one shut; its refusal is raised at the end. A
    program that hangs would do so for each port, longer than the guardian's watchdog waits, so its
    refusal is raised at once.
    """
    bridge = params["bridge"]
    loads: list[_flows.Load] = []
    failures: list[Refusal] = []
    with _one_writer():
        local, there = _flows.local_addresses(), _flows.every(bridge)
        for guard, number in _plugged(params):
            flows = rules_of(params, guard, number, local)
            if there.get(guard.cookie) == flows:
                continue
            try:
                loads.append(_load_of(params, guard, number, local))
            except Refusal as refusal:
                failures.append(_at_once_if_hung(refusal))
                # Its flows are none of the guard's.
                loads.append(_flows.of_port(guard, number, frozenset()))
        try:
            _flows.load(bridge, _flows.BASE_LOAD, *loads)
        except Refusal as refused:
            _at_once_if_hung(refused)
            # The transaction is all or nothing, so a flow that the switch refuses would keep every
            # port shut. A switch that does not answer refuses the bridge's own flows too.
            _flows.load(bridge, _flows.BASE_LOAD)
            for load_of_port in loads:
                try:
                    _flows.load(bridge, load_of_port)
                except Refusal as refusal:
                    failures.append(_at_once_if_hung(refusal))
                    _flows.load(bridge, dataclasses.replace(load_of_port, flows=frozenset()))
    if failures:
        raise failures[0]


def _at_once_if_hung(refusal: Refusal) -> Refusal:
    """The refusal. That of a program that did not end, or of a lock that is held, is raised."""
    if refusal.code in (*_command.HUNG, "lock_held"):
        raise refusal
    return refusal


def _plugged(params: Params) -> list[tuple[_flows.Guard, int]]:
    """Each guard whose port is on the bridge now, with the port's number."""
    numbers = _flows.ports()
    return [
        (guard, numbers[guard.port])
        for guard in _with_probe(params).values()
        if numbers.get(guard.port) and guard.bridge == params["bridge"]
    ]


def _on_bridge(params: Params) -> set[str]:
    """Cookie and port of each guard whose port is on the bridge now: since the ports were read, the
    start hook of a slice may have loaded its guard.
    """
    return {name for guard, _number in _plugged(params) for name in (guard.cookie, guard.port)}


def rules_of(
    params: Params, guard: _flows.Guard, number: int, local: list[str]
) -> frozenset[_flows.Flow]:
    """All flows of a guarded port, with the guest's managed ingress."""
    return _flows.rules(guard, number, local, egress_of(params, guard), ingress_of(guard))


def install(params: Params, guard: _flows.Guard, number: int) -> int:
    """Replace the port's filter and flows; returns the number of flows."""
    with _one_writer():
        flows = _load_of(params, guard, number, _flows.local_addresses())
        _flows.load(guard.bridge, flows)
        return len(flows.flows)


def _load_of(params: Params, guard: _flows.Guard, number: int, local: list[str]) -> _flows.Load:
    """Replace the port's filter and limits; returns its flows."""
    if guard.allocation_id != _flows.PROBE_ID:
        _port_filter.install(guard)
    return _flows.load_of(guard, number, local, egress_of(params, guard), ingress_of(guard))


def _filter_of(guard: _flows.Guard) -> str:
    """Filter before the switch. The probe's port is internal to the switch and has no filter."""
    return "" if guard.allocation_id == _flows.PROBE_ID else _port_filter.normalized(guard)


def ingress_of(guard: _flows.Guard) -> tuple[_ingress.Rule, ...]:
    """The guest's rules of managed ingress that have not expired."""
    is_probe = guard.allocation_id == _flows.PROBE_ID
    return () if is_probe else _ingress.kept(guard.allocation_id).live()


def _one_writer() -> AbstractContextManager[None]:
    """One process at a time reads the files and loads them, so that none loads an older state."""
    # A guardian that waits for longer is ended by its watchdog.
    return _host.locked("/run/gpuaas/guards", mode=0o700, wait_s=60)


def reload_firewall() -> None:
    """Load the firewall again, so that only guests with a kept guard can use DHCP."""
    settings = recorded()
    if settings:
        apply(settings, _change.Step("load_firewall", "firewall of the guests", None, "loaded"))


def probe_guard(params: Params) -> _flows.Guard:
    """Guard of parity's probe, which plays a guest on its own port."""
    return _flows.Guard(
        allocation_id=_flows.PROBE_ID,
        bridge=params["bridge"],
        mac=_baseline_files.PROBE_MAC,
        ip=_baseline_files.probe_address(params["subnet"]),
        address=params["address"],
    )


def probe_targets(params: Params) -> tuple[str, ...]:
    """Addresses that parity's probe contacts: the profile's, or else the default gateway, if there
    is one, and the probe's own service.
    """
    target = str(params.get("egress_probe") or "").partition(":")[0] or _slice_network.gateway()
    return (*([target] if target else []), _baseline_files.PROBE_SERVICE)


def problems(params: Params, local: list[str]) -> list[Refusal]:
    """Reasons against the site's rule for traffic of guests. local: the host's own addresses."""
    refusals = []
    rate = _firewall.egress_of(params).packets_per_second
    if not LEAST_RATE <= rate <= HIGHEST_RATE:
        expected = f"a number from {LEAST_RATE} to {HIGHEST_RATE}"
        refusals.append(_invalid("packets_per_second", expected, str(rate)))
    if (target := str(params.get("egress_probe") or "")) and not _is_target(target):
        expected = "an address such as 9.9.9.9, or with a port of TCP as 9.9.9.9:443"
        refusals.append(_invalid("egress_probe", expected, target))
    gateway = ipaddress.IPv4Interface(params["address"]).ip
    for text in params.get(_baseline_files.NAME_SERVERS) or ():
        try:
            server = ipaddress.IPv4Address(text)
        except ValueError as error:
            refusals.append(_invalid("name_servers", "addresses such as 9.9.9.9", str(error)))
            continue
        if server == gateway or server.is_unspecified or server.is_multicast:
            expected = "addresses of name servers other than the slice bridge's"
            refusals.append(_invalid("name_servers", expected, text))
    for name in _baseline_files.EGRESS:
        for text in params.get(name) or ():
            try:
                network = ipaddress.IPv4Network(text)
            except ValueError as error:
                refusals.append(_invalid(name, "IPv4 networks such as 10.20.0.0/16", str(error)))
                continue
            inside = [a for a in local if ipaddress.IPv4Address(a) in network]
            subnet = ipaddress.IPv4Network(params["subnet"])
            if name == "allowed_networks" and (inside or network.overlaps(subnet)):
                reached = ", ".join(inside) or f"the slice subnet {subnet}"
                expected = "networks without an address of the host"
                refusals.append(_invalid(name, expected, f"{text}, which contains {reached}"))
    return refusals


def _is_target(text: str) -> bool:
    address, colon, port = text.partition(":")
    try:
        ipaddress.IPv4Address(address)
        return not colon or 0 < int(port) < 65536
    except ValueError:
        return False


def lacking(bridge: str) -> list[Refusal]:
    """Features of the kernel without which the bridge cannot hold a guard."""
    kernel = "boot a kernel whose openvswitch module has it, then run the bootstrap playbook again"
    missing = []
    if not _flows.tracks_connections(bridge):
        missing.append(
            Refusal(
                "connection_tracking_missing",
                expected=f"an Open vSwitch datapath of {bridge} that tracks connections in zones",
                found="no connection tracking (`ovs-appctl dpif/show-dp-features`)",
                remedy=f"{kernel} (nf_conntrack)",
            )
        )
    if not _packet_limit.supported(bridge):
        missing.append(
            Refusal(
                "packet_limit_missing",
                expected=f"an Open vSwitch datapath of {bridge} with meters for packets",
                found="no meters (`ovs-ofctl -O OpenFlow13 meter-features`)",
                remedy=f"{kernel} (Linux 4.15 or later)",
            )
        )
    try:
        _host_connections.normalized(bridge)
    except Refusal as refusal:
        missing.append(refusal)
    return missing


def restore(params: Params, *, with_firewall: bool) -> list[str]:
    """Bring the isolation back; returns the steps that were needed."""
    return list(restoring(params, with_firewall=with_firewall))


def restoring(params: Params, *, with_firewall: bool) -> Iterator[str]:
    """As `restore`, and gives each step once it is done, because a later one may fail."""
    state = observe(params, with_firewall=with_firewall)
    yield from carrying_out(params, plan(params, state) if state else ())


def carrying_out(params: Params, steps: Iterable[_change.Step]) -> Iterator[str]:
    """Do the steps, and give each once it is done. The refusal of a port is raised at the end."""
    for refusal in (yield from doing(apply, params, steps)):
        raise refusal


def doing(
    apply_step: Callable[[Params, _change.Step], object],
    params: Params,
    steps: Iterable[_change.Step],
) -> Generator[str, None, list[Refusal]]:
    """Do the steps, and give each once it is done. A port that fails keeps no later step from being
    done; returns the refusals of such ports.
    """
    failures = []
    for step in steps:
        try:
            apply_step(params, step)
        except Refusal as refusal:
            if step.name not in _OF_A_PORT:
                raise
            failures.append(_at_once_if_hung(refusal))
        else:
            yield f"{step.name} {step.subject}"
    return failures


def without_neighbours(steps: Iterable[_change.Step], port: str) -> list[_change.Step]:
    """The steps without those of other ports."""
    return [step for step in steps if step.name not in _OF_A_PORT or step.subject == port]


def _with_probe(params: Params) -> dict[str, _flows.Guard]:
    """The guards that may be loaded, by cookie: all kept ones, and that of parity's probe."""
    return {**load(), _flows.PROBE_COOKIE: probe_guard(params)}


def _rules(params: Params, guards: Mapping[str, _flows.Guard]) -> str:
    probe = (guards[_flows.PROBE_COOKIE].ip, probe_targets(params))
    ingress = [(guard, rule) for _c, guard in sorted(guards.items()) for rule in ingress_of(guard)]
    return _firewall.rules(params, guards.values(), probe, ingress)


def _shown(rate: int, connections: Mapping[int, int] | None, number: int) -> list[str]:
    """Limits of a port; without the second when connections were not looked at."""
    shown = [f"packets per second: {rate or 'no limit'}"]
    if connections is not None:
        shown.append(f"connections: {connections.get(number, 0) or 'no limit'}")
    return shown


def _texts(flows: frozenset[_flows.Flow]) -> list[str]:
    return sorted(flow.text() for flow in flows)


def _invalid(field: str, expected: str, text: str) -> Refusal:
    return Refusal(
        "network_invalid",
        expected=f"network.{field}: {expected}",
        found=text,
        remedy=f"correct network.{field} of the hardware profile",
    )

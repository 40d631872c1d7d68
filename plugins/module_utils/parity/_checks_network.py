"""Parity checks of the slice network; most of them send traffic through it."""

from __future__ import annotations

import contextlib
import ipaddress
import time
from collections.abc import Mapping, Sequence
from typing import Any

from ansible_collections.gpuaas.slice.plugins.module_utils.core import (
    _boot_units,
    _command,
    _file_edits,
    _host,
    _object_names,
    _pci,
)
from ansible_collections.gpuaas.slice.plugins.module_utils.core._errors import Refusal
from ansible_collections.gpuaas.slice.plugins.module_utils.fabric import (
    _function_guards,
    _ipoib_address,
    _virtual_functions,
)
from ansible_collections.gpuaas.slice.plugins.module_utils.network import (
    _baseline_files,
    _flows,
    _guards,
    _host_filter,
    _nat,
    _netplan,
    _slice_network,
    _start_hook,
)
from ansible_collections.gpuaas.slice.plugins.module_utils.parity import _guest_probe, _tcp_probe
from ansible_collections.gpuaas.slice.plugins.module_utils.parity._check import (
    Verdict,
    failed,
    passed,
    verdict,
    warned,
)
from ansible_collections.gpuaas.slice.plugins.module_utils.parity._host_facts import (
    OLD_BASELINE,
    RSHIM,
    Facts,
)
from ansible_collections.gpuaas.slice.plugins.module_utils.slice import _dnsmasq

IPOIB = _ipoib_address.FILE


def fabric_vfs(facts: Facts) -> Verdict:
    """Each fabric card has its virtual functions, with the identities that slice mode gives them.

    The link state of each function follows its card's port, now and after the next boot. All
    approved functions exist; a lost one blocks its own slot.
    """
    fabric = facts.profile["fabric"]
    link = str(fabric.get("link") or "")
    alike = [device for device in facts.devices.values() if device.id in fabric["pf_ids"]]
    others = {
        other.address: why for other in alike if (why := _pci.unlike_link(other.address, link))
    }
    physical = [device for device in alike if device.address not in others]
    problems = []
    if not physical:
        sought = f"no {link} physical function of {', '.join(fabric['pf_ids'])}"
        problems = ["; ".join([" ".join(sought.split()), *others.values()])]
    fewer = [
        f"{device.address} has {device.sriov_numvfs} of {fabric['vfs_per_pf']} functions"
        for device in physical
        if device.sriov_numvfs < int(fabric["vfs_per_pf"])
    ]
    # A card without its functions beside a whole one blocks the slots that had them.
    functions = {slot["fabric_vf_pci_address"] for slot in facts.slots}
    lost = len(fewer) < len(physical) and not functions.isdisjoint(facts.spared)
    problems += [] if lost else fewer
    doubts = fewer if lost else []
    for slot in facts.slots:
        address = slot["fabric_vf_pci_address"]
        if address in facts.spared:
            doubts.append(f"{address} is not there: its slot is blocked")
        elif address not in facts.devices:
            problems.append(f"{address} is not there")
        elif not (parent := facts.devices[address].physfn):
            problems.append(f"{address} is no virtual function")
        elif parent not in {device.address for device in physical}:
            why = others.get(parent) or f"{parent} is no card of the profile's fabric"
            problems.append(f"{address} is a slot's: {why}")
    problems += facts.not_at_boot(_boot_units.FABRIC)
    # The parameters that the bootstrap role passes: all cards with these device ids, with generated
    # identities.
    cards = {"pfs": [], "pf_ids": list(fabric["pf_ids"]), "macs": {}, "link": link}
    for device in physical:
        card = facts.card(device.address)
        problems += [*card.misnamed(cards), *card.unlinked()]
    settings = {**cards, "count": fabric["vfs_per_pf"], "idle_vlan": _isolation_of(facts)[1]}
    problems += _file_edits.unlike_settings(_boot_units.FABRIC.settings_path, settings)
    made = sum(device.sriov_numvfs for device in physical)
    return verdict(problems, f"{made} functions on {len(physical)} cards", doubts)


def fabric_isolation(facts: Facts) -> Verdict:
    """The card keeps the functions of different tenants apart, as the profile says.

    On InfiniBand only the subnet manager can. The reconciler reads its partitions.
    """
    isolation, idle_vlan, problems = _isolation_of(facts)
    fabric = facts.profile["fabric"]
    names = {device.address for device in facts.devices.values() if device.id in fabric["pf_ids"]}
    names = {address for address in names if not _pci.unlike_link(address, fabric["link"])}
    guarded = 0
    # A run for a tenant keeps a guard in its file first. `facts.card` may be older than the file.
    with _function_guards.exclusive(wait_s=_virtual_functions.LOOK_S):
        for card in map(_virtual_functions.card_at, sorted(names)):
            guarded += len(card.guards)
            problems += [f"{r.expected}: found {r.found}" for r in card.unguarded(idle_vlan)]
        holders = _function_guards.holders()
    if isolation == "vlan" and not guarded:
        problems.append("no function of a fabric card shows a VLAN")
    for address, vlans in holders.items():
        problems += [
            f"{address} is in VLAN {vlan}, which is none of the profile's fabric.vlans"
            for vlan in vlans.values()
            if vlan and not _is_tenants(vlan, fabric)
        ]
        if len(vlans) > 1:
            problems.append(f"{address} has the guards of {', '.join(sorted(vlans))}")
    shown = {
        "vlan": f"{guarded} functions with spoof check and their VLAN",
        "partition": "partitions are the subnet manager's",
        "single_tenant": "one tenant owns the fabric",
    }
    return verdict(problems, shown[isolation])


def _isolation_of(facts: Facts) -> tuple[str, int, list[str]]:
    """Isolation of the profile's fabric, the VLAN of idle functions, and what the profile lacks."""
    fabric = facts.profile["fabric"]
    ethernet = fabric.get("link") == _pci.ETHERNET
    isolation = str(fabric.get("isolation") or ("vlan" if ethernet else "partition"))
    problems = []
    if isolation != "single_tenant" and ethernet != (isolation == "vlan"):
        problems.append(f"fabric.isolation {isolation} does not isolate a fabric of this link")
    first, last = fabric.get("vlans") or (0, 0)
    if isolation == "vlan" and not first < last:
        problems.append("the profile names no fabric.vlans, first and last")
    return isolation, int(first), problems


def _is_tenants(vlan: int, fabric: Mapping[str, Any]) -> bool:
    first, last = fabric.get("vlans") or (0, 0)
    return bool(first < vlan <= last)


def ipoib_netplan(facts: Facts) -> Verdict:
    """The next boot gives the host its site address, as netplan reads all of its files.

    A netplan file of this collection must be as bootstrap writes it. Other content of the site's
    own file is not judged.
    """
    fabric, text = facts.profile["fabric"], _host.kept(IPOIB)
    address = str(fabric.get("site_address") or "")
    if not text:
        return failed(f"{IPOIB} is missing")
    problems = []
    # An operator can set a machine's interface outside the profile. The file is compared only if
    # the profile names one.
    if address and fabric.get("interface") and text.startswith(_ipoib_address.MARKER):
        settings = {key: str(fabric.get(key) or "") for key in ("interface", "route")}
        problems += _file_edits.unlike(IPOIB, _ipoib_address.text({**settings, "address": address}))
    judged = _netplan.judge()
    if judged.refused:
        problems.append(f"netplan refuses the host's files: {' '.join(judged.refused.split())}")
    elif address:
        problems += _not_given(facts, judged.links, address)
    return verdict(problems, f"{IPOIB} {address}".strip())


def fabric_address(facts: Facts) -> Verdict:
    address = str(facts.profile["fabric"].get("site_address") or "")
    for name in _owners(facts, address):
        return passed(f"{name} has {address}")
    named = facts.profile["fabric"].get("interface") or "ibp*"
    return failed(f"no interface {named} has {address or 'a site address (none is set)'}")


def fabric_route(facts: Facts) -> Verdict:
    """Every hop of the fabric route uses the interface that owns the site address. Any other
    interface leads to no fabric or to a different one.
    """
    fabric = facts.profile["fabric"]
    destination, address = str(fabric.get("route") or ""), str(fabric.get("site_address") or "")
    if not destination:
        return failed("the profile names no fabric route")
    owners = _owners(facts, address) if address else _fabric_interfaces(facts)
    if not owners:
        return failed(f"no interface has {address or 'an address'} for a route to {destination}")
    routes = _slice_network.ways(destination)
    for way in routes:
        if {*way} <= {*owners}:
            return passed(f"{destination} by {', '.join(way)}")
    others = [f"; one leads by {', '.join(way)}" for way in routes]
    return failed(f"no route to {destination} by {', '.join(owners)}{''.join(others)}")


def ovs_bridge(facts: Facts) -> Verdict:
    """The slice bridge is an Open vSwitch bridge, is up, and has the gateway address."""
    name, address = facts.network["bridge"], facts.network["address"]
    interface = facts.interfaces.get(name)
    if interface is None:
        return failed(f"{name} is missing")
    problems = [] if interface.up else [f"{name} is down"]
    if address not in interface.addresses:
        problems.append(
            f"{name} has {', '.join(interface.addresses) or 'no address'}, not {address}"
        )
    # The guest probe, for which the next lines wait, changes no table of nft.
    tables = None
    with contextlib.suppress(Refusal):  # the next read names it
        tables = _guards.tables(facts.network)
    # A successful guest probe already proves this, because its port was added to the bridge.
    if (
        facts.guest_problem
        and _command.run(["ovs-vsctl", "--timeout=10", "br-exists", name], ok=(0, 2)).rc
    ):
        problems.append(f"{name} is no bridge of Open vSwitch")
        return verdict(problems, "")
    problems += _isolation(facts, tables)
    if not facts.guest_problem:
        problems += _guard(facts.guest.forged)
    return verdict(problems, f"{name} {address}, fails closed, flows and firewall as they must be")


def _guard(forged: Sequence[str] | None) -> list[str]:
    """Failures of a guest's guard that the frames of the probe show."""
    if forged is None:
        return ["a permitted frame of the probe did not reach the host: its guard is not proven"]
    return [f"the guard of a guest lets forged frames pass: {', '.join(forged)}"] if forged else []


def _isolation(facts: Facts, tables: _guards.Tables | None = None) -> list[str]:
    """Differences of fail mode, flows and firewall from those that the slices' guards require.

    A slice may start or end meanwhile, or an ingress rule expire, so a difference counts only if
    the boot service does not repair it in time.
    """
    deadline = time.monotonic() + _guards.ROUND_S
    while True:
        state = _guards.observe(facts.network, read=tables)
        tables = None
        if state is None:
            return []
        steps = _guards.plan(facts.network, state)
        if not steps or time.monotonic() >= deadline:
            break
        time.sleep(1)
    refusals = _guards.problems(facts.network, _flows.local_addresses())
    # The switch refuses the guard of a guest probe without connection tracking or meters, and
    # `observe` refuses a kernel that cannot count connections.
    if facts.guest_problem:
        refusals = [*_guards.lacking(facts.network["bridge"]), *refusals]
    return [
        *map(str, refusals),
        *(f"isolation of the guests differs: {step.name} {step.subject}" for step in steps),
    ]


def dnsmasq(facts: Facts) -> Verdict:
    """A guest on the bridge gets a DNS answer and a DHCP offer."""
    pid, bridge = _slice_network.dnsmasq_pid(), facts.network["bridge"]
    if not pid:
        return failed("dnsmasq does not run")
    problems = []
    if not facts.guest.named:
        problems.append(f"process {pid} runs, but does not answer a guest on {bridge}")
    expected, offered = _baseline_files.probe_address(facts.network["subnet"]), facts.guest.offered
    if offered != expected:
        problems.append(f"a guest on {bridge} is offered {offered or 'no address'}, not {expected}")
    return verdict(problems, f"process {pid} answers a guest on {bridge} and offers it an address")


def dnsmasq_config(facts: Facts) -> Verdict:
    """The dnsmasq configuration works at its next start.

    It is the configuration that bootstrap writes, it parses, nothing in it is stale, and no address
    is reserved twice.
    """
    problems = [f"stale {name}" for name in _slice_network.stale_reservations()]
    problems += _file_edits.unlike(_baseline_files.DNSMASQ, _baseline_files.dnsmasq(facts.network))
    problems += _duplicates(_baseline_files.probe_address(facts.network["subnet"]))
    # Debian's service adds this folder on its command line, so the test must name it too.
    folder = "--conf-dir=/etc/dnsmasq.d,.dpkg-dist,.dpkg-old,.dpkg-new"
    tested = _command.run(["dnsmasq", "--test", folder], ok=range(256))
    if tested.rc:
        problems.append((tested.err or tested.out).strip())
    return verdict(problems, "as bootstrap writes it, syntax check OK, nothing stale")


def nat(facts: Facts) -> Verdict:
    """Guests are translated, and their connections take no port of a service of the host."""
    subnet = facts.network["subnet"]
    if not any(_slice_network.translates(rule, subnet) for rule in facts.nat_rules):
        return failed(f"no rule of POSTROUTING translates {subnet}")
    doubts = [
        f"guests can cut clients off from the service at {address}: give it a port below"
        f" {_nat.PORTS[0]}"
        for address in _nat.services()
    ]
    fine = _nat.rules(facts.network)[-1]
    return verdict(_nat.problems(facts.network, facts.nat_rules), fine, doubts)


def ip_forwarding(facts: Facts) -> Verdict:
    """IP forwarding is on and the table of neighbours is large, now and in the settings of the next
    boot, and the host's filter lets guests pass.
    """
    problems = [] if _slice_network.forwarding() else ["net.ipv4.ip_forward is not 1"]
    sizes = _slice_network.neighbours()
    problems += [
        f"{key} is {sizes[key]}, less than {size}"
        for key, size in _slice_network.small_neighbours(sizes).items()
    ]
    problems += _file_edits.unlike(_baseline_files.SYSCTL, _baseline_files.SYSCTLS)
    missing = _host_filter.changes(facts.network["bridge"])
    problems += [f"the host's filter needs {line}" for line in missing]
    return verdict(problems, "net.ipv4.ip_forward is 1, the host's filter admits guests")


def guest_egress(facts: Facts) -> Verdict:
    """A guest-like namespace on the bridge reaches the outside through NAT."""
    target = facts.network.get("egress_probe") or _slice_network.gateway()
    if not target:
        return failed("the profile names no egress_probe and the host has no default gateway")
    probe, subnet = facts.guest, ipaddress.ip_network(facts.network["subnet"])
    raw = [source for source in probe.sources if ipaddress.ip_address(source) in subnet]
    problems = []
    if target_silent(facts):
        problems.append(f"{target} does not answer a guest, whose packets leave the host")
    elif probe.egress_ms is None:
        problems.append(f"{target} does not answer a guest, whatever the services say")
    if raw:
        problems.append(f"a guest's packets leave untranslated, as {', '.join(raw)}")
    elif not probe.sources:
        problems.append("no packet of a guest was seen leaving the host")
    shown = f"{target} answered a guest in {probe.egress_ms or 0:.1f} ms"
    return verdict(problems, f"{shown}, seen as {', '.join(probe.sources)}")


def guest_tcp(facts: Facts) -> Verdict:
    """A connection of a guest goes on through its guard and NAT, in both directions."""
    shown = f"{_tcp_probe.MESSAGES} messages of a guest and their answers passed NAT"
    return verdict([facts.guest.tcp] if facts.guest.tcp else [], shown)


def target_silent(facts: Facts) -> bool:
    """Whether the egress probe fails only at its target, which this host cannot repair: a guest's
    packets leave with the host's address, but no answer comes.
    """
    subnet = ipaddress.ip_network(facts.network["subnet"])
    sources = [ipaddress.ip_address(source) for source in facts.guest.sources]
    left = bool(sources) and not any(source in subnet for source in sources)
    return left and facts.guest.egress_ms is None


def network_service(facts: Facts) -> Verdict:
    """The network service succeeded, starts at the next boot, its settings match this profile, and
    libvirt calls its start hook.
    """
    name = _boot_units.NETWORK.service
    unit = facts.unit(name)
    problems = facts.not_at_boot(_boot_units.NETWORK)
    if unit.load != "loaded":
        return verdict(problems, "")
    if (unit.active, unit.result) != ("active", "success"):
        problems.append(f"{name} is {unit.active}/{unit.sub} ({unit.result})")
    for daemon in _start_hook.unnoticed():
        problems.append(f"{daemon} is older than {_object_names.START_HOOK} and does not call it")
    settings = _baseline_files.settings(facts.network)
    problems += _file_edits.unlike_settings(_baseline_files.SETTINGS, settings)
    return verdict(problems, f"{unit.active}/{unit.sub}")


def historical_network_service(facts: Facts) -> Verdict:
    unit = facts.unit(OLD_BASELINE)
    if unit.load in ("not-found", ""):
        return passed("absent")
    return warned(f"{OLD_BASELINE} is still there ({unit.active})")


def tmfifo(facts: Facts) -> Verdict:
    """The tmfifo link has its address, and the next boot starts the service that
    creates the link.
    """
    interface = facts.interfaces.get(_slice_network.TMFIFO)
    problems = []
    if interface is None:
        problems.append(f"{_slice_network.TMFIFO} is missing")
    elif _slice_network.TMFIFO_ADDRESS not in interface.addresses:
        addresses = ", ".join(interface.addresses) or "no address"
        problems.append(f"{_slice_network.TMFIFO}: {addresses}")
    if facts.network.get("tmfifo"):
        unit = facts.unit(RSHIM)
        if not unit.file.startswith("enabled"):
            why = unit.file or unit.load or "unknown"
            problems.append(f"{RSHIM} is {why}: it would not start at boot")
    return verdict(problems, ", ".join(interface.addresses) if interface else "")


def rshim_peer(_facts: Facts) -> Verdict:
    peer = _slice_network.TMFIFO_PEER
    took = _guest_probe.echo(peer)
    return failed(f"{peer} is silent") if took is None else passed(f"{took:.1f} ms")


def _fabric_interfaces(facts: Facts) -> list[str]:
    """Interfaces that may own the site address: the profile's, or each ibp* if the profile names
    none.
    """
    named = str(facts.profile["fabric"].get("interface") or "")
    return [named] if named else [name for name in facts.interfaces if name.startswith("ibp")]


def _owners(facts: Facts, address: str) -> list[str]:
    """Fabric interfaces that have the site address now."""
    return [
        name
        for name in _fabric_interfaces(facts)
        if name in facts.interfaces and _is_among(address, facts.interfaces[name].addresses)
    ]


def _is_among(expected: str, addresses: Sequence[str]) -> bool:
    """Whether the address is in the list; a profile may omit the prefix length."""
    return any(expected in (address, address.partition("/")[0]) for address in addresses)


def _not_given(facts: Facts, links: Sequence[_netplan.Link], expected: str) -> list[str]:
    """Reasons why the next boot would not give the address to its interface."""
    giving = [link for link in links if _is_among(expected, link.addresses)]
    if not giving:
        return [f"{IPOIB} does not give {expected}"]
    owner = str(facts.profile["fabric"].get("interface") or "")
    for link in giving:
        ib_names = (name for name in link.names if name.startswith("ibp"))
        names = [owner] if owner else [*_fabric_interfaces(facts), *ib_names]
        if any(link.is_of(name) for name in names):
            return []
    given = ", ".join(name for link in giving for name in (*link.names, *link.macs)) or "others"
    return [f"{IPOIB} gives {expected} to {given}, not to {owner or 'an interface ibp*'}"]


def _duplicates(bootstrap_file: str) -> list[str]:
    """Addresses with two DHCP reservations, including the probe guest's address. dnsmasq does not
    start with such a pair, or it ignores the second reservation.
    """
    seen = {bootstrap_file: "bootstrap's own file"}
    problems = []
    for entry in _dnsmasq.reservations():
        for key in filter(None, (entry.mac, entry.ip)):
            if key in seen:
                problems.append(f"{key} is reserved in {seen[key]} and {entry.name}")
            seen[key] = entry.name
    return problems

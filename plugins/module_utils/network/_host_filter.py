"""Rules for guests in the host's own packet filter, which docker and ufw share (iptables).

A packet that one chain drops is lost, whatever other tables accept. Under the policy DROP of docker
and ufw, guests therefore need accepting rules in these chains. `_firewall` runs earlier and has
dropped what no guest may send or receive. The site's rules decide first: ours come only before the
policy, or before the last rules that ufw and administrators use as a policy. The site's rules are
neither flushed nor moved.
"""

from __future__ import annotations

import re

from ansible_collections.gpuaas.slice.plugins.module_utils.core._errors import Refusal
from ansible_collections.gpuaas.slice.plugins.module_utils.network import _iptables

CHAINS = ("INPUT", "FORWARD")
_END = f"{_iptables.MARK} -j ACCEPT"
# ufw's last chains are its policy: they drop DHCP, log and reject. The other rules here drop or
# reject every packet.
_POLICY = re.compile(r"-A \S+ -j (ufw-after-\S+|DROP|REJECT( .*)?)")


def rules(bridge: str) -> list[str]:
    """The rules as `iptables -S` writes them."""
    return [
        f"-A INPUT -i {bridge} {_END}",
        f"-A FORWARD -i {bridge} {_END}",
        f"-A FORWARD -o {bridge} -m conntrack --ctstate RELATED,ESTABLISHED,DNAT {_END}",
    ]


def installed() -> list[str]:
    """Our rules on this host."""
    try:
        return [rule for chain in CHAINS for rule in _iptables.listed(chain) if rule.endswith(_END)]
    except Refusal as refusal:
        if refusal.code != "command_missing":
            raise
        # iptables creates the rules, so a host without iptables cannot have them.
        return []


def changes(bridge: str) -> list[str]:
    """Commands that put our rules in place; [] if they are. bridge: "" for no rules."""
    return [line for chain in CHAINS for line in _changes(chain, rules(bridge) if bridge else [])]


def establish(bridge: str) -> None:
    """Put our rules in place, in one transaction. bridge: "" removes them."""
    _iptables.commit(changes(bridge))


def _changes(chain: str, every: list[str]) -> list[str]:
    try:
        listed = _iptables.listed(chain)
    except Refusal as refusal:
        if refusal.code not in ("command_missing", "command_failed"):
            raise
        # Then docker and ufw cannot use the chain either. Parity reports guests without egress.
        return []
    ours = [rule for rule in every if rule.split()[1] == chain]
    theirs = [rule for rule in listed if not rule.endswith(_END)]
    place = next((n for n, rule in enumerate(theirs) if _POLICY.fullmatch(rule)), len(theirs))
    return _iptables.changes(chain, listed, theirs, ours, place)

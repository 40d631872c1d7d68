"""Public ingress of slices: rules that forward a public address and port to a guest, in files.

Each allocation has one file. `_firewall` and `_flows` put its rules in force, and the network's
boot service restores them. A rule ends at its expiry on the host itself, also while no controller
reaches it. A removed rule is remembered for a day, so that a late run cannot add it again.
"""

from __future__ import annotations

import ipaddress
import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from ansible_collections.gpuaas.slice.plugins.module_utils.core import _host, _object_names
from ansible_collections.gpuaas.slice.plugins.module_utils.core._errors import Refusal

# An answer of a UDP port cannot be proven, so TCP is the only protocol.
PROTOCOLS = ("tcp",)
# Seconds for which a removed rule is remembered. A run may be minutes late. Rules can be requested
# for months, and the guardian reads the file every few seconds.
MEMORY_S = 86_400


@dataclass(frozen=True)
class Rule:
    """Forwards connections from `sources` to a guest's port until `expires_at` (epoch seconds)."""

    id: str
    protocol: str
    public_address: str
    public_port: int
    guest_port: int
    sources: tuple[str, ...]
    expires_at: int

    @property
    def listener(self) -> tuple[str, str, int]:
        """Protocol, address and port, which no two rules may share."""
        return self.protocol, self.public_address, self.public_port


@dataclass(frozen=True)
class Kept:
    """An allocation's file. rules: by id. removed: time by which each removed rule is forgotten, by
    id. broken: why the file cannot be read, or "". Such a file has no rules, and its removed rules
    are unknown, so no rule can be added to it.
    """

    rules: Mapping[str, Rule] = field(default_factory=dict)
    removed: Mapping[str, int] = field(default_factory=dict)
    broken: str = ""

    def live(self) -> tuple[Rule, ...]:
        """The rules that have not expired, by id."""
        now = time.time()
        return tuple(rule for _id, rule in sorted(self.rules.items()) if rule.expires_at > now)

    def with_rule(self, rule: Rule) -> Kept:
        return Kept({**self.rules, rule.id: rule}, self.removed)

    def without(self, rule: Rule) -> Kept:
        now = int(time.time())
        removed = {id: end for id, end in self.removed.items() if end > now}
        rules = {id: other for id, other in self.rules.items() if id != rule.id}
        return Kept(rules, {**removed, rule.id: min(rule.expires_at, now + MEMORY_S)})


def check(fields: Mapping[str, Any]) -> Rule:
    """The rule of these fields, or a refusal that names the wrong one."""
    try:
        rule = Rule(**{**fields, "sources": tuple(fields["sources"])})
    except (KeyError, TypeError) as error:
        raise _object_names.invalid("rule", "the fields of an ingress rule", str(error)) from error
    _object_names.hexadecimal(rule.id)
    if rule.protocol not in PROTOCOLS:
        raise _object_names.invalid("protocol", " or ".join(PROTOCOLS), str(rule.protocol))
    for name in ("public_port", "guest_port"):
        port = getattr(rule, name)
        if not _is_int(port) or not 0 < port < 65536:
            raise _object_names.invalid(name, "a port from 1 to 65535", str(port))
    if not _is_int(rule.expires_at):
        raise _object_names.invalid("expires_at", "seconds since 1970", str(rule.expires_at))
    try:
        ipaddress.IPv4Address(rule.public_address)
        networks = [ipaddress.IPv4Network(source) for source in rule.sources]
    except ValueError as error:
        raise _object_names.invalid("rule", "IPv4 addresses and networks", str(error)) from error
    # The kernel refuses a set whose networks overlap.
    if not networks or list(ipaddress.collapse_addresses(networks)) != sorted(networks):
        raise _object_names.invalid(
            "sources", "separate IPv4 networks, in their shortest form", ", ".join(rule.sources)
        )
    return rule


def _is_int(value: object) -> bool:
    """Whether it is a number; True and False are none."""
    return isinstance(value, int) and not isinstance(value, bool)


def kept(allocation_id: str) -> Kept:
    """The allocation's file. An invalid file only takes rights away."""
    try:
        text = _host.kept(_object_names.ingress_path(allocation_id))
        if text is None:
            return Kept()
        document = json.loads(text)
        rules = [check(fields) for fields in document.get("rules", [])]
        removed = {str(id): int(end) for id, end in document.get("removed", {}).items()}
    except (ValueError, OverflowError, TypeError, AttributeError, Refusal) as broken:
        return Kept(broken=str(broken) or type(broken).__name__)
    return Kept({rule.id: rule for rule in rules}, removed)


def save(allocation_id: str, kept: Kept) -> None:
    """Replace the allocation's file."""
    document = {"rules": [asdict(rule) for rule in kept.rules.values()], "removed": kept.removed}
    text = json.dumps(document, indent=2, sort_keys=True) + "\n"
    _host.write(_object_names.ingress_path(allocation_id), text, 0o600)


def forget(allocation_id: str) -> None:
    _host.remove(_object_names.ingress_path(allocation_id))


def every() -> dict[str, Kept]:
    """All files by allocation."""
    owners = [_object_names.owner(path) for path in _object_names.files("ingress")]
    return {owner: kept(owner) for owner in owners if owner}

#!/usr/bin/python
# Copyright: the gpuaas.slice authors; Apache-2.0 (see LICENSE)
"""Managed public ingress of one slice: a rule in force, or removed with its connections."""

from __future__ import annotations

DOCUMENTATION = r"""
module: slice_ingress
short_description: Public ingress of a slice, in force or removed
version_added: "0.1.0"
author: The gpuaas.slice authors (@gpuaas)
description:
  - Forwards connections to a public address and port of this host to a port of a slice's guest,
    for the named sources and until the rule expires.
  - A rule is added only after the guest's port has answered. The host keeps it in
    C(/var/lib/gpuaas/ingress); the network's boot service restores it, and ends it at its expiry.
  - O(state=absent) removes the rule, or all rules of the allocation without O(rule), and cuts
    connections that are open. A removed rule cannot be added again.
  - While the file of an allocation cannot be read, none of its rules is in force. None can be
    added, because the removed ones are unknown, and none counts as removed, because it may come
    back with the file. The removal of all rules ends this.
  - Refuses with C(spec_invalid), C(stale_fence), C(lease_missing), C(guard_missing),
    C(ingress_address_absent), C(ingress_address_reserved), C(ingress_port_in_use),
    C(ingress_rule_ended), C(ingress_file_unreadable) and C(guest_port_silent).
options:
  allocation_id:
    description: The allocation, a UUID with dashes.
    type: str
    required: true
  rule:
    description: The rule. Required unless O(state=absent).
    type: dict
    suboptions:
      id:
        description: Id of the rule, a UUID with dashes.
        type: str
        required: true
      protocol:
        description: Protocol of the service.
        type: str
        choices: [tcp]
        default: tcp
      public_address:
        description: IPv4 address of this host that is kept for ingress.
        type: str
        required: true
      public_port:
        description: Port at the public address.
        type: int
        required: true
      guest_port:
        description: Port of the service in the guest.
        type: int
        required: true
      sources:
        description: IPv4 networks of the clients, none within another.
        type: list
        elements: str
        required: true
      expires_at:
        description: End of the rule in seconds since 1970.
        type: int
        required: true
  slots:
    description: >-
      The allocation's slots with C(slot_id) and C(fence). A rule is added only under the fence and
      the hold that the host has recorded.
    type: list
    elements: dict
    default: []
  deadline:
    description: Seconds that the guest's port has to answer.
    type: int
    default: 30
  state:
    description: Whether the rule is in force.
    type: str
    choices: [present, absent]
    default: present
requirements:
  - nftables
  - conntrack
seealso:
  - module: gpuaas.slice.slice_vm
  - module: gpuaas.slice.slice_relay
extends_documentation_fragment: [gpuaas.slice.change]
"""

EXAMPLES = r"""
- name: Let one network reach the guest's web server
  gpuaas.slice.slice_ingress:
    allocation_id: 23bd713b-6073-4ef7-8a51-2897e902365d
    rule:
      id: 7d9f2a52-6c54-4f8e-9f0a-3f4b5c6d7e8f
      public_address: 192.0.2.10
      public_port: 443
      guest_port: 8443
      sources: [198.51.100.0/24]
      expires_at: 1800000000
    slots:
      - {slot_id: slot-1, fence: 7}

- name: Remove all rules before the slice is stopped
  gpuaas.slice.slice_ingress:
    allocation_id: 23bd713b-6073-4ef7-8a51-2897e902365d
    state: absent
"""

RETURN = r"""
ingress:
  description: The allocation's rules in the kernel, by id.
  returned: always
  type: dict
  sample:
    rules: [7d9f2a52-6c54-4f8e-9f0a-3f4b5c6d7e8f]
"""

import os
import socket
import time
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from ipaddress import IPv4Address, IPv4Network
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.gpuaas.slice.plugins.module_utils.core import (
    _change,
    _command,
    _host,
    _ledger,
    _object_names,
)
from ansible_collections.gpuaas.slice.plugins.module_utils.core._errors import Refusal
from ansible_collections.gpuaas.slice.plugins.module_utils.network import (
    _firewall,
    _flows,
    _guards,
    _ingress,
    _slice_network,
)

_PAUSE_SECONDS = 1.0
_CONNECT_SECONDS = 3.0
# Address and port of the client, then those of the server.
_SSH_CONNECTION_WORDS = 4
_LOOPBACK = IPv4Network("127.0.0.0/8")


@dataclass(frozen=True)
class State:
    """guard: of the allocation's port. kept: its file, which may be there without rules. loaded:
    ids of its rules in the kernel. differs: whether the flows of its port differ from the file.
    tracked: open connections that rules to remove have let in. own_addresses: by which the host is
    managed and speaks to others. others: listeners of other rules.
    """

    guard: _flows.Guard | None
    kept: _ingress.Kept
    file: bool
    loaded: tuple[str, ...]
    differs: bool
    tracked: int = 0
    addresses: tuple[str, ...] = ()
    own_addresses: frozenset[str] = frozenset()
    others: tuple[tuple[str, str, int], ...] = ()
    listening: bool = False


def observe(params: _change.Params) -> State:
    allocation = params["allocation_id"]
    _object_names.hexadecimal(allocation)
    _require_lease(params)
    rule = _rule(params)
    guard, kept = _guards.saved(allocation), _ingress.kept(allocation)
    settings = _guards.recorded()
    present: dict[str, Any] = {}
    if params["state"] == "present" and rule is not None:
        present = {
            "addresses": _addresses(),
            "own_addresses": frozenset({_source_address(), _managed_address()}) - {""},
            "others": tuple(
                other.listener
                for kept_of in _ingress.every().values()
                for other in kept_of.live()
                if other.id != rule.id
            ),
            "listening": _listening(rule),
        }
    elif guard is not None:
        present = {"tracked": _connections("-L", guard, rule)}
    return State(
        guard=guard,
        kept=kept,
        file=_host.path(_object_names.ingress_path(allocation)).exists(),
        loaded=tuple(id for owner, id in _firewall.forwarded() if owner == allocation),
        differs=bool(_flows_to_load(settings, guard)),
        **present,
    )


def plan(params: _change.Params, state: State) -> _change.Plan:
    if params["state"] == "absent":
        rule = _rule(params)
        blockers = []
        if rule and state.kept.broken:
            # It may be in the file, and would be in force again once that can be read.
            blockers.append(_unreadable(params["allocation_id"], state))
        return _change.Plan(tuple(_removal(params, state, rule)), tuple(blockers))
    rule = _ingress.check(params["rule"])
    steps = []
    if state.kept.rules.get(rule.id) != rule:
        target = f"{state.guard.ip if state.guard else ''}:{rule.guest_port}"
        steps.append(_change.Step("probe_guest", target, None, "answers"))
        steps.append(_change.Step("keep_rule", f"rule {rule.id}", None, asdict(rule)))
    if steps or state.differs or rule.id not in state.loaded:
        steps.append(_change.Step("load_rules", "rules in force", list(state.loaded), [rule.id]))
    return _change.Plan(tuple(steps), tuple(_obstacles(params["allocation_id"], state, rule)))


def _removal(
    params: _change.Params, state: State, rule: _ingress.Rule | None
) -> list[_change.Step]:
    steps = []
    if rule is None:
        unwanted = set(state.loaded)
        if state.file:
            path = _object_names.ingress_path(params["allocation_id"])
            steps.append(_change.Step("forget_rules", path, list(state.kept.rules), None))
    else:
        unwanted = {rule.id} & set(state.loaded)
        # Remembered also if it never came: its run may come late. Not where the slice is not.
        new = state.guard is not None and rule.id not in state.kept.removed
        if rule.id in state.kept.rules or new:
            steps.append(_change.Step("forget_rule", f"rule {rule.id}", asdict(rule), None))
    if unwanted or state.differs:
        steps.append(_change.Step("load_rules", "rules in force", list(state.loaded), []))
    if state.tracked:
        steps.append(_change.Step("forget_connections", "open connections", state.tracked, 0))
    return steps


def _require_lease(params: _change.Params) -> None:
    if params["state"] != "absent":
        _ledger.require_leased(params["slots"], params["allocation_id"])


def _obstacles(allocation: str, state: State, rule: _ingress.Rule) -> list[Refusal]:
    blockers = []
    where = f"{rule.public_address}:{rule.public_port}"
    if state.guard is None:
        blockers.append(
            _refuse(
                "guard_missing",
                "a slice with a guarded port on this host",
                "no guard of the allocation",
                "start the slice first; run bootstrap if this host never had its network",
            )
        )
    if state.kept.broken:
        blockers.append(_unreadable(allocation, state))
    if rule.id in state.kept.removed or rule.expires_at <= time.time():
        actual = "removed before" if rule.id in state.kept.removed else "expired"
        remedy = "request a new rule"
        blockers.append(_refuse("ingress_rule_ended", f"rule {rule.id} to begin", actual, remedy))
    reserved = _reserved(state, rule)
    if reserved:
        remedy = "name an address that is kept for ingress"
        expected = "an address without another purpose"
        blockers.append(_refuse("ingress_address_reserved", expected, reserved, remedy))
    elif rule.public_address not in state.addresses:
        blockers.append(
            _refuse(
                "ingress_address_absent",
                f"{rule.public_address} on an interface of this host",
                "other addresses only",
                "name an address of the slice's host, or add it to the host's network",
            )
        )
    if rule.listener in state.others or state.listening:
        actual = "a service of the host" if state.listening else "another rule"
        remedy = "choose another public port"
        blockers.append(_refuse("ingress_port_in_use", f"{where} free", actual, remedy))
    return blockers


def _unreadable(allocation: str, state: State) -> Refusal:
    return _refuse(
        "ingress_file_unreadable",
        "the allocation's rules, and those that were removed",
        f"{_object_names.ingress_path(allocation)}: {state.kept.broken}",
        "repair the file on the host; otherwise the slice has no ingress until its release",
    )


def _reserved(state: State, rule: _ingress.Rule) -> str:
    """The purpose that this host has for the address already; "" for none."""
    address = IPv4Address(rule.public_address)
    if rule.public_address in state.own_addresses:
        return f"{address}, by which the host is managed or speaks to others"
    if address in _LOOPBACK or address.is_multicast or address.is_unspecified:
        return f"{address}, which no client can reach"
    guard = state.guard
    if guard and address in IPv4Network(guard.address, strict=False):
        return f"{address} of the slice network"
    return ""


def apply(params: _change.Params, step: _change.Step) -> dict[str, Any] | None:
    allocation, rule = params["allocation_id"], _rule(params)
    _require_lease(params)
    guard = _guards.saved(allocation)
    if step.name == "probe_guest" and rule and guard:
        return {"seconds": _probe(guard.ip, rule.guest_port, params["deadline"])}
    if step.name == "keep_rule" and rule:
        _ingress.save(allocation, _ingress.kept(allocation).with_rule(rule))
    elif step.name == "forget_rule" and rule:
        _ingress.save(allocation, _ingress.kept(allocation).without(rule))
    elif step.name == "forget_rules":
        _ingress.forget(allocation)
    elif step.name == "load_rules":
        settings = _guards.recorded()
        _guards.reload_firewall()
        for each in _flows_to_load(settings, guard):
            _guards.apply(settings, each)
    elif step.name == "forget_connections" and guard:
        _connections("-D", guard, rule)
    return None


def facts(_params: _change.Params, state: State) -> dict[str, Any]:
    return {"ingress": {"rules": list(state.loaded)}}


def _rule(params: _change.Params) -> _ingress.Rule | None:
    return _ingress.check(params["rule"]) if params.get("rule") else None


def _flows_to_load(settings: _change.Params, guard: _flows.Guard | None) -> list[_change.Step]:
    """The step by which the allocation's port follows its file. Other slices may change meanwhile,
    so their ports and the whole firewall are not compared. A switch that has just started gets the
    flows of all ports at once.
    """
    if not settings or guard is None:
        return []
    state = _guards.observe(settings, with_firewall=False)
    steps = _guards.plan(settings, state) if state else []
    of_port = ("guard_port", guard.port)
    return [s for s in steps if s.name == "guard_bridge" or (s.name, s.subject) == of_port]


def _probe(ip: str, port: int, deadline: float) -> float:
    """Seconds until the guest's port answered."""
    begin = time.monotonic()
    while True:
        try:
            socket.create_connection((ip, port), timeout=_CONNECT_SECONDS).close()
        except OSError as silent:
            if time.monotonic() - begin >= deadline:
                raise _refuse(
                    "guest_port_silent",
                    f"port {port} of the guest to answer within {deadline} s",
                    silent.strerror or str(silent),
                    "start the service in the guest, let its firewall admit it, request again",
                ) from silent
        else:
            return round(time.monotonic() - begin, 1)
        time.sleep(_PAUSE_SECONDS)


def _addresses() -> tuple[str, ...]:
    """The host's own IPv4 addresses."""
    interfaces = _slice_network.interfaces().values()
    texts = (text for interface in interfaces for text in interface.addresses)
    return tuple(text.partition("/")[0] for text in texts if ":" not in text)


def _managed_address() -> str:
    """The address at which SSH reached this run; "" for a run without SSH."""
    pid = os.getpid()
    # Programs such as sudo clear the environment for their children.
    while pid > 1:
        variables = (_host.read(f"/proc/{pid}/environ") or "").split("\0")
        connections = [text.split() for text in variables if text.startswith("SSH_CONNECTION=")]
        if connections and len(connections[0]) == _SSH_CONNECTION_WORDS:
            return connections[0][2]
        status = (_host.read(f"/proc/{pid}/status") or "").splitlines()
        parents = [line.split()[1] for line in status if line.startswith("PPid:")]
        pid = int(parents[0]) if parents else 0
    return ""


def _source_address() -> str:
    """The address with which the host itself speaks to others; "" without a default route."""
    shown = _command.run(["ip", "-4", "-o", "route", "get", "1.0.0.0"], ok=(0, 1, 2)).out
    words = shown.split()
    return words[words.index("src") + 1] if "src" in words[:-1] else ""


def _listening(rule: _ingress.Rule) -> bool:
    """Whether a program of the host has bound exactly this address and port."""
    where = f"{rule.public_address}:{rule.public_port}"
    return bool(_command.run(["ss", "-H", "-l", "-t", "-n", f"src {where}"]).out.strip())


def _connections(action: str, guard: _flows.Guard, rule: _ingress.Rule | None) -> int:
    """List or delete the connections that were let in, of a rule or of all."""
    words = ["conntrack", action, "--dst-nat", guard.ip]
    if rule is not None:
        words += ["-p", rule.protocol, "--orig-dst", rule.public_address]
        words += ["--orig-port-dst", str(rule.public_port)]
    # With -D, exit code 1 also means that no connection existed.
    ok = (0, 1) if action == "-D" else (0,)
    return len(_command.run(words, ok=ok).out.split("\n")) - 1


def _refuse(code: str, expected: str, found: str, remedy: str) -> Refusal:
    return Refusal(code, expected=expected, found=found, remedy=remedy)


def exclusive(params: _change.Params) -> AbstractContextManager[None]:
    """One run at a time changes the rules of an allocation. Others do not wait for its guest."""
    name = _object_names.domain_name(params["allocation_id"])
    return _host.locked(f"/run/gpuaas/ingress/{name}", mode=0o700)


SUBJECT = _change.Subject(observe, plan, apply, facts, exclusive=exclusive)


def main() -> None:
    rule: dict[str, Any] = {
        "id": {"type": "str", "required": True},
        "protocol": {"type": "str", "choices": ["tcp"], "default": "tcp"},
        "public_address": {"type": "str", "required": True},
        "public_port": {"type": "int", "required": True},
        "guest_port": {"type": "int", "required": True},
        "sources": {"type": "list", "elements": "str", "required": True},
        "expires_at": {"type": "int", "required": True},
    }
    module = AnsibleModule(
        argument_spec={
            "allocation_id": {"type": "str", "required": True},
            "rule": {"type": "dict", "options": rule},
            "slots": {"type": "list", "elements": "dict", "default": []},
            "deadline": {"type": "int", "default": 30},
            "state": {"type": "str", "choices": ["present", "absent"], "default": "present"},
        },
        required_if=[("state", "present", ("rule",))],
        supports_check_mode=True,
    )
    _change.run(module, SUBJECT)


if __name__ == "__main__":
    main()

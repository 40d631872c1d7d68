"""Address of the host on the InfiniBand fabric, by netplan. Not yet run on hardware."""

from __future__ import annotations

import ipaddress
import json
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ansible_collections.gpuaas.slice.plugins.module_utils.core import (
    _change,
    _command,
    _host,
    _host_snapshot,
)
from ansible_collections.gpuaas.slice.plugins.module_utils.core._errors import Refusal
from ansible_collections.gpuaas.slice.plugins.module_utils.network import _netplan, _slice_network

FILE = "/etc/netplan/60-ipoib.yaml"
RECORD = "ipoib"
MARKER = "# Written by the gpuaas.slice collection; changed by its playbooks only."

_INTERFACE = re.compile(r"[a-z][a-z0-9]{0,14}")
# networkd configures a link after `netplan apply` has ended.
_SETTLES_S = 30.0

Params = Mapping[str, Any]


@dataclass(frozen=True)
class State:
    """before: the site's own file that the managed file replaced, if any; None without a record.

    refused: netplan's error for the new file, or "". missing: parts of address and route that the
    host lacks. there: whether the interface exists.
    """

    text: str | None
    before: Mapping[str, Any] | None
    refused: str = ""
    missing: tuple[str, ...] = ()
    there: bool = True

    @property
    def ours(self) -> bool:
        return (self.text or "").startswith(MARKER)


def observe(params: Params) -> State:
    written, before = _host.kept(FILE), _host_snapshot.recall(RECORD)
    # Unsafe values never reach netplan.
    if params.get("state") == "absent" or _unsafe(params):
        return State(written, before)
    expected = text(params)
    refused = _netplan.judge(FILE, expected).refused if written != expected.strip() else ""
    interface = _slice_network.interfaces().get(params["interface"])
    return State(written, before, refused, _missing(params, interface), interface is not None)


def plan(params: Params, state: State) -> _change.Plan:
    if params.get("state") == "absent":
        return _change.Plan(tuple(_back(state)))
    blockers = (*_unsafe(params), *_impossible(params, state))
    if blockers:
        return _change.Plan(blockers=blockers)
    expected, steps = text(params), []
    if state.before is None:
        # The absence of a file is recorded too, because a file that later replaces the managed file
        # is not the site's original.
        was = None if state.ours else state.text
        steps += _host_snapshot.remember_steps(RECORD, None, {"text": was})
    different = state.text != expected.strip()
    if different:
        steps.append(_change.Step("write_netplan", FILE, state.text, expected))
    # A correct file proves nothing, because a failed apply leaves it in place.
    if different or state.missing:
        lacking = f"without {', '.join(state.missing)}" if state.missing else "another file"
        steps.append(_change.Step("apply_netplan", params["interface"], lacking, "as the file"))
    return _change.Plan(tuple(steps))


def _back(state: State) -> list[_change.Step]:
    steps = []
    if state.ours:
        was = (state.before or {}).get("text")
        name = "remove_netplan" if was is None else "write_netplan"
        steps.append(_change.Step(name, FILE, state.text, None if was is None else f"{was}\n"))
    # While a record exists, the restore has not been completed.
    if state.ours or state.before is not None:
        steps.append(_change.Step("apply_netplan", "netplan", "ours", "the site's"))
    return [*steps, *_host_snapshot.forget_steps(RECORD, state.before)]


def apply(params: Params, step: _change.Step) -> dict[str, Any] | None:
    if step.name in _host_snapshot.STEPS:
        _host_snapshot.apply(step)
    elif step.name == "remove_netplan":
        _host.remove(FILE)
    elif step.name == "write_netplan":
        # netplan warns about files that others can read.
        _host.write(FILE, step.after, 0o600)
    else:
        _command.run(["netplan", "apply"], timeout=120)
        if params.get("state") != "absent":
            _await_live(params)
    return None


def _await_live(params: Params) -> None:
    end = time.monotonic() + _SETTLES_S
    while missing := _missing(params, _slice_network.interfaces().get(params["interface"])):
        if time.monotonic() > end:
            raise Refusal(
                "ipoib_not_live",
                expected=f"{params['interface']} to have {', '.join(missing)}",
                found=f"still not {_SETTLES_S:g} s after `netplan apply`",
                remedy="look at `networkctl status` and at the link; the file is written",
            )
        time.sleep(0.5)


def _missing(params: Params, interface: _slice_network.Interface | None) -> tuple[str, ...]:
    lacking = []
    address, route = params["address"], params["route"]
    if interface is None or address not in interface.addresses:
        lacking.append(f"address {address}")
    ways = _slice_network.ways(route) if route else []
    if route and not any({*way} == {params["interface"]} for way in ways):
        lacking.append(f"route {route}")
    return tuple(lacking)


SUBJECT = _change.Subject(observe, plan, apply)


def text(params: Params) -> str:
    """netplan's document; JSON strings are YAML strings too."""
    rows = [
        MARKER,
        "network:",
        "  version: 2",
        "  ethernets:",
        f"    {json.dumps(params['interface'])}:",
        f"      addresses: [{json.dumps(params['address'])}]",
    ]
    if params["route"]:
        rows += ["      routes:", f"        - to: {json.dumps(params['route'])}"]
        rows.append("          scope: link")
    return "\n".join(rows) + "\n"


def _unsafe(params: Params) -> list[Refusal]:
    problems = []
    if not _INTERFACE.fullmatch(params["interface"]):
        problems.append(f"interface {params['interface']!r}")
    for name, parse in (("address", _address), ("route", ipaddress.IPv4Network)):
        try:
            if params[name] or name == "address":
                parse(params[name])
        except ValueError:
            problems.append(f"{name} {params[name]!r}")
    return [
        Refusal(
            "ipoib_invalid",
            expected="an interface, an IPv4 address with prefix length, a subnet to route or none",
            found=problem,
            remedy="correct fabric_interface and fabric_address of the node, or fabric.route of"
            " the profile",
        )
        for problem in problems
    ]


def _address(text: str) -> None:
    """Require a prefix length. Without it netplan refuses the address, and the host would be alone
    on its fabric.
    """
    if "/" not in text:
        raise ValueError(text)
    ipaddress.IPv4Interface(text)


def _impossible(params: Params, state: State) -> list[Refusal]:
    blockers = []
    if state.refused:
        blockers.append(
            Refusal(
                "netplan_refused",
                expected=f"netplan to take {FILE} together with the site's own files",
                found=state.refused,
                remedy="correct the values, or the site's file that contradicts them; nothing was"
                " written",
            )
        )
    if not state.there:
        blockers.append(
            Refusal(
                "ipoib_interface_missing",
                expected=f"an interface {params['interface']} on this host",
                found="no such interface",
                remedy="correct fabric_interface of the node, or look at the card and at ib_ipoib",
            )
        )
    return blockers

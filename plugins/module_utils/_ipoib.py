"""The host's own address on the InfiniBand fabric, kept by netplan. Not yet run on hardware."""

from __future__ import annotations

import ipaddress
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ansible_collections.gpuaas.slice.plugins.module_utils import _before, _change, _command, _host
from ansible_collections.gpuaas.slice.plugins.module_utils._errors import Refusal

FILE = "/etc/netplan/60-ipoib.yaml"
RECORD = "ipoib"
MARKER = "# Written by the gpuaas.slice collection; changed by its playbooks only."

_INTERFACE = re.compile(r"[a-z][a-z0-9]{0,14}")

Params = Mapping[str, Any]


@dataclass(frozen=True)
class State:
    """before: the site's own file that ours replaced, if any; None when nothing was remembered."""

    text: str | None
    before: Mapping[str, Any] | None

    @property
    def ours(self) -> bool:
        return (self.text or "").startswith(MARKER)


def observe(_params: Params) -> State:
    return State(_host.read(FILE), _before.recalled(RECORD))


def plan(params: Params, state: State) -> _change.Plan:
    if params.get("state") == "absent":
        return _change.Plan(tuple(_back(state)))
    blockers = tuple(_unsafe(params))
    if blockers:
        return _change.Plan(blockers=blockers)
    wanted, steps = text(params), []
    if state.before is None:
        # No file is remembered too: one that somebody puts over ours later is not the site's own.
        was = None if state.ours else state.text
        steps += _before.remembering(RECORD, None, {"text": was})
    if state.text != wanted.strip():
        steps.append(_change.Step("write_netplan", FILE, state.text, wanted))
    return _change.Plan(tuple(steps))


def _back(state: State) -> list[_change.Step]:
    steps = []
    if state.ours:
        was = (state.before or {}).get("text")
        name = "remove_netplan" if was is None else "write_netplan"
        steps.append(_change.Step(name, FILE, state.text, None if was is None else f"{was}\n"))
    return [*steps, *_before.forgetting(RECORD, state.before)]


def apply(_params: Params, step: _change.Step) -> dict[str, Any] | None:
    if step.name in _before.STEPS:
        _before.apply(step)
        return None
    if step.name == "remove_netplan":
        _host.remove(FILE)
        _command.run(["netplan", "apply"], timeout=120)
        return None
    # netplan warns about files that others can read.
    _host.write(FILE, step.after, 0o600)
    _command.run(["netplan", "apply"], timeout=120)
    return None


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
    for name, parse in (("address", ipaddress.ip_interface), ("route", ipaddress.ip_network)):
        try:
            if params[name] or name == "address":
                parse(params[name])
        except ValueError:
            problems.append(f"{name} {params[name]!r}")
    return [
        Refusal(
            "ipoib_invalid",
            expected="an interface, an address with prefix length, the fabric's subnet or none",
            found=problem,
            remedy="correct fabric.interface, fabric.site_address or fabric.route of the profile",
        )
        for problem in problems
    ]

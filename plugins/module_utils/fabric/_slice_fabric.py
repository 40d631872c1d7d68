"""Fabric functions of an allocation: given to its tenant's network, and taken back.

On Ethernet the tenant's network is a VLAN that the card enforces. On InfiniBand it is a partition,
which only the subnet manager can set; here the function's GUIDs and link state are verified.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ansible_collections.gpuaas.slice.plugins.module_utils.core import (
    _change,
    _ledger,
    _object_names,
    _pci,
)
from ansible_collections.gpuaas.slice.plugins.module_utils.core._errors import Refusal
from ansible_collections.gpuaas.slice.plugins.module_utils.fabric import (
    _function_guards,
    _virtual_functions,
)

Params = Mapping[str, Any]


@dataclass(frozen=True)
class Function:
    """A virtual function of the allocation. guard: None on InfiniBand."""

    address: str
    pf: str
    index: int
    kind: str
    identity: str
    link_state: str
    guard: _function_guards.Guard | None


@dataclass(frozen=True)
class State:
    """missing: addresses that are no virtual functions. kept: VLANs of the allocation's file, None
    without one. others: allocations with a kept guard, by address. idle_vlan: of this host.
    """

    functions: tuple[Function, ...]
    missing: tuple[str, ...]
    kept: Mapping[str, int] | None
    others: Mapping[str, Sequence[str]]
    idle_vlan: int


def observe(params: Params) -> State:
    allocation = params["allocation_id"]
    _object_names.hexadecimal(allocation)
    if params["state"] == "present":
        _ledger.check_each(params["slots"])
    addresses = [str(s["fabric_vf_pci_address"]) for s in params["slots"] if _has_function(s)]
    functions, missing = [], []
    for address in addresses:
        place = _virtual_functions.function_at(address) if _pci.present(address) else None
        if place is None:
            missing.append(address)
            continue
        card, index = place
        row = _virtual_functions.documents(card)[index : index + 1]
        functions.append(
            Function(
                address=address,
                pf=card.address,
                index=index,
                kind=card.kind,
                identity=row[0]["identity"] if row else "",
                link_state=row[0]["link_state"] if row else "",
                guard=card.guards[index] if card.guards else None,
            )
        )
    holders = _function_guards.holders()
    others = {
        address: [other for other in sorted(holders.get(address, {})) if other != allocation]
        for address in addresses
    }
    guarded = any(function.guard for function in functions)
    return State(
        tuple(functions),
        tuple(missing),
        _function_guards.saved(allocation),
        others,
        # Only Ethernet has one.
        _virtual_functions.idle_vlan(_virtual_functions.recorded()) if guarded else 0,
    )


def _has_function(slot: Mapping[str, Any]) -> bool:
    return bool(slot.get("fabric_vf_pci_address"))


def plan(params: Params, state: State) -> _change.Plan:
    if params["state"] == "absent":
        steps = [] if state.kept is None else [_forget(params)]
        # A function that another allocation holds by now keeps the guard of that allocation.
        mine = [f for f in state.functions if not state.others[f.address]]
        return _change.Plan((*steps, *_guard_steps(mine, state.idle_vlan)))
    blockers = [*_unfit(params, state), *_not_the_tenants(params, state)]
    vlans = {f.address: params["vlan"] for f in state.functions if f.guard}
    steps = []
    if (state.kept or {}) != vlans:
        steps.append(_change.Step("keep_guard", "guard of the fabric", state.kept, vlans))
    return _change.Plan((*steps, *_guard_steps(state.functions, params["vlan"])), tuple(blockers))


def _forget(params: Params) -> _change.Step:
    return _change.Step("forget_guard", "guard of the fabric", params["allocation_id"], None)


def _guard_steps(functions: Sequence[Function], vlan: int) -> list[_change.Step]:
    wish = _function_guards.Guard(vlan)
    return [
        _change.Step("guard_function", f.address, f.guard.text(), wish.text())
        for f in functions
        if f.guard and f.guard != wish
    ]


def _unfit(params: Params, state: State) -> list[Refusal]:
    """Reasons why the functions cannot be given to a guest."""
    refusals = [
        _refuse("function_missing", f"a virtual function at {address}", "none", _AGAIN)
        for address in state.missing
    ]
    for function in state.functions:
        name = f"function {function.index} of {function.pf}"
        if function.kind != params["link"]:
            actual = function.kind or "no known link"
            refusals.append(_refuse("wrong_link", f"{name} on {params['link']}", actual, _AGAIN))
        wish = params["identities"].get(function.address) or function.identity
        if not function.identity or function.identity != wish.lower():
            actual = function.identity or "none"
            expected = f"{name} with the identity {wish or 'that slice mode gives'}"
            refusals.append(_refuse("function_renamed", expected, actual, _AGAIN))
        if function.link_state != _virtual_functions.FOLLOW:
            actual = function.link_state or "unknown"
            expected = f"{name} with link state {_virtual_functions.FOLLOW}"
            refusals.append(_refuse("function_link_state", expected, actual, _AGAIN))
        if state.others[function.address]:
            actual = ", ".join(state.others[function.address])
            remedy = "verify the absence of that allocation and release it first"
            refusals.append(
                _refuse("function_guarded", f"{name} free", f"held by {actual}", remedy)
            )
    return refusals


def _not_the_tenants(params: Params, state: State) -> list[Refusal]:
    """Reasons why the VLAN would isolate no tenant."""
    if all(function.guard is None for function in state.functions):
        return []
    vlan, idle = params["vlan"], state.idle_vlan
    if not 0 <= vlan <= _function_guards.LAST_VLAN:
        actual, expected = str(vlan), f"a VLAN from 1 to {_function_guards.LAST_VLAN}"
    elif bool(vlan) != bool(idle):
        actual = f"VLAN {vlan}" if vlan else "no VLAN"
        expected = f"a VLAN of the tenant, because idle functions are in VLAN {idle}"
        if not idle:
            expected = "no VLAN, because bootstrap found a fabric that one tenant owns"
    elif vlan and vlan == idle:
        actual, expected = f"VLAN {vlan}", "another VLAN than that of idle functions"
    else:
        return []
    remedy = "run the bootstrap playbook with the node's hardware profile, then launch again"
    return [_refuse("vlan_invalid", expected, actual, remedy)]


def apply(params: Params, step: _change.Step) -> dict[str, Any] | None:
    if params["state"] == "present":
        _ledger.check_each(params["slots"])
    if step.name == "keep_guard":
        # First the file: from now on the boot service restores this guard.
        _function_guards.save(params["allocation_id"], step.after)
    elif step.name == "forget_guard":
        _function_guards.forget(params["allocation_id"])
    else:
        place = _virtual_functions.function_at(step.subject)
        if place:
            card, _index = place
            settings = _virtual_functions.recorded()
            _virtual_functions.guard_functions(card, _virtual_functions.idle_vlan(settings))
    return None


def facts(_params: Params, state: State) -> dict[str, Any]:
    rows = [
        {
            "address": function.address,
            "pf": function.pf,
            "index": function.index,
            "link": function.kind,
            "identity": function.identity,
            "link_state": function.link_state,
            "vlan": function.guard.vlan if function.guard else None,
            "spoof_check": function.guard.spoof_check if function.guard else None,
            "trust": function.guard.trust if function.guard else None,
        }
        for function in state.functions
    ]
    return {"functions": rows}


SUBJECT = _change.Subject(
    observe, plan, apply, facts, exclusive=lambda _params: _function_guards.exclusive()
)


def unguarded(address: str) -> list[Refusal]:
    """Reasons why the function of a slot is not isolated; [] for a function without a card."""
    place = _virtual_functions.function_at(address) if _pci.present(address) else None
    if place is None:
        return []
    card, index = place
    if not card.guards:
        return []
    idle_vlan = _virtual_functions.idle_vlan(_virtual_functions.recorded())
    wish = card.desired_guards(idle_vlan)[index]
    refusal = _function_guards.unguarded(address, card.guards[index], wish)
    return [refusal] if refusal else []


_AGAIN = "run the bootstrap playbook (role fabric_functions), then discovery and parity"


def _refuse(code: str, expected: str, found: str, remedy: str) -> Refusal:
    return Refusal(code, expected=expected, found=found, remedy=remedy)

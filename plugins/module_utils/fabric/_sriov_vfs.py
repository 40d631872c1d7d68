"""SR-IOV of the fabric cards: virtual functions now and at every boot, and their removal.

A card's state is recorded before its first change. A card that an installed service already served
without a record (earlier versions kept none) has an unknown original state and returns to plain
use: no virtual functions, and automatic probing. A card with neither a record nor such a service is
the site's, and is left alone.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ansible_collections.gpuaas.slice.plugins.module_utils.core import (
    _boot_service,
    _boot_units,
    _change,
    _host,
    _host_snapshot,
    _pci,
)
from ansible_collections.gpuaas.slice.plugins.module_utils.core._errors import Refusal
from ansible_collections.gpuaas.slice.plugins.module_utils.fabric import (
    _function_guards,
    _virtual_functions,
)

RECORD = _virtual_functions.RECORD


@dataclass(frozen=True)
class State:
    """before: recorded state by card, None without a record. served: the cards whose functions the
    installed service creates, so their current state is not the original state.
    """

    live: _virtual_functions.State
    installed: _boot_service.Installed
    before: Mapping[str, Any] | None
    served: frozenset[str]


def observe(params: _change.Params) -> State:
    before, installed = _recalled(), _boot_service.observe(_unit(params))
    selection = params
    if not params["count"]:
        # The profile may have dropped a card or a device id since, and a port may have changed its
        # link type.
        pfs, ids, _link = _served_cards() or ((), (), "")
        addresses = [*params["pfs"], *(before or {}), *pfs]
        kinds = [*params["pf_ids"], *ids]
        every = {"pfs": [*dict.fromkeys(addresses)], "pf_ids": [*dict.fromkeys(kinds)], "link": ""}
        selection = {**params, **every}
    live = _virtual_functions.observe(selection)
    return State(live, installed, before, _served(live, installed))


def plan(params: _change.Params, state: State) -> _change.Plan:
    if params["count"]:
        live = _virtual_functions.plan(params, state.live)
        service = _boot_service.plan(_unit(params), state.installed)
        blockers = (*_unsaid(params), *live.blockers)
        return _change.Plan((*_remembering(state), *live.steps, *service), blockers)
    live = _virtual_functions.plan({**params, "before": state.before}, _to_give_back(state))
    service = _boot_service.plan_removal(_unit(params), state.installed)
    forget = _host_snapshot.forget_steps(RECORD, state.before)
    return _change.Plan((*live.steps, *service, *forget), live.blockers)


def apply(params: _change.Params, step: _change.Step) -> dict[str, Any] | None:
    if step.name in ("remove_service", _host_snapshot.FORGET):
        _prove_given_back(params)
    if step.name in _host_snapshot.STEPS:
        _host_snapshot.apply(step)
    elif step.name in _boot_service.STEPS:
        _boot_service.apply(_unit(params), step)
    else:
        return _virtual_functions.apply(params, step)
    return None


def facts(params: _change.Params, state: State) -> dict[str, Any]:
    return {**_virtual_functions.facts(params, state.live), "before": dict(state.before or {})}


SUBJECT = _change.Subject(
    observe, plan, apply, facts, exclusive=lambda _params: _function_guards.exclusive()
)


def settings(params: _change.Params) -> dict[str, Any]:
    """Settings of the boot service."""
    fields = {key: params[key] for key in ("pfs", "pf_ids", "count", "macs")}
    idle_vlan = _virtual_functions.idle_vlan(params)
    return {**fields, "link": params.get("link") or "", "idle_vlan": idle_vlan}


def _unit(params: _change.Params) -> _boot_service.Unit:
    return dataclasses.replace(_boot_units.FABRIC, settings=settings(params))


def _unsaid(params: _change.Params) -> list[Refusal]:
    """Require the link type. A device id alone would also match a port of the other type, outside
    the bridge's isolation.
    """
    if params.get("link") or not params["pf_ids"]:
        return []
    return [
        Refusal(
            "link_missing",
            expected=f"the link of the fabric, {_pci.INFINIBAND} or {_pci.ETHERNET}",
            found=f"only the ids {', '.join(params['pf_ids'])}, which a vendor gives to both",
            remedy="say fabric.link in the hardware profile",
        )
    ]


def _remembering(state: State) -> list[_change.Step]:
    # Recorded even if nothing else changes, because a later repair would take drift for the
    # original state.
    cards = [card for card in state.live.cards if card.address not in state.served]
    was = {card.address: card.remembered() for card in cards}
    return _host_snapshot.remember_steps(RECORD, state.before, was) if was else []


def _to_give_back(state: State) -> _virtual_functions.State:
    addresses = {*(state.before or {}), *state.served}
    cards = tuple(card for card in state.live.cards if card.address in addresses)
    return dataclasses.replace(state.live, cards=cards)


def _prove_given_back(params: _change.Params) -> None:
    """Verify that no setting for a card is left on the host."""
    state = observe(params)
    wish = {**params, "before": state.before}
    cards = _to_give_back(state).cards
    left = {card: steps for card in cards if (steps := _virtual_functions.open_steps(card, wish))}
    if left:
        now = [
            f"{card.address}: {card.count}, autoprobe {card.autoprobe:d}"
            f" ({', '.join(step.name for step in steps)} is open)"
            for card, steps in left.items()
        ]
        raise Refusal(
            "vfs_not_restored",
            expected="the fabric cards with the virtual functions that they had before slice mode",
            found="; ".join(now),
            remedy="find the other program that makes virtual functions here, then run again",
        )


def _served(live: _virtual_functions.State, installed: _boot_service.Installed) -> frozenset[str]:
    every = frozenset(card.address for card in live.cards)
    if not installed.present:
        return frozenset()
    served = _served_cards()
    if served is None:
        # Edited or gone: any card may be a served card.
        return every
    pfs, ids, link = served
    alike = {a for a in every if _pci.read(a).id in ids and link in ("", _pci.link(a))}
    return frozenset(a for a in every if a in pfs or a in alike)


def _served_cards() -> tuple[list[str], list[str], str] | None:
    """Addresses, device ids and link of the cards that the installed service serves; None if
    unknown.

    Earlier versions gave the service no link, so it serves both link types.
    """
    try:
        document = json.loads(_host.kept(_boot_units.FABRIC.settings_path) or "")
        pfs, ids, link = document["pfs"], document["pf_ids"], document.get("link", "")
    except (ValueError, LookupError, TypeError):
        return None
    named = isinstance(pfs, list) and all(isinstance(a, str) and _pci.is_address(a) for a in pfs)
    kinds_valid = isinstance(ids, list) and all(isinstance(kind, str) for kind in ids)
    return (pfs, ids, link) if named and kinds_valid and link in ("", *_pci.LINKS) else None


def _recalled() -> dict[str, Any] | None:
    """The record, checked, because a person may have written it."""
    before = _host_snapshot.recall(RECORD)
    for address, was in (before or {}).items():
        if not (_pci.is_address(address) and _is_card(was)):
            raise Refusal(
                "before_unreadable",
                expected=f'cards like "0000:25:00.0": {{"count": 2, "autoprobe": true}} '
                f"in {_host_snapshot.file_of(RECORD)}",
                found=json.dumps({address: was}),
                remedy="record the earlier state of the card there by hand",
            )
    return before


def _is_card(was: object) -> bool:
    if not isinstance(was, Mapping):
        return False
    count, autoprobe = was.get("count"), was.get("autoprobe")
    counted = isinstance(count, int) and not isinstance(count, bool) and count >= 0
    functions = was.get("functions", [])
    every = (
        isinstance(functions, list)
        and len(functions) in (0, count)
        and all(map(_virtual_functions.is_function, functions))
    )
    return counted and isinstance(autoprobe, bool) and every

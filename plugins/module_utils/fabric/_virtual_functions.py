"""Virtual functions of the fabric cards: number, identities, link states and guards.

A card is identified by its PCI address, because its interface name changes between boots. Automatic
probing is off for virtual functions, so that no host driver takes a function on its way to a guest.

Vendors use the same id for InfiniBand and Ethernet ports. A fabric card has a matching id and the
fabric's link. The port of an InfiniBand function is down until it is set to follow the card's port.

A site may have its own virtual functions on these cards. A restore (count 0) gives each card its
recorded state. On InfiniBand the record includes the identities, because the driver gives new
functions the identities of their predecessors.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ansible_collections.gpuaas.slice.plugins.module_utils.core import (
    _boot_service,
    _change,
    _command,
    _host,
    _host_snapshot,
    _pci,
)
from ansible_collections.gpuaas.slice.plugins.module_utils.core._errors import Refusal
from ansible_collections.gpuaas.slice.plugins.module_utils.fabric import _function_guards

SETTINGS = "/etc/gpuaas/fabric.json"
RECORD = "fabric"
# Interval between two checks of the guards: each starts `ip` per card, and only the host's root can
# change the guards.
_PERIOD_S = 5.0
# Time that a comparison waits for a run that changes guards.
LOOK_S = 30.0
# Rounds of the guardian between two searches for new cards: a minute.
_SELDOM = 12
_UP = 0x1  # IFF_UP
_AND = " and "
# Link states in iproute2's spelling. A following function's port is up when the card's port is.
FOLLOW, _DOWN = "auto", "disable"
_LINK_STATES = (FOLLOW, "enable", _DOWN)
_NO_GUID = ":".join(["00"] * 8)  # GUID of a function without an assigned identity
_GUID = "([0-9a-f]{2}:){7}[0-9a-f]{2}"
_GUIDS = re.compile(f"({_GUID}({_AND}{_GUID})?)?")

Params = Mapping[str, Any]


@dataclass(frozen=True)
class Card:
    """Observed state of a physical function.

    kind: its link. identities: MAC or GUID per virtual function, by index; both if its two GUIDs
    differ. states: link state per function. guards: guard per function, () on InfiniBand.
    """

    address: str
    interface: str
    kind: str
    hardware_address: str
    up: bool
    total: int
    count: int
    autoprobe: bool
    functions: tuple[str, ...]
    identities: tuple[str, ...]
    states: tuple[str, ...]
    used: tuple[str, ...]
    guards: tuple[_function_guards.Guard, ...] = ()

    def desired_identities(self, params: Params, count: int) -> list[str]:
        """The identity of every function: configured, or derived from the card's own unique
        identity.
        """
        given = params.get("macs") or {}
        return [
            str(given.get(f"{self.address}/{index}") or self._derived(index)).lower()
            for index in range(count)
        ]

    def ours(self, params: Params) -> bool:
        """Whether a function has the identity that slice mode assigns."""
        names = self.desired_identities(params, len(self.identities))
        return any(n in have.split(_AND) for have, n in zip(self.identities, names, strict=True))

    def misnamed(self, params: Params) -> list[str]:
        """The functions without the identity that slice mode assigns."""
        have = [*self.identities, *[""] * (len(self.functions) - len(self.identities))]
        names = self.desired_identities(params, len(have))
        return [
            f"function {index} of {self.address} is {is_ or 'nobody'}, not {name}"
            for index, (is_, name) in enumerate(zip(have, names, strict=True))
            if is_ != name
        ]

    def unlinked(self) -> list[str]:
        """The functions whose port does not follow the card's port; a tenant's port could stay
        down.
        """
        return [
            f"function {index} of {self.address} has link state {state or 'unknown'}, not {FOLLOW}"
            for index, state in enumerate(self.states)
            if state != FOLLOW
        ]

    def desired_guards(self, idle_vlan: int) -> list[_function_guards.Guard]:
        """The guard of every function; [] on InfiniBand, where the subnet manager isolates."""
        kept = _function_guards.holders() if self.guards else {}
        functions = self.functions if self.guards else ()
        return [_function_guards.expected(address, idle_vlan, kept) for address in functions]

    def unguarded(self, idle_vlan: int) -> list[Refusal]:
        """Reasons why functions are not isolated."""
        rows = zip(self.functions, self.guards, self.desired_guards(idle_vlan), strict=True)
        refusals = (_function_guards.unguarded(*row) for row in rows)
        return [refusal for refusal in refusals if refusal]

    def remembered(self) -> dict[str, Any]:
        """State to be restored. On Ethernet a function's identity ends with the function."""
        was: dict[str, Any] = {"count": self.count, "autoprobe": self.autoprobe}
        named = self.kind == _pci.INFINIBAND
        if not self.states or not (named or self.unlinked()):
            return was
        every = zip(self.identities, self.states, strict=True)
        functions = [
            {"identity": who if named else "", "link_state": state} for who, state in every
        ]
        return {**was, "functions": functions} if all(map(is_function, functions)) else was

    def is_as(self, then: Mapping[str, Any]) -> bool:
        return (self.count, self.autoprobe) == (then["count"], then["autoprobe"])

    def _derived(self, index: int) -> str:
        # 02 marks a locally administered address, so it cannot collide with a vendor's address.
        octets = 8 if self.kind == _pci.INFINIBAND else 6
        # Only the last 8 of IPoIB's 20 octets belong to the card. The others change with every
        # start of the driver or the subnet manager.
        guid = ":".join(self.hardware_address.split(":")[-8:])
        digest = hashlib.sha256(f"{guid}/{index}".encode()).digest()
        return ":".join(f"{byte:02x}" for byte in b"\x02" + digest[: octets - 1])


@dataclass(frozen=True)
class State:
    """missing: each requested card that is absent, with the device found in its place."""

    cards: tuple[Card, ...]
    missing: tuple[tuple[str, str], ...]


def is_function(function: object) -> bool:
    """Whether a function can be restored from this record."""
    if not isinstance(function, Mapping):
        return False
    who = function.get("identity")
    named = isinstance(who, str) and _GUIDS.fullmatch(who) is not None
    return named and function.get("link_state") in _LINK_STATES


def observe(params: Params) -> State:
    requested = params.get("pfs") or []
    ids = params.get("pf_ids") or []
    link = str(params.get("link") or "")
    alike = [d.address for d in _pci.devices() if d.id in ids and not d.physfn] if ids else []
    matching = [address for address in alike if link in ("", _pci.link(address))]
    gone = [address for address in requested if not _pci.present(address)]
    missing = [(address, "no such PCI function") for address in gone]
    if ids and not matching and not requested:
        others = "; ".join(_pci.unlike_link(address, link) for address in alike)
        description = f"any {link} card of {', '.join(ids)}"
        missing.append((" ".join(description.split()), others or "no such PCI function"))
    there = sorted({*matching, *(address for address in requested if address not in gone)})
    return State(tuple(card_at(address) for address in there), tuple(missing))


def wish(params: Params, address: str) -> dict[str, Any]:
    """Target state of a card. For a restore it is the recorded state, or plain use without a
    record.
    """
    if params["count"]:
        return {"count": params["count"], "autoprobe": False}
    was = (params.get("before") or {}).get(address)
    plain = {"count": 0, "autoprobe": True}
    return {**(plain if was is None else was), "remembered": was is not None}


def plan(params: Params, state: State) -> _change.Plan:
    blockers = [
        Refusal(
            "device_missing",
            expected=f"the fabric card {name}",
            found=reason,
            remedy="check the card, the link type of its port, and the profile's fabric",
        )
        for name, reason in state.missing
        # A missing card must not prevent the others from returning to plain use.
        if params["count"]
    ]
    steps: list[_change.Step] = []
    for card in state.cards:
        blockers.extend(_blockers(card, params))
        steps.extend(open_steps(card, params))
    return _change.Plan(tuple(steps), tuple(blockers))


def apply(params: Params, step: _change.Step) -> dict[str, Any] | None:
    address = step.subject.partition(" ")[0]
    folder = f"{_pci.DEVICES}/{address}"
    if step.name == "make_functions":
        count = step.after["count"]
        _pci.store(f"{folder}/sriov_drivers_autoprobe", "1" if step.after["autoprobe"] else "0")
        # The kernel changes the number only from or to zero. A restore keeps no managed function,
        # with its identity and without a driver, even if the site had the same number.
        stays = (0, count) if params["count"] else (0,)
        if _pci.read(address).sriov_numvfs not in stays:
            _pci.store(f"{folder}/sriov_numvfs", "0")
        if _pci.read(address).sriov_numvfs != count:
            _pci.store(f"{folder}/sriov_numvfs", str(count))
        return {"functions": _pci.functions(address)}
    card = card_at(address)
    if step.name == "raise_card":
        _command.run(["ip", "link", "set", "dev", card.interface, "up"])
        return None
    if step.name == "guard_functions":
        # Not step.after: the addresses of new functions are known only now.
        guard_functions(card, idle_vlan(params))
        return None
    for index, value in enumerate(step.after):
        if step.name == "link_functions":
            _set_attribute(card, index, "state", value)
        elif card.kind == _pci.INFINIBAND:
            names = value.split(_AND)
            _set_attribute(card, index, "node_guid", names[0])
            _set_attribute(card, index, "port_guid", names[-1])
        else:
            _set_attribute(card, index, "mac", value)
    return None


def _set_attribute(card: Card, index: int, word: str, value: str) -> None:
    _command.run(["ip", "link", "set", "dev", card.interface, "vf", str(index), word, value])


def guard_functions(card: Card, idle_vlan: int) -> None:
    """Give each function of an Ethernet card its guard."""
    wishes = card.desired_guards(idle_vlan)
    for index, (shown, wish) in enumerate(zip(card.guards, wishes, strict=True)):
        for word, value in wish.commands(shown):
            _set_attribute(card, index, word, value)


def facts(_params: Params, state: State) -> dict[str, Any]:
    return {"vfs": [row for card in state.cards for row in documents(card)]}


def documents(card: Card) -> list[dict[str, Any]]:
    """The functions of a card for a result."""
    rows = [
        {
            "pf": card.address,
            "index": index,
            "address": address,
            "identity": identity,
            "link_state": link_state,
        }
        for index, (address, identity, link_state) in enumerate(
            zip(card.functions, card.identities, card.states, strict=False)
        )
    ]
    for row, guard in zip(rows, card.guards, strict=False):
        row.update(dataclasses.asdict(guard))
    return rows


LIVE = _change.Subject(observe, plan, apply, facts)


def boot(settings_path: str) -> int:
    """Create the functions again at boot. The card's driver may still be loading."""
    waiting = ("device_missing", "interface_missing")
    failed = _boot_service.boot(LIVE, settings_path, wait_for=waiting, required=True)
    return failed or watch(settings_path)


def watch(settings_path: str, *, sleep: Callable[[float], None] = time.sleep) -> int:
    """Body of the boot service after the boot: restore the guards for ever."""
    cards: list[str] = []

    def restore(settings: Params, turn: int) -> Iterator[str]:
        nonlocal cards
        # A scan of all devices costs many times as much as a read of the known cards.
        if turn % _SELDOM == 0:
            cards = [card.address for card in observe(settings).cards]
        with _function_guards.exclusive():
            yield from _restore_guards(settings, filter(_pci.present, cards))

    return _boot_service.watch(
        settings_path,
        restore,
        trouble="cannot compare the guards",
        required=True,
        period_s=_PERIOD_S,
        sleep=sleep,
    )


def restore_guards(settings: Params) -> Iterator[str]:
    """Restore the guards of all functions once; gives each once those of its card are restored."""
    cards = [card.address for card in observe(settings).cards]
    with _function_guards.exclusive(wait_s=LOOK_S):
        yield from _restore_guards(settings, cards)


def _restore_guards(settings: Params, cards: Iterable[str]) -> Iterator[str]:
    for card in map(card_at, cards):
        wrong = card.unguarded(idle_vlan(settings))
        if wrong:
            guard_functions(card, idle_vlan(settings))
            yield from (f"{refusal.expected}, was {refusal.found}" for refusal in wrong)


def idle_vlan(settings: Params) -> int:
    """VLAN of functions without a tenant. It has no default, because 0 is the native network of the
    cards.
    """
    number = settings.get("idle_vlan")
    if isinstance(number, int):
        return number
    raise Refusal(
        "settings_unreadable",
        expected=f"the number idle_vlan in {SETTINGS}",
        found=repr(number),
        remedy="run the bootstrap playbook again",
    )


def recorded() -> dict[str, Any]:
    """Settings of the boot service, as bootstrap recorded them on this host."""
    return _boot_service.settings(SETTINGS)


def function_at(address: str) -> tuple[Card, int] | None:
    """The card of a virtual function and its index; None if it is no virtual function."""
    parent = _pci.read(address).physfn
    if not parent:
        return None
    card = card_at(parent)
    return card, card.functions.index(address)


def _blockers(card: Card, params: Params) -> list[Refusal]:
    blockers, then = [], wish(params, card.address)
    made = _made(card, params)
    if then["count"] > card.total:
        # The record is a file that a person may correct, like the profile.
        where = "vfs_per_pf in the profile" if params["count"] else _host_snapshot.file_of(RECORD)
        blockers.append(
            Refusal(
                "too_many_functions",
                expected=f"at most {card.total} virtual functions on {card.address}",
                found=str(then["count"]),
                remedy=f"lower the number ({where}), or raise the limit in the card's firmware",
            )
        )
    if then["count"] and not card.interface and (params["count"] or made):
        blockers.append(
            Refusal(
                "interface_missing",
                expected=f"a network interface of {card.address}",
                found="none: no driver has taken the card",
                remedy="load the card's driver on the host and look at the kernel log",
            )
        )
    link = params.get("link") or card.kind
    if params["count"] and card.kind != link:
        blockers.append(
            Refusal(
                "wrong_link",
                expected=f"{card.address} to be {link}",
                found=_pci.unlike_link(card.address, link),
                remedy="leave the card out, or set its port to the fabric's link in its firmware",
            )
        )
    if params["count"]:
        names, _states = _desired_functions(card, params)
        recreated = card.count not in (0, params["count"]) or list(card.identities) != names
    else:
        recreated = card.count > 0 and made
    if card.used and recreated:
        blockers.append(
            Refusal(
                "vf_in_use",
                expected=f"no virtual function of {card.address} in use",
                found=", ".join(card.used),
                remedy="disable their slots and unbind them, or take their interfaces down",
            )
        )
    return blockers


def open_steps(card: Card, params: Params) -> list[_change.Step]:
    """Open steps for the card."""
    steps, then, made = [], wish(params, card.address), _made(card, params)
    if made:
        now = {"count": card.count, "autoprobe": card.autoprobe}
        after = {key: then[key] for key in then if key != "functions"}
        steps.append(_change.Step("make_functions", f"{card.address} functions", now, after))
    if params["count"] and not card.up:
        steps.append(_change.Step("raise_card", f"{card.address} link", "down", "up"))
    names, states = _desired_functions(card, params)
    anew = card.count != then["count"] or (made and not params["count"])
    if names and (anew or list(card.identities) != names):
        before = list(card.identities)
        steps.append(_change.Step("name_functions", f"{card.address} identities", before, names))
    # The initial state of an InfiniBand function depends on its predecessors.
    fresh = "" if card.kind == _pci.INFINIBAND else FOLLOW
    if states and states != ([fresh] * len(states) if anew else list(card.states)):
        before = list(card.states)
        steps.append(_change.Step("link_functions", f"{card.address} link states", before, states))
    guards = _guard_step(card, params, anew=anew) if params["count"] else None
    return [*steps, guards] if guards else steps


def _guard_step(card: Card, params: Params, *, anew: bool) -> _change.Step | None:
    """The step that sets guards. Functions that are not created anew keep their tenants' guards."""
    if card.kind == _pci.INFINIBAND:
        return None
    shown, wishes = list(card.guards), card.desired_guards(idle_vlan(params))
    if anew:
        wishes = [_function_guards.Guard(idle_vlan(params))] * params["count"]
    elif shown == wishes:
        return None
    before, after = ([guard.text() for guard in guards] for guards in (shown, wishes))
    return _change.Step("guard_functions", f"{card.address} guards", before, after)


def _made(card: Card, params: Params) -> bool:
    """Whether the functions must be created or removed. An equal number does not make managed
    functions the site's.
    """
    if not card.is_as(wish(params, card.address)):
        return True
    names, _states = _desired_functions(card, params)
    return not params["count"] and card.ours(params) and list(card.identities) != names


def _desired_functions(card: Card, params: Params) -> tuple[list[str], list[str]]:
    """Identities and link states to set on the functions; [] keeps their initial values."""
    if params["count"]:
        return card.desired_identities(params, params["count"]), [FOLLOW] * params["count"]
    then = wish(params, card.address)
    functions: Sequence[Mapping[str, str]] = then.get("functions") or ()
    if not functions and card.kind == _pci.INFINIBAND and card.ours(params):
        # Records of earlier versions contain no identities, so the functions get the null identity.
        functions = [{"identity": _NO_GUID, "link_state": _DOWN}] * then["count"]
    names = [function["identity"] for function in functions]
    return names if all(names) else [], [function["link_state"] for function in functions]


def card_at(address: str) -> Card:
    """Current state of the card. An unreadable state is refused, because it would be recorded as
    empty.
    """
    device, folder = _pci.read(address), f"{_pci.DEVICES}/{address}"
    name = next(iter(_pci.interfaces(address)), "")
    kind, functions = _pci.link(address), _pci.functions(address)
    shown = _shown(name) if functions else []
    # iproute2 shows no link state for an Ethernet card whose driver supports only the default.
    unsaid = "" if kind == _pci.INFINIBAND else FOLLOW
    return Card(
        address=address,
        interface=name,
        kind=kind,
        hardware_address=_own_address(name),
        up=_is_up(name),
        total=device.sriov_totalvfs,
        count=int(_host.kept(f"{folder}/sriov_numvfs") or 0),
        autoprobe=_host.kept(f"{folder}/sriov_drivers_autoprobe") != "0",
        functions=tuple(functions),
        identities=tuple(_identity(vf) for vf in shown),
        states=tuple(str(vf.get("link_state") or unsaid) for vf in shown),
        used=tuple(f for f in functions if _is_used(f)),
        guards=() if kind == _pci.INFINIBAND else tuple(_guards(shown, len(functions))),
    )


def _guards(shown: Sequence[Mapping[str, Any]], count: int) -> Iterator[_function_guards.Guard]:
    """The guard of every function. A function that iproute2 does not show has an unknown guard."""
    for index in range(count):
        yield _function_guards.of(shown[index] if index < len(shown) else {"vlan_list": None})


def _is_used(address: str) -> bool:
    """Bound for a slice, or a host interface that is up."""
    if _pci.read(address).driver == _pci.VFIO:
        return True
    return any(_is_up(name) for name in _pci.interfaces(address))


def _is_up(name: str) -> bool:
    return bool(int(_link(name, "flags") or "0", 16) & _UP)


def _link(name: str, attribute: str) -> str:
    return (_host.read(f"/sys/class/net/{name}/{attribute}") or "") if name else ""


def _own_address(name: str) -> str:
    """The card's permanent address. In a bond the card has another address, often equal to its
    neighbour's.
    """
    bonded = _host.kept(f"/sys/class/net/{name}/bonding_slave/perm_hwaddr") if name else None
    return bonded or _link(name, "address")


def _shown(name: str) -> list[Mapping[str, Any]]:
    """The virtual functions of an interface as iproute2 shows them, by index."""
    if not name:
        return []
    shown = json.loads(_command.run(["ip", "-j", "link", "show", "dev", name]).out or "[]")
    functions = shown[0].get("vfinfo_list", []) if shown else []
    return sorted(functions, key=lambda vf: int(vf["vf"]))


def _identity(vf: Mapping[str, Any]) -> str:
    # iproute2 writes these keys with a space. One of the two GUIDs may be wrong.
    guids = [str(vf[key]).lower() for key in ("node guid", "port guid") if vf.get(key)]
    # iproute2 wrote `mac` before 5.0.
    return _AND.join(dict.fromkeys(guids)) or str(vf.get("address") or vf.get("mac") or "").lower()

"""Virtual functions of the fabric cards: how many, and who they are before a guest gets them.

A card is found by its PCI address; its interface name changes between boots. Automatic probing is
off for virtual functions, so that no driver of the host takes one on its way to a guest.

A site may have virtual functions of its own on them: what is remembered of a card is what it gets
on the way back, where count is 0.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ansible_collections.gpuaas.slice.plugins.module_utils import (
    _before,
    _boot,
    _change,
    _command,
    _host,
    _pci,
)
from ansible_collections.gpuaas.slice.plugins.module_utils._errors import Refusal

SETTINGS = "/etc/gpuaas/fabric.json"
RECORD = "fabric"
_INFINIBAND = "32"  # ARPHRD_INFINIBAND in /sys/class/net/*/type
_UP = 0x1  # IFF_UP
_AND = " and "

Params = Mapping[str, Any]


@dataclass(frozen=True)
class Card:
    """A physical function as found. identities: MAC or GUID per virtual function, by index; where
    its two GUIDs differ, both.
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
    used: tuple[str, ...]

    def wanted(self, params: Params, count: int) -> list[str]:
        """The identity of every function: given, or derived from the card's own unique one."""
        given = params.get("macs") or {}
        return [
            str(given.get(f"{self.address}/{index}") or self._derived(index)).lower()
            for index in range(count)
        ]

    def ours(self, params: Params) -> bool:
        """Whether a function has the identity that slice mode gives it."""
        names = self.wanted(params, len(self.identities))
        return any(n in have.split(_AND) for have, n in zip(self.identities, names, strict=True))

    def misnamed(self, params: Params) -> list[str]:
        """The functions that have not the identity which slice mode gives them."""
        have = [*self.identities, *[""] * (len(self.functions) - len(self.identities))]
        names = self.wanted(params, len(have))
        return [
            f"function {index} of {self.address} is {is_ or 'nobody'}, not {name}"
            for index, (is_, name) in enumerate(zip(have, names, strict=True))
            if is_ != name
        ]

    def is_as(self, then: Mapping[str, Any]) -> bool:
        return (self.count, self.autoprobe) == (then["count"], then["autoprobe"])

    def _derived(self, index: int) -> str:
        # 02 says locally administered: it cannot meet an address that a vendor gave out.
        octets = 8 if self.kind == "infiniband" else 6
        # Of IPoIB's 20 octets only the last 8 are the card's: what comes before changes whenever
        # the driver or the subnet manager starts.
        own = ":".join(self.hardware_address.split(":")[-8:])
        digest = hashlib.sha256(f"{own}/{index}".encode()).digest()
        return ":".join(f"{byte:02x}" for byte in b"\x02" + digest[: octets - 1])


@dataclass(frozen=True)
class State:
    cards: tuple[Card, ...]
    missing: tuple[str, ...]


def observe(params: Params) -> State:
    asked = params.get("pfs") or []
    ids = params.get("pf_ids") or []
    found = [d.address for d in _pci.devices() if d.id in ids and not d.physfn] if ids else []
    missing = [address for address in asked if not _pci.present(address)]
    if ids and not found and not asked:
        missing.append(f"any card of {', '.join(ids)}")
    there = sorted({*found, *(address for address in asked if address not in missing)})
    return State(tuple(card_at(address) for address in there), tuple(missing))


def wish(params: Params, address: str) -> dict[str, Any]:
    """What a card is to have. On the way back that is what is remembered of it, else plain use."""
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
            found="no such PCI function",
            remedy="check the card and the profile's fabric ids",
        )
        for name in state.missing
        # A card that is gone must not keep the others from going back to plain use.
        if params["count"]
    ]
    steps: list[_change.Step] = []
    for card in state.cards:
        blockers.extend(_blockers(card, params))
        steps.extend(_steps(card, params))
    return _change.Plan(tuple(steps), tuple(blockers))


def apply(params: Params, step: _change.Step) -> dict[str, Any] | None:
    address = step.subject.partition(" ")[0]
    folder = f"{_pci.DEVICES}/{address}"
    if step.name == "make_functions":
        count = step.after["count"]
        _pci.store(f"{folder}/sriov_drivers_autoprobe", "1" if step.after["autoprobe"] else "0")
        # The kernel changes the number only from or to zero. On the way back none of ours stays,
        # with our identity and without a driver, where the site had as many.
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
    words = ["node_guid", "port_guid"] if card.kind == "infiniband" else ["mac"]
    for index, identity in enumerate(card.wanted(params, params["count"])):
        for word in words:
            argv = ["ip", "link", "set", "dev", card.interface, "vf", str(index), word, identity]
            _command.run(argv)
    return None


def facts(_params: Params, state: State) -> dict[str, Any]:
    vfs = [
        {"pf": card.address, "index": index, "address": address, "identity": identity}
        for card in state.cards
        for index, (address, identity) in enumerate(
            zip(card.functions, card.identities, strict=False)
        )
    ]
    return {"vfs": vfs}


LIVE = _change.Subject(observe, plan, apply, facts)


def boot(settings_path: str) -> int:
    """At boot: make the functions again. The card's driver may still be loading."""
    return _boot.boot(LIVE, settings_path, wait_for=("device_missing", "interface_missing"))


def _blockers(card: Card, params: Params) -> list[Refusal]:
    found, then = [], wish(params, card.address)
    made = _made(card, params)
    if then["count"] > card.total:
        # What is remembered is a file that a person may correct, as the profile is.
        where = "vfs_per_pf in the profile" if params["count"] else _before.file_of(RECORD)
        found.append(
            Refusal(
                "too_many_functions",
                expected=f"at most {card.total} virtual functions on {card.address}",
                found=str(then["count"]),
                remedy=f"lower the number ({where}), or raise the limit in the card's firmware",
            )
        )
    if then["count"] and not card.interface and (params["count"] or made):
        found.append(
            Refusal(
                "interface_missing",
                expected=f"a network interface of {card.address}",
                found="none: no driver has taken the card",
                remedy="load the card's driver on the host and look at the kernel log",
            )
        )
    if params["count"]:
        recreated = card.count not in (0, params["count"]) or _renamed(card, params)
    else:
        recreated = card.count > 0 and made
    if card.used and recreated:
        found.append(
            Refusal(
                "vf_in_use",
                expected=f"no virtual function of {card.address} in use",
                found=", ".join(card.used),
                remedy="disable their slots and unbind them, or take their interfaces down",
            )
        )
    return found


def _steps(card: Card, params: Params) -> list[_change.Step]:
    steps = []
    if _made(card, params):
        now, then = {"count": card.count, "autoprobe": card.autoprobe}, wish(params, card.address)
        steps.append(_change.Step("make_functions", f"{card.address} functions", now, then))
    if params["count"] and not card.up:
        steps.append(_change.Step("raise_card", f"{card.address} link", "down", "up"))
    if params["count"] and _renamed(card, params):
        before, after = list(card.identities), card.wanted(params, params["count"])
        steps.append(_change.Step("name_functions", f"{card.address} identities", before, after))
    return steps


def _made(card: Card, params: Params) -> bool:
    """Whether the functions are to be made, or unmade. Ours are not the site's if as many."""
    return not card.is_as(wish(params, card.address)) or (not params["count"] and card.ours(params))


def _renamed(card: Card, params: Params) -> bool:
    return list(card.identities) != card.wanted(params, params["count"])


def card_at(address: str) -> Card:
    """The card as it is now. What cannot be read is refused: it would be remembered as none."""
    device, folder = _pci.read(address), f"{_pci.DEVICES}/{address}"
    name = next(iter(_pci.interfaces(address)), "")
    kind = "infiniband" if _link(name, "type") == _INFINIBAND else "ethernet"
    functions = _pci.functions(address)
    return Card(
        address=address,
        interface=name,
        kind=kind,
        hardware_address=_link(name, "address"),
        up=_is_up(name),
        total=device.sriov_totalvfs,
        count=int(_host.kept(f"{folder}/sriov_numvfs") or 0),
        autoprobe=_host.kept(f"{folder}/sriov_drivers_autoprobe") != "0",
        functions=tuple(functions),
        identities=tuple(_identities(name)) if functions else (),
        used=tuple(f for f in functions if _is_used(f)),
    )


def _is_used(address: str) -> bool:
    """Bound for a slice, or an interface of the host that is up."""
    if _pci.read(address).driver == _pci.VFIO:
        return True
    return any(_is_up(name) for name in _pci.interfaces(address))


def _is_up(name: str) -> bool:
    return bool(int(_link(name, "flags") or "0", 16) & _UP)


def _link(name: str, attribute: str) -> str:
    return (_host.read(f"/sys/class/net/{name}/{attribute}") or "") if name else ""


def _identities(name: str) -> list[str]:
    if not name:
        return []
    shown = json.loads(_command.run(["ip", "-j", "link", "show", "dev", name]).out or "[]")
    functions = shown[0].get("vfinfo_list", []) if shown else []
    return [_identity(vf) for vf in sorted(functions, key=lambda vf: int(vf["vf"]))]


def _identity(vf: Mapping[str, Any]) -> str:
    # GUIDs stand under a key with a space. One that is right says nothing about the other.
    guids = [str(vf[key]).lower() for key in ("node guid", "port guid") if vf.get(key)]
    # iproute2 wrote `mac` before 5.0.
    return _AND.join(dict.fromkeys(guids)) or str(vf.get("address") or vf.get("mac") or "").lower()

"""Guards of Ethernet virtual functions: spoof check, trust and VLAN, which the card enforces.

The card applies a guard to every frame of a function. A guest cannot change it: with an assigned
MAC and without trust, its driver gets neither another MAC nor a VLAN of its own.

The VLANs of an allocation are kept in a file, so that the boot service sets them again before a
guest can start. A function without a kept guard belongs to the idle VLAN, in which there is no
tenant, so a guest that is started without a guard has no peer.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from ansible_collections.gpuaas.slice.plugins.module_utils.core import (
    _host,
    _object_names,
    _pci,
)
from ansible_collections.gpuaas.slice.plugins.module_utils.core._errors import Refusal

# 0 means untagged; 4095 is reserved.
LAST_VLAN = 4094
_LOCK = "/run/gpuaas/fabric-guards"
_PROTOCOL = "802.1Q"


@dataclass(frozen=True)
class Guard:
    """Guard of a function. None: the card does not report the attribute."""

    vlan: int | None
    spoof_check: bool | None = True
    trust: bool | None = False

    def text(self) -> str:
        words = {None: "not reported", True: "on", False: "off"}
        vlan = "not reported" if self.vlan is None else str(self.vlan)
        return f"VLAN {vlan}, spoof check {words[self.spoof_check]}, trust {words[self.trust]}"

    def commands(self, shown: Guard) -> Iterator[tuple[str, str]]:
        """Words and values of iproute2 that lead from `shown` to this guard. Rights are taken away
        first.
        """
        if shown.spoof_check != self.spoof_check:
            yield "spoofchk", "on" if self.spoof_check else "off"
        if shown.trust != self.trust:
            yield "trust", "on" if self.trust else "off"
        if shown.vlan != self.vlan:
            yield "vlan", str(self.vlan)


def of(vf: Mapping[str, Any]) -> Guard:
    """The guard that iproute2 shows for a function."""
    return Guard(_vlan(vf), _flag(vf, "spoofchk"), _flag(vf, "trust"))


def _flag(vf: Mapping[str, Any], name: str) -> bool | None:
    value = vf.get(name)
    return value if isinstance(value, bool) else None


def _vlan(vf: Mapping[str, Any]) -> int | None:
    """The only VLAN of a function, 0 for untagged; None if unknown, stacked or of another kind.

    iproute2 lists VLANs with an empty entry for an untagged function. Old kernels have no list.
    """
    entries = vf.get("vlan_list", [vf])
    if not isinstance(entries, list) or len(entries) > 1:
        return None
    for entry in entries:
        number = entry.get("vlan", 0)
        plain = entry.get("protocol", _PROTOCOL) == _PROTOCOL
        return number if plain and isinstance(number, int) else None
    return 0


def exclusive(wait_s: float = 0) -> AbstractContextManager[object]:
    """Lock of guards and their files. Without it, the boot service could undo a guard whose file it
    has not read, and a comparison could see a file without its guard.
    """
    return _host.locked(_LOCK, mode=0o700, wait_s=wait_s)


def save(allocation_id: str, vlans: Mapping[str, int]) -> None:
    """Keep the VLAN of each function of an allocation, by PCI address."""
    text = json.dumps({"allocation_id": allocation_id, "vlans": dict(vlans)}, indent=2)
    _host.write(_object_names.fabric_guard_path(allocation_id), f"{text}\n", 0o600)


def forget(allocation_id: str) -> None:
    _host.remove(_object_names.fabric_guard_path(allocation_id))


def saved(allocation_id: str) -> dict[str, int] | None:
    """Kept VLANs of an allocation by PCI address; None without a file, {} for an invalid one."""
    text = _host.kept(_object_names.fabric_guard_path(allocation_id))
    if text is None:
        return None
    try:
        kept = json.loads(text)
        vlans = {str(address): number for address, number in kept["vlans"].items()}
    except (ValueError, TypeError, KeyError, AttributeError):
        return {}
    valid = kept.get("allocation_id") == allocation_id and all(
        _pci.is_address(address) and _is_vlan(number) for address, number in vlans.items()
    )
    return vlans if valid else {}


def holders() -> dict[str, dict[str, int]]:
    """Kept VLAN by allocation, for each function. Functions of invalid files are not listed."""
    vlans: dict[str, dict[str, int]] = {}
    for path in _object_names.files("fabric_guard"):
        allocation = _object_names.owner(path)
        for address, vlan in (saved(allocation) or {} if allocation else {}).items():
            vlans.setdefault(address, {})[allocation] = vlan
    return vlans


def expected(address: str, idle_vlan: int, kept: Mapping[str, Mapping[str, int]]) -> Guard:
    """Guard that a function must have. kept: answer of `holders`.

    A function that two allocations name belongs to neither.
    """
    vlans = list(kept.get(address, {}).values())
    return Guard(vlans[0] if len(vlans) == 1 else idle_vlan)


def unguarded(address: str, shown: Guard, wish: Guard) -> Refusal | None:
    """Reason against giving the function to a guest."""
    if shown == wish:
        return None
    return Refusal(
        "function_not_isolated",
        expected=f"{address} with {wish.text()}",
        found=shown.text(),
        remedy="run the bootstrap playbook (role fabric_functions); a card that does not report an"
        " attribute cannot isolate tenants",
    )


def _is_vlan(number: object) -> bool:
    return isinstance(number, int) and not isinstance(number, bool) and 0 <= number <= LAST_VLAN

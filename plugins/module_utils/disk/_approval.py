"""Approval of a disk's takeover, and content on the disk beyond the approval.

An approval names the findings of the dry run: the disk's identity, its mounts and its signatures.
Anything added later is not approved.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ansible_collections.gpuaas.slice.plugins.module_utils.core._errors import Refusal
from ansible_collections.gpuaas.slice.plugins.module_utils.disk import _block, _disk, _signature

Approval = Mapping[str, Any]


def of(disk: _block.Disk, used: _block.Usage, signatures: Sequence[str]) -> dict[str, Any]:
    """The approval that would cover the disk in its current state."""
    return {
        "serial": disk.serial,
        "eui": disk.eui or disk.nguid,
        "mounts": sorted(used.mounts),
        "filesystems": sorted(used.filesystems.values()),
        "signatures": list(signatures),
    }


def resumed(
    approved: Approval, begun: Approval | None, used: _block.Usage, signatures: Sequence[str]
) -> Approval:
    """The approval, extended by an interrupted erase's approval and by that erase's residue.

    Unchanged if the disk has any other content, because then it is in use again.
    """
    if begun is None or _made_since(begun, used, signatures):
        return approved
    left = Counter(kind for kind in used.filesystems.values() if kind == _signature.RAW)
    kinds: Counter[str] = Counter(approved.get("filesystems") or ())
    kinds |= Counter(begun.get("filesystems") or ())
    approved_signatures = approved.get("signatures")
    if approved_signatures is not None:
        raw = [sign for sign in signatures if sign.startswith(f"{_signature.RAW}@")]
        approved_signatures = [*approved_signatures, *(begun.get("signatures") or ()), *raw]
    return {
        **approved,
        "filesystems": sorted((kinds | left).elements()),
        "signatures": approved_signatures,
    }


def _made_since(begun: Approval, used: _block.Usage, signatures: Sequence[str]) -> bool:
    before = begun.get("signatures")
    if before is not None:
        new = set(signatures) - set(before)
        return any(not sign.startswith(f"{_signature.RAW}@") for sign in new)
    kinds = Counter(used.filesystems.values()) - Counter(begun.get("filesystems") or ())
    return bool(set(kinds) - {_signature.RAW})


def identity(
    disk: _block.Disk, path: str, approved: Approval | None, *, apply: bool
) -> Iterator[Refusal]:
    """Reason why the disk is not the approved disk."""
    named = approved or {}
    serial, identifier = str(named.get("serial") or ""), str(named.get("eui") or "")
    if apply and not (serial and identifier):
        yield Refusal(
            "approval_missing",
            expected=f"serial and eui of {path} in `expected`",
            found="none" if approved is None else f"serial {serial!r}, eui {identifier!r}",
            remedy="make a dry run, have it approved, and pass its approval",
        )
    try:
        _disk.require(disk, identifier=identifier, serial=serial)
    except Refusal as refusal:
        yield refusal


def unusual(named: str, used: _block.Usage, approved: Approval) -> Iterator[Refusal]:
    """Content other than plain filesystems, unless the approval names it. Members of larger volumes
    are never allowed.
    """
    allowed = (*_signature.PLAIN, *(approved.get("filesystems") or ()))
    for name, kind in sorted(used.filesystems.items()):
        if kind in _signature.MEMBERS or kind not in (*_signature.TABLES, *allowed):
            yield Refusal(
                _signature.MEMBERS.get(kind, "unexpected_filesystem"),
                expected=f"on {named} nothing, or {', '.join(dict.fromkeys(allowed))}",
                found=f"{kind} on {name}",
                remedy="find the owner of the data; dissolve an array or volume group with its own "
                "tools, name any other type under `filesystems` in the approval",
            )


def exceeded(
    named: str, used: _block.Usage, signatures: Sequence[str], approved: Approval
) -> Iterator[Refusal]:
    """Mounts and content that were not on the disk when it was approved."""
    more = [f"mounted on {at}" for at in used.mounts if at not in (approved.get("mounts") or ())]
    kinds = Counter(used.filesystems.values()) - Counter(approved.get("filesystems") or ())
    more += sorted(kinds.elements())
    # An approval from a report without signatures is limited by mounts and types only.
    approved_signatures = approved.get("signatures")
    if approved_signatures is not None:
        more += [sign for sign in signatures if sign not in approved_signatures]
    if more:
        yield Refusal(
            "changed_since_approval",
            expected=f"on {named} no more than was approved",
            found=", ".join(more),
            remedy="find the user of the disk; make a new dry run and have it approved",
        )

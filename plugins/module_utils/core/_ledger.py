"""Ledger of the host: the highest fence, the holder and the dirty mark of each slot.

One JSON file per slot under /var/lib/gpuaas/ledger, replaced atomically and synced, so that it
survives power loss. With it a host refuses a controller that lost its claim (I10). It also proves
whether a failed run wrote to the disk, because a disk is marked dirty *before* the first byte.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from typing import Any

from ansible_collections.gpuaas.slice.plugins.module_utils.core import _host
from ansible_collections.gpuaas.slice.plugins.module_utils.core._errors import Refusal

DIRECTORY = f"{_host.STATE_DIRECTORY}/ledger"
# Records of takeovers of disks, by identity.
PROOFS = f"{_host.STATE_DIRECTORY}/proofs"

# The entry of the whole machine. The slots and the disks of a whole-machine tenant have their own.
MACHINE = "machine"
# Power fence of a slot that is being released: no run of power follows, whatever its number.
NO_POWER = -1
_REPAIR = (
    "keep the file as evidence and write the entry anew, dirty and with the slot's fence and"
    " holder (docs/operations.md, A damaged entry of a host's ledger)"
)


@dataclass(frozen=True)
class Entry:
    """The host's entry for a slot.

    fence: highest number seen; 0 before the first claim. allocation_id: holder or "".
    disk_identity: of the slot's disk, `disk` in the file. dirty: a tenant's or unknown bytes may be
    on it. dirty_at, clean_at: ISO times. proof: the last wipe proof, as nvme_wipe returned it.
    clean_fence: the fence of that proof, -1 before the first. written_off: time, reason and holder
    of the last hold that was given up. gpu: the last evidence of a reset, as gpu_reset returned it.
    gpu_used: a guest or the host may have used the GPU since then. power_fence: highest number of
    a run of power under this fence, or NO_POWER.
    """

    slot_id: str
    fence: int = 0
    allocation_id: str = ""
    disk_identity: str = ""
    dirty: bool = False
    dirty_at: str = ""
    clean_at: str = ""
    proof: dict[str, object] | None = None
    clean_fence: int = -1
    written_off: dict[str, object] | None = None
    gpu: dict[str, object] | None = None
    gpu_used: bool = False
    power_fence: int = 0

    @property
    def used(self) -> bool:
        """Whether an allocation has the slot, or a tenant's bytes may be on its disk."""
        return self.dirty or bool(self.allocation_id)

    def document(self) -> dict[str, Any]:
        """The entry in the form of its file and the run contract."""
        document = asdict(self)
        document["disk"] = document.pop("disk_identity")
        return document

    def stale(self, fence: int) -> list[Refusal]:
        """The refusal of a fence lower than the highest seen; [] for any other."""
        if fence >= self.fence:
            return []
        return [
            Refusal(
                "stale_fence",
                expected=f"a fence of at least {self.fence} for slot {self.slot_id}",
                found=f"fence {fence}",
                remedy="this run belongs to an older claim: read the slot, do not retry",
            )
        ]

    def refusals(self, allocation_id: str, fence: int) -> list[Refusal]:
        """Reasons why an allocation cannot take the hold under a fence."""
        if stale := self.stale(fence):
            return stale
        reasons = []
        if self.allocation_id not in ("", allocation_id) and fence == self.fence:
            reasons.append(
                Refusal(
                    "slot_leased",
                    expected=f"slot {self.slot_id} free or leased by {allocation_id}",
                    found=f"leased by {self.allocation_id} under the same fence {fence}",
                    remedy="verify the absence of that allocation and release it first",
                )
            )
        if self.dirty and self.allocation_id != allocation_id:
            reasons.append(
                Refusal(
                    "disk_dirty",
                    expected=f"a clean disk in slot {self.slot_id}",
                    found=f"marked dirty at {self.dirty_at} and not wiped since",
                    remedy="wipe the slot (`gpuaas recover`) before it is given to another tenant",
                )
            )
        return reasons


_KINDS: dict[str, type] = {
    "fence": int,
    "allocation_id": str,
    "disk": str,
    "dirty": bool,
    "gpu_used": bool,
    "power_fence": int,
}


def load(slot_id: str) -> Entry:
    """The slot's entry; a new entry when the host has never seen the slot."""
    file = _file(slot_id)
    kept = _host.document(file, code="ledger_unreadable", remedy=_REPAIR)
    if kept is None:
        return Entry(slot_id)
    try:
        entry = Entry(disk_identity=kept.pop("disk", ""), **kept)
    except TypeError as broken:
        raise _unreadable(file, str(broken)) from broken
    if entry.slot_id != slot_id:
        raise _unreadable(file, f"the entry of {entry.slot_id!r}")
    document = entry.document()
    for key, kind in _KINDS.items():
        value = document[key]
        # In Python a bool is an int too.
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise _unreadable(file, f"{key} {value!r}")
    return entry


def entries() -> list[Entry]:
    """Every slot that this host has seen, by slot id."""
    try:
        names = sorted(file.name for file in _host.path(DIRECTORY).iterdir())
    except FileNotFoundError:
        return []
    except OSError as broken:
        raise _unreadable(DIRECTORY, broken.strerror or str(broken)) from broken
    stems = [name.removesuffix(".json") for name in names if name.endswith(".json")]
    # Temporary files of a write have names that begin with a dot.
    return [load(stem) for stem in stems if not stem.startswith(".")]


def check(slot_id: str, fence: int) -> Entry:
    """Refuse a fence lower than the highest seen. Call it before every destructive step."""
    entry = load(slot_id)
    for refusal in entry.stale(fence):
        raise refusal
    return entry


def check_each(slots: Iterable[Mapping[str, Any]]) -> None:
    """The same check for every bundle of a run, with its `power_fence` in a run of power."""
    for slot in slots:
        entry = check(str(slot["slot_id"]), int(slot["fence"]))
        if slot.get("power_fence") is not None:
            _check_power(entry, int(slot["power_fence"]))


def _check_power(entry: Entry, fence: int) -> None:
    """Refuse a run of power after its successor began, or after the release of the slot began.

    All runs of power of an allocation have the fence of its claim, so this number tells them apart.
    """
    if entry.power_fence == NO_POWER or fence < entry.power_fence:
        last = f"a power fence of at least {entry.power_fence} for slot {entry.slot_id}"
        over = f"no power action of slot {entry.slot_id}, which is being released"
        raise Refusal(
            "stale_fence",
            expected=over if entry.power_fence == NO_POWER else last,
            found=f"power fence {fence}",
            remedy="this run has a successor: read the allocation, do not retry",
        )


def require_leased(slots: Collection[Mapping[str, Any]], allocation_id: str) -> None:
    """Refuse a late run: the slots and their addresses may be the next tenant's."""
    check_each(slots)
    holders = [load(str(slot["slot_id"])).allocation_id for slot in slots]
    if not holders or any(holder != allocation_id for holder in holders):
        leased = ", ".join(holder or "no allocation" for holder in holders)
        raise Refusal(
            "lease_missing",
            expected=f"slots that are leased to {allocation_id}",
            found=f"leased to {leased or 'no slot'}",
            remedy="do not retry: the allocation does not have the slots any more",
        )


def machine_taken(allocation_id: str) -> list[Refusal]:
    """Reasons why an allocation can hold nothing of this machine: another allocation holds all of
    it.

    The machine's fence is the node's and cannot be compared with a slot's. A dirty mark without a
    holder counts too, because a tenant with root access can delete the name from the ledger.
    """
    machine = load(MACHINE)
    # A request without an allocation id never matches a hold, even if the ledger entry has no
    # allocation id either.
    is_holder = allocation_id != "" and machine.allocation_id == allocation_id
    if is_holder or not (machine.allocation_id or machine.dirty):
        return []
    since = f", the tenant's since {machine.dirty_at}" if machine.dirty else ""
    return [
        Refusal(
            "machine_leased",
            expected="a machine that is leased to no allocation as a whole",
            found=f"leased by {machine.allocation_id or 'an unnamed allocation'}{since}",
            remedy="release that bare-metal allocation first; nothing was changed",
        )
    ]


def others_leased(allocation_id: str) -> list[Refusal]:
    """Reasons why an allocation cannot hold the whole machine: others hold parts of it."""
    return [
        Refusal(
            "slot_leased",
            expected="a machine on which nothing is leased",
            found=f"{entry.slot_id} leased by {entry.allocation_id}",
            remedy="release that allocation first, or clean its traces up",
        )
        for entry in entries()
        if entry.allocation_id not in ("", allocation_id)
    ]


def hold(slot_id: str, *, fence: int, allocation_id: str, disk_identity: str) -> Entry:
    """Take the hold for an allocation and record its fence.

    The check that slots and the whole machine exclude each other runs under the lock, so that of
    two concurrent runs one is refused (I2).
    """
    with locked():
        entry = check(slot_id, fence)
        exclude = others_leased if slot_id == MACHINE else machine_taken
        for refusal in (*exclude(allocation_id), *entry.refusals(allocation_id, fence)):
            raise refusal
        same = (entry.allocation_id, entry.fence) == (allocation_id, fence)
        power_fence = entry.power_fence if same else 0
        entry = replace(entry, fence=fence, allocation_id=allocation_id, power_fence=power_fence)
        return _save(replace(entry, disk_identity=disk_identity))


def raise_fence(slot_id: str, *, fence: int) -> Entry:
    """Refuse every later run with a lower fence."""
    with locked():
        return _save(replace(check(slot_id, fence), fence=fence))


def end_power(slot_id: str, *, fence: int) -> Entry:
    """As `raise_fence`, and refuse every later run of power of the present holder."""
    with locked():
        return _save(replace(check(slot_id, fence), fence=fence, power_fence=NO_POWER))


def raise_power_fence(slot_id: str, *, fence: int, power_fence: int) -> Entry:
    """Refuse every later step of a run of power with a lower number."""
    with locked():
        entry = check(slot_id, fence)
        _check_power(entry, power_fence)
        return _save(replace(entry, power_fence=power_fence))


def release(slot_id: str, *, fence: int) -> Entry:
    """Give the hold back; fence and disk state stay."""
    with locked():
        return _save(replace(check(slot_id, fence), fence=fence, allocation_id=""))


def give_up(slot_id: str, *, fence: int, allocation_id: str, reason: str) -> Entry:
    """Take the hold from an allocation that can never give it back, and record its holder.

    A dirty mark stays: if the disk returns, it has not been wiped.
    """
    with locked():
        entry = check(slot_id, fence)
        if entry.allocation_id != allocation_id:
            raise not_its_holder(entry, allocation_id)
        record: dict[str, object] = {
            "at": _host.now(),
            "allocation_id": allocation_id,
            "reason": reason,
        }
        return _save(replace(entry, fence=fence, allocation_id="", written_off=record))


def not_its_holder(entry: Entry, allocation_id: str) -> Refusal:
    """The refusal to give up a slot for an allocation that does not hold it."""
    return Refusal(
        "slot_leased",
        expected=f"slot {entry.slot_id} free or leased by {allocation_id}",
        found=f"leased by {entry.allocation_id or 'no allocation'}",
        remedy="release that allocation; one that is in no record, as after the restore of an older"
        " backup, is removed by its id with `gpuaas slots remove-orphan`, and from a whole machine"
        " by a new installation",
    )


def mark_dirty(slot_id: str, *, fence: int, disk_identity: str) -> Entry:
    """Record durably that bytes are about to be written. This must happen before the first byte is
    written.

    It ends every proof of the disk, that of its takeover included, and for the whole machine also
    the evidence of every GPU. Times cannot show which came later, because the host's clock may have
    jumped.
    """
    with locked():
        entry = check(slot_id, fence)
        record = takeover(disk_identity) or {}
        if record.get("proof"):
            record_takeover(disk_identity, {**record, "proof": None})
        for other in entries():
            same_disk = disk_identity != "" and other.disk_identity == disk_identity
            proof = None if same_disk else other.proof
            used = other.gpu_used or (slot_id == MACHINE and other.gpu is not None)
            if (proof, used) != (other.proof, other.gpu_used):
                _save(replace(other, proof=proof, gpu_used=used))
        return _save(
            replace(
                entry,
                fence=fence,
                disk_identity=disk_identity,
                dirty=True,
                dirty_at=_host.now(),
                proof=None,
            )
        )


def mark_clean(slot_id: str, *, fence: int, disk_identity: str, proof: dict[str, object]) -> Entry:
    """Record a verified wipe."""
    with locked():
        entry = check(slot_id, fence)
        entry = replace(
            entry, fence=fence, disk_identity=disk_identity, dirty=False, clean_at=_host.now()
        )
        return _save(replace(entry, proof=proof, clean_fence=fence))


def takeover(disk_identity: str) -> dict[str, Any] | None:
    """The record of a disk's takeover: `proof`, None once the disk is used, and `manifest`."""
    return _host.document(
        f"{PROOFS}/{disk_identity}.json",
        code="proof_unreadable",
        remedy="remove the file; the disk then counts as one without a proof",
    )


def record_takeover(disk_identity: str, document: Mapping[str, Any]) -> None:
    text = json.dumps(document, sort_keys=True) + "\n"
    _host.write(f"{PROOFS}/{disk_identity}.json", text, mode=0o600)


def proven() -> list[str]:
    """Ids of slots with a proof, and identities of disks with a proof of their takeover."""
    slots = [entry.slot_id for entry in entries() if entry.proof is not None]
    disks = [disk for disk in _taken_over() if (takeover(disk) or {}).get("proof")]
    return [*slots, *disks]


def end_proofs() -> None:
    """End every proof on this host. Manifests of takeovers stay."""
    with locked():
        for entry in entries():
            if entry.proof is not None:
                _save(replace(entry, proof=None))
        for disk in _taken_over():
            record = takeover(disk) or {}
            if record.get("proof"):
                record_takeover(disk, {**record, "proof": None})


def _taken_over() -> list[str]:
    # Temporary files of a write have names that begin with a dot.
    names = [name for name in _host.listed(PROOFS) if not name.startswith(".")]
    return [name.removesuffix(".json") for name in names if name.endswith(".json")]


def mark_gpu_used(slot_id: str, *, fence: int) -> Entry:
    """Record durably that a guest is about to get the GPU; the evidence of its reset ends."""
    with locked():
        return _save(replace(check(slot_id, fence), fence=fence, gpu_used=True))


def mark_gpu_reset(slot_id: str, *, fence: int, evidence: dict[str, object]) -> Entry:
    """Record a verified reset of the slot's GPU."""
    with locked():
        entry = check(slot_id, fence)
        return _save(replace(entry, fence=fence, gpu=evidence, gpu_used=False))


def distrust_gpu(address: str) -> None:
    """Record that the host itself may use, or has used, the GPU at a PCI address."""
    with locked():
        for entry in entries():
            if entry.gpu and not entry.gpu_used and entry.gpu.get("address") == address:
                _save(replace(entry, gpu_used=True))


def leased_gpus() -> dict[str, str]:
    """Holder of each leased GPU by its PCI address, as far as it was reset before."""
    return {
        str(entry.gpu["address"]): entry.allocation_id
        for entry in entries()
        if entry.allocation_id and entry.gpu and entry.gpu.get("address")
    }


def standing_gpu(slot_id: str, address: str) -> dict[str, Any] | None:
    """Evidence that the GPU at `address` was reset since its last use, or None."""
    entry = load(slot_id)
    if entry.gpu is None or entry.gpu_used or entry.gpu.get("address") != address:
        return None
    return dict(entry.gpu)


def locked() -> AbstractContextManager[None]:
    """The lock of the ledger: a single writer at a time on this host."""
    return _host.locked(DIRECTORY, mode=0o700)


def _file(slot_id: str) -> str:
    if not slot_id or not all(c.isalnum() or c in "-_" for c in slot_id):
        raise Refusal(
            "slot_id_invalid",
            expected="a slot id of letters, digits, - and _",
            found=repr(slot_id),
            remedy="pass the id that the reconciler shows",
        )
    return f"{DIRECTORY}/{slot_id}.json"


def _unreadable(file: str, found: str) -> Refusal:
    return Refusal(
        "ledger_unreadable", expected=f"a ledger entry in {file}", found=found, remedy=_REPAIR
    )


def _save(entry: Entry) -> Entry:
    _host.write(
        _file(entry.slot_id), json.dumps(entry.document(), sort_keys=True) + "\n", mode=0o600
    )
    return entry

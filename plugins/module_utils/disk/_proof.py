"""Proof of a wipe: the read-back result, and whether the proof is still valid.

A proof is valid until the next write to the disk. Proofs of slots are in the ledger. Proofs from
the first use of a disk, before it belongs to a slot, are in files of their own.
"""

from __future__ import annotations

import hashlib
import json
import mmap
from collections.abc import Iterable, Mapping
from typing import Any

from ansible_collections.gpuaas.slice.plugins.module_utils.core import _ledger
from ansible_collections.gpuaas.slice.plugins.module_utils.disk import _device
from ansible_collections.gpuaas.slice.plugins.module_utils.disk._device import ALIGN, MIB

# Read back in full at both ends, where labels and tables live.
EDGE = 16 * MIB
# With 64 spots a residue on 5 % of the disk is missed with probability 4 %, on 10 % with 0.1 %.
SPOTS = 64
SPOT = MIB


def samples(size: int, marks: Iterable[int], seed: bytes) -> list[tuple[int, int]]:
    """Ranges to read back, as (offset, length): both ends, old signatures, spots drawn from `seed`.

    One spot is drawn from each of SPOTS equal parts, so that they cannot cluster.
    """
    chosen = [(0, EDGE), (size - EDGE, EDGE), *((mark, ALIGN) for mark in marks)]
    part = size // SPOTS
    room = max(1, part - SPOT)
    chosen += [(part * spot + _draw(seed, spot) % room, SPOT) for spot in range(SPOTS)]
    return _merged(chosen, size)


def residue(descriptor: int, chosen: Iterable[tuple[int, int]]) -> list[int]:
    """Offsets of the pieces (up to 1 MiB) of `chosen` that do not read as zeros."""
    buffer, zeros = mmap.mmap(-1, MIB), bytes(MIB)
    offsets = []
    with memoryview(buffer) as view:
        for start, length in chosen:
            for offset in range(start, start + length, MIB):
                piece = min(MIB, start + length - offset)
                got = _device.fill(descriptor, view[:piece], offset)
                if got != piece or buffer[:got] != zeros[:got]:
                    offsets.append(offset)
    return offsets


def seal(proof: Mapping[str, Any]) -> dict[str, Any]:
    """The proof with a digest over its other fields, so that a later change is detected."""
    body = {key: value for key, value in proof.items() if key not in ("digest", "slot_id")}
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return {**proof, "digest": f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"}


def standing(disk_identity: str) -> dict[str, Any] | None:
    """The newest proof of the disk, or None when it was never wiped or was written to since."""
    entries = [entry for entry in _ledger.entries() if entry.disk_identity == disk_identity]
    # Under a hold, a tenant writes after the disk was marked. Without one, nothing writes after the
    # mark.
    if any(entry.dirty and entry.allocation_id for entry in entries):
        return None
    # A mark ends every proof of its disk.
    proofs: list[Mapping[str, Any]] = [entry.proof for entry in entries if entry.proof]
    record = _ledger.takeover(disk_identity) or {}
    # Earlier versions recorded `marks` instead of ending the proof, which says too little.
    if record.get("proof") and "marks" not in record:
        proofs.append(record["proof"])
    proofs = [
        proof for proof in proofs if proof.get("disk") == disk_identity and proof.get("verified")
    ]
    newest = max(proofs, key=lambda proof: str(proof["finished_at"]), default=None)
    return None if newest is None else dict(newest)


def record(disk_identity: str, proof: Mapping[str, Any], *, manifest: str = "") -> None:
    """Keep the proof of a disk that belongs to no slot yet."""
    _ledger.record_takeover(disk_identity, {"proof": dict(proof), "manifest": manifest})


def _draw(seed: bytes, spot: int) -> int:
    return int.from_bytes(hashlib.sha256(seed + spot.to_bytes(2, "big")).digest()[:8], "big")


def _merged(chosen: Iterable[tuple[int, int]], size: int) -> list[tuple[int, int]]:
    """Aligned, inside the disk, sorted, without overlap."""
    merged: list[tuple[int, int]] = []
    for offset, length in sorted(chosen):
        start = max(0, offset - offset % ALIGN)
        end = min(-(-(offset + length) // ALIGN) * ALIGN, size - size % 512)
        if merged and start <= merged[-1][0] + merged[-1][1]:
            first, reach = merged[-1][0], merged[-1][0] + merged[-1][1]
            merged[-1] = (first, max(reach, end) - first)
        elif end > start:
            merged.append((start, end - start))
    return merged

#!/usr/bin/python
# Copyright: the gpuaas.slice authors; Apache-2.0 (see LICENSE)
"""Clone of a cached image on the raw boot disk of a slot."""

from __future__ import annotations

DOCUMENTATION = r"""
module: image_clone
short_description: Clone a cached image onto the raw boot disk of a slot
version_added: "0.1.0"
author: The gpuaas.slice authors (@gpuaas)
description:
  - Writes the image on one exclusively opened descriptor, on which identity and use are checked
    first.
  - Every chunk is compared with its verified hash before it is written. Zeros are written without
    being read.
  - Marks the disk dirty in the host's ledger before the first byte. The disk must be clean with a
    standing wipe proof and carry no signature, when it is planned and on the descriptor before the
    first byte, or already be dirty under the same claim, which is a clone that was interrupted.
  - A disk that already carries the image for this claim is not written again, even after the
    tenant has changed it.
  - Refuses with C(already_cloned), C(image_not_cached), C(image_digest_mismatch),
    C(disk_too_small), C(stale_fence), C(lease_not_held), C(not_clean), C(unexpected_filesystem),
    C(changed_since_plan), C(os_disk), C(disk_in_use), C(identity_mismatch), C(duplicate_identity),
    C(excluded_model), C(bundle_incomplete), C(kernel_name_not_allowed).
options:
  image_path:
    description: The image in the cache, as M(gpuaas.slice.image_cache) returned it.
    type: path
    required: true
  digest:
    description: C(sha256:) and the hex digest of the image, from the catalogue.
    type: str
    required: true
  size_bytes:
    description: Size of the raw image.
    type: int
    required: true
  slot:
    description: Slot bundle of the boot disk, with its C(fence).
    type: dict
    required: true
  allocation_id:
    description: Allocation that must have the slot in this host's ledger.
    type: str
    default: ""
  exclude_models:
    description: Parts of model names that no image goes onto, beyond those known as boot cards.
    type: list
    elements: str
    default: []
  progress_path:
    description: File that is given C(done) and C(total) in bytes about once a second.
    type: path
    default: ""
seealso:
  - module: gpuaas.slice.image_cache
  - module: gpuaas.slice.nvme_wipe
extends_documentation_fragment: [gpuaas.slice.change]
"""

EXAMPLES = r"""
- name: Clone the image
  gpuaas.slice.image_clone:
    image_path: "{{ cached.path }}"
    digest: "{{ slice_image.digest }}"
    size_bytes: "{{ slice_image.size_bytes }}"
    slot: "{{ slice_slots | first }}"
    allocation_id: "{{ slice_allocation.id }}"
    progress_path: /run/gpuaas/clone.json
"""

RETURN = r"""
bytes:
  description: Size of the image on the disk; 0 before it is complete.
  returned: always
  type: int
  sample: 1258291200
seconds:
  description: How long the clone took.
  returned: always
  type: float
  sample: 7.2
digest:
  description: The digest of the bytes that were written; empty before they are complete.
  returned: always
  type: str
  sample: sha256:9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08
"""

import syslog
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.gpuaas.slice.plugins.module_utils.core import _change, _host, _ledger
from ansible_collections.gpuaas.slice.plugins.module_utils.core._errors import Refusal
from ansible_collections.gpuaas.slice.plugins.module_utils.disk import (
    _block,
    _disk,
    _image_cache,
    _image_clone,
    _proof,
    _slot_use,
)
from ansible_collections.gpuaas.slice.plugins.module_utils.slice import _slots


@dataclass(frozen=True)
class State:
    """complete: the record of this claim's clone, of whatever image, unless the disk was wiped
    since. proven: a wipe proof stands. written: signatures on the disk.
    """

    disk: _block.Disk
    entry: _ledger.Entry
    proven: bool
    uses: tuple[Refusal, ...]
    written: tuple[str, ...]
    complete: Mapping[str, Any]
    stamp: _image_cache.Stamp | None
    index: _image_cache.Index | None


_NEEDED = ("slot_id", "fence", "nvme_device", "nvme_serial", "nvme_eui")


def observe(params: _change.Params) -> State:
    (slot,) = _slots.checked([params["slot"]], needed=_NEEDED)
    _disk.require_stable(str(slot["nvme_device"]))
    entry = _ledger.check(str(slot["slot_id"]), int(slot["fence"]))
    disk = _block.of_slot(slot)
    complete = _complete(disk, entry, int(slot["fence"]))
    # After the clone the disk is the tenant's, and of course in use.
    used = _block.Usage() if complete else _block.usage(disk)
    others = _slot_use.refusals(disk, entry.slot_id)
    return State(
        disk=disk,
        entry=entry,
        proven=_proof.standing(disk.disk_identity) is not None,
        uses=() if complete else (*others, *_block.refusals(disk, used, _excluded(params))),
        written=tuple(_block.written(used.filesystems)),
        complete=complete,
        stamp=_image_cache.stamp_of(params["image_path"]),
        index=_image_cache.verified(params["image_path"]),
    )


def _excluded(params: _change.Params) -> list[str]:
    return list(params.get("exclude_models") or [])


def _complete(disk: _block.Disk, entry: _ledger.Entry, fence: int) -> Mapping[str, Any]:
    # A later wipe has another time. Which time is greater says nothing: the clock may have jumped.
    expected = {"fence": fence, "disk": disk.disk_identity, "clean_at": entry.clean_at}
    record = _image_clone.finished(entry.slot_id) or {}
    return record if entry.dirty and expected.items() <= record.items() else {}


def plan(params: _change.Params, state: State) -> _change.Plan:
    if state.complete:
        same = state.complete["digest"] == params["digest"]
        return _change.Plan(blockers=() if same else (_cloned(params, state.complete),))
    digest, disk = params["digest"], state.disk.disk_identity
    verify = _change.Step("verify_image", params["image_path"], after=digest)
    clone = _change.Step(
        "clone_image", state.disk.by_id or state.disk.kernel_name, after=digest, destroys=disk
    )
    return _change.Plan(
        steps=(clone,) if state.index else (verify, clone),
        blockers=(*_image_blockers(params, state), *_disk_blockers(params, state)),
    )


def _cloned(params: _change.Params, record: Mapping[str, Any]) -> Refusal:
    """The disk is the tenant's since its clone, whether its machine runs or not."""
    return Refusal(
        "already_cloned",
        expected=f"{params['digest']} onto a disk without this claim's image",
        found=f"{record['digest']}, complete at {record['finished_at']}",
        remedy="keep the image of this launch; for another one release the allocation and launch"
        " again",
    )


def _image_blockers(params: _change.Params, state: State) -> Iterator[Refusal]:
    path, digest, size = params["image_path"], params["digest"], params["size_bytes"]
    if state.stamp is None:
        yield _image_cache.missing(path)
    elif state.stamp.size_bytes != size:
        yield _image_cache.mismatch(path, digest, f"{state.stamp.size_bytes} bytes", size)
    elif state.index and state.index.digest != digest:
        yield _image_cache.mismatch(path, digest, state.index.digest, size)


def _disk_blockers(params: _change.Params, state: State) -> Iterator[Refusal]:
    entry, allocation_id = state.entry, params["allocation_id"]
    yield from state.uses
    if params["size_bytes"] > state.disk.size_bytes:
        yield _image_clone.too_small(state.disk, params["size_bytes"])
    if entry.allocation_id != allocation_id:
        yield Refusal(
            "lease_not_held",
            expected=f"slot {entry.slot_id} leased by {allocation_id or 'no allocation'} on this"
            " host",
            found=f"leased by {entry.allocation_id or 'no allocation'}",
            remedy="take the lease (slice_lease) before the clone",
        )
    interrupted = entry.dirty and entry.fence == int(params["slot"]["fence"]) and allocation_id
    if state.proven and state.written:
        yield Refusal(
            "unexpected_filesystem",
            expected=f"nothing on {state.disk.disk_identity}, as its wipe proof says",
            found=", ".join(state.written),
            remedy="find the owner of the data, then wipe the slot's disk (`gpuaas recover`)",
        )
    if not (state.proven or interrupted):
        yield Refusal(
            "not_clean",
            expected=f"a wipe proof of {state.disk.disk_identity} that still stands",
            found=f"written to at {entry.dirty_at}" if entry.dirty else "no proof",
            remedy="wipe the slot's disk first (`gpuaas recover`, or nvme_wipe by hand)",
        )


def apply(params: _change.Params, step: _change.Step) -> dict[str, Any]:
    path, slot = params["image_path"], params["slot"]
    if step.name == "verify_image":
        index = _image_cache.verify(path, params["digest"], params["size_bytes"])
        return {"chunks": len(index.chunks)}
    image = _image_cache.verified(path)
    if image is None or image.digest != params["digest"]:
        raise _image_cache.mismatch(path, params["digest"], "a changed file", params["size_bytes"])
    disk, slot_id, fence = _block.of_slot(slot), str(slot["slot_id"]), int(slot["fence"])
    # Bytes of this claim's interrupted clone are overwritten. A clean disk must be empty.
    seen = None if _ledger.load(slot_id).dirty else ()
    with _block.exclusive(disk, seen=seen) as descriptor:
        # Another run of this claim may have cloned since the plan.
        if record := _complete(disk, _ledger.load(slot_id), fence):
            raise _cloned(params, record)
        entry = _ledger.mark_dirty(slot_id, fence=fence, disk_identity=disk.disk_identity)
        syslog.syslog(
            f"gpuaas: cloning {params['digest']} onto {disk.disk_identity}, slot {slot_id}"
        )
        began = time.monotonic()
        progress = _image_clone.Progress(params["progress_path"], params["size_bytes"])
        _image_clone.copy(path, image, descriptor, progress)
        seconds = round(time.monotonic() - began, 3)
        document = {
            "slot_id": slot_id,
            "fence": fence,
            "disk": disk.disk_identity,
            "digest": params["digest"],
            "bytes": params["size_bytes"],
            "seconds": seconds,
            "finished_at": _host.now(),
            "clean_at": entry.clean_at,
        }
        _image_clone.record(slot_id, document)
    syslog.syslog(
        f"gpuaas: cloned {params['size_bytes']} bytes onto {disk.disk_identity}, {seconds} s"
    )
    return document


def facts(_params: _change.Params, state: State) -> dict[str, Any]:
    return {
        "bytes": state.complete.get("bytes", 0),
        "seconds": state.complete.get("seconds", 0.0),
        "digest": state.complete.get("digest", ""),
    }


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "image_path": {"type": "path", "required": True},
            "digest": {"type": "str", "required": True},
            "size_bytes": {"type": "int", "required": True},
            "slot": {"type": "dict", "required": True},
            "allocation_id": {"type": "str", "default": ""},
            "exclude_models": {"type": "list", "elements": "str", "default": []},
            "progress_path": {"type": "path", "default": ""},
        },
        supports_check_mode=True,
    )
    _change.run(module, _change.Subject(observe, plan, apply, facts))


if __name__ == "__main__":
    main()

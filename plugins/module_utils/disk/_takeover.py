"""Takeover of a disk from host storage: blockers, steps and manifest."""

from __future__ import annotations

import errno
import json
import os
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ansible_collections.gpuaas.slice.plugins.module_utils.core import _change, _host, _ledger
from ansible_collections.gpuaas.slice.plugins.module_utils.core._errors import Refusal
from ansible_collections.gpuaas.slice.plugins.module_utils.disk import (
    _approval,
    _block,
    _disk,
    _erase_journal,
    _fstab_entries,
    _mounting,
    _proof,
    _slot_use,
    _usage,
)


@dataclass(frozen=True)
class Device:
    """A requested path. disk is None when it could not be identified; refusal gives the reason.

    obstacles: problems that would otherwise appear only at the exclusive open, after the unmount.
    begun: the approval of an interrupted erase.
    """

    path: str
    disk: _block.Disk | None
    used: _block.Usage
    fstab: tuple[str, ...] = ()
    slots: tuple[str, ...] = ()
    proof: Mapping[str, Any] | None = None
    manifest: str = ""
    refusal: Refusal | None = None
    mounts: tuple[_usage.Mount, ...] = ()
    signatures: tuple[str, ...] = ()
    obstacles: tuple[Refusal, ...] = ()
    begun: Mapping[str, Any] | None = None

    @property
    def disk_identity(self) -> str:
        return self.disk.disk_identity if self.disk else ""

    def needs_erase(self) -> bool:
        there = self.used.children or self.used.filesystems
        return bool(there) or self.proof is None or self.begun is not None


def observe(path: str) -> Device:
    """Read a device; a problem that a blocker can express raises nothing."""
    try:
        disk = _block.resolve(path)
    except Refusal as refusal:
        return Device(path, None, _block.Usage(), refusal=refusal)
    used = _block.usage(disk)
    manifest = _manifest(disk)
    table, names = _usage.mounts(), [disk.kernel_name, *used.children]
    mounts = _usage.mounted(names, table)
    return Device(
        path=path,
        disk=disk,
        used=used,
        fstab=tuple(_fstab_entries.lines_of([disk.kernel_name, *used.children], used.mounts)),
        slots=tuple(_slot_use.in_use(disk.disk_identity)),
        proof=_proof.standing(disk.disk_identity),
        manifest=manifest,
        mounts=tuple(mounts),
        signatures=tuple(used.signatures),
        obstacles=(*_mounting.covered(mounts, table), *_claimed(disk, used, mounts)),
        begun=_erase_journal.resumable(disk),
    )


def _manifest(disk: _block.Disk) -> str:
    """The path of the disk's manifest, "" without one; a second manifest would lose the first's
    content.
    """
    path = str((_ledger.takeover(disk.disk_identity) or {}).get("manifest", ""))
    again = "repair the file, or move it away: a new one is written then; nothing was changed"
    if not path or _host.document(path, code="manifest_unreadable", remedy=again) is None:
        return ""
    return path


def _claimed(
    disk: _block.Disk, used: _block.Usage, mounts: Sequence[_usage.Mount]
) -> Iterator[Refusal]:
    """Devices that cannot be opened exclusively although no use is visible, except for mounts."""
    if [code for code, _why in used.findings() if code != "mounted"]:
        return
    names = [disk.kernel_name, *used.children]
    free = [name for name in names if not _usage.mounted([name], mounts)]
    # While a partition is mounted the whole disk cannot be claimed, which proves nothing.
    for name in (name for name in free if name != disk.kernel_name or not mounts):
        try:
            os.close(os.open(_disk.node(name), os.O_RDONLY | os.O_EXCL | os.O_CLOEXEC))
        except OSError as refused:
            if refused.errno == errno.EBUSY:
                yield Refusal(
                    "held",
                    expected=f"{disk.disk_identity} free but for its mounts",
                    found=f"{name} is claimed in the kernel by something that shows nowhere",
                    remedy="look for a pool or volume with this disk (`zpool status`, "
                    "`btrfs filesystem show`) and take the disk out of it; nothing was changed",
                )


def stamp() -> str:
    """Time stamp in the names of backups and manifests, UTC."""
    return time.strftime("%Y%m%d%H%M%S", time.gmtime())


def blockers(
    device: Device,
    expected: Mapping[str, Any] | None,
    *,
    apply: bool,
    exclude_models: Collection[str] = (),
) -> Iterator[Refusal]:
    """Reasons against the takeover; `expected` is the device's approval."""
    if device.disk is None or device.refusal is not None:
        yield device.refusal or _disk.mismatch(device.path, "a disk", "nothing", "identity")
        return
    if apply and not device.path.startswith(_disk.BY_ID):
        yield Refusal(
            "kernel_name_not_allowed",
            expected=f"a path that starts with {_disk.BY_ID}",
            found=device.path,
            remedy=f"kernel names move between boots; this disk is {device.disk.by_id}",
        )
    yield from _disk.excluded(device.disk, exclude_models)
    yield from _approval.identity(device.disk, device.path, expected, apply=apply)
    yield from _use_blockers(device, expected or {}, apply=apply)


def steps(device: Device) -> list[_change.Step]:
    """Steps on the device itself, in order; all devices share fstab and manifest."""
    if device.disk is None:
        return []
    planned = _mounting.steps(device.mounts, device.disk_identity)
    if device.needs_erase():
        before = {
            "partitions": device.used.children,
            "filesystems": device.used.filesystems,
            "signatures": list(device.signatures),
        }
        planned.append(
            _change.Step("erase_disk", device.path, before=before, destroys=device.disk_identity)
        )
    return planned


def fstab_step(devices: Sequence[Device], moment: str) -> list[_change.Step]:
    """A single edit of fstab for all devices."""
    lines = sorted({line for device in devices for line in device.fstab})
    if not lines:
        return []
    after = {
        "backup": _fstab_entries.BACKUP + moment,
        "marker": _fstab_entries.MARKER,
        "of": {device.disk_identity: list(device.fstab) for device in devices if device.fstab},
    }
    return [_change.Step("disable_fstab", _fstab_entries.FILE, before=lines, after=after)]


def manifest_step(devices: Sequence[Device], directory: str, moment: str) -> list[_change.Step]:
    """The record of the takeover, for devices without a manifest."""
    taken = [device for device in devices if device.needs_erase() or not device.manifest]
    if not taken:
        return []
    document = {
        "schema": 1,
        "fstab_backup": _fstab_entries.BACKUP + moment
        if any(mount.fstab for mount in taken)
        else "",
        "devices": [document_of(device) for device in taken],
    }
    # The contract requires this suffix; the content is JSON all the same.
    path = f"{directory}/slice-storage-transition-{moment}.txt"
    return [_change.Step("write_manifest", path, after=document)]


def write_manifest(step: _change.Step) -> None:
    """Write the manifest with the proofs of its devices, and link each proof to it."""
    devices = []
    for device in step.after["devices"]:
        proof = _proof.standing(device["identity"])
        devices.append({**device, "proof": proof})
    document = {**step.after, "written_at": _host.now(), **_host.identity(), "devices": devices}
    _host.write(step.subject, json.dumps(document, indent=2, sort_keys=True) + "\n", mode=0o640)
    for device in devices:
        # A process that has marked the disk since has ended its proof.
        with _ledger.locked():
            if device["proof"] and _proof.standing(device["identity"]) == device["proof"]:
                _proof.record(device["identity"], device["proof"], manifest=step.subject)


def document_of(device: Device) -> dict[str, Any]:
    """The device in results and manifests."""
    disk = device.disk
    return {
        "nvme_device": (disk.by_id or device.path) if disk else device.path,
        "identity": device.disk_identity,
        "kernel_name": disk.kernel_name if disk else "",
        "serial": disk.serial if disk else "",
        "model": disk.model if disk else "",
        "eui": disk.eui or disk.nguid if disk else "",
        "size_bytes": disk.size_bytes if disk else 0,
        "mounts": device.used.mounts,
        "partitions": device.used.children,
        "filesystems": device.used.filesystems,
        "signatures": list(device.signatures),
        "approval": _approval.of(disk, device.used, device.signatures) if disk else {},
        "fstab": list(device.fstab),
        "steps": [step.document() for step in steps(device)],
        "proof": dict(device.proof) if device.proof and not device.needs_erase() else None,
        "manifest": device.manifest,
    }


def _use_blockers(
    device: Device, approved: _approval.Approval, *, apply: bool
) -> Iterator[Refusal]:
    named = f"{device.path} ({device.disk_identity})"
    approved = _approval.resumed(approved, device.begun, device.used, device.signatures)
    for code, text in device.used.findings():
        if code != "mounted":
            remedy = "choose another disk, or take it out of that use first; nothing is forced"
            yield Refusal(code, expected=f"{named} free", found=text, remedy=remedy)
    yield from device.obstacles
    strange = list(_approval.unusual(named, device.used, approved))
    yield from strange
    if apply and not strange:
        yield from _approval.exceeded(named, device.used, device.signatures, approved)
    if device.slots and device.disk:
        yield _slot_use.belongs(device.disk, f"leased or not wiped in {', '.join(device.slots)}")

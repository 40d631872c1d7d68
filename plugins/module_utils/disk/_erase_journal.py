"""Journal of a begun erase: the disk, and what was approved of it.

Written before the first byte and removed after the verified end. What a broken erase leaves reads
as bytes of no known kind, which no approval names; with this record the disk can be taken again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ansible_collections.gpuaas.slice.plugins.module_utils.core import _host
from ansible_collections.gpuaas.slice.plugins.module_utils.disk import _disk, _proof

DIRECTORY = f"{_host.STATE_DIRECTORY}/erasing"


def resumable(disk: _disk.Disk) -> dict[str, Any] | None:
    """What was approved for the erase of this disk that has not ended; None when there is none."""
    record = _host.document(
        _file(disk.disk_identity),
        code="erase_record_unreadable",
        remedy="remove the file; what is on the disk then needs an approval of its own",
    )
    if record is None or record.get("disk") != _who(disk):
        return None
    # It ended, and what is on the disk came after: only the removal of the record was missed.
    ended = str((_proof.standing(disk.disk_identity) or {}).get("finished_at", ""))
    if ended > str(record.get("begun_at", "")):
        return None
    return dict(record.get("approved") or {})


def record(disk: _disk.Disk, approved: Mapping[str, Any]) -> None:
    """Say, durably, that bytes are about to be written. Before the first byte, never after."""
    text = {"disk": _who(disk), "approved": dict(approved), "begun_at": _host.now()}
    _host.write(_file(disk.disk_identity), json.dumps(text, sort_keys=True) + "\n", mode=0o600)


def forget(disk: _disk.Disk) -> None:
    _host.remove(_file(disk.disk_identity))


def has_entry(disk_identity: str) -> bool:
    """Whether bytes of the disk may be gone; what cannot be looked at may."""
    try:
        _host.path(_file(disk_identity)).lstat()
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return True


def _file(disk_identity: str) -> str:
    return f"{DIRECTORY}/{disk_identity}.json"


def _who(disk: _disk.Disk) -> dict[str, Any]:
    return {
        "identity": disk.disk_identity,
        "serial": disk.serial,
        "eui": disk.eui or disk.nguid,
        "size_bytes": disk.size_bytes,
    }

"""Journal of an erase in progress: the disk and its approval.

Written before the first byte and removed after the verified end. An interrupted erase leaves bytes
of unknown kind, which no approval names. This record lets the takeover continue.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ansible_collections.gpuaas.slice.plugins.module_utils.core import _host
from ansible_collections.gpuaas.slice.plugins.module_utils.disk import _disk, _proof

DIRECTORY = f"{_host.STATE_DIRECTORY}/erasing"


def resumable(disk: _disk.Disk) -> dict[str, Any] | None:
    """The approval of this disk's unfinished erase; None when no erase is unfinished."""
    record = _document(_file(disk.disk_identity))
    if record is None or record.get("disk") != _who(disk):
        return None
    # A newer proof shows that the erase ended and that the disk's content is newer; only the record
    # was not removed.
    if record.get("proof", "") != _digest(disk.disk_identity):
        return None
    return dict(record.get("approved") or {})


def record(disk: _disk.Disk, approved: Mapping[str, Any]) -> None:
    """Record durably that an erase starts. This must happen before the first byte is written."""
    text = {"disk": _who(disk), "approved": dict(approved), "begun_at": _host.now()}
    text["proof"] = _digest(disk.disk_identity)
    _host.write(_file(disk.disk_identity), json.dumps(text, sort_keys=True) + "\n", mode=0o600)


def forget_ended() -> None:
    """Remove the records that a newer proof has ended, before that proof ends itself.

    Without the proof such a record would count again, and approve the erase of whatever is on the
    disk by then.
    """
    for name in _host.listed(DIRECTORY):
        if name.startswith("."):
            continue  # a draft of an interrupted write
        path = f"{DIRECTORY}/{name}"
        document = _document(path) or {}
        identity = str((document.get("disk") or {}).get("identity", ""))
        if document.get("proof", "") != _digest(identity):
            _host.remove(path)


def _document(path: str) -> dict[str, Any] | None:
    return _host.document(
        path,
        code="erase_record_unreadable",
        remedy="remove the file; the content of the disk then needs its own approval",
    )


def _digest(disk_identity: str) -> str:
    """Digest of the disk's proof, "" without a proof."""
    return str((_proof.standing(disk_identity) or {}).get("digest", ""))


def forget(disk: _disk.Disk) -> None:
    _host.remove(_file(disk.disk_identity))


def has_entry(disk_identity: str) -> bool:
    """Whether bytes of the disk may be erased; an unreadable journal counts as yes."""
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

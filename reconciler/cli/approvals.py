"""What is approved of a disk that is taken over, as a person reads it and as a file keeps it."""

from __future__ import annotations

from typing import Any

# Partition tables, and the file shares of a bare-metal host. Anything else is named by a person.
PLAIN = frozenset({"gpt", "dos", "ext2", "ext3", "ext4", "xfs", "vfat"})


def by_path(found: Any) -> dict[str, Any]:
    """Approvals by by-id path, from a file of them or from the plan itself."""
    if isinstance(found, list):
        disks = [disk for disk in found if isinstance(disk, dict) and disk.get("approval")]
        return {str(disk["nvme_device"]): disk["approval"] for disk in disks}
    return dict(found) if isinstance(found, dict) else {}


def seen(disk: dict[str, Any], named: list[str]) -> dict[str, Any]:
    """The approval of a disk as a discovery saw it; unusual types only when they were named."""
    kinds = sorted((disk.get("filesystems") or {}).values())
    return {
        "serial": disk["serial"],
        "eui": disk["eui"] or disk["nguid"],
        "mounts": sorted(disk.get("mounts") or []),
        "filesystems": [kind for kind in kinds if kind in PLAIN or kind in named],
    }


def line(path: str, approval: dict[str, Any]) -> str:
    """One disk as it is asked about."""
    mounts = ", ".join(approval.get("mounts") or []) or "nowhere"
    kinds = ", ".join(approval.get("filesystems") or []) or "nothing"
    return (
        f"to be wiped: {path}  serial {approval['serial']}  eui {approval['eui']}"
        f"  mounted on {mounts}  carries {kinds}"
    )

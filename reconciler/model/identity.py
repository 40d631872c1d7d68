"""Identity of a host installation and of a disk."""

from __future__ import annotations

import hashlib


def install_id(machine_id: str, host_key: str) -> str:
    """Install id, a digest of machine-id and host key; "" while either is unknown."""
    if not machine_id or not host_key:
        return ""
    # Only type and key, because the comment of a public key is free text.
    key = " ".join(host_key.split()[:2])
    return hashlib.sha256(f"{machine_id}\n{key}".encode()).hexdigest()[:32]


def disk_identity(hexadecimal: str) -> str:
    """Canonical spelling of a disk's identity: eui.<16 or 32 lowercase hex digits>."""
    return f"eui.{hexadecimal.lower()}"

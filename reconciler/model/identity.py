"""What tells one installation of a host from another."""

from __future__ import annotations

import hashlib


def install_id(machine_id: str, host_key: str) -> str:
    """One text for machine-id and host key together; "" while either is unknown."""
    if not machine_id or not host_key:
        return ""
    # Only type and key: the comment of a public key is free text.
    key = " ".join(host_key.split()[:2])
    return hashlib.sha256(f"{machine_id}\n{key}".encode()).hexdigest()[:32]


def disk_identity(hexadecimal: str) -> str:
    """The one spelling of a disk's identity: eui.<16 or 32 lowercase hex digits>."""
    return f"eui.{hexadecimal.lower()}"

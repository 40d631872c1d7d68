"""Does a host's proof show that this very disk is clean, and clean enough for its policy?"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from reconciler.model.errors import Problem

# NIST SP 800-88: `purge` withstands a laboratory, `clear` the disk's own interface. By method, not
# by the class that a proof names for itself: the host does not judge its own work.
CLASSES = {
    "crypto_erase": "purge",
    "user_data_erase": "purge",
    "discard": "clear",
    "zero_fill": "clear",
}
# What a slot's `destructive_wipe_policy` lets count. `blkdiscard` is what the operators' guide
# calls a wipe through the disk's own interface.
POLICIES = {
    "clear": frozenset({"clear", "purge"}),
    "purge": frozenset({"purge"}),
    "blkdiscard": frozenset({"clear", "purge"}),
}
DEFAULT_POLICY = "clear"


def accepts(policy: str, method: str) -> bool:
    """Whether a wipe by this method counts; an unknown policy or method never does."""
    return CLASSES.get(method) in POLICIES.get(policy, frozenset())


def check_proof(
    document: Mapping[str, Any],
    *,
    identity: str,
    serial: str = "",
    size_bytes: int = 0,
    policy: str = DEFAULT_POLICY,
) -> None:
    """Raise unless the proof is for the disk, read back and verified, and of a class that counts.

    policy: the slot's `destructive_wipe_policy`.
    """
    told = {
        "disk": str(document.get("disk") or document.get("identity") or ""),
        "serial": str(document.get("serial") or ""),
        "size_bytes": document.get("size_bytes") or 0,
    }
    expected = {"disk": identity, "serial": serial, "size_bytes": size_bytes}
    wrong = [
        name
        for name, value in expected.items()
        if value and told[name] != value and (told[name] or name == "disk")
    ]
    if wrong:
        raise Problem(
            "proof_mismatch",
            409,
            expected=", ".join(f"{name} {expected[name]}" for name in wrong),
            found=", ".join(f"{name} {told[name]}" for name in wrong),
            remedy="the proof is for another disk: discover the node, then wipe the slot again",
        )
    if document.get("verified") is not True:
        raise Problem(
            "proof_unverified",
            409,
            expected=f"a wipe of {identity} that was read back and verified",
            found=f"verified={document.get('verified')!r}",
            remedy="wipe the slot again (`gpuaas recover`)",
        )
    method = str(document.get("method") or "")
    if not accepts(policy, method):
        raise Problem(
            "proof_class_refused",
            409,
            expected=f"a wipe of {identity} that the policy {policy!r} accepts",
            found=f"method {method!r}, class {CLASSES.get(method, 'unknown')}",
            remedy="allow a method of a better class in the profile's wipe_methods and wipe again",
        )


# What is said of a host on which nothing was begun.
NOTHING_DONE = {"disk_written": False, "leftovers": False}


def nothing_written(evidence: Mapping[str, Any]) -> bool:
    """True only when the host says outright that it wrote nothing and left nothing."""
    return evidence.get("disk_written") is False and evidence.get("leftovers") is False

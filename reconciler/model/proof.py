"""Checks of a slot's proof: its disk and wipe class, and the reset of its GPU."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from reconciler.model.errors import Problem

# NIST SP 800-88: `purge` withstands a laboratory, `clear` the disk's own interface. The class comes
# from the method and not from the proof's own claim, because the host must not judge its own work.
CLASSES = {
    "crypto_erase": "purge",
    "user_data_erase": "purge",
    "discard": "clear",
    "zero_fill": "clear",
}
# Wipe classes that each `destructive_wipe_policy` accepts. `blkdiscard` is the name of the
# operators' guide for a wipe through the disk's own interface.
POLICIES = {
    "clear": frozenset({"clear", "purge"}),
    "purge": frozenset({"purge"}),
    "blkdiscard": frozenset({"clear", "purge"}),
}
DEFAULT_POLICY = "clear"


def accepts(policy: str, method: str) -> bool:
    """Whether the policy accepts a wipe by this method; never for an unknown policy or method."""
    return CLASSES.get(method) in POLICIES.get(policy, frozenset())


def check_proof(
    document: Mapping[str, Any],
    *,
    identity: str,
    serial: str = "",
    size_bytes: int = 0,
    policy: str = DEFAULT_POLICY,
) -> None:
    """Raise unless the proof is for this disk, verified by read-back, and of an accepted class.

    policy: the slot's `destructive_wipe_policy`.
    """
    stated = {
        "disk": str(document.get("disk") or document.get("identity") or ""),
        "serial": str(document.get("serial") or ""),
        "size_bytes": document.get("size_bytes") or 0,
    }
    expected = {"disk": identity, "serial": serial, "size_bytes": size_bytes}
    wrong = [
        name
        for name, value in expected.items()
        if value and stated[name] != value and (stated[name] or name == "disk")
    ]
    if wrong:
        raise Problem(
            "proof_mismatch",
            expected=", ".join(f"{name} {expected[name]}" for name in wrong),
            found=", ".join(f"{name} {stated[name]}" for name in wrong),
            remedy="the proof is for another disk: discover the node, then wipe the slot again",
        )
    if document.get("verified") is not True:
        raise Problem(
            "proof_unverified",
            expected=f"a wipe of {identity} that was read back and verified",
            found=f"verified={document.get('verified')!r}",
            remedy="wipe the slot again (`gpuaas recover`)",
        )
    method = str(document.get("method") or "")
    if not accepts(policy, method):
        raise Problem(
            "proof_class_refused",
            expected=f"a wipe of {identity} that the policy {policy!r} accepts",
            found=f"method {method!r}, class {CLASSES.get(method, 'unknown')}",
            remedy="allow a method of a better class in the profile's wipe_methods and wipe again",
        )


def check_gpu(evidence: object, *, address: str, link: Mapping[str, Any]) -> None:
    """Raise unless the evidence shows a verified reset of this GPU, with its link as approved.

    link: speed and width of the PCIe link at the approval; {} when it has none.
    """
    gpu = evidence if isinstance(evidence, Mapping) else {}
    if gpu.get("verified") is not True or gpu.get("address") != address:
        raise Problem(
            "gpu_unproven",
            expected=f"evidence of a verified reset of the GPU {address}",
            found=f"address={gpu.get('address')!r}, verified={gpu.get('verified')!r}",
            remedy="treat the run as failed; `gpuaas recover` resets it again",
        )
    reported = gpu.get("link")
    slower = [name for name in link if _amount(reported, name) < _amount(link, name)]
    if slower:
        raise Problem(
            "gpu_link_degraded",
            expected=f"a link of {address} with " + ", ".join(f"{n} {link[n]}" for n in slower),
            found=f"link {reported!r}"[:200],
            remedy="reseat or replace the GPU, restart the host, then recover the slot",
        )


def _amount(link: object, name: str) -> float:
    """The number at the start of a speed (`32.0 GT/s PCIe`) or a width (`16`), or 0."""
    text = str(link.get(name) or "") if isinstance(link, Mapping) else ""
    match = re.match(r"\d{1,4}(\.\d{1,4})?", text)
    return float(match.group()) if match else 0.0


# Evidence for a host on which no run was started.
NOTHING_DONE = {"disk_written": False, "leftovers": False}


def nothing_written(evidence: Mapping[str, Any]) -> bool:
    """True only when the host states explicitly that it wrote nothing and left nothing."""
    return evidence.get("disk_written") is False and evidence.get("leftovers") is False

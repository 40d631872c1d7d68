"""Mode of a host, as its marker file names it: slice, or bare metal after a conversion."""

from __future__ import annotations

import json

from ansible_collections.gpuaas.slice.plugins.module_utils.core import _host
from ansible_collections.gpuaas.slice.plugins.module_utils.core._errors import Refusal

MARKER = "/etc/gpuaas/slice-mode.json"


def mode() -> str:
    """`slice`, `baremetal`, or "" on a host that was never bootstrapped."""
    try:
        return str(json.loads(_host.read(MARKER) or "{}").get("mode", ""))
    except (ValueError, AttributeError):
        return ""


def is_slice() -> bool:
    """Whether this host was put into slice mode on purpose (bootstrap writes the file)."""
    return mode() == "slice"


def not_slice() -> Refusal:
    """The refusal for a host without slice mode."""
    return Refusal(
        "not_slice_mode",
        expected=f"a host put into slice mode ({MARKER})",
        found="no such file on this host",
        remedy="run the bootstrap playbook, which puts the host into slice mode",
    )


def not_ordinary() -> list[Refusal]:
    """Reasons why this host accepts no bare-metal tenant; [] when it is an ordinary machine.

    An unreadable file counts as slice mode, because it shows that this was meant to be a slice
    host.
    """
    try:
        document = _host.document(MARKER, code="mode_unreadable", remedy="convert the node")
        if document is None:
            return []
        named = str(document.get("mode", ""))
    except Refusal:
        named = "unreadable"
    if named == "baremetal":
        return []
    return [
        Refusal(
            "node_in_slice_mode",
            expected=f"a machine without {MARKER}",
            found=f"mode {named or 'not named'}",
            remedy="convert the node to bare metal first; its slots go off sale",
        )
    ]

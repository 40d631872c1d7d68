"""Detection of edits in files that the collection writes whole.

Wanted is what the present code would write, since that is what a repair writes; nothing has to be
remembered for it, and a host that an older release set up otherwise is found too. The one exception
is the code that the boot services were given, see `_boot_files`.
"""

from __future__ import annotations

import hashlib
import json
import stat
from collections.abc import Mapping
from typing import Any

from ansible_collections.gpuaas.slice.plugins.module_utils.core import _host
from ansible_collections.gpuaas.slice.plugins.module_utils.core._errors import Refusal


def unlike(path: str, text: str | None, mode: int | None = None) -> list[str]:
    """Why a file is not what its role writes; [] when it is. text: None for one that must not be.

    mode: what its mode must be, where a wrong one has consequences: a program that may not be run.
    """
    try:
        found = _host.kept(path)
    except Refusal as unreadable:
        return [f"{unreadable.code}: {unreadable.found}"]
    if text is None:
        return [] if found is None else [f"{path} is there, and bootstrap writes none"]
    if found is None:
        return [f"{path} is missing"]
    if found != text.strip():
        return [f"{path} is not what bootstrap writes: {_difference(text.strip(), found)}"]
    has = _host.path(path).stat().st_mode
    if mode is not None and stat.S_IMODE(has) != mode:
        return [f"{path} has mode {stat.S_IMODE(has):04o}, not {mode:04o}"]
    return []


def unlike_settings(path: str, wanted: Mapping[str, Any]) -> list[str]:
    """The same for settings, which are data: their layout does not matter."""
    try:
        there = json.loads(_host.read(path) or "null")
    except ValueError:
        there = None
    if there is None:
        return [f"{path} is missing or unreadable"]
    if there == wanted:
        return []
    kept = there if isinstance(there, dict) else {}
    differing = [key for key in sorted({*wanted, *kept}) if kept.get(key) != wanted.get(key)]
    return [f"{path} has another {', '.join(differing)} than the profile"]


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def digest_of(path: str) -> str:
    """Of the file as it is; "" for one that is not there or cannot be read."""
    try:
        return digest(_host.path(path).read_bytes())
    except OSError:
        return ""


def _difference(wanted: str, found: str) -> str:
    """One line says which edit it was, and lets nobody read a whole foreign file in a report."""
    rows, there = wanted.split("\n"), found.split("\n")
    first = next((row for row in there if row not in rows), "")
    lost = next((row for row in rows if row not in there), "")
    return f"has {first!r}" if first else f"lacks {lost!r}" if lost else "has its lines otherwise"

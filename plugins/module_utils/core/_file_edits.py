"""Detection of edits in files that the collection writes completely.

The reference is the current code's rendering, because a repair writes exactly that. Nothing needs
to be recorded for it, and the different setup of an older release is detected too. The only
exception is the code of the boot services, see `_boot_files`.
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
    """Differences between a file and its expected content; [] when equal. text: None for a file
    that must be absent.

    mode: the required mode, for a file whose mode matters, such as a program.
    """
    try:
        existing = _host.kept(path)
    except Refusal as unreadable:
        return [f"{unreadable.code}: {unreadable.found}"]
    if text is None:
        return [] if existing is None else [f"{path} is there, and bootstrap writes none"]
    if existing is None:
        return [f"{path} is missing"]
    if existing != text.strip():
        return [f"{path} is not what bootstrap writes: {_difference(text.strip(), existing)}"]
    has = _host.path(path).stat().st_mode
    if mode is not None and stat.S_IMODE(has) != mode:
        return [f"{path} has mode {stat.S_IMODE(has):04o}, not {mode:04o}"]
    return []


def unlike_settings(path: str, settings: Mapping[str, Any]) -> list[str]:
    """As `unlike`, for a JSON file. It is compared as data, because the layout does not matter."""
    try:
        there = json.loads(_host.read(path) or "null")
    except ValueError:
        there = None
    if there is None:
        return [f"{path} is missing or unreadable"]
    if there == settings:
        return []
    kept = there if isinstance(there, dict) else {}
    differing = [key for key in sorted({*settings, *kept}) if kept.get(key) != settings.get(key)]
    return [f"{path} has another {', '.join(differing)} than the profile"]


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def digest_of(path: str) -> str:
    """Digest of the file's current content; "" if it is absent or unreadable."""
    try:
        return digest(_host.path(path).read_bytes())
    except OSError:
        return ""


def _difference(expected: str, existing: str) -> str:
    """The first different line. It identifies the edit, and a report never shows a whole foreign
    file.
    """
    rows, there = expected.split("\n"), existing.split("\n")
    first = next((row for row in there if row not in rows), "")
    lost = next((row for row in rows if row not in there), "")
    return f"has {first!r}" if first else f"lacks {lost!r}" if lost else "has its lines otherwise"

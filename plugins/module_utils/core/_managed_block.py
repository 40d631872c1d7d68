"""Managed block at the end of a configuration file that the site owns."""

from __future__ import annotations

import re
from collections.abc import Iterable

BEGIN, END = "# gpuaas.slice: begin", "# gpuaas.slice: end"
# A mark whose counterpart was deleted is removed alone, so that no line of the site is lost. An
# editor may have left the last line without a newline.
_PART = re.compile(
    rf"^{BEGIN}\n(?:(?!{BEGIN}\n).*\n)*?{END}(?:\n|\Z)|^(?:{BEGIN}|{END})(?:\n|\Z)",
    re.MULTILINE,
)


def render(rows: Iterable[str]) -> str:
    """The rows between their marks."""
    return "\n".join([BEGIN, *rows, END, ""])


def block_of(text: str) -> str:
    """The managed block of a file, marks included."""
    return "".join(match.group() for match in _PART.finditer(text))


def without_block(text: str) -> str:
    """The file without the managed block."""
    return _PART.sub("", text)


def with_block(text: str, ours: str) -> str:
    """The file with this managed block in place of the old block."""
    site = without_block(text)
    return site + ("\n" if site and not site.endswith("\n") else "") + ours

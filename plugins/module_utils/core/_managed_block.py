"""Our part of a file of the site's: some lines between two marks, at the file's end."""

from __future__ import annotations

import re
from collections.abc import Iterable

BEGIN, END = "# gpuaas.slice: begin", "# gpuaas.slice: end"
# A mark whose other half somebody deleted goes too, and takes no line of the site with it. An
# editor may have left the last line without its end.
_PART = re.compile(
    rf"^{BEGIN}\n(?:(?!{BEGIN}\n).*\n)*?{END}(?:\n|\Z)|^(?:{BEGIN}|{END})(?:\n|\Z)",
    re.MULTILINE,
)


def part(rows: Iterable[str]) -> str:
    """The rows between their marks."""
    return "\n".join([BEGIN, *rows, END, ""])


def own(text: str) -> str:
    """What of a file is ours, marks included."""
    return "".join(found.group() for found in _PART.finditer(text))


def without(text: str) -> str:
    """What of a file is the site's."""
    return _PART.sub("", text)


def joined(text: str, ours: str) -> str:
    """The file with this as our part, in place of what was there of ours."""
    site = without(text)
    return site + ("\n" if site and not site.endswith("\n") else "") + ours

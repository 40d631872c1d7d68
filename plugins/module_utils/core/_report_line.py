"""Machine-readable report lines: a marker and `key=value` words, always exactly one line."""

from __future__ import annotations

import string

# Written as they are; everything else gets a backslash, as a shell would quote it. `=` is not among
# them, so that a hostile serial cannot put a second `status=…` into a line.
_PLAIN = frozenset(string.ascii_letters + string.digits + "_@%+:,./-")


def report_line(marker: str, **fields: str) -> str:
    """`<marker> key=value …`, each value one shell word."""
    return " ".join([marker, *(f"{key}={quoted(value)}" for key, value in fields.items())])


def quoted(text: str) -> str:
    """`text` as one shell word; what does not print in ASCII is shown as its escape, never raw."""
    shown = "".join(
        c if c.isascii() and c.isprintable() else c.encode("unicode_escape").decode() for c in text
    )
    return "".join(c if c in _PLAIN else f"\\{c}" for c in shown) or "-"

"""Machine-readable report lines: a marker and `key=value` words, never a line break."""

from __future__ import annotations

import string

# Written unchanged; all other characters get a backslash, as in shell quoting. `=` is not included,
# so that a hostile serial cannot add a second `status=…` to a line.
_PLAIN = frozenset(string.ascii_letters + string.digits + "_@%+:,./-")


def report_line(marker: str, **fields: str) -> str:
    """`<marker> key=value …`, each value a single shell word."""
    return " ".join([marker, *(f"{key}={quoted(value)}" for key, value in fields.items())])


def quoted(text: str) -> str:
    """`text` as a shell word; characters outside printable ASCII appear as escapes, never raw."""
    shown = "".join(
        c if c.isascii() and c.isprintable() else c.encode("unicode_escape").decode() for c in text
    )
    return "".join(c if c in _PLAIN else f"\\{c}" for c in shown) or "-"

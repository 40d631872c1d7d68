"""Formatting of figures and of text from measured machines, for tables and charts."""

from __future__ import annotations

from typing import Any

SIGNS = {"better": "\u25b2", "worse": "\u25bc", "same": "=", "unclear": "?"}


def plain(text: object, limit: int = 200) -> str:
    """A line without control, bidirectional or unpaired characters of a measured machine."""
    clean = "".join(
        char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in str(text)
    )
    return clean if len(clean) <= limit else f"{clean[: limit - 1]}\u2026"


def figure(value: float) -> str:
    """Three digits, or a whole number."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def percent(delta: float) -> str:
    """Percentage with sign and a decimal, never -0.0."""
    return f"{round(delta, 1) + 0.0:+.1f} %"


def cell(value: dict[str, Any]) -> str:
    """Text of a cell of a comparison: `98.2  -1.8 % worse (note)`."""
    parts = [] if value["value"] is None else [figure(value["value"])]
    if value["delta_percent"] is not None:
        parts.append(f"{percent(value['delta_percent'])} {value['direction']}")
    elif value["direction"] != "baseline":
        parts.append(value["direction"])
    if value["note"]:
        parts.append(f"({value['note']})")
    return plain(" ".join(parts))

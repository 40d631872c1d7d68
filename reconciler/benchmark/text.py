"""How figures and foreign text are written, in tables and pictures alike."""

from __future__ import annotations

from typing import Any

SIGNS = {"better": "\u25b2", "worse": "\u25bc", "same": "=", "unclear": "?"}


def plain(text: object, limit: int = 200) -> str:
    """One line without control, bidirectional or unpaired characters: machines wrote some of it."""
    clean = "".join(
        char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in str(text)
    )
    return clean if len(clean) <= limit else f"{clean[: limit - 1]}\u2026"


def figure(value: float) -> str:
    """Three digits, whole numbers above."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def percent(delta: float) -> str:
    """Signed, one digit; never minus zero."""
    return f"{round(delta, 1) + 0.0:+.1f} %"


def cell(found: dict[str, Any]) -> str:
    """A cell of a comparison: `98.2  -1.8 % worse (note)`."""
    parts = [] if found["value"] is None else [figure(found["value"])]
    if found["delta_percent"] is not None:
        parts.append(f"{percent(found['delta_percent'])} {found['direction']}")
    elif found["direction"] != "baseline":
        parts.append(found["direction"])
    if found["note"]:
        parts.append(f"({found['note']})")
    return plain(" ".join(parts))

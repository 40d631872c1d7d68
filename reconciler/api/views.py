"""Records as callers see them: times as text, nothing that opens a door."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from reconciler.db import clock

Record = dict[str, Any]

# A lease token would let its reader end a task; hashes are nobody's business.
HIDDEN = frozenset({"hash", "lease_token"})
_MOMENTS = ("_at", "_since", "not_before", "valid_until")


def record(row: Record) -> Record:
    """One record, and the records it holds."""
    return {name: _value(name, value) for name, value in row.items() if name not in HIDDEN}


def items(rows: Iterable[Record]) -> Record:
    """A list, as every list route answers it."""
    return {"items": [record(row) for row in rows]}


def is_moment(name: str) -> bool:
    """Whether a field of this name holds a time."""
    return name == "at" or name.endswith(_MOMENTS)


def _value(name: str, value: Any) -> Any:
    if isinstance(value, dict):
        return record(value)
    if isinstance(value, list):
        return [record(row) if isinstance(row, dict) else row for row in value]
    # Hosts' documents hold times as text already; whole numbers are not times of ours.
    return clock.iso(value) if is_moment(name) and isinstance(value, float) else value

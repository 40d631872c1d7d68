"""Storable and printable forms of texts and documents that hosts, models and services send."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from decimal import Decimal

from reconciler.model.errors import Refusal

# Our documents nest ten deep. Much deeper documents exhaust the stack of recursive readers.
_DEEPEST = 100
STORABLE = (
    "text without NUL and half surrogate pairs, finite numbers, and at most"
    f" {_DEEPEST} documents or lists in each other"
)
_NO_TEXT = re.compile("[\0\ud800-\udfff]")
# Names in a document come from the host too.
_LONGEST_PATH = 200


def unstorable(document: object) -> str | None:
    """The dotted path of the first value that cannot be stored; None when all values can.

    The rules are the same for both databases. PostgreSQL accepts no NUL and no half of a surrogate
    pair in text, and no infinite number. A document nested without end cannot be written or read.
    """
    path = _unstorable(document, _DEEPEST)
    return None if path is None else ".".join(map(storable_text, path))[:_LONGEST_PATH]


def stored_size(document: object, most: int) -> int:
    """Bytes of a document as a database gives it back; a document above `most` is not measured
    further. PostgreSQL gives numbers such as 1e308 and 1e-308 with all their digits.
    """
    text = json.dumps(document)
    size = len(text)
    if size <= most and ("e+" in text or "e-" in text):
        numbers: list[str] = []
        json.loads(text, parse_float=numbers.append)
        size += sum(len(f"{Decimal(number):f}") - len(number) for number in numbers)
    return size


def storable_text(text: str) -> str:
    """The text with a replacement mark for each character that cannot be stored."""
    return _NO_TEXT.sub("\ufffd", text)


def printable(text: str, also: str = "") -> str:
    """The text for display, with a replacement mark for each control, bidirectional or unpaired
    character, in which a host or another service could hide other words. also: those that stay.
    """
    return "".join(char if char.isprintable() or char in also else "\ufffd" for char in text)


def shown(value: object, longest: int = 200) -> str:
    """A value for display, cut to a length."""
    text = printable(str(value))
    return text if len(text) <= longest else f"{text[: longest - 1]}…"


def storable_parts(refusal: Refusal) -> dict[str, str]:
    """The parts of a refusal, which may repeat what a host or another service answered."""
    return {part: storable_text(text) for part, text in refusal.to_dict().items()}


def _unstorable(value: object, deeper: int) -> list[str] | None:
    """The path to the first value that cannot be stored."""
    if isinstance(value, (str, float)):
        bad = _NO_TEXT.search(value) if isinstance(value, str) else not math.isfinite(value)
        return [] if bad else None
    pairs: Iterable[tuple[object, object]]
    # A dict by its own type first: the check by an abstract one takes longer.
    if isinstance(value, (dict, Mapping)):
        pairs = value.items()
    elif isinstance(value, list | tuple):
        pairs = enumerate(value)
    else:
        return None
    if not deeper:
        return []
    for name, inner in pairs:
        if isinstance(name, str) and _NO_TEXT.search(name):
            return [name]
        # Half a million numbers fit into a request.
        if inner is None or isinstance(inner, int):
            continue
        if (inside := _unstorable(inner, deeper - 1)) is not None:
            # The path is put together at the end: a name may be as long as the document.
            return [str(name), *inside]
    return None

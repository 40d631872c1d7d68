"""What a host says, as it can be kept: what one of the databases refuses is refused for both.

PostgreSQL takes no NUL and no half of a surrogate pair in text, and no number that is none. What is
nested without end can be neither written down nor read back.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping

# The code of a result that cannot be recorded; what its run did on the host is unknown then.
UNREADABLE = "outcome_unreadable"
# Ours are nested ten deep. Much more, and those who walk through a document run out of stack.
_DEEPEST = 100
STORABLE = (
    "text without NUL and half surrogate pairs, finite numbers, and at most"
    f" {_DEEPEST} documents or lists in each other"
)

_NO_TEXT = re.compile("[\0\ud800-\udfff]")
# Names in a document are the host's own words too.
_LONGEST_PATH = 200


def unstorable(document: object) -> str | None:
    """The dotted path of the first value that cannot be kept; None when all of it can."""
    found = next(_unstorable(document, "", _DEEPEST), None)
    return None if found is None else found.lstrip(".")[:_LONGEST_PATH]


def clean(text: str) -> str:
    """The text, with a mark for each letter that cannot be kept."""
    return _NO_TEXT.sub("\ufffd", text)


def _unstorable(value: object, path: str, deeper: int) -> Iterator[str]:
    if isinstance(value, str):
        if _NO_TEXT.search(value):
            yield path
    elif isinstance(value, float):
        if not math.isfinite(value):
            yield path
    elif isinstance(value, Mapping | list | tuple) and not deeper:
        yield path
    elif isinstance(value, Mapping):
        for name, inner in value.items():
            inside = f"{path}.{clean(str(name))}"
            if _NO_TEXT.search(str(name)):
                yield inside
            yield from _unstorable(inner, inside, deeper - 1)
    elif isinstance(value, list | tuple):
        for number, inner in enumerate(value):
            yield from _unstorable(inner, f"{path}.{number}", deeper - 1)

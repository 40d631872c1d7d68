"""The harness as one text for `python3 -`: modules and request together, so nothing is quoted."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from functools import lru_cache
from pathlib import Path

from reconciler import carrier as carrying
from reconciler.benchmark.harness.request import Request

_HERE = Path(__file__).resolve().parent
_PACKAGE = "reconciler.benchmark.harness"


@lru_cache(maxsize=1)
def sources() -> dict[str, str]:
    """The carried modules by full name; the packages above the harness are empty."""
    found = {"reconciler": "", "reconciler.benchmark": ""}
    for path in sorted((_HERE / "harness").glob("*.py")):
        name = _PACKAGE if path.stem == "__init__" else f"{_PACKAGE}.{path.stem}"
        found[name] = path.read_text(encoding="utf-8")
    return found


def digest() -> str:
    """Names the measurement: two captures with one digest were made by the same code."""
    return f"sha256:{hashlib.sha256(json.dumps(sources()).encode()).hexdigest()}"


def text(request: Request) -> str:
    """A program that prints one capture."""
    asked = dataclasses.asdict(dataclasses.replace(request, harness=digest()))
    carrier = Path(carrying.__file__).read_text(encoding="utf-8")
    # A Python literal made from plain strings and numbers: whatever a label holds, it stays data.
    # One line each: an error message then quotes a line, not the whole harness.
    lines = "".join(f"    {name!r}: {source!r},\n" for name, source in sources().items())
    return f"{carrier}\n\ninstall({{\n{lines}}})\nrun({f'{_PACKAGE}.main:main'!r}, {asked!r})\n"

"""Program text for `python3 -` with the modules of the harness and the request."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from functools import lru_cache
from pathlib import Path

from reconciler import carrier as carrying
from reconciler.benchmark.harness.request import Request

_FOLDER = Path(__file__).resolve().parent
_PACKAGE = "reconciler.benchmark.harness"


@lru_cache(maxsize=1)
def sources() -> dict[str, str]:
    """Source text of the harness by module name, with empty parent packages."""
    modules = {"reconciler": "", "reconciler.benchmark": ""}
    for path in sorted((_FOLDER / "harness").glob("*.py")):
        name = _PACKAGE if path.stem == "__init__" else f"{_PACKAGE}.{path.stem}"
        modules[name] = path.read_text(encoding="utf-8")
    return modules


def digest() -> str:
    """Digest of the harness: captures with the same digest were made by the same code."""
    return f"sha256:{hashlib.sha256(json.dumps(sources()).encode()).hexdigest()}"


def text(request: Request) -> str:
    """A program that prints a capture."""
    arguments = dataclasses.asdict(dataclasses.replace(request, harness=digest()))
    carrier = Path(carrying.__file__).read_text(encoding="utf-8")
    # Python literals of strings and numbers, so the text of a label stays data.
    # A line per module, because an error message quotes a whole line.
    lines = "".join(f"    {name!r}: {source!r},\n" for name, source in sources().items())
    return f"{carrier}\n\ninstall({{\n{lines}}})\nrun({f'{_PACKAGE}.main:main'!r}, {arguments!r})\n"

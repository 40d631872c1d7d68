"""Captures as files: read within a limit, held to contracts/benchmark.schema.json."""

from __future__ import annotations

import json
import tempfile
from functools import lru_cache
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.exceptions import best_match

from reconciler.model.errors import Problem
from reconciler.shipped import PROJECT

SCHEMA = PROJECT / "contracts" / "benchmark.schema.json"

# A capture of a machine with 1024 CPUs is some ten kilobytes.
LIMIT_BYTES = 1 << 20


def load(path: Path) -> dict[str, Any]:
    """The capture in this file; Problem `file_invalid` or `capture_invalid`."""
    try:
        with path.open("rb") as file:
            text = file.read(LIMIT_BYTES + 1).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise Problem(
            "file_invalid",
            422,
            expected=f"a readable capture at {path}",
            found=str(error),
            remedy="make one with `gpuaas host benchmark capture`",
        ) from error
    return check(parse(text, str(path)), str(path))


def parse(text: str, source: str) -> dict[str, Any]:
    """A JSON object of bounded size."""
    try:
        if len(text.encode()) > LIMIT_BYTES:
            raise ValueError(f"more than {LIMIT_BYTES} bytes")
        found = json.loads(text, parse_constant=_no_constant)
        if not isinstance(found, dict):
            raise TypeError(f"a {type(found).__name__}")
    except (ValueError, TypeError, RecursionError) as error:
        raise _invalid(source, str(error)) from error
    return found


def check(found: dict[str, Any], source: str) -> dict[str, Any]:
    """The capture itself when the schema allows it."""
    error = best_match(_validator().iter_errors(found))
    if error is not None:
        raise _invalid(source, f"{error.json_path}: {error.message[:500]}")
    return found


def save(capture: dict[str, Any], path: Path) -> None:
    """Whole or not at all: a comparison must never read half a capture."""
    write(path, json.dumps(capture, indent=1) + "\n")


def write(path: Path, text: str) -> None:
    """A file of the caller's, replaced in one step."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(
            "w", encoding="utf-8", dir=path.parent, prefix=".", delete=False
        ) as file:
            file.write(text)
        Path(file.name).chmod(0o644)
        Path(file.name).replace(path)
    except OSError as error:
        raise Problem(
            "file_invalid",
            422,
            expected=f"to be able to write {path}",
            found=str(error),
            remedy="choose another file",
        ) from error


@lru_cache(maxsize=1)
def _validator() -> Draft202012Validator:
    return Draft202012Validator(json.loads(SCHEMA.read_text(encoding="utf-8")))


def _invalid(source: str, found: str) -> Problem:
    return Problem(
        "capture_invalid",
        422,
        expected=f"{source} to be a capture as contracts/benchmark.schema.json describes it",
        found=found,
        remedy="capture again with this version",
    )


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not a figure")

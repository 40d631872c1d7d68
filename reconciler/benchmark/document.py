"""Files of captures: bounded reading, validation by contracts/benchmark.schema.json, writing."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from reconciler.durable import write_text
from reconciler.model.errors import Problem
from reconciler.shipped import PROJECT

SCHEMA = PROJECT / "contracts" / "benchmark.schema.json"

# A capture of a machine with 1024 CPUs has about ten kilobytes.
LIMIT_BYTES = 1 << 20


def load(path: Path) -> dict[str, Any]:
    """The capture in this file; Problem `file_invalid` or `capture_invalid`."""
    try:
        with path.open("rb") as file:
            text = file.read(LIMIT_BYTES + 1).decode()
    except (OSError, UnicodeDecodeError) as error:
        remedy = "create a capture with `gpuaas host benchmark capture`"
        raise _file_invalid(f"a readable capture at {path}", error, remedy) from error
    return check(parse(text, str(path)), str(path))


def parse(text: str, source: str) -> dict[str, Any]:
    """A JSON object of bounded size."""
    try:
        if len(text.encode()) > LIMIT_BYTES:
            raise ValueError(f"more than {LIMIT_BYTES} bytes")
        parsed = json.loads(text, parse_constant=_finite, parse_float=_finite)
        if not isinstance(parsed, dict):
            raise TypeError(f"a {type(parsed).__name__}")
    except (ValueError, TypeError, RecursionError) as error:
        raise _capture_invalid(source, str(error)) from error
    return parsed


def check(capture: dict[str, Any], source: str) -> dict[str, Any]:
    """Validate a capture by the schema and return it; Problem `capture_invalid`."""
    # To load it with the rest would be a quarter of the start of every other command.
    from jsonschema import Draft202012Validator  # noqa: PLC0415
    from jsonschema.exceptions import best_match  # noqa: PLC0415

    schema = json.loads(SCHEMA.read_text(encoding="utf-8"))
    error = best_match(Draft202012Validator(schema).iter_errors(capture))
    if error is not None:
        raise _capture_invalid(source, f"{error.json_path}: {error.message[:500]}")
    return capture


def save(capture: dict[str, Any], path: Path) -> None:
    """Write a capture completely or not at all, so that no comparison reads a part of it."""
    write(path, json.dumps(capture, indent=1) + "\n")


def write(path: Path, text: str) -> None:
    """Write or replace a file in a single step; Problem `file_invalid`."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, text, mode=0o644)
    except OSError as error:
        raise _file_invalid(f"to be able to write {path}", error, "choose another file") from error


def _finite(text: str) -> float:
    # 1e999 becomes infinity, which is saved as a constant that is refused here.
    if math.isfinite(number := float(text)):
        return number
    raise ValueError(f"{text[:50]} is not a figure")


def _file_invalid(expected: str, error: Exception, remedy: str) -> Problem:
    return Problem("file_invalid", 422, expected=expected, found=str(error), remedy=remedy)


def _capture_invalid(source: str, found: str) -> Problem:
    return Problem(
        "capture_invalid",
        422,
        expected=f"{source} to be a capture as contracts/benchmark.schema.json describes it",
        found=found,
        remedy="capture again with this version",
    )

"""Files of captures: bounded reading, validation by contracts/benchmark.schema.json, writing."""

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

# A capture of a machine with 1024 CPUs has about ten kilobytes.
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
            remedy="create a capture with `gpuaas host benchmark capture`",
        ) from error
    return check(parse(text, str(path)), str(path))


def parse(text: str, source: str) -> dict[str, Any]:
    """A JSON object of bounded size."""
    try:
        if len(text.encode()) > LIMIT_BYTES:
            raise ValueError(f"more than {LIMIT_BYTES} bytes")
        parsed = json.loads(text, parse_constant=_no_constant)
        if not isinstance(parsed, dict):
            raise TypeError(f"a {type(parsed).__name__}")
    except (ValueError, TypeError, RecursionError) as error:
        raise _invalid(source, str(error)) from error
    return parsed


def check(capture: dict[str, Any], source: str) -> dict[str, Any]:
    """Validate a capture by the schema and return it; Problem `capture_invalid`."""
    error = best_match(_validator().iter_errors(capture))
    if error is not None:
        raise _invalid(source, f"{error.json_path}: {error.message[:500]}")
    return capture


def save(capture: dict[str, Any], path: Path) -> None:
    """Write a capture completely or not at all, so that no comparison reads a part of it."""
    write(path, json.dumps(capture, indent=1) + "\n")


def write(path: Path, text: str) -> None:
    """Write or replace a file in a single step."""
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

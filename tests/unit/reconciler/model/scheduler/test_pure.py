"""Purity of the scheduler: its decision depends on the snapshot alone."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from reconciler.model import scheduler as planning
from reconciler.model import states

pytestmark = pytest.mark.covers("CTRL-5")

HERE = Path(planning.__file__).parent
# Modules that only compute: no store, clock, file, process or chance.
PURE = {"__future__", "collections", "collections.abc", "dataclasses", "itertools", "typing"}
OURS = ("reconciler.model.scheduler.", "reconciler.model.states")
# By which a module reaches out without an import, or depends on this process alone.
REACHING = {"open", "input", "print", "exec", "eval", "compile", "__import__", "id", "hash"}
REACHING |= {"globals", "vars", "setattr", "delattr", "breakpoint"}


def impurities(text: str) -> Iterator[str]:
    """The names by which this source could see or change more than it is given."""
    for part in ast.walk(ast.parse(text)):
        if isinstance(part, ast.Import):
            yield from (alias.name for alias in part.names if alias.name not in PURE)
        elif isinstance(part, ast.ImportFrom):
            name = "." * part.level + (part.module or "")
            if name not in PURE and not name.startswith(OURS):
                yield name
        elif isinstance(part, ast.Name) and isinstance(part.ctx, ast.Load) and part.id in REACHING:
            yield part.id
        elif isinstance(part, ast.Global | ast.Nonlocal):
            yield from part.names


@pytest.mark.parametrize("file", sorted(HERE.glob("*.py")), ids=lambda file: file.name)
def test_planning_sees_only_what_it_is_given(file: Path) -> None:
    assert list(impurities(file.read_text())) == []


def test_the_states_that_it_may_name_are_pure_as_well() -> None:
    assert set(impurities(Path(states.__file__).read_text())) <= {"enum"}


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("import random", ["random"]),
        ("def f():\n    from time import time", ["time"]),
        ("from reconciler.records import slots", ["reconciler.records"]),
        ("from reconciler.model import proof", ["reconciler.model"]),
        ("from . import score", ["."]),
        ("import itertools, os.path", ["os.path"]),
        ("x = open('y').read()", ["open"]),
        ("def f():\n    global seen", ["seen"]),
        ("from itertools import combinations", []),
    ],
)
def test_what_reaches_out_would_be_named(text: str, names: list[str]) -> None:
    assert list(impurities(text)) == names

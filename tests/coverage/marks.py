"""The marks as pytest sees them."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.coverage.rows import KNOWN

ROOT = Path(__file__).resolve().parents[2]
_MARK = re.compile(r"\bmark\.covers\(")


@dataclass(frozen=True)
class File:
    """One file with marks. about: its first sentence. tests: the rows of each test function.

    A function whose parameters show different rows is there once for each of them. long: the names
    of those that `make test` leaves to `make test-long`.
    """

    path: str
    about: str
    lab: bool
    tests: dict[str, frozenset[str]]
    long: frozenset[str] = frozenset()

    def showing(self, row: str) -> list[str]:
        """Its tests that show the row; a function that shows it with all its parameters once."""
        shown = [name for name, rows in self.tests.items() if row in rows]
        partly = {_function(name) for name, rows in self.tests.items() if row not in rows}
        names = [name if _function(name) in partly else _function(name) for name in shown]
        return list(dict.fromkeys(names))

    def only_long(self, row: str) -> bool:
        """Whether `make test` plays none of its tests that show the row."""
        return all(name in self.long for name, rows in self.tests.items() if row in rows)

    def all_showing(self, row: str) -> bool:
        return all(row in rows for rows in self.tests.values())


def _function(name: str) -> str:
    return name.partition("[")[0]


class _Collector:
    def __init__(self) -> None:
        self.items: list[pytest.Item] = []

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.items = session.items


def marked(root: Path = ROOT) -> list[str]:
    """The test files that name a row: only these are collected."""
    files = sorted((root / "tests").rglob("test_*.py"))
    return [str(path) for path in files if _MARK.search(path.read_text())]


def collect(paths: list[str]) -> list[File]:
    """The files of `paths` by name; ValueError when a mark names a row that no document has."""
    collector = _Collector()
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        code = pytest.main(
            ["--collect-only", "-q", "-m", "", "-p", "no:cacheprovider", *paths], [collector]
        )
    if code != pytest.ExitCode.OK:
        raise ValueError(f"expected the tests to be collected; found:\n{said.getvalue()}")
    return list(_files(collector.items))


def _files(items: list[pytest.Item]) -> Iterator[File]:
    by_path: dict[Path, list[pytest.Item]] = {}
    for item in items:
        by_path.setdefault(item.path, []).append(item)
    for path, found in sorted(by_path.items()):
        module = found[0].getparent(pytest.Module)
        about = ((module.obj.__doc__ if module else "") or "").strip().partition("\n")[0]
        tests = by_name(found)
        lab = any(item.get_closest_marker("lab") for item in found)
        yield File(path.relative_to(ROOT).as_posix(), about, lab, tests, long_of(found, tests))


def by_name(items: Iterable[pytest.Item]) -> dict[str, frozenset[str]]:
    """The rows of each test function; of each of its parameters where they show different ones."""
    functions: dict[str, dict[str, frozenset[str]]] = {}
    for item in items:
        name = getattr(item, "originalname", item.name)
        functions.setdefault(name, {})[item.name] = rows_of(item)
    tests: dict[str, frozenset[str]] = {}
    for name, parameters in functions.items():
        different = set(parameters.values())
        tests |= parameters if len(different) > 1 else {name: different.pop()}
    return tests


def long_of(items: Iterable[pytest.Item], tests: Iterable[str]) -> frozenset[str]:
    """The names of `tests` of which every parameter is marked long."""
    items = list(items)
    short = {
        name
        for item in items
        if item.get_closest_marker("long") is None
        for name in (item.name, getattr(item, "originalname", item.name))
    }
    return frozenset(name for name in tests if name not in short)


def rows_of(item: pytest.Item) -> frozenset[str]:
    """The rows that a test names, itself or through its file."""
    rows = frozenset(row for mark in item.iter_markers("covers") for row in mark.args)
    if not rows <= KNOWN:
        unknown = ", ".join(sorted(rows - KNOWN))
        raise ValueError(f"{item.nodeid}: expected rows of tests/coverage/rows.py; found {unknown}")
    return rows

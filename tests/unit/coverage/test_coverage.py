"""Requirement coverage report: pages of real pytest runs, in one process and by two workers."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import coverage

ROOT = Path(__file__).resolve().parents[3]
SETTINGS = """[pytest]
markers =
  covers(*rows): rows
  later: left out
"""
TESTS = """
import pytest

pytestmark = pytest.mark.covers("HOST-4")

@pytest.mark.covers("I7")
@pytest.mark.parametrize("word", ["a", "b"])
def test_parameters(word):
    assert word == "a"

@pytest.mark.covers("HOST-7")
def test_elsewhere(): pass

@pytest.mark.later
def test_left_out(): pass
"""
ON_LAB = """
import pytest

@pytest.mark.covers("HOST-4")
def test_on_the_lab_host(): pass

def test_without_a_row(): pass

@pytest.fixture
def broken():
    raise OSError

@pytest.mark.covers("HOST-5")
def test_of_a_broken_fixture(broken): pass

@pytest.mark.covers("HOST-6", "HOST-7")
def test_skipped(): pytest.skip("not here")
"""


def run(folder: Path, *words: str) -> int:
    (folder / "tests" / "lab").mkdir(parents=True, exist_ok=True)
    (folder / "pytest.ini").write_text(SETTINGS)
    (folder / "tests" / "test_unit.py").write_text(TESTS)
    (folder / "tests" / "lab" / "test_lab.py").write_text(ON_LAB)
    argv = ["-q", "-p", "no:cacheprovider", "-p", "tests.coverage", "--coverage-pages", "pages"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *argv, *words],
        cwd=folder,
        env={"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "INTERNALERROR" not in done.stdout, done.stdout
    return done.returncode


@pytest.mark.parametrize(
    "workers", [(), ("-p", "xdist", "-n", "2")], ids=["one process", "two workers"]
)
def test_a_page_has_the_last_result_of_every_test(tmp_path: Path, workers: tuple[str, ...]) -> None:
    assert run(tmp_path, *workers, "-m", "not later") == 1
    lines = (tmp_path / "pages" / "host.md").read_text().splitlines()
    rows = {line.split(" | ")[0]: line.split(" | ")[2:] for line in lines if line[:3] == "| H"}
    assert rows["| HOST-4"] == ["fails", "2 passed, 1 not run, 1 failed", "1 passed |"]
    assert rows["| HOST-5"] == ["fails", "none", "1 error |"]
    assert rows["| HOST-6"] == ["not run", "none", "1 skipped |"]
    assert rows["| HOST-7"][0].startswith("shown, lab skipped; not on hardware")
    assert rows["| HOST-7"][1:] == ["1 passed", "1 skipped |"]
    assert rows["| HOST-8"][1:] == ["none", "none |"]
    start = lines.index(next(line for line in lines if line.startswith("## HOST-4:")))
    assert lines[start + 2 : start + 6] == [
        "- passed: `tests/lab/test_lab.py::test_on_the_lab_host`",
        "- passed: `tests/test_unit.py::test_elsewhere`",
        "- not run: `tests/test_unit.py::test_left_out`",
        "- failed: `tests/test_unit.py::test_parameters`",
    ]
    assert "| I7 |" in (tmp_path / "pages" / "control.md").read_text()


def test_runs_add_up(tmp_path: Path) -> None:
    """The second run plays the tests that the first omitted, and keeps the first run's results."""
    assert run(tmp_path, "-m", "not later", "tests/lab", "-k", "on_the_lab_host") == 0
    assert run(tmp_path, "-m", "later", "tests") == 0
    (row,) = (
        line
        for line in (tmp_path / "pages" / "host.md").read_text().splitlines()
        if line.startswith("| HOST-4 |")
    )
    assert row.endswith("| 1 passed, 3 not run | 1 passed |")


def test_an_unknown_row_is_refused(request: pytest.FixtureRequest) -> None:
    request.node.add_marker(pytest.mark.covers("HOST-4"))
    assert coverage.rows_of(request.node) == ["HOST-4"]
    request.node.add_marker(pytest.mark.covers("HOST-99"))
    with pytest.raises(ValueError, match="found HOST-99"):
        coverage.rows_of(request.node)


def test_a_row_says_what_is_shown_and_what_is_not() -> None:
    for name, row in coverage.ROWS.items():
        assert not row.open or coverage.state(name, [], []) == f"open: {row.open}"
    assert coverage.state("SLICE-4", ["passed", "not run"], []) == (
        f"shown; left: {coverage.ROWS['SLICE-4'].left}"
        f"; not on hardware: {coverage.NOT_ON_HARDWARE['SLICE-4']}"
    )
    assert coverage.state("I1", ["passed", "skipped"], ["passed", "skipped"]) == "shown"
    assert coverage.state("I1", ["passed", "error"], []) == "fails"
    assert coverage.state("I1", ["passed"], ["skipped", "not run"]) == "shown, lab skipped"
    assert coverage.state("I1", ["passed"], ["skipped", "failed"]) == "fails"
    assert coverage.state("SLICE-4", ["passed"], ["skipped"]).startswith("shown, lab skipped; left")
    assert coverage.state("I1", [], ["skipped"]) == "not run"
    assert {"HOST-9", "P11"} < set(coverage.NOT_ON_HARDWARE) < coverage.KNOWN


def test_only_a_mark_names_a_row() -> None:
    marked = """
ROWS = {"name": ("HOST-1",)}

@pytest.mark.covers("P9", *ROWS["name"])
def test_guest():
    assert "P10" != "I7"
"""
    assert named_rows(marked) == {"P9", "HOST-1"}
    assert named_rows('pytestmark = pytest.mark.covers("I7")') == {"I7"}
    assert named_rows('row = "P9"  # pytest.mark.covers("P9")') == set()


def test_a_row_is_shown_by_a_test_or_open() -> None:
    """A row without a test names the work that will show it; a row with a test is not open."""
    named: set[str] = set()
    for file in set((ROOT / "tests").rglob("test_*.py")) - {Path(__file__)}:
        text = file.read_text()
        # To parse all files takes seconds.
        if any(f'"{row}"' in text for row in coverage.KNOWN - named):
            named |= named_rows(text)
    open_rows = {name for name, row in coverage.ROWS.items() if row.open}
    assert coverage.KNOWN - named == open_rows


def named_rows(text: str) -> set[str]:
    """Arguments of the marks in a file of tests; a name among them stands for its strings."""
    nodes = list(ast.walk(ast.parse(text)))
    strings = {
        target.id: set(_strings(node.value))
        for node in nodes
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    rows: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Call) and _is_mark(node.func):
            for argument in node.args:
                rows |= set(_strings(argument))
                for part in ast.walk(argument):
                    rows |= strings.get(part.id, set()) if isinstance(part, ast.Name) else set()
    return rows & coverage.KNOWN


def _is_mark(function: ast.expr) -> bool:
    return (
        isinstance(function, ast.Attribute)
        and function.attr == "covers"
        and ast.unparse(function.value) == "pytest.mark"
    )


def _strings(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value

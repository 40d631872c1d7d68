"""The documents that say which test shows which row of the requirements."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.coverage import __main__ as command
from tests.coverage import marks, page, rows

ROWS = (rows.Row("X-1", "Doors", ""), rows.Row("X-2", "Windows", "glass"))
DOCUMENT = rows.Document("docs/x.md", "A house", "Read this.", ROWS)
BOTH = frozenset({"X-1", "X-2"})


def test_the_documents_are_current() -> None:
    """When this fails: python -m tests.coverage."""
    words = [sys.executable, "-m", "tests.coverage", "--check"]
    done = subprocess.run(words, cwd=marks.ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_row_lists_whole_files_single_tests_and_the_lab_last() -> None:
    files = [
        marks.File("a_lab.py", "The lab.", True, {"test_it_opens": BOTH, "test_it_boots": BOTH}),
        marks.File("b.py", "", False, {"test_a_door_opens": BOTH, "test_paint": frozenset()}),
    ]
    lines = page.markdown(DOCUMENT, files).splitlines()
    assert "| X-1 | Doors | yes | yes | needs none |" in lines
    assert "| X-2 | Windows | yes | yes | glass |" in lines
    start = lines.index("## X-1: Doors")
    assert lines[start + 2 : start + 4] == [
        "- `b.py`: a door opens",
        "- on the lab host, `a_lab.py`, all of it. The lab.",
    ]


def test_what_only_the_long_run_shows_is_told_apart() -> None:
    some = frozenset({"X-1"})
    file = marks.File("a_lab.py", "", True, {"test_a": BOTH, "test_b": some}, frozenset({"test_a"}))
    lines = page.markdown(DOCUMENT, [file]).splitlines()
    assert "| X-1 | Doors | no | yes | needs none |" in lines
    assert "| X-2 | Windows | no | long | glass |" in lines
    assert "- on the lab host, by `make test-long`, `a_lab.py`: a" in lines


@pytest.mark.parametrize(
    ("marked", "long"), [((), set()), (("a",), set()), (("a", "b"), {"test_it"})]
)
def test_a_function_is_long_when_all_its_parameters_are(
    request: pytest.FixtureRequest, marked: tuple[str, ...], long: set[str]
) -> None:
    items = []
    for parameter in ("a", "b"):
        item = pytest.Function.from_parent(
            request.node.parent,
            name=f"test_it[{parameter}]",
            originalname="test_it",
            callobj=lambda: None,
        )
        if parameter in marked:
            item.add_marker(pytest.mark.long)
        items.append(item)
    assert marks.long_of(items, {"test_it"}) == long


def test_a_function_is_named_once_where_all_its_parameters_show_the_row() -> None:
    some = frozenset({"X-1"})
    file = marks.File("a.py", "", False, {"test_it[a]": some, "test_it[b]": BOTH, "test_x": BOTH})
    assert file.showing("X-1") == ["test_it", "test_x"]
    assert file.all_showing("X-1")
    assert file.showing("X-2") == ["test_it[b]", "test_x"]
    assert not file.all_showing("X-2")


def test_a_row_that_nothing_shows_says_so() -> None:
    lines = page.markdown(DOCUMENT, []).splitlines()
    assert "| X-2 | Windows | nothing yet | nothing yet | glass |" in lines
    assert lines[-1] == "No test shows it yet."


@pytest.mark.parametrize(
    ("shown", "missing"), [(BOTH, ""), (frozenset({"X-1"}), "X-2"), (frozenset(), "X-1, X-2")]
)
def test_a_current_document_with_a_row_that_nothing_shows_fails(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    shown: frozenset[str],
    missing: str,
) -> None:
    (tmp_path / "docs").mkdir()
    monkeypatch.setattr(command, "ROOT", tmp_path)
    monkeypatch.setattr(command, "DOCUMENTS", (DOCUMENT,))
    monkeypatch.setattr(command, "marked", list)
    file = marks.File("a.py", "", False, {"test_it": shown})
    monkeypatch.setattr(command, "collect", lambda _paths: [file])
    for argv in ([], ["--check"]):
        assert command.main(argv) == (1 if missing else 0)
        said = capsys.readouterr().err
        assert said == (f"shown by no test: {missing}; mark one with covers\n" if missing else "")
    assert (tmp_path / "docs/x.md").read_text() == page.markdown(DOCUMENT, [file])


def test_an_unknown_row_is_refused(request: pytest.FixtureRequest) -> None:
    request.node.add_marker(pytest.mark.covers("HOST-4"))
    assert marks.rows_of(request.node) == {"HOST-4"}
    request.node.add_marker(pytest.mark.covers("HOST-99"))
    with pytest.raises(ValueError, match="found HOST-99"):
        marks.rows_of(request.node)


@pytest.mark.parametrize(
    ("last", "found"),
    [
        ("HOST-4", {"test_it": frozenset({"HOST-4"})}),
        (
            "HOST-5",
            {"test_it[a]": frozenset({"HOST-4"}), "test_it[b]": frozenset({"HOST-5"})},
        ),
    ],
)
def test_parameters_count_one_by_one_where_they_show_different_rows(
    request: pytest.FixtureRequest, last: str, found: dict[str, frozenset[str]]
) -> None:
    items = []
    for name, row in (("test_it[a]", "HOST-4"), ("test_it[b]", last)):
        item = pytest.Function.from_parent(
            request.node.parent, name=name, originalname="test_it", callobj=lambda: None
        )
        item.add_marker(pytest.mark.covers(row))
        items.append(item)
    assert marks.by_name(items) == found


def test_a_file_with_marks_is_found() -> None:
    found = marks.marked()
    assert str(marks.ROOT / "tests/unit/plugins/module_utils/network/test_bridge.py") in found
    assert str(marks.ROOT / "tests/unit/reconciler/domain/test_diagram.py") not in found

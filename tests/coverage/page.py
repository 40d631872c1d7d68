"""A document: the table of its rows, and under it the tests of each."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tests.coverage.marks import File
from tests.coverage.rows import Document, Row


def markdown(document: Document, files: Sequence[File]) -> str:
    lines = ["<!-- Written by `python -m tests.coverage` from the marks in the tests. -->"]
    lines += [f"# {document.title}", "", document.intro, ""]
    lines += ["| row | what | without a lab host | on the lab host | not run on hardware |"]
    lines += ["|---|---|---|---|---|"]
    lines += [_summary(row, files) for row in document.rows]
    for row in document.rows:
        lines += ["", f"## {row.id}: {row.title}", "", *_section(row, files)]
    return "\n".join(lines) + "\n"


def unshown(document: Document, files: Iterable[File]) -> list[str]:
    """The rows that no test shows."""
    listed = list(files)
    return [row.id for row in document.rows if not any(file.showing(row.id) for file in listed)]


def _summary(row: Row, files: Iterable[File]) -> str:
    shown = [file for file in files if file.showing(row.id)]
    unit = _cell(row, [file for file in shown if not file.lab])
    lab = _cell(row, [file for file in shown if file.lab])
    if not shown:
        unit = lab = "nothing yet"
    return f"| {row.id} | {row.title} | {unit} | {lab} | {row.hardware or 'needs none'} |"


def _cell(row: Row, shown: Sequence[File]) -> str:
    if not shown:
        return "no"
    return "long" if all(file.only_long(row.id) for file in shown) else "yes"


def _section(row: Row, files: Iterable[File]) -> list[str]:
    shown = [file for file in files if file.showing(row.id)]
    lines = [_line(row, file) for file in sorted(shown, key=lambda file: file.lab)]
    return lines or ["No test shows it yet."]


def _line(row: Row, file: File) -> str:
    names = file.showing(row.id)
    place = "on the lab host, " if file.lab else ""
    if file.only_long(row.id):
        place += "by `make test-long`, "
    if file.all_showing(row.id):
        return f"- {place}`{file.path}`, all of it. {file.about}".rstrip()
    said = "; ".join(name.removeprefix("test_").replace("_", " ") for name in names)
    return f"- {place}`{file.path}`: {said}"

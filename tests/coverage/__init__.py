"""Requirement coverage report, as a pytest plugin: which test shows which row, and its last result.

`--coverage-pages FOLDER` writes a page for each group of rows.yml. Runs on the same folder add up:
`make test` plays the unit tests and the lab tests one after the other. A row that no test shows is
`open` in rows.yml; the gap of a row that is shown in part is its `left`. A row whose lab tests were
skipped, for example because no time was left for them, is `shown, lab skipped`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
PAGES: dict[str, dict[str, Any]] = yaml.safe_load((Path(__file__).parent / "rows.yml").read_text())


class Row(NamedTuple):
    """A requirement, an invariant or a promise."""

    title: str
    # The gap of a row without a test.
    open: str = ""
    # The gap of a row that its tests show in part.
    left: str = ""


ROWS: dict[str, Row] = {
    name: Row(row) if isinstance(row, str) else Row(**row)
    for page in PAGES.values()
    for name, row in page["rows"].items()
}
KNOWN = frozenset(ROWS)
# Rows that are shown on recorded or simulated devices, with the gap that needs hardware.
NOT_ON_HARDWARE = dict(
    re.findall(
        r"^\| ([A-Z]+-?\d+) \| [^|]* \| ([^|]*) \|$",
        (ROOT / "docs" / "hardware.md").read_text(),
        re.MULTILINE,
    )
)
# A file in the folder of the pages; the pages are written from it.
RESULTS = "results.json"
NOT_RUN = "not run"
# The worst result counts for a parametrized function, or a test with its fixtures.
_WORST_FIRST = ("failed", "error", NOT_RUN, "skipped", "passed")

Results = dict[str, dict[str, Any]]


def pytest_addoption(parser: pytest.Parser) -> None:
    text = "write which test shows which requirement"
    parser.addoption("--coverage-pages", type=Path, metavar="FOLDER", help=text)


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Recorder(config), "requirement-coverage")


class Recorder:
    """tests: every collected test with a mark, also those that this run leaves out."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.tests: Results = {}

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        rows = {item.nodeid: rows_of(item) for item in items}
        self.tests = {name: {"rows": of, "result": NOT_RUN} for name, of in rows.items() if of}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call" and report.passed:
            return
        result = "error" if report.failed and report.when != "call" else report.outcome
        test = self.tests.setdefault(report.nodeid, {"rows": [], "result": NOT_RUN})
        earlier = [] if test["result"] == NOT_RUN else [test["result"]]
        test["result"] = worst([*earlier, result])

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """pytest-xdist collects in its workers: each of them has collected everything."""
        for name, rows in getattr(node, "workeroutput", {}).get("rows", {}).items():
            self.tests.setdefault(name, {"result": NOT_RUN})["rows"] = rows

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self) -> None:
        output = getattr(self.config, "workeroutput", {})
        output["rows"] = {name: test["rows"] for name, test in self.tests.items()}

    def pytest_unconfigure(self) -> None:
        folder = self.config.getoption("--coverage-pages", None)
        if folder is not None and not hasattr(self.config, "workeroutput"):
            write(folder, {name: test for name, test in self.tests.items() if test["rows"]})


def rows_of(item: pytest.Item) -> list[str]:
    """The rows that a test names, itself or through its file."""
    rows = {row for mark in item.iter_markers("covers") for row in mark.args}
    if not rows <= KNOWN:
        unknown = ", ".join(sorted(rows - KNOWN))
        raise ValueError(
            f"{item.nodeid}: expected rows of tests/coverage/rows.yml; found {unknown}"
        )
    return sorted(rows)


def write(folder: Path, tests: Results) -> None:
    """Add the tests to those of earlier runs, and write the pages anew."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / RESULTS
    results: Results = json.loads(file.read_text()) if file.exists() else {}
    for name, test in tests.items():
        earlier = results.get(name, test)["result"]
        results[name] = {**test, "result": earlier} if test["result"] == NOT_RUN else test
    file.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
    for name, page in PAGES.items():
        (folder / f"{name}.md").write_text(markdown(page, results))


def markdown(page: dict[str, Any], results: Results) -> str:
    lines = [f"# {page['title']}", "", page["intro"], ""]
    lines += [
        "| row | what | state | without a lab host | on the lab host |",
        "|---|---|---|---|---|",
    ]
    sections: list[str] = []
    for row in page["rows"]:
        places: dict[bool, list[str]] = {False: [], True: []}
        functions: dict[str, list[str]] = {}
        for name, test in results.items():
            if row in test["rows"]:
                places[name.startswith("tests/lab/")].append(test["result"])
                functions.setdefault(name.partition("[")[0], []).append(test["result"])
        title = ROWS[row].title
        shown = state(row, places[False], places[True])
        counts = f"{summary(places[False])} | {summary(places[True])}"
        lines.append(f"| {row} | {title} | {shown} | {counts} |")
        sections += ["", f"## {row}: {title}", ""]
        sections += [f"- {worst(of)}: `{name}`" for name, of in sorted(functions.items())]
    return "\n".join([*lines, *sections]) + "\n"


def state(row: str, elsewhere: list[str], on_lab: list[str]) -> str:
    """Such as "shown, lab skipped; not on hardware: reset of a GPU"."""
    results = [*elsewhere, *on_lab]
    if ROWS[row].open:
        return f"open: {ROWS[row].open}"
    if {"failed", "error"} & set(results):
        return "fails"
    if "passed" not in results:
        return "not run"
    lab = ", lab skipped" if "skipped" in on_lab and "passed" not in on_lab else ""
    left = f"; left: {ROWS[row].left}" if ROWS[row].left else ""
    hardware = f"; not on hardware: {NOT_ON_HARDWARE[row]}" if row in NOT_ON_HARDWARE else ""
    return f"shown{lab}{left}{hardware}"


def worst(results: Iterable[str]) -> str:
    return min(results, key=_WORST_FIRST.index)


def summary(results: list[str]) -> str:
    """Such as "12 passed, 1 not run"."""
    counts = [f"{results.count(end)} {end}" for end in reversed(_WORST_FIRST) if end in results]
    return ", ".join(counts) or "none"

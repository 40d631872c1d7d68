"""Order of the lab tests, and their selection on a slow machine."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from scripts import scenarios
from tests.lab import conftest

FOLDER = Path(conftest.__file__).parent


@pytest.fixture
def items(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The lab tests of `make test`: one test of each file, and the scenario of the day."""
    monkeypatch.setattr(scenarios, "of_the_day", lambda _text, _day: "api_names")
    names = {"test_roles": "test_drift[api_names]"}
    marks: dict[str, list[str]] = {}
    collected: list[Any] = [
        SimpleNamespace(
            path=FOLDER / f"{stem}.py",
            name=names.get(stem, "test"),
            add_marker=lambda mark, stem=stem: marks.setdefault(stem, []).append(mark.name),
        )
        for stem in sorted((*conftest.ALONE, *conftest.STORY))
    ]
    conftest.pytest_collection_modifyitems(collected)
    return [item for item in collected if "long" not in marks[item.path.stem]]


def test_slices_come_before_the_scenario_of_the_day(items: list[Any]) -> None:
    stems = [item.path.stem.removeprefix("test_") for item in items]
    expected = ["slice_host", "two_slices", "upkeep", "roles", "way_back", "whole_machine"]
    assert stems == expected


def test_a_slow_machine_leaves_out_what_has_no_time(
    items: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def begun(seconds_left: float) -> list[str]:
        monkeypatch.setenv("SLICE_TEST_LAB_ENDS", str(time.time() + seconds_left))
        return [item.path.stem for item in items if not _skipped(item)]

    assert len(begun(60)) == len(items)
    assert begun(-1) == []


def _skipped(item: Any) -> bool:
    try:
        conftest.pytest_runtest_setup(item)
    except pytest.skip.Exception:
        return True
    return False

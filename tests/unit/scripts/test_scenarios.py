"""The README's tables of runs: rows from runs, and the short scenario of each day."""

from __future__ import annotations

import datetime
from pathlib import Path

import pytest

from scripts import scenarios

TEXT = scenarios.README.read_text(encoding="utf-8")
DAY = datetime.date(2026, 11, 23)


def test_a_run_is_shown_with_its_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scenarios, "BUILD", tmp_path / "build")
    monkeypatch.setattr(scenarios, "README", tmp_path / "README.md")
    scenarios.README.write_text(
        scenarios.SCENARIOS.render(TEXT, {"racadm": ["2026-01-02", "abc", "90"]})
    )
    scenarios.SCENARIOS.record("slice_network", "42")
    scenarios.RELEASES.record(release := scenarios.RELEASES.rows[0], "3.11")
    assert scenarios.main(["--write"]) == 0
    text = scenarios.README.read_text()
    assert scenarios.RELEASES.played(text)[release][2] == "3.11"
    rows = scenarios.SCENARIOS.played(text)
    assert rows["racadm"] == ["2026-01-02", "abc", "90"]
    day, commit, seconds = rows["slice_network"]
    assert day.startswith("20") and len(commit) >= 7 and seconds == "42"


def test_each_day_has_another_short_scenario() -> None:
    """slice_host, which is played every day, has no day of its own."""
    rows = {name: ["2026-01-02", "abc", "199"] for name in ("api_names", "slice_network")}
    others = {
        "slice_host": ["2026-01-02", "abc", "59"],
        "vfio_binding": ["2026-01-02", "abc", "200"],
    }
    text = scenarios.SCENARIOS.render(TEXT, rows | others)
    days = [DAY + datetime.timedelta(days=number) for number in range(4)]
    chosen = [scenarios.of_the_day(text, day) for day in days]
    assert set(chosen) == set(rows) and chosen[0] != chosen[1]
    assert scenarios.of_the_day(scenarios.SCENARIOS.render(TEXT, {}), DAY) == ""


def test_several_scenarios_of_the_readme_take_turns() -> None:
    days = [
        DAY + datetime.timedelta(days=number) for number in range(len(scenarios.SCENARIOS.rows))
    ]
    assert len({scenarios.of_the_day(TEXT, day) for day in days}) > 1

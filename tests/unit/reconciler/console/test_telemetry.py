"""Telemetry as charts: picture, sentence and table, and hostile values."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any
from xml.etree import ElementTree

import pytest

from reconciler.console import charts
from tests.unit.reconciler.api.stack import NODE, Stack
from tests.unit.reconciler.api.test_launches import activate, launch
from tests.unit.reconciler.console.browser import Browser
from tests.unit.reconciler.console.samples import hour_of_samples

pytestmark = pytest.mark.covers("CTRL-13", "SLICE-11")

Browse = Callable[[str], Browser]
NAN, HUGE = float("nan"), 10**400


def sample(minutes_ago: float, host: dict[str, Any], guest: dict[str, Any] | None = None) -> Any:
    at = datetime.fromtimestamp(time.time() - minutes_ago * 60, UTC).isoformat()
    return {"at": at, "host": host, "guest": guest}


def drawn(*samples: Any, minutes: int = 60) -> dict[str, charts.Chart]:
    answer = {"samples": list(samples)}
    return {chart.title: chart for chart in charts.of_slice(answer, minutes)}


def points(path: str) -> list[float]:
    """Heights of a line's points in percent of the scale."""
    numbers = re.findall(r"[ML]([\d.-]+) ([\d.-]+)", path)
    return [round((charts.HEIGHT - 2 - float(y)) / (charts.HEIGHT - 4) * 100) for _, y in numbers]


def test_counters_become_rates_and_a_restart_a_gap() -> None:
    # 30 s of processor time in a minute on one of two CPUs; then the machine starts again.
    counters = [(20, 100), (19, 130), (18, 160), (17, 5), (16, 125), (3, 200)]
    cpu = drawn(*(sample(ago, {"cpu_s": value, "vcpus": 2}) for ago, value in counters))["CPU"]
    (line,) = cpu.lines
    values = [round(value) for value in line.values if value is not None]
    assert values[0] == 25 and values[-1] == 100
    # The hour is whole: times without a sample are gaps, not zero.
    assert len(line.values) == 30
    assert set(line.values) - {None} <= {25.0, 100.0, *[v for v in line.values if v]}
    assert points(line.path)[0] == 25
    assert "none, 25 % to 100 %" in cpu.summary
    assert {text for _, (text,) in cpu.rows} >= {"none", "25 %"}


def test_sources_are_named_and_gpus_have_a_line_each() -> None:
    gpus = [
        {"index": index, "utilisation_percent": 10 * index, "memory_used_bytes": 1}
        for index in range(8)
    ]
    host = {"sent_bytes": 0, "received_bytes": 0}
    more = {"sent_bytes": 60 * 2048, "received_bytes": 60}
    shown = drawn(sample(2, host, {"gpus": gpus}), sample(1, more, {"gpus": gpus}))
    assert [line.name for line in shown["GPU utilisation"].lines] == [f"GPU {n}" for n in range(8)]
    assert shown["GPU utilisation"].by_guest
    assert [line.name for line in shown["Network"].lines] == ["sent", "received"]
    assert shown["Network"].top == "2 KiB/s"
    assert not shown["Network"].by_guest
    # Without a total there is no share, and without a value no chart.
    assert set(shown) == {"GPU utilisation", "Network"}


@pytest.mark.parametrize("wrong", [NAN, float("inf"), HUGE, -1, "9" * 9, None, True, [1], 2.0**60])
def test_a_value_that_is_no_measurement_leaves_a_gap(wrong: Any) -> None:
    names = ("cpu_s", "sent_bytes", "disk_read_bytes", "vcpus")
    gpu = {"index": 0, "utilisation_percent": wrong, "power_w": wrong, "memory_used_bytes": wrong}
    guest = {"memory_total_bytes": wrong, "memory_available_bytes": 1, "gpus": [gpu]}
    rows = [sample(ago, dict.fromkeys(names, wrong), guest) for ago in (5, 4, 3)]
    assert drawn(*rows) == {}
    good = sample(2, {}, {"gpus": [{"index": 0, "utilisation_percent": 50}]})
    (chart,) = drawn(*rows, good).values()
    assert points(chart.lines[0].path) == [50]


def test_nothing_that_a_guest_says_leaves_the_picture() -> None:
    guest = {"gpus": [{"index": 0, "utilisation_percent": 2**53, "power_w": 2**53}]}
    low = {"gpus": [{"index": 0, "utilisation_percent": 0, "power_w": 0}]}
    shown = drawn(sample(3, {}, low), sample(1, {}, guest))
    for chart in shown.values():
        assert all(0 <= height <= 100 for height in points(chart.lines[0].path))
        assert len(chart.summary) < 100
    # Samples out of order, at the same time, of the future and of last week.
    times = (5, 9, 9, -100, 10_080)
    assert len(drawn(*(sample(ago, {}, low) for ago in times))) == 2
    many = [{"index": number, "utilisation_percent": 1} for number in range(1000)]
    (chart,) = drawn(sample(1, {}, {"gpus": many})).values()
    assert len(chart.lines) == 16


@pytest.fixture
def measured(selling: Stack) -> str:
    """An active slice with an hour of samples."""
    mine: str = launch(selling, hostname="measured").json()["id"]
    activate(selling, mine)
    hour_of_samples(selling, mine)
    return mine


def test_charts_on_the_pages(selling: Stack, measured: str, browse: Browse) -> None:
    page = f"/console/projects/demo/allocations/{measured}"
    text = browse("member").get(page).text
    pictures = re.findall(r"<svg viewBox.*?</svg>", text, re.S)
    assert len(pictures) == 4
    for picture in pictures:
        svg = ElementTree.fromstring(picture)  # noqa: S314  # our own page
        assert svg.get("role") == "img"
        assert "to" in str(svg.get("aria-label"))
        assert all("NaN" not in str(path.get("d")) for path in svg)
    assert "CPU. 25 %, 25 % to 25 %" in text
    assert text.count("by the guest") == 3
    assert text.count("in numbers</summary>") == 4
    # A day has the same samples in wider steps; another period is the hour.
    assert "GPU temperature" in browse("member").get(f"{page}?minutes=1440").text
    assert browse("member").get(f"{page}?minutes=999999").status_code == 200
    node = browse("admin").get(f"/console/nodes/{NODE}")
    assert "Last hour of measured" in node.text
    assert "CPU of measured. 25 %" in node.text
    # The slots refresh themselves every few seconds, without reading samples.
    polled = browse("admin").get(
        f"/console/nodes/{NODE}", headers={"HX-Request": "true", "HX-Target": "div#live"}
    )
    assert "Last hour" not in polled.text


def test_a_slice_without_samples(selling: Stack, browse: Browse) -> None:
    mine = launch(selling).json()["id"]
    page = f"/console/projects/demo/allocations/{mine}"
    assert "Telemetry" not in browse("member").get(page).text
    activate(selling, mine)
    assert "No sample in this period" in browse("member").get(page).text

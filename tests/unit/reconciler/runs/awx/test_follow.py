"""A job that is under way: its progress, its end, and everything that keeps us from seeing them."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest

from reconciler.runs import collect
from reconciler.runs.awx.job import Feed
from reconciler.runs.paths import RunPaths
from tests.standin.controller import TOKEN, Controller
from tests.unit.reconciler.runs.awx.conftest import RESULT, Play, events, steps

pytestmark = pytest.mark.covers("CTRL-9")

JOB, EVENTS, CANCEL = "GET /jobs/1/", "GET /jobs/1/job_events/", "POST /jobs/1/cancel/"
ALL = [("started", "One"), ("ok", "One"), ("started", "Two"), ("ok", "Two")]
LINES = "".join(f"line {number}\n" for number in range(1, 7))


def verdict_of(play: Play, **pace: float) -> dict[str, Any]:
    verdict = play(**pace)
    assert verdict is not None
    return verdict


def test_progress_output_and_result(awx: Controller, prepared: RunPaths, play: Play) -> None:
    verdict = verdict_of(play)
    assert (verdict["status"], verdict["result"], verdict["touched"]) == (
        "successful",
        RESULT,
        True,
    )
    assert steps(prepared) == ALL
    assert collect.output(prepared.root) == LINES
    for path in prepared.root.rglob("*"):
        assert not path.is_file() or TOKEN not in path.read_text()


@pytest.mark.parametrize(
    "faults",
    [
        {"page_size": 2},
        {"twice": True},
        {"late": [2, 4]},
        {"late": [5, 6]},
        {"drip_s": 0.02},
        {"drop": {JOB: 3, EVENTS: 3}},
        {"cut": {JOB: 2, EVENTS: 2}},
        {"status": {JOB: [503, 3], EVENTS: [500, 2]}},
        {"status": {JOB: [401, 2], EVENTS: [404, 2]}},
    ],
    ids=str,
)
def test_nothing_that_breaks_on_the_way_changes_what_is_seen(
    awx: Controller, prepared: RunPaths, play: Play, faults: dict[str, Any]
) -> None:
    awx.change(**faults)
    assert verdict_of(play, gap=5)["result"] == RESULT
    assert steps(prepared) == ALL
    assert collect.output(prepared.root) == LINES


def test_an_event_that_never_comes_is_not_waited_for_for_ever(
    awx: Controller, prepared: RunPaths, play: Play
) -> None:
    awx.change(never=[3], steps=60)
    seen: list[int] = []

    def stop_requested() -> bool:
        seen.append(len(steps(prepared)))
        return False

    assert play(stop_requested) is not None
    assert 3 in seen, "while the job was running still"
    assert steps(prepared) == [ALL[0], *ALL[2:]]


UNREACHABLE = [
    {
        "event": "runner_on_unreachable",
        "event_data": {"task": "One", "res": {"msg": "Connection refused"}},
    },
    {"event": "playbook_on_stats", "event_data": {"dark": {"node-1": 1}}},
]


@pytest.mark.parametrize(("counters", "touched"), [((1, 2), False), ((1, 3), True), ((1,), True)])
def test_only_a_host_that_was_surely_left_alone_counts_as_such(
    awx: Controller, play: Play, counters: tuple[int, ...], touched: bool
) -> None:
    host_events = [{**UNREACHABLE[at], "counter": number} for at, number in enumerate(counters)]
    awx.begin(events=host_events, ends="failed")
    verdict = verdict_of(play)
    assert (verdict["unreachable"], verdict["touched"]) == (True, touched)
    assert verdict["problem"] == "unreachable: Connection refused"


ERROR = {"code": "stale_fence", "expected": "a", "found": "b", "remedy": "c"}
REFUSED = {**RESULT, "ok": False, "step": "Lease", "error": ERROR}


@pytest.mark.parametrize(
    ("ends", "artifacts", "status", "problem"),
    [
        ("failed", {"slice_result": REFUSED}, "failed", ""),
        ("failed", {}, "failed", "result_missing: Job terminated due to timeout"),
        ("successful", {}, "failed", "result_missing: Job terminated due to timeout"),
        ("successful", {"slice_result": REFUSED}, "failed", "result_contradicts_run"),
        ("successful", {"slice_result": {"ok": True}}, "failed", "result_invalid"),
        ("canceled", {"slice_result": RESULT}, "canceled", "Job terminated"),
        ("error", {"slice_result": RESULT}, "lost", "awx_error: Job terminated due to timeout"),
    ],
)
def test_how_a_job_ended(
    awx: Controller, play: Play, ends: str, artifacts: dict[str, Any], status: str, problem: str
) -> None:
    awx.change(ends=ends, artifacts=artifacts, explanation="Job terminated due to timeout")
    verdict = verdict_of(play)
    assert verdict["status"] == status
    assert problem in verdict.get("problem", ""), verdict
    assert verdict["result"] == (REFUSED if problem == "" else None)


def test_canceling_is_repeated_until_the_job_has_ended(
    awx: Controller, prepared: RunPaths, play: Play
) -> None:
    awx.change(steps=1000, drop={CANCEL: 2}, status={CANCEL: [500, 1]})
    collect_later = threading.Timer(0.3, collect.cancel, (prepared.root,))
    collect_later.start()
    verdict = verdict_of(play)
    collect_later.join()
    assert (verdict["status"], verdict["result"]) == ("canceled", None)


def test_a_cancel_that_comes_too_late_changes_nothing(
    awx: Controller, prepared: RunPaths, play: Play
) -> None:
    awx.change(steps=1, status={CANCEL: [405, 9]})
    play(lambda: awx.jobs() != [])
    collect.cancel(prepared.root)
    assert verdict_of(play)["result"] == RESULT


def test_a_job_past_its_deadline_is_ended(awx: Controller, prepared: RunPaths, play: Play) -> None:
    awx.change(steps=1000)
    play(lambda: awx.jobs() != [])
    manifest = prepared.manifest.read_text()
    prepared.manifest.write_text(manifest.replace('"deadline_s": 60', '"deadline_s": 0'))
    verdict = verdict_of(play)
    assert (verdict["status"], verdict["result"]) == ("timeout", None)


def test_a_lost_connection_is_unknown_and_not_an_end(
    awx: Controller, prepared: RunPaths, play: Play
) -> None:
    awx.change(steps=1000)
    play(lambda: awx.jobs() != [])
    awx.change(drop={JOB: 10_000})
    until = time.monotonic() + 0.5
    assert play(lambda: time.monotonic() > until) is None
    awx.change(drop={}, steps=0)
    assert verdict_of(play)["result"] == RESULT


def test_nobody_waits_for_ever_past_the_deadline(
    awx: Controller, prepared: RunPaths, play: Play
) -> None:
    awx.change(steps=1000)
    play(lambda: awx.jobs() != [])
    manifest = prepared.manifest.read_text()
    prepared.manifest.write_text(manifest.replace('"deadline_s": 60', '"deadline_s": 0'))
    awx.change(drop={JOB: 10_000})
    verdict = verdict_of(play, forsaken=0)
    assert verdict["status"] == "lost"
    assert verdict["problem"].startswith("awx_silent: ")


@pytest.mark.parametrize("torn", ["", '{"event": "st', "[" * 100_000], ids=["", "torn", "deep"])
def test_progress_goes_on_where_a_killed_process_left_it(tmp_path: Path, torn: str) -> None:
    paths = RunPaths(tmp_path)
    first = Feed(paths, gap_s=1)
    first.take(events("One", "Two")[:4], last=False)
    with paths.progress.open("a") as handle:
        handle.write(torn)
    again = Feed(paths, gap_s=1)
    again.take(events("One", "Two"), last=True)
    assert steps(paths) == ALL
    assert collect.output(tmp_path) == LINES

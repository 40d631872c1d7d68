"""A job under way: progress, end, and every failure to read them."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from reconciler.runs import collect
from reconciler.runs.awx import job as followed
from reconciler.runs.awx.client import Client
from reconciler.runs.awx.job import Feed
from reconciler.runs.paths import RunPaths
from tests.standin.awx import REAPED_AT_START, REAPED_BY_PEER, REAPED_FROM_QUEUE
from tests.standin.controller import TOKEN, Controller
from tests.unit.reconciler.runs.awx.conftest import RESULT, Play, events, steps

pytestmark = pytest.mark.covers("CTRL-9")

JOB, EVENTS, CANCEL = "GET /jobs/1/", "GET /jobs/1/job_events/", "POST /jobs/1/cancel/"
ALL = [("started", "One"), ("ok", "One"), ("started", "Two"), ("ok", "Two")]
# The last is no sentence of AWX 24.6.1: a later AWX may use other words.
REAPED = [REAPED_AT_START, REAPED_FROM_QUEUE, REAPED_BY_PEER, "The node is gone."]
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


@pytest.mark.covers("I12")
def test_answers_of_a_host_that_fill_each_event_are_read(
    awx: Controller, prepared: RunPaths, play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A page that is too large is silence, and a run that AWX is silent about has no end for a day.
    Sizes are a hundredth of the real sizes.
    """
    monkeypatch.setattr(Client, "LARGEST", Client.LARGEST // 100)
    tasks = [f"Task {number}" for number in range(60)]
    answers = events(*tasks)
    for event in answers:
        if event["event"] == "runner_on_ok":
            event["event_data"]["res"]["filled"] = "x" * 7_000
    awx.begin(artifacts={"slice_result": RESULT}, events=answers, steps=1)
    assert verdict_of(play, forsaken=-50)["result"] == RESULT
    assert len(steps(prepared)) == 2 * len(tasks)


def test_a_job_whose_events_cannot_be_read_is_canceled_as_asked(
    awx: Controller, prepared: RunPaths, play: Play
) -> None:
    awx.change(steps=1000, status={EVENTS: [404, 10**6]})
    play(lambda: any(job["status"] == "running" for job in awx.jobs()))
    collect.cancel(prepared.root)

    def readable_then() -> bool:
        if [job["status"] for job in awx.jobs()] == ["canceled"]:
            awx.change(status={})
        return False

    verdict = play(readable_then, forsaken=0)
    assert verdict["status"] == "canceled", verdict


def test_events_without_an_end_keep_no_job_from_being_canceled(
    awx: Controller, prepared: RunPaths, play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(followed, "_PAGES", 3)
    get = Client.get

    def endless(client: Client, path: str, **query: Any) -> dict[str, Any]:
        if not path.endswith("/job_events/"):
            return get(client, path, **query)
        collect.cancel(prepared.root)
        return {"results": [{"counter": query["counter__gt"] + 1, "event": "verbose"}]}

    monkeypatch.setattr(Client, "get", endless)
    awx.change(steps=1000)
    assert verdict_of(play)["status"] in ("canceled", "lost")
    assert CANCEL in awx.record()["requests"]


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
        ("failed", {}, "timeout", "Job terminated due to timeout"),
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


@pytest.mark.parametrize("unacknowledged", [False, True])
@pytest.mark.parametrize("count", [0, 1, 5])
@pytest.mark.parametrize("explanation", REAPED)
def test_a_job_that_awx_lost_is_lost(
    awx: Controller,
    prepared: RunPaths,
    play: Play,
    explanation: str,
    count: int,
    unacknowledged: bool,
) -> None:
    """AWX says `failed`, or `canceled` when no dispatcher hears the request. Neither is an end."""
    faults = {"steps": 1000, "deaf": True} if unacknowledged else {"lost": explanation}
    awx.begin(events=events("One", "Two")[:count], artifacts={"slice_result": RESULT}, **faults)
    if unacknowledged:
        play(lambda: any(job["status"] == "running" for job in awx.jobs()))
        collect.cancel(prepared.root)
    verdict = verdict_of(play)
    assert verdict["status"] == "lost", verdict
    assert verdict["result"] is None
    reason = "awx_canceled: " if unacknowledged else f"awx_failed: {explanation}"
    assert verdict["problem"].startswith(reason)


def test_a_job_whose_events_are_saved_late_is_not_lost(awx: Controller, play: Play) -> None:
    awx.begin(events=events("One", "Two")[:-1], late=[2, 3], ends="failed")
    verdict = verdict_of(play)
    assert (verdict["status"], verdict["problem"]) == ("failed", "result_missing")


def test_a_failed_job_with_an_event_missing_for_ever_is_lost(awx: Controller, play: Play) -> None:
    """It cannot be told from a job that AWX lost."""
    awx.begin(events=events("One", "Two"), never=[3], ends="failed")
    assert verdict_of(play)["status"] == "lost"


def test_a_result_document_shows_the_end(awx: Controller, play: Play) -> None:
    artifacts = {"slice_result": REFUSED}
    awx.begin(events=events("One", "Two"), never=[3], ends="failed", artifacts=artifacts)
    verdict = verdict_of(play)
    assert (verdict["status"], verdict["result"]) == ("failed", REFUSED)


MESSAGES = [
    {"event": "verbose", "counter": 1, "stdout": "Identity added: /runner/artifacts/1/ssh_key"},
    {"event": "verbose", "counter": 2, "stdout": "Error: initializing source: no such image"},
]
DOCUMENT = {"event": "verbose", "counter": 3, "stdout": "CUSTOM STATS: ***\n\tRUN: { 'ok': false }"}
TRACEBACK = "Traceback (most recent call last):\n  File …\nConnectionRefusedError: [Errno 111]\n"


@pytest.mark.parametrize(
    ("faults", "problem"),
    [
        (
            {"ends": "error", "traceback": TRACEBACK, "unit": None},
            "awx_error: ConnectionRefusedError: [Errno 111]",
        ),
        ({"ends": "failed", "events": MESSAGES}, "awx_failed: Error: initializing source: no such"),
        ({"ends": "failed", "events": [*MESSAGES, DOCUMENT]}, "awx_failed: Error: initializing"),
    ],
)
def test_what_awx_could_not_begin_was_not_begun(
    awx: Controller, play: Play, faults: dict[str, Any], problem: str
) -> None:
    awx.begin(**faults)
    verdict = verdict_of(play)
    assert (verdict["status"], verdict["touched"], verdict["begun"]) == ("failed", False, False)
    assert verdict["problem"].startswith(problem)


def test_a_job_that_is_canceled_in_the_queue_was_not_begun(
    awx: Controller, prepared: RunPaths, play: Play
) -> None:
    awx.begin(queued=True)
    play(lambda: awx.jobs() != [])
    collect.cancel(prepared.root)
    verdict = verdict_of(play)
    assert (verdict["status"], verdict["begun"]) == ("canceled", False)


@pytest.mark.parametrize(
    "faults",
    [
        # The work was handed over, so that its container may be there.
        {"ends": "error", "traceback": TRACEBACK},
        {"ends": "error", "traceback": TRACEBACK, "unit": None, "events": MESSAGES},
        {"ends": "error", "events": events("One")},
    ],
)
def test_an_error_after_the_beginning_is_lost(
    awx: Controller, play: Play, faults: dict[str, Any]
) -> None:
    awx.begin(**faults)
    verdict = verdict_of(play)
    assert verdict["status"] == "lost"
    assert "begun" not in verdict


@pytest.mark.parametrize(
    "faults",
    [
        {"events": events("One")[:2]},
        {"events": MESSAGES, "explanation": "Task was canceled due to receiving a shutdown signal"},
        {"events": [{**MESSAGES[1], "counter": 2}]},
    ],
)
def test_a_failure_that_may_have_reached_the_host_has_touched_it(
    awx: Controller, play: Play, faults: dict[str, Any]
) -> None:
    awx.begin(ends="failed", **faults)
    verdict = verdict_of(play)
    assert (verdict["status"], verdict["touched"]) == ("failed", True)


HOSTILE = "\x1b[1;31mred\x1b[0m\r\n\x1b]0;title\x07\x1b\x1b[0m[2Jclear\x9b2J\rback\x1b]8;;http://x"


def test_output_is_plain_text(awx: Controller, prepared: RunPaths, play: Play) -> None:
    """Colours, line ends of a terminal, and control sequences that a host may print."""
    awx.begin(
        artifacts={"slice_result": RESULT}, events=[{**events()[0], "stdout": HOSTILE}, events()[1]]
    )
    verdict_of(play)
    assert collect.output(prepared.root) == "red\n[2Jclear2Jback]8;;http://x\nline 2\n"


def test_canceling_is_repeated_until_the_job_has_ended(
    awx: Controller, prepared: RunPaths, play: Play
) -> None:
    awx.change(steps=1000, drop={CANCEL: 2}, status={CANCEL: [500, 1]})
    collect_later = threading.Timer(0.3, collect.cancel, (prepared.root,))
    collect_later.start()
    verdict = verdict_of(play)
    collect_later.join()
    assert (verdict["status"], verdict["result"]) == ("canceled", None)


# The last is the end of the job after ours.
STRANGE = [
    None,
    {"status": "ok"},
    {"id": 1, "status": "canceled", "limit": None},
    {"id": 2, "status": "canceled", "limit": "node-2", "event_processing_finished": True},
    # AWX was restored from a backup, and has given our job's number to another.
    {"id": 1, "status": "running", "limit": "node-2", "extra_vars": "slice_run: {id: run-2}"},
    {"id": 1, "status": "failed", "limit": "all", "name": "a job of the site's", "extra_vars": ""},
    {"id": 1, "status": ["running"], "limit": "node-1"},
]


OURS = {"id": 1, "limit": "node-1", "event_processing_finished": True}


@pytest.mark.parametrize(
    "strange",
    [
        *STRANGE,
        {**OURS, "status": "successful", "elapsed": "soon"},
        {**OURS, "status": "successful", "elapsed": 10**400},
    ],
    ids=lambda document: str(document)[:80],
)
def test_an_answer_without_our_job_neither_ends_nor_cancels_it(
    awx: Controller, prepared: RunPaths, play: Play, strange: object
) -> None:
    """An empty answer, or a proxy's, does not show that the template was changed."""
    awx.change(strange={JOB: [strange]})
    assert verdict_of(play)["result"] == RESULT
    assert not prepared.cancel.exists()
    assert CANCEL not in awx.record()["requests"]


@pytest.mark.parametrize("strange", STRANGE, ids=str)
def test_an_answer_without_our_job_excuses_no_refusal_to_cancel_it(
    awx: Controller,
    prepared: RunPaths,
    play: Play,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    strange: object,
) -> None:
    awx.change(steps=1000, status={CANCEL: [403, 1]})
    play(lambda: awx.jobs() != [])
    collect.cancel(prepared.root)
    post = Client.post

    def then_strange(client: Client, path: str, document: dict[str, Any]) -> dict[str, Any]:
        awx.change(strange={JOB: [strange]})
        return post(client, path, document)

    monkeypatch.setattr(Client, "post", then_strange)
    assert verdict_of(play)["status"] == "canceled"
    assert "awx_silent" in capfd.readouterr().err


def test_a_job_for_another_host_is_canceled(
    awx: Controller, prepared: RunPaths, play: Play
) -> None:
    awx.change(steps=1000)
    play(lambda: any(job["status"] == "running" for job in awx.jobs()))
    awx.change(strange={JOB: [{"id": 1, "status": "running", "limit": "node-2"}]})
    assert verdict_of(play)["status"] == "canceled"
    assert prepared.cancel.exists()


def test_a_job_for_another_host_that_ends_before_it_is_canceled_is_no_success(
    awx: Controller, play: Play
) -> None:
    awx.change(
        steps=1,
        status={CANCEL: [405, 9]},
        strange={JOB: [{"id": 1, "status": "running", "limit": "node-2"}]},
    )
    verdict = verdict_of(play)
    assert (verdict["status"], verdict["result"]) == ("failed", None)
    assert verdict["problem"].startswith("awx_job_differs: ")
    assert verdict["touched"]


def test_a_cancel_that_comes_too_late_changes_nothing(
    awx: Controller, prepared: RunPaths, play: Play
) -> None:
    awx.change(steps=1, status={CANCEL: [405, 9]})
    play(lambda: awx.jobs() != [])
    collect.cancel(prepared.root)
    assert verdict_of(play)["result"] == RESULT


@pytest.mark.parametrize("privileged", [False, True])
def test_a_refusal_to_cancel_an_ended_job_is_quiet(
    awx: Controller,
    prepared: RunPaths,
    play: Play,
    capfd: pytest.CaptureFixture[str],
    privileged: bool,
) -> None:
    """The job ends between two requests, so that AWX refuses with 403, to a superuser with 405."""
    awx.change(steps=2, ends_on_cancel=True, privileged=privileged)
    play(lambda: awx.jobs() != [])
    collect.cancel(prepared.root)
    assert verdict_of(play)["result"] == RESULT
    assert "POST /jobs/1/cancel/" in awx.record()["requests"]
    assert capfd.readouterr().err == ""


def test_a_refusal_to_cancel_a_job_that_goes_on_is_logged(
    awx: Controller, prepared: RunPaths, play: Play, capfd: pytest.CaptureFixture[str]
) -> None:
    awx.change(steps=1000, status={CANCEL: [403, 1]})
    play(lambda: awx.jobs() != [])
    collect.cancel(prepared.root)
    assert verdict_of(play)["status"] == "canceled"
    assert "awx_forbidden" in capfd.readouterr().err


def test_a_job_past_its_deadline_is_ended(awx: Controller, prepared: RunPaths, play: Play) -> None:
    awx.change(steps=1000)
    play(lambda: awx.jobs() != [])
    manifest = prepared.manifest.read_text()
    prepared.manifest.write_text(manifest.replace('"deadline_s": 60', '"deadline_s": 0'))
    verdict = verdict_of(play)
    assert (verdict["status"], verdict["result"]) == ("timeout", None)


def test_time_in_the_queue_of_awx_is_no_time_of_the_run(
    awx: Controller, prepared: RunPaths, play: Play
) -> None:
    manifest = prepared.manifest.read_text()
    prepared.manifest.write_text(manifest.replace('"deadline_s": 60', '"deadline_s": 1'))
    awx.change(queued=True, queue_s=3600)
    until = time.monotonic() + 2.5
    assert play(lambda: time.monotonic() > until) is None
    assert "POST /jobs/1/cancel/" not in awx.record()["requests"]
    assert collect.queued_limit_s(prepared.root) == 1
    # A later process knows the time in the queue from AWX, by the clock of AWX.
    awx.change(queued=False, steps=5)
    assert verdict_of(play)["result"] == RESULT
    os.utime(prepared.queued, (0.0, 0.0))
    assert collect.queued_limit_s(prepared.root) is None


def test_a_later_process_leaves_out_the_time_before_awx_had_the_job(
    awx: Controller, prepared: RunPaths, play: Play
) -> None:
    """AWX does not count the time until it answered the launch, and its clock may be another."""
    manifest = prepared.manifest.read_text()
    prepared.manifest.write_text(manifest.replace('"deadline_s": 60', '"deadline_s": 2'))
    awx.change(queued=True)
    until = time.monotonic() + 2.5
    assert play(lambda: time.monotonic() > until) is None
    awx.change(queued=False, steps=5)
    assert verdict_of(play)["result"] == RESULT


def test_the_time_in_the_queue_of_awx_is_limited(
    awx: Controller, prepared: RunPaths, play: Play
) -> None:
    manifest = prepared.manifest.read_text()
    prepared.manifest.write_text(manifest.replace('"deadline_s": 60', '"deadline_s": 0'))
    awx.change(queued=True)
    verdict = verdict_of(play, queue=0.5)
    assert (verdict["status"], verdict["begun"]) == ("timeout", False)


@pytest.mark.parametrize("created", [None, "yesterday", 7, "2026-11-21T10:00:00"])
def test_a_queue_of_unknown_length_extends_no_deadline(created: object) -> None:
    assert followed._queued_s({"created": created, "started": "2026-11-21T11:00:00Z"}) == 0.0


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

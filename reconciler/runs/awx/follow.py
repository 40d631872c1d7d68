"""Following a job of AWX to its end. No answer means unknown, so AWX is polled without limit.

A person may cancel the job in AWX; that ends the run as well. Here the job is only read.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from reconciler.runs.awx.client import PAGE_SIZE, AwxAccess, Client, results
from reconciler.runs.awx.request import JobRecord
from reconciler.runs.awx.start import Leaving, NotStarted, Pace, Poll, Starter
from reconciler.runs.events import Recorder, judge
from reconciler.runs.paths import RunPaths
from reconciler.runs.scrub import scrub
from reconciler.runs.spec import RunError

_OVER = frozenset({"successful", "failed", "error", "canceled"})
_LONGEST_REASON = 500


def play(
    paths: RunPaths,
    manifest: Mapping[str, Any],
    stop_requested: Callable[[], bool],
    pace: Pace | None = None,
) -> dict[str, Any] | None:
    """The verdict on the run; None when this process was asked to stop and the job goes on."""
    pace = pace or Pace()
    record = JobRecord.load(paths)
    if record is None:
        raise FileNotFoundError(paths.root / "awx.json")
    deadline = record.requested_at + manifest["deadline_s"]
    poll = Poll(paths, stop_requested, pace)
    with Client(AwxAccess.of(manifest["awx"])) as client:
        try:
            Starter(paths, client, poll, pace=pace, deadline=deadline).ensure(record)
            return Follower(
                paths,
                client,
                poll,
                record,
                pace=pace,
                deadline=deadline,
                limit=manifest["node_id"],
            ).follow()
        except NotStarted as reason:
            return {
                "status": reason.status,
                "rc": None,
                "problem": reason.problem,
                "touched": False,
            }
        except Leaving:
            return None


class Follower:
    """Polls an existing job until its end. limit: the only host that the job may act on."""

    def __init__(
        self,
        paths: RunPaths,
        client: Client,
        poll: Poll,
        record: JobRecord,
        *,
        pace: Pace,
        deadline: float,
        limit: str,
    ) -> None:
        self._paths = paths
        self._client = client
        self._poll = poll
        self._record = record
        self._pace = pace
        self._deadline = deadline
        self._limit = limit
        self._path = f"/jobs/{record.job}/"
        self._feed = Feed(paths, pace.gap)
        self._cancel_sent: float | None = None
        self._ended: float | None = None

    def follow(self) -> dict[str, Any]:
        while True:
            try:
                verdict = self._look()
                self._poll.answered()
            except RunError as error:
                # Includes refusals: the token may have been withdrawn while the job goes on.
                if time.time() > self._deadline + self._pace.forsaken:
                    return _lost(f"awx_silent: {error.found}")
                self._poll.silent(error)
                continue
            if verdict:
                return verdict
            self._poll.rest()

    def _look(self) -> dict[str, Any] | None:
        job = self._client.get(self._path)
        if job.get("limit") != self._limit:
            # The template was changed during the launch, so the job differs from the request.
            self._paths.cancel.touch(mode=0o600)
        over = job.get("status") in _OVER
        last = over and self._all_saved(job)
        self._read(last=last)
        if last:
            return self._verdict(job)
        if not over:
            self._cancel_if_due()
        return None

    def _all_saved(self, job: dict[str, Any]) -> bool:
        self._ended = self._ended or time.monotonic()
        waited = time.monotonic() - self._ended > self._pace.saving
        return waited or job.get("event_processing_finished") is True

    def _read(self, *, last: bool) -> None:
        since, more = self._feed.counter, True
        while more:
            page = results(
                self._client.get(
                    f"{self._path}job_events/",
                    counter__gt=since,
                    order_by="counter",
                    page_size=PAGE_SIZE,
                )
            )
            numbers = [n for event in page if isinstance(n := event.get("counter"), int)]
            more = bool(numbers) and max(numbers) > since
            since = max([since, *numbers])
            self._feed.take(page, last=False)
        self._feed.take([], last=last)

    def _cancel_if_due(self) -> None:
        late = time.time() > self._deadline
        if not (late or self._poll.canceled):
            return
        now = time.monotonic()
        if self._cancel_sent is not None and now - self._cancel_sent < self._pace.again:
            return
        if late and not self._poll.canceled and not self._record.timed_out:
            self._record.timed_out = True
            self._record.save(self._paths)
        self._cancel_sent = now
        try:
            self._client.post(f"{self._path}cancel/", {})
        except RunError as refusal:
            # 405: the job has ended meanwhile, which the next request will show.
            if not refusal.found.startswith("HTTP 405"):
                raise

    def _verdict(self, job: dict[str, Any]) -> dict[str, Any]:
        recorder = self._feed.recorder
        artifacts = job.get("artifacts")
        if isinstance(artifacts, dict) and "slice_result" in artifacts:
            recorder.artifacts = artifacts
        reason = " ".join(scrub(str(job.get("job_explanation") or "")).split())[:_LONGEST_REASON]
        if job["status"] == "error":
            # AWX lost the job or could not begin it, so it does not know the effect on the host.
            return _lost(f"awx_error: {reason}")
        status = str(job["status"])
        if status == "canceled" and self._record.timed_out:
            status = "timeout"
        elapsed = job.get("elapsed")
        verdict = judge(recorder, status, None, float(elapsed) if elapsed else 0.0)
        # A missing event may have been a module that ran on the host.
        if self._feed.missing or not recorder.over:
            verdict["touched"] = True
        if reason and not verdict["result"]:
            verdict["problem"] = ": ".join(filter(None, (verdict.get("problem"), reason)))
        return verdict | {"started_at": str(job.get("started") or datetime.now(UTC).isoformat())}


class Feed:
    """The events of a job, in order and once, as the run's progress and output.

    AWX saves events with several processes: a later event may appear before an earlier event, and
    an event may never appear. Each missing event is waited for, but not without limit. The feed
    always begins with the job's first event and does not repeat progress that is already written.
    """

    def __init__(self, paths: RunPaths, gap_s: float) -> None:
        self.recorder = Recorder(paths.progress, written=_complete_lines(paths.progress))
        self.missing = 0
        # Number of the last recorded event; the next request begins after it.
        self.counter = 0
        self._gap_s = gap_s
        self._gap_since: float | None = None
        self._early: dict[int, dict[str, Any]] = {}
        paths.output.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        paths.output.write_text("")
        self._output = paths.output

    def take(self, events: Iterable[dict[str, Any]], *, last: bool) -> None:
        """Record events in order. last: no more events will come, so gaps are not waited for."""
        for event in events:
            number = event.get("counter")
            if isinstance(number, int) and number > self.counter:
                self._early[number] = event
        while self._early:
            number = min(self._early)
            if number > self.counter + 1 and not last and self._wait():
                return
            self.missing += number - self.counter - 1
            self._gap_since = None
            self._record(self._early.pop(number))
            self.counter = number

    def _wait(self) -> bool:
        now = time.monotonic()
        self._gap_since = now if self._gap_since is None else self._gap_since
        return now - self._gap_since < self._gap_s

    def _record(self, event: dict[str, Any]) -> None:
        self.recorder(event)
        if text := event.get("stdout"):
            with self._output.open("a", encoding="utf-8", errors="replace") as handle:
                handle.write(f"{text}\n")


def _complete_lines(progress: Path) -> int:
    """The number of complete lines; a fragment left by a crash gets a line end."""
    try:
        text = progress.read_bytes()
    except FileNotFoundError:
        return 0
    if text and not text.endswith(b"\n"):
        with progress.open("ab") as handle:
            handle.write(b"\n")
    return sum(1 for line in text.splitlines() if _is_document(line))


def _is_document(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def _lost(problem: str) -> dict[str, Any]:
    return {"status": "lost", "rc": None, "problem": problem, "result": None}

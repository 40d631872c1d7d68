"""Follow a job of AWX to its end. No answer means unknown: AWX is asked again, for however long.

What a person does to the job in AWX is the end of the run as well; here it is only read.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any

from reconciler.runs.awx.access import AwxAccess
from reconciler.runs.awx.client import PAGE_SIZE, Client, results
from reconciler.runs.awx.feed import Feed
from reconciler.runs.awx.record import Record, load
from reconciler.runs.awx.rhythm import Leaving, Pace, Rhythm
from reconciler.runs.awx.start import NotStarted, Starter
from reconciler.runs.errors import RunError
from reconciler.runs.events import judge
from reconciler.runs.paths import RunPaths
from reconciler.runs.scrub import scrub

_OVER = frozenset({"successful", "failed", "error", "canceled"})
_LONGEST_REASON = 500


def play(
    paths: RunPaths, manifest: Mapping[str, Any], told: Callable[[], bool], pace: Pace | None = None
) -> dict[str, Any] | None:
    """The verdict on the run; None when we were told to go and its job goes on."""
    pace = pace or Pace()
    record = load(paths)
    if record is None:
        raise FileNotFoundError(paths.root / "awx.json")
    deadline = record.requested_at + manifest["deadline_s"]
    rhythm = Rhythm(paths, told, pace)
    with Client(AwxAccess.of(manifest["awx"])) as client:
        try:
            Starter(paths, client, rhythm, pace=pace, deadline=deadline).ensure(record)
            return Follower(
                paths,
                client,
                rhythm,
                record,
                pace=pace,
                deadline=deadline,
                limit=manifest["node_id"],
            ).follow()
        except NotStarted as nothing:
            return {
                "status": nothing.status,
                "rc": None,
                "problem": nothing.problem,
                "touched": False,
            }
        except Leaving:
            return None


class Follower:
    """One job that exists, from here to its end. limit: the one host that it is for."""

    def __init__(
        self,
        paths: RunPaths,
        client: Client,
        rhythm: Rhythm,
        record: Record,
        *,
        pace: Pace,
        deadline: float,
        limit: str,
    ) -> None:
        self._paths = paths
        self._client = client
        self._rhythm = rhythm
        self._record = record
        self._pace = pace
        self._deadline = deadline
        self._limit = limit
        self._path = f"/jobs/{record.job}/"
        self._feed = Feed(paths, pace.gap)
        self._asked: float | None = None
        self._ended: float | None = None

    def follow(self) -> dict[str, Any]:
        while True:
            try:
                verdict = self._look()
                self._rhythm.answered()
            except RunError as error:
                # Also a refusal: the token may have been withdrawn, the job goes on all the same.
                if time.time() > self._deadline + self._pace.forsaken:
                    return _lost(f"awx_silent: {error.found}")
                self._rhythm.silent(error)
                continue
            if verdict:
                return verdict
            self._rhythm.rest()

    def _look(self) -> dict[str, Any] | None:
        job = self._client.get(self._path)
        if job.get("limit") != self._limit:
            # Its template was changed while it was launched: it is not what was asked for.
            self._paths.cancel.touch(mode=0o600)
        over = job.get("status") in _OVER
        last = over and self._all_saved(job)
        self._read(last=last)
        if last:
            return self._verdict(job)
        if not over:
            self._end_if_wanted()
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

    def _end_if_wanted(self) -> None:
        late = time.time() > self._deadline
        if not (late or self._rhythm.canceled):
            return
        now = time.monotonic()
        if self._asked is not None and now - self._asked < self._pace.again:
            return
        if late and not self._rhythm.canceled and not self._record.timed_out:
            self._record.timed_out = True
            self._record.save(self._paths)
        self._asked = now
        try:
            self._client.post(f"{self._path}cancel/", {})
        except RunError as refusal:
            # 405: it has ended meanwhile, which the next look will show.
            if not refusal.found.startswith("HTTP 405"):
                raise

    def _verdict(self, job: dict[str, Any]) -> dict[str, Any]:
        recorder = self._feed.recorder
        artifacts = job.get("artifacts")
        if isinstance(artifacts, dict) and "slice_result" in artifacts:
            recorder.artifacts = artifacts
        said = " ".join(scrub(str(job.get("job_explanation") or "")).split())[:_LONGEST_REASON]
        if job["status"] == "error":
            # AWX lost the job, or could not begin it: what acts on the host it does not know.
            return _lost(f"awx_error: {said}")
        status = str(job["status"])
        if status == "canceled" and self._record.timed_out:
            status = "timeout"
        elapsed = job.get("elapsed")
        verdict = judge(recorder, status, None, float(elapsed) if elapsed else 0.0)
        # What was not seen may have been a module at work.
        if self._feed.missing or not recorder.over:
            verdict["touched"] = True
        if said and not verdict["result"]:
            verdict["problem"] = ": ".join(filter(None, (verdict.get("problem"), said)))
        return verdict | {"started_at": str(job.get("started") or datetime.now(UTC).isoformat())}


def _lost(problem: str) -> dict[str, Any]:
    return {"status": "lost", "rc": None, "problem": problem, "result": None}

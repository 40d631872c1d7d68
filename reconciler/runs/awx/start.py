"""Start of a run's job: find the existing job or launch it, never a second.

AWX has no idempotency key, and its lists cannot be searched by a job's variables. So the newest
job is recorded before the launch, and our job is searched among the later jobs by the run's id in
its variables. AWX may still carry out a request whose answer was lost. A job that is missing is
launched again only after AWX must have given up that request.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from reconciler.runs.awx import request
from reconciler.runs.awx.client import Client, NotSent, Silent
from reconciler.runs.awx.request import JobRecord
from reconciler.runs.paths import RunPaths, read_json
from reconciler.runs.spec import RunError

_SLICE_S = 0.1


@dataclass(frozen=True)
class Pace:
    """Intervals in seconds.

    every: between two requests. longest: between two requests while AWX is silent. quiet: a launch
    whose job has not appeared by then was never carried out. AWX gives up a request after 120 s,
    so a lower value could start a job twice. gap: wait for a missing event. saving: wait for
    events after the end of the job. again: between two cancel requests. forsaken: after its
    deadline, a run that cannot be observed counts as lost.
    """

    every: float = 2.0
    longest: float = 30.0
    quiet: float = 180.0
    gap: float = 15.0
    saving: float = 60.0
    again: float = 10.0
    forsaken: float = 86_400.0


class Leaving(Exception):
    """This process was asked to stop. The job goes on, and the next process follows it."""


class NotStarted(Exception):
    """There is no job and there will be none. status: of the run; problem: the reason."""

    def __init__(self, status: str, problem: str) -> None:
        super().__init__(problem)
        self.status = status
        self.problem = problem


class Poll:
    """Pauses between requests to AWX: longer while AWX is silent, cut short by a stop or cancel.

    stop_requested: whether this process or the run was asked to stop. The file `cancel` means the
    run.
    """

    def __init__(self, paths: RunPaths, stop_requested: Callable[[], bool], pace: Pace) -> None:
        self._paths = paths
        self._stop_requested = stop_requested
        self._pace = pace
        self._pause = pace.every
        self._logged = ""

    @property
    def canceled(self) -> bool:
        return self._paths.cancel.exists()

    def answered(self) -> None:
        if self._logged:
            self._log("AWX answers again")
        self._logged, self._pause = "", self._pace.every

    def silent(self, error: Exception) -> None:
        """Wait longer each time. A repeated error is written once to the log of the process."""
        if str(error) != self._logged:
            self._logged = str(error)
            self._log(self._logged)
        self.rest(self._pause)
        self._pause = min(self._pause * 2, self._pace.longest)

    def rest(self, seconds: float | None = None) -> None:
        until = time.monotonic() + (self._pace.every if seconds is None else seconds)
        canceled = self.canceled
        while time.monotonic() < until:
            if self._stop_requested() and not self.canceled:
                raise Leaving
            if self.canceled != canceled:
                return
            time.sleep(min(_SLICE_S, self._pace.every))

    @staticmethod
    def _log(text: str) -> None:
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()


class Starter:
    """Launches the job of a run. deadline: wall clock, after which no job is launched."""

    def __init__(
        self, paths: RunPaths, client: Client, poll: Poll, *, pace: Pace, deadline: float
    ) -> None:
        self._paths = paths
        self._client = client
        self._poll = poll
        self._pace = pace
        self._deadline = deadline
        # By the monotonic clock of this process: a new process waits from the beginning.
        self._since = time.monotonic()

    def ensure(self, record: JobRecord) -> None:
        """Return once the job's id is in the record; NotStarted when there will be no job."""
        while not record.job:
            try:
                if record.posted and self._find(record):
                    self._poll.answered()
                    return
                if record.posted and time.monotonic() - self._since < self._pace.quiet:
                    self._poll.answered()
                    self._poll.rest()
                    continue
                self._launch(record)
            except Silent as away:
                self._give_up_late(record)
                self._poll.silent(away)
            except RunError as refusal:
                self._give_up_late(record)
                if not record.posted:
                    raise NotStarted("failed", f"{refusal.code}: {refusal.found}") from refusal
                self._poll.silent(refusal)

    def _give_up_late(self, record: JobRecord) -> None:
        if time.time() > self._deadline + self._pace.forsaken:
            raise NotStarted("lost" if record.posted else "timeout", "awx_silent")

    def _find(self, record: JobRecord) -> bool:
        later = self._client.every("/jobs/", id__gt=record.after, name=record.name, order_by="id")
        for job in later:
            if request.run_id(job) == self._paths.root.name:
                self._save_job(record, job)
                return True
        return False

    def _launch(self, record: JobRecord) -> None:
        if self._poll.canceled:
            raise NotStarted("canceled", "never_began")
        if time.time() > self._deadline:
            raise NotStarted("timeout", "never_began")
        body = read_json(self._paths.env / "request.json")
        if body is None:
            raise FileNotFoundError(self._paths.env / "request.json")
        record.posted = True
        record.save(self._paths)
        self._since = time.monotonic()
        try:
            job = self._client.post(f"/job_templates/{record.template}/launch/", body)
        except Silent as away:
            if isinstance(away, NotSent):
                self._save_unsent(record)
            raise
        except RunError:
            self._save_unsent(record)
            raise
        self._save_job(record, job)
        if job.get("ignored_fields"):
            # The template was changed meanwhile, so the job differs from the request.
            self._paths.cancel.touch(mode=0o600)

    def _save_unsent(self, record: JobRecord) -> None:
        record.posted = False
        record.save(self._paths)

    def _save_job(self, record: JobRecord, job: dict[str, Any]) -> None:
        number = job.get("id")
        if not isinstance(number, int) or number <= record.after:
            raise Silent(
                "awx_silent",
                expected="the id of the new job",
                found=repr(number)[:100],
                remedy="check AWX and any proxy in front of it",
            )
        record.job = number
        record.save(self._paths)

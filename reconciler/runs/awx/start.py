"""A job for this run: the one that is there already, or a new one; never a second.

AWX knows no idempotency key, and its lists cannot be searched by a job's variables. So the newest
job is noted before ours is asked for, and ours is looked for among the later ones, by the run's id
in its variables. A request without an answer may still be carried out for as long as AWX works on
requests; only after that is a job that is not there asked for again.
"""

from __future__ import annotations

import time
from typing import Any

from reconciler.runs.awx import request
from reconciler.runs.awx.client import Client
from reconciler.runs.awx.errors import NotSent, Silent
from reconciler.runs.awx.record import Record
from reconciler.runs.awx.rhythm import Pace, Rhythm
from reconciler.runs.errors import RunError
from reconciler.runs.paths import RunPaths, read_json


class NotStarted(Exception):
    """There is no job and there will be none. status: of the run; problem: why."""

    def __init__(self, status: str, problem: str) -> None:
        super().__init__(problem)
        self.status = status
        self.problem = problem


class Starter:
    """deadline: wall clock, after which no job is begun any more."""

    def __init__(
        self, paths: RunPaths, client: Client, rhythm: Rhythm, *, pace: Pace, deadline: float
    ) -> None:
        self._paths = paths
        self._client = client
        self._rhythm = rhythm
        self._pace = pace
        self._deadline = deadline
        # By the monotonic clock of this process: one that begins anew waits anew.
        self._since = time.monotonic()

    def ensure(self, record: Record) -> None:
        """Until the job's id is in the record; NotStarted when there is none."""
        while not record.job:
            try:
                if record.posted and self._find(record):
                    self._rhythm.answered()
                    return
                if record.posted and time.monotonic() - self._since < self._pace.quiet:
                    self._rhythm.answered()
                    self._rhythm.rest()
                    continue
                self._ask(record)
            except Silent as away:
                self._forsake(record)
                self._rhythm.silent(away)
            except RunError as refusal:
                self._forsake(record)
                if not record.posted:
                    raise NotStarted("failed", f"{refusal.code}: {refusal.found}") from refusal
                self._rhythm.silent(refusal)

    def _forsake(self, record: Record) -> None:
        """Long past its deadline nobody waits for it any more."""
        if time.time() > self._deadline + self._pace.forsaken:
            raise NotStarted("lost" if record.posted else "timeout", "awx_silent")

    def _find(self, record: Record) -> bool:
        later = self._client.every("/jobs/", id__gt=record.after, name=record.name, order_by="id")
        for job in later:
            if request.run_id(job) == self._paths.root.name:
                self._keep(record, job)
                return True
        return False

    def _ask(self, record: Record) -> None:
        if self._rhythm.canceled:
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
                self._unsent(record)
            raise
        except RunError:
            self._unsent(record)
            raise
        self._keep(record, job)
        if job.get("ignored_fields"):
            # The template was changed meanwhile, and the job is not what was asked for.
            self._paths.cancel.touch(mode=0o600)

    def _unsent(self, record: Record) -> None:
        record.posted = False
        record.save(self._paths)

    def _keep(self, record: Record, job: dict[str, Any]) -> None:
        number = job.get("id")
        if not isinstance(number, int) or number <= record.after:
            raise Silent(
                "awx_silent",
                expected="the id of the new job",
                found=repr(number)[:100],
                remedy="look at AWX and at what stands before it",
            )
        record.job = number
        record.save(self._paths)

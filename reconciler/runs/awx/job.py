"""The job of a run in AWX: started once, followed to its end.

AWX has no idempotency key, and its lists cannot be searched by a job's variables. So the newest
job is recorded before the launch, and our job is searched among the later jobs by the run's id in
its variables. AWX may still carry out a request whose answer was lost. A job that is missing is
launched again only after AWX must have given up that request.

No answer means unknown, so AWX is polled without limit. A person may cancel the job in AWX; that
ends the run as well.
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from reconciler.runs.awx import request
from reconciler.runs.awx.client import API, AwxAccess, Client, NotSent, Silent, results
from reconciler.runs.awx.request import JobRecord
from reconciler.runs.events import Recorder, judge
from reconciler.runs.paths import RunPaths, read_json
from reconciler.runs.scrub import scrub
from reconciler.runs.spec import RunError

_OVER = frozenset({"successful", "failed", "error", "canceled"})
_QUEUED = frozenset({"new", "pending", "waiting"})
_LONGEST_REASON = 500
# Events of a page. AWX keeps 700,000 bytes of a host's answer in each, and this process holds the
# whole page, in which a host may have put objects of two bytes.
_EVENTS = 20
# Pages of a poll.
_PAGES = 500
# Beginnings of the explanations of AWX's reaper. It writes `failed` for a job that AWX lost.
_REAPED = ("Task was marked as running", "Job reaped")
_TIMED_OUT = "Job terminated due to timeout"
# The template was changed during the launch.
_DIFFERS = "awx_job_differs: the job is not the one that was asked for"
_UNKNOWN_LAUNCH = "awx_launch_unknown: no answer to its launch was received, and AWX shows no job"
# Colours and other control sequences of a terminal, then what is left of broken ones.
_CONTROL = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|[\x00-\x08\x0b-\x1f\x7f-\x9f]"
)
# Interval at which a pause looks for a stop request.
_SLICE_S = 0.1


@dataclass(frozen=True)
class Pace:
    """Intervals in seconds.

    every: between two requests. longest: between two requests while AWX is silent. quiet: a launch
    whose job has not appeared by then was never carried out. AWX gives up a request after 120 s,
    so a lower value could start a job twice. gap: wait for a missing event. saving: wait for
    events after the end of the job. again: between two cancel requests. forsaken: after its
    deadline, a run that cannot be observed counts as lost. queue: time in AWX's queue that is no
    time of the run.
    """

    every: float = 2.0
    longest: float = 30.0
    quiet: float = 180.0
    gap: float = 15.0
    saving: float = 60.0
    again: float = 10.0
    forsaken: float = 86_400.0
    queue: float = 14_400.0


class _Following(Client):
    """Requests with a deadline each, because a job may last for hours."""

    DEADLINE_S = 30.0

    def _request(self, method: str, path: str, **arguments: Any) -> dict[str, Any]:
        self.begin()
        return super()._request(method, path, **arguments)


class StopRequested(Exception):
    """This process was asked to stop. The job goes on, and the next process follows it."""


class NotStarted(Exception):
    """There is no job and there will be none. Arguments: status of the run, and the reason."""


def play(
    paths: RunPaths,
    manifest: Mapping[str, Any],
    stop_requested: Callable[[], bool],
    pace: Pace | None = None,
) -> dict[str, Any] | None:
    """The verdict on the run; None when this process was asked to stop and the job goes on."""
    record = JobRecord.load(paths)
    if record is None:
        raise FileNotFoundError(paths.root / "awx.json")
    with _Following(AwxAccess.of(manifest["awx"])) as client:
        job = Job(paths, client, record, manifest, stop_requested, pace or Pace())
        try:
            job.start()
            return job.follow()
        except NotStarted as reason:
            return _not_begun(*reason.args)
        except StopRequested:
            return None


class Job:
    """The job of a run. stop_requested: whether this process or the run was asked to stop; the file
    `cancel` means the run.
    """

    def __init__(
        self,
        paths: RunPaths,
        client: Client,
        record: JobRecord,
        manifest: Mapping[str, Any],
        stop_requested: Callable[[], bool],
        pace: Pace,
    ) -> None:
        self._paths = paths
        self._client = client
        self._record = record
        # The only host that the job may act on.
        self._node_id = manifest["node_id"]
        # Wall clock, after which no job is launched and a job is cancelled.
        self._limit_s: float = manifest["deadline_s"]
        self._deadline: float = record.requested_at + self._limit_s
        self._stop_requested = stop_requested
        self._pace = pace
        self._pause = pace.every
        self._logged = ""
        # By the monotonic clock of this process: a new process waits from the beginning.
        self._since = time.monotonic()
        self._cancel_sent: float | None = None
        self._ended: float | None = None

    def start(self) -> None:
        """Return once the job's id is in the record; NotStarted when there will be no job."""
        record = self._record
        while not record.job:
            try:
                if record.posted and self._find():
                    self._answered()
                    return
                if record.posted and time.monotonic() - self._since < self._pace.quiet:
                    self._answered()
                    self._rest()
                    continue
                self._launch()
            except RunError as error:
                if self._forsaken():
                    raise NotStarted("lost" if record.posted else "timeout", "awx_silent") from None
                if not isinstance(error, Silent) and not record.posted:
                    raise NotStarted("failed", f"{error.code}: {error.found}") from error
                self._silent(error)

    def follow(self) -> dict[str, Any]:
        """Poll the existing job until its end; returns the verdict on the run."""
        feed = Feed(self._paths, self._pace.gap)
        while True:
            try:
                with request.readable(self._client):
                    verdict = self._poll(feed)
                self._answered()
            except RunError as error:
                # Includes refusals: the token may have been withdrawn while the job goes on.
                if self._forsaken():
                    return _lost(f"awx_silent: {error.found}")
                self._silent(error)
                continue
            if verdict:
                return verdict
            self._rest()

    @property
    def _path(self) -> str:
        return f"/jobs/{self._record.job}/"

    @property
    def _canceled(self) -> bool:
        return self._paths.cancel.exists()

    def _forsaken(self) -> bool:
        return time.time() > self._deadline + self._pace.forsaken

    def _answered(self) -> None:
        if self._logged:
            _log("AWX answers again")
        self._logged, self._pause = "", self._pace.every

    def _silent(self, error: Exception) -> None:
        """Wait longer each time. A repeated error is written once to the log of the process."""
        if str(error) != self._logged:
            self._logged = str(error)
            _log(self._logged)
        self._rest(self._pause)
        self._pause = min(self._pause * 2, self._pace.longest)

    def _rest(self, seconds: float | None = None) -> None:
        """Pause between two requests; a request to stop or to cancel ends it."""
        until = time.monotonic() + (self._pace.every if seconds is None else seconds)
        canceled = self._canceled
        while True:
            # Once at least, however busy the machine is.
            if self._stop_requested() and not self._canceled:
                raise StopRequested
            if self._canceled != canceled or time.monotonic() >= until:
                return
            time.sleep(min(_SLICE_S, self._pace.every))

    def _find(self) -> bool:
        # Not by name: a job has the name that its template had at the launch.
        query = {"id__gt": self._record.after, "job_template": self._record.template}
        for job in self._client.every("/jobs/", **query, order_by="id"):
            if request.run_id(job) == self._paths.root.name:
                self._save_job(job)
                return True
        return False

    def _launch(self) -> None:
        record = self._record
        posted = record.posted
        if self._canceled or time.time() > self._deadline:
            if posted:
                raise NotStarted("lost", _UNKNOWN_LAUNCH)
            raise NotStarted("canceled" if self._canceled else "timeout", "never_began")
        if posted:
            self._require_sight()
            # The search before may have had no sight.
            if self._find():
                return
        body = read_json(self._paths.env / "request.json")
        if body is None:
            raise FileNotFoundError(self._paths.env / "request.json")
        record.posted = True
        record.save(self._paths)
        self._since = time.monotonic()
        try:
            job = self._client.post(f"/job_templates/{record.template}/launch/", body)
        except RunError as error:
            # After any other silence AWX may still carry out the request.
            if isinstance(error, NotSent) or not isinstance(error, Silent):
                record.posted = posted
                record.save(self._paths)
            raise
        ignored = job.get("ignored_fields")
        names = [name for name in body if isinstance(ignored, dict) and name in ignored]
        problem = f"{_DIFFERS}: AWX left out {', '.join(names) or 'a field'}"
        self._save_job(job, problem if ignored else "")

    def _require_sight(self) -> None:
        """RunError unless the list of jobs would show ours. AWX shows the jobs of a template to all
        who may read it. A template that drops the variables makes jobs without a run id.
        """
        path = f"/job_templates/{self._record.template}/"
        template = self._client.get(path)
        for name in ("ask_limit_on_launch", "ask_variables_on_launch"):
            if template.get(name) is not True:
                shown = f"a template whose {name} is not true"
                raise self._client.silent(f"GET {API}{path}", shown)

    def _save_job(self, job: dict[str, Any], problem: str = "") -> None:
        number, run = job.get("id"), request.run_id(job)
        # An AWX that was restored from a backup counts its jobs from an older number. Without its
        # variables, which a changed template drops, a job names no run.
        ours = run == self._paths.root.name
        new = isinstance(number, int) and number > self._record.after and not run
        if not isinstance(number, int) or not (ours or new):
            raise Silent(
                "awx_silent",
                expected="the id of the new job of this run",
                found=f"{number!r}, run {scrub(run)!r}"[:100],
                remedy="check AWX and any proxy in front of it",
            )
        self._record.job, self._record.problem = number, problem
        self._record.save(self._paths)

    def _poll(self, feed: Feed) -> dict[str, Any] | None:
        """Read the job and its new events; the verdict once the job is over."""
        job = self._get_job()
        record = self._record
        self._extend_deadline(job)
        if job["limit"] != self._node_id and not record.problem:
            limit = scrub(job["limit"])[:100]
            record.problem = f"{_DIFFERS}: its limit is {limit!r} and not {self._node_id}"
            record.save(self._paths)
        if record.problem:
            self._paths.cancel.touch(mode=0o600)
        over = job.get("status") in _OVER
        if not over:
            self._ended = None
            # Whether or not its events can be read.
            self._cancel_if_due()
        complete = self._read(feed)
        if not over:
            return None
        self._ended = self._ended or time.monotonic()
        waited = time.monotonic() - self._ended > self._pace.saving
        saved = job.get("event_processing_finished") is True
        settled = _end_is_known(job, feed) or _never_began(job, feed)
        if not waited and not (complete and saved and settled):
            return None
        feed.take([], last=True)
        return self._verdict(job, feed)

    def _extend_deadline(self, job: dict[str, Any]) -> None:
        """Leave out the time in AWX's queue, which says nothing about the host."""
        if job.get("status") in _QUEUED:
            queued_s = time.time() - self._record.requested_at
            if queued_s < self._pace.queue:
                self._paths.queued.touch(mode=0o600)
        else:
            queued_s = max(_queued_s(job), self._seen_queued_s())
        deadline = self._record.requested_at + min(queued_s, self._pace.queue) + self._limit_s
        self._deadline = max(self._deadline, deadline)

    def _seen_queued_s(self) -> float:
        """Time until a process of this run last saw the job in the queue; 0.0 if none has."""
        try:
            return self._paths.queued.stat().st_mtime - self._record.requested_at
        except FileNotFoundError:
            return 0.0

    def _get_job(self) -> dict[str, Any]:
        """Our job. Any other answer is silence, because it would look like a job for another host,
        which is canceled: the empty answer of a proxy, or the job that has this number in an AWX
        that was restored from a backup.
        """
        job = self._client.get(self._path)
        if job.get("id") != self._record.job or not isinstance(job.get("limit"), str):
            raise self._client.silent(f"GET {API}{self._path}", "an answer without this job")
        run, name = request.run_id(job), job.get("name", self._record.name)
        # A changed template drops our run's id, and a renamed template gives another name.
        named = name == self._record.name or job.get("job_template") == self._record.template
        if run != self._paths.root.name and (run or not named):
            shown = f"the job of another run, {scrub(str(run or name))[:100]}"
            raise self._client.silent(f"GET {API}{self._path}", shown)
        return job

    def _read(self, feed: Feed) -> bool:
        """Read new events; False if there may be more. Their number in a poll is limited, because
        a job is canceled between two polls only.
        """
        since = feed.counter
        for _ in range(_PAGES):
            query: dict[str, str | int] = {
                "counter__gt": since,
                "order_by": "counter",
                "page_size": _EVENTS,
            }
            page = results(self._client.get(f"{self._path}job_events/", **query))
            numbers = [n for event in page if isinstance(n := event.get("counter"), int)]
            feed.take(page, last=False)
            if not numbers or max(numbers) <= since:
                return True
            since = max(numbers)
        return False

    def _cancel_if_due(self) -> None:
        late = time.time() > self._deadline
        if not (late or self._canceled):
            return
        now = time.monotonic()
        if self._cancel_sent is not None and now - self._cancel_sent < self._pace.again:
            return
        if late and not self._canceled and not self._record.timed_out:
            self._record.timed_out = True
            self._record.save(self._paths)
        self._cancel_sent = now
        try:
            self._client.post(f"{self._path}cancel/", {})
        except RunError as refusal:
            # AWX refuses to cancel a job that has ended: 403, to a superuser 405.
            job = {} if isinstance(refusal, Silent) else self._get_job()
            if job.get("status") not in _OVER:
                raise

    def _verdict(self, job: dict[str, Any], feed: Feed) -> dict[str, Any]:
        recorder = feed.recorder
        if artifacts := _artifacts(job):
            recorder.artifacts = artifacts
        status, reason = str(job["status"]), _reason(job)
        problem = f"awx_{status}: {reason or feed.last_line or 'AWX gives no reason'}"
        problem = self._record.problem or problem
        never_began = _never_began(job, feed)
        if not never_began and (status == "error" or not _end_is_known(job, feed)):
            return _lost(problem)
        if status == "canceled" and self._record.timed_out:
            status = "timeout"
        if never_began:
            return _not_begun("failed" if status == "error" else status, problem)
        if status == "failed" and reason.startswith(_TIMED_OUT) and not recorder.artifacts:
            status = "timeout"
        elapsed = job.get("elapsed")
        verdict = judge(recorder, status, None, float(elapsed) if elapsed else 0.0)
        if self._record.problem and verdict["result"]:
            # It ended before it was canceled. It had other variables, or other hosts.
            verdict |= {"status": "failed", "result": None}
        # A missing event may have been a module that ran on the host.
        if feed.missing or not recorder.over:
            verdict["touched"] = True
        reason = self._record.problem or reason
        if reason and not verdict["result"]:
            verdict["problem"] = ": ".join(filter(None, (verdict.get("problem"), reason)))
        return verdict | {"started_at": str(job.get("started") or datetime.now(UTC).isoformat())}


def _queued_s(job: dict[str, Any]) -> float:
    """Time that a started job was in AWX's queue, by AWX's clock; 0.0 if it cannot be read."""
    try:
        created, started = (datetime.fromisoformat(job[name]) for name in ("created", "started"))
        return max(0.0, (started - created).total_seconds())
    except (KeyError, TypeError, ValueError):
        return 0.0


def _end_is_known(job: dict[str, Any], feed: Feed) -> bool:
    """Whether AWX saw the end of the job's playbook.

    At that end the worker of the job reports artifacts and the number of events. AWX also gives
    jobs up while their playbooks go on. Its reaper writes `failed`, and a cancel request that no
    dispatcher acknowledges writes `canceled`. Such a job has no number of events, so only a job
    without any event looks complete.
    """
    if job["status"] == "successful" or _artifacts(job):
        return True
    explanation = str(job.get("job_explanation") or "")
    reaped = any(text in explanation for text in _REAPED)
    if job.get("event_processing_finished") is not True or (reaped and not feed.recorder.over):
        return False
    # Without events: AWX handed nothing to receptor, or says itself that it ended the playbook.
    ended = not _handed_over(job) or explanation.startswith(_TIMED_OUT)
    return feed.counter > 0 or (ended and job["status"] != "canceled")


def _never_began(job: dict[str, Any], feed: Feed) -> bool:
    """Whether the job ended before its playbook reached a task for the host.

    Such a job never left the queue, or AWX could not hand it to receptor (`error`). A job without
    its image, or without a matching host, is `failed` without an explanation; its events say so.
    """
    if feed.missing or feed.recorder.began or job.get("event_processing_finished") is not True:
        return False
    if feed.counter == 0:
        refused = job["status"] == "error" and not _handed_over(job)
        return refused or job.get("started", "") is None
    unexplained = not job.get("job_explanation") and not feed.recorder.over
    return job["status"] == "failed" and unexplained


def _handed_over(job: dict[str, Any]) -> bool:
    """Whether AWX gave the job to receptor, which runs its container."""
    return job.get("work_unit_id", "?") not in (None, "")


def _artifacts(job: dict[str, Any]) -> dict[str, Any]:
    """Artifacts of the job with its result document, or none."""
    artifacts = job.get("artifacts")
    return artifacts if isinstance(artifacts, dict) and "slice_result" in artifacts else {}


def _reason(job: dict[str, Any]) -> str:
    """AWX's explanation; for a job that AWX could not carry out, the last line of its traceback."""
    traceback = str(job.get("result_traceback") or "").strip().rpartition("\n")[2]
    text = scrub(_plain(str(job.get("job_explanation") or traceback)))
    return " ".join(text.split())[:_LONGEST_REASON]


def _plain(text: str) -> str:
    """The text without control sequences, with line feeds as line ends."""
    return _CONTROL.sub("", text.replace("\r\n", "\n"))


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
        # The last line of the output.
        self.last_line = ""
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
        if text := _plain(str(event.get("stdout") or "")):
            line = scrub(text.strip().rpartition("\n")[2].strip())[:_LONGEST_REASON]
            # The result document, which ansible.cfg has printed, is no reason of a failure.
            if line and not line.startswith("RUN: "):
                self.last_line = line
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


def _not_begun(status: str, problem: str) -> dict[str, Any]:
    """The verdict on a run that did not begin. If it was lost, it may have begun."""
    lost = status == "lost"
    return {"status": status, "rc": None, "problem": problem, "touched": lost, "begun": lost}


def _lost(problem: str) -> dict[str, Any]:
    return {"status": "lost", "rc": None, "problem": problem, "result": None}


def _log(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()

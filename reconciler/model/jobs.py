"""Decisions about inference jobs: their states, fair shares of a claim, retries."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from reconciler.model.states import Described

# Leases of a job that may expire before it is a dead letter. A worker that is killed takes innocent
# jobs along, so a job that was lost once is claimed alone: each loss after the first is its own.
# Fewer than the ends of workers after which their pool is given up (`pools.ENDS_LIMIT`).
LOST_LIMIT = 5
_FIRST_PAUSE_S = 1.0
_TEXT = 300
_TEXT_BYTES = 900
_DETAIL_BYTES = 2_000
_LONGEST_PAUSE_S = 300.0


class JobStatus(Described):
    """Lifecycle of a job."""

    PENDING = "pending", "It waits for a worker, or for its time."
    RUNNING = "running", "A worker holds its lease."
    DONE = "done", "Its result is recorded."
    DEAD_LETTER = "dead_letter", "It failed too often; its error says why."
    CANCELED = "canceled", "Ended by request. A late result does not count."


class Mode(Described):
    """Whether jobs are admitted and claimed."""

    NORMAL = "normal", "Jobs are admitted and run."
    DRAIN = "drain", "Nothing is admitted or claimed; jobs that run may end."
    DRAINED = "drained", "No job runs. The service and its workers are alive."


OPEN = (JobStatus.PENDING, JobStatus.RUNNING)
ENDED = (JobStatus.DONE, JobStatus.DEAD_LETTER, JobStatus.CANCELED)


@dataclass(frozen=True)
class Call:
    """A job as a worker holds it: the call of a model, and the token of the lease.

    lost: leases that expired. A worker that holds such a job holds no other. project_id: "" for a
    worker without the database, whose jobs are all of one project.
    """

    id: str
    token: str
    model: str
    input: Mapping[str, Any]
    timeout_s: int
    lost: int = 0
    project_id: str = ""


@dataclass(frozen=True)
class Outcome:
    """How a call of a model ended. result None: it failed with this error.

    permanent: another attempt would fail in the same way.
    """

    result: Mapping[str, Any] | None = None
    error: Mapping[str, str] | None = None
    permanent: bool = False


def shares(
    waiting: Iterable[tuple[str, str]], running: Mapping[str, int], limit: int
) -> dict[tuple[str, str], int]:
    """Divide a claim of at most `limit` jobs among the (project, model) queues that wait.

    Each place goes to a queue of the project with the fewest running jobs, the earlier one in
    `waiting` among equals. So a project with a long queue delays another by a claim at most.
    """
    queues = list(waiting)
    load = {project: running.get(project, 0) for project, _ in queues}
    given: Counter[tuple[str, str]] = Counter()
    for _ in range(limit if queues else 0):
        queue = min(queues, key=lambda queue: (load[queue[0]], given[queue]))
        given[queue] += 1
        load[queue[0]] += 1
    return dict(given)


def pause(attempts: int, jitter: float) -> float:
    """Seconds until the next attempt: twice as long each time, spread by a jitter from 0 to 1."""
    longest: float = min(_FIRST_PAUSE_S * 2 ** min(attempts, 20), _LONGEST_PAUSE_S)
    return longest * (0.5 + jitter / 2)


def kept_error(error: Mapping[str, str]) -> dict[str, str]:
    """An error as the records keep it: each text cut to 300 characters and 900 bytes, `detail` to
    its last 2,000 bytes.

    Bytes are those of JSON, where a character may have twelve. Errors do not count against the size
    of a project's jobs, so that a worker must not make them large.
    """
    kept = {name: _cut(text[:_TEXT], _TEXT_BYTES) for name, text in error.items()}
    if "detail" in error:
        kept["detail"] = _cut(error["detail"][::-1], _DETAIL_BYTES)[::-1]
    return kept


def _cut(text: str, most: int) -> str:
    while (size := len(json.dumps(text)) - len('""')) > most:
        text = text[: len(text) * most // size]
    return text

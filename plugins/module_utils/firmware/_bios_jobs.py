"""Wait for BIOS jobs, independent of the interface that reports them."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from ansible_collections.gpuaas.slice.plugins.module_utils.core._errors import Refusal
from ansible_collections.gpuaas.slice.plugins.module_utils.firmware import _bios

Observer = Callable[[_bios.Job], None]


def silent(_job: _bios.Job) -> None:
    """No progress output, for modules; a console program prints progress."""


@dataclass(frozen=True)
class Watch:
    """Settings for following a job.

    look: returns the job of an id, or raises Refusal. deadline: seconds until every job must have
    ended. interval: seconds between two reads. fatal: refusal codes for which a retry is useless.
    Every other refusal says nothing about the job, because the controller is busy while the machine
    restarts.
    """

    look: Callable[[str], _bios.Job]
    deadline: float
    interval: float
    observer: Observer = silent
    fatal: Collection[str] = ()


def follow(watch: Watch, ids: Iterable[str]) -> list[_bios.Job]:
    """Poll until every job of `ids` has succeeded.

    Raises Refusal `bios_job_failed`, `bios_job_timeout` or a fatal refusal.
    """
    until = time.monotonic() + watch.deadline
    job_ids = list(ids)
    seen: dict[str, _bios.Job] = {}
    problem = ""
    while True:
        for job_id in job_ids:
            if job_id in seen and seen[job_id].phase is not _bios.Phase.OPEN:
                continue
            try:
                job = watch.look(job_id)
            except Refusal as refusal:
                if refusal.code in watch.fatal:
                    raise
                problem = f"; last look: {refusal.code}: {refusal.found}"
                continue
            if job != seen.get(job_id):
                watch.observer(job)
            seen[job_id], problem = job, ""
        bad = [job for job in seen.values() if job.phase is _bios.Phase.FAILED]
        if bad:
            raise _bios.failed(bad)
        if len(seen) == len(job_ids) and all(j.phase is _bios.Phase.DONE for j in seen.values()):
            return list(seen.values())
        if time.monotonic() >= until:
            unfinished = [_shown(job_id, seen.get(job_id)) for job_id in job_ids]
            raise late(", ".join(unfinished) + problem, watch.deadline, "end")
        time.sleep(watch.interval)


def late(found: str, seconds: float, what: str) -> Refusal:
    return Refusal(
        "bios_job_timeout",
        expected=f"the BIOS job to {what} within {seconds:g} s",
        found=found,
        remedy="look at the machine's console; ask again to follow the same job",
    )


def _shown(job_id: str, job: _bios.Job | None) -> str:
    return job_id if job is None else f"{job_id} is {job.status} ({job.percent}%)"

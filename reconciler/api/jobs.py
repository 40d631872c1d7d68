"""Inference jobs of a project, and the maintenance of the site's jobs for operators."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, Literal, Self

from fastapi import APIRouter, Query
from fastapi.responses import JSONResponse
from pydantic import Field, model_validator
from sqlalchemy import Connection

from reconciler.api.http import PageOf, Paging, idempotency_key
from reconciler.api.models import (
    Answer,
    Body,
    Document,
    Id,
    Integer,
    Moment,
    Name,
    Reasoned,
    StrictFlag,
)
from reconciler.api.security import Admin, Context, Holder, Member
from reconciler.db import schema
from reconciler.db.rows import Record
from reconciler.model.act import Act
from reconciler.model.errors import Problem
from reconciler.model.jobs import JobStatus, Mode
from reconciler.model.states import Role
from reconciler.pools import control, hints, jobs

router = APIRouter(prefix="/projects/{project_id}/jobs", tags=["jobs"])
own_router = APIRouter(prefix="/jobs", tags=["jobs"])
admin_router = APIRouter(prefix="/admin/jobs", tags=["jobs"])
control_router = APIRouter(prefix="/control", tags=["operator"])

_DAY_S = 86_400
# Jobs of one request; the body's limit is 1 MiB anyway.
_TOGETHER = 100


class NewJob(Body):
    """A call of a model with an input."""

    model: Name
    input: Document
    priority: Annotated[Integer, Field(ge=0, le=9, description="0 is served first.")] = 5
    delay_s: Annotated[Integer, Field(ge=0, le=7 * _DAY_S)] = 0
    max_attempts: Annotated[Integer, Field(ge=1, le=10)] = 3
    timeout_s: Annotated[Integer, Field(ge=1, le=3600)] = 60


class NewJobs(Body):
    """Jobs that are queued together, all or none."""

    jobs: Annotated[list[NewJob], Field(min_length=1, max_length=_TOGETHER)]


class Reprocess(Reasoned):
    """Which dead letters to queue again: a sample of the oldest, or all (a thousand at a time)."""

    sample: Annotated[Integer, Field(ge=1, le=jobs.REPROCESS_LIMIT)] | None = None
    all: StrictFlag = False
    force: Annotated[
        StrictFlag, Field(description="Also if the last sample has not succeeded.")
    ] = False
    model: Annotated[Name | None, Field(description="Only those of this model.")] = None

    @model_validator(mode="after")
    def _names_one(self) -> Self:
        if (self.sample is None) is not self.all:
            raise ValueError("either a sample or all")
        return self


class CancelJobs(Reasoned):
    """Which jobs to cancel: those of a model, or all."""

    model: Name | None = None
    all: StrictFlag = False
    dead_letters: Annotated[
        StrictFlag, Field(description="Give up dead letters, and not jobs that have not ended.")
    ] = False

    @model_validator(mode="after")
    def _names_one(self) -> Self:
        if (self.model is None) is not self.all:
            raise ValueError("either a model or all")
        return self


class CanceledJobs(Answer):
    """Number of jobs that were canceled. Repeat the request until it is 0."""

    canceled: int


class QueueDepth(Answer):
    """How many jobs had not ended, at the end of each step since a time."""

    since: Moment
    step_s: int
    open: list[int]


class SiteQueue(QueueDepth):
    """The queue of all projects."""

    projects: dict[str, dict[str, int]] = Field(
        description="Number of jobs by status, of each project that has any."
    )


class ServedModel(Answer):
    """A model that jobs of the project may call. serving: a worker takes its jobs now. due: jobs of
    the project that wait for one.
    """

    name: str
    serving: bool
    due: int


class ServedModels(Answer):
    """Models by name."""

    models: list[ServedModel]


class JobIds(Answer):
    """Jobs by their ids."""

    ids: list[str]


class Failure(Answer):
    """The last failure. detail: for operators, because it may name files of the worker."""

    code: str
    expected: str
    found: str
    remedy: str
    detail: str = ""


class JobSummary(Answer):
    """A job without its input and result."""

    id: str
    project_id: str
    model: str
    priority: int
    status: JobStatus
    attempts: int
    max_attempts: int
    lost: int = Field(description="How often its worker died or was away for too long.")
    timeout_s: int
    not_before: Moment | None
    failure: Failure | None
    correlation_id: str
    enqueued_at: Moment
    started_at: Moment | None
    updated_at: Moment
    reprocessed_at: Moment | None

    @classmethod
    def of_job(cls, job: schema.Job | Record, context: Context) -> Self:
        error = job.error if isinstance(job, schema.Job) else job["error"]
        if error and context.caller.role != Role.PLATFORM_ADMIN:
            error = {**error, "detail": ""}
        return cls.of(job, failure=error or None)


class Job(JobSummary):
    """A job."""

    input: Document
    result: Document | None


# Answers to requests with a key are remembered for days, so they leave out what a job may hold:
# a project could fill the database with copies of one input.
@router.post("", status_code=201, response_model=JobSummary)
def create(project_id: Id, body: NewJob, context: Member) -> JSONResponse:
    """Queue a call of a model. Its `result` can be read once the job is `done`."""

    def answer(conn: Connection, ids: list[str]) -> JobSummary:
        return JobSummary.of_job(jobs.get(conn, project_id, ids[0]), context)

    return _queue(context, project_id, [body], body, answer)


@own_router.post("", status_code=201, response_model=JobSummary)
def create_own(body: NewJob, context: Holder) -> JSONResponse:
    """Queue a call of a model for the project of the token, which must have exactly one."""
    return create(_own_project(context), body, context)


@router.post("/batch", status_code=201, response_model=JobIds)
def create_together(project_id: Id, body: NewJobs, context: Member) -> JSONResponse:
    """Queue jobs together, all or none; their ids are in the order of the request."""
    return _queue(context, project_id, body.jobs, body, lambda _conn, ids: JobIds(ids=ids))


@router.post("/dlq/reprocess", response_model=JobIds)
def reprocess(project_id: Id, body: Reprocess, context: Member) -> JSONResponse:
    """Queue dead letters again with all their attempts; answers their ids."""

    def work(conn: Connection, act: Act) -> JobIds:
        options = body.model_dump(include={"sample", "force", "model"})
        return JobIds(ids=jobs.reprocess(conn, project_id, act, **options))

    return context.write(work, body=body, reason="requested by its project")


@router.post("/cancel", response_model=CanceledJobs)
def cancel_all(project_id: Id, body: CancelJobs, context: Member) -> JSONResponse:
    """Cancel jobs of the project that have not ended, a thousand at a time. Their results do not
    count, even if workers run them.
    """

    def work(conn: Connection, act: Act) -> CanceledJobs:
        dead, model = body.dead_letters, body.model
        return CanceledJobs(canceled=jobs.cancel_all(conn, project_id, act, dead=dead, model=model))

    return context.write(work, body=body, reason="requested by its project")


@router.get("")
def list_jobs(
    project_id: Id,
    context: Member,
    paging: Paging,
    status: Annotated[JobStatus | None, Query()] = None,
    model: Annotated[Name | None, Query()] = None,
) -> PageOf[JobSummary]:
    """The project's jobs, the newest first. Dead letters have the status dead_letter."""
    read = partial(jobs.every, project_id=project_id, status=status, model=model)
    return context.page(paging, jobs.ORDER, read, lambda job: JobSummary.of_job(job, context))


@router.get("/depth")
def depth(project_id: Id, context: Member) -> QueueDepth:
    """The project's queue over the last hour. Jobs that were deleted since are not in it."""
    queue = context.read(lambda conn: jobs.depth(conn, project_id))
    return QueueDepth.of(queue._asdict(), step_s=jobs.DEPTH_STEP_S)


@router.get("/models")
def list_models(project_id: Id, context: Member) -> ServedModels:
    """Models that a worker serves for the project, or has lately (GPUAAS_KEEP_JOBS_DAYS)."""
    served = context.read(lambda conn: jobs.models(conn, project_id))
    return ServedModels(models=[ServedModel.of(model) for model in served])


@admin_router.get("/queue")
def site_queue(context: Admin) -> SiteQueue:
    """Jobs of all projects: the queue over the last hour, and their number by project."""
    queue, counts = context.read(lambda conn: (jobs.depth(conn), jobs.by_project(conn)))
    return SiteQueue.of(queue._asdict(), step_s=jobs.DEPTH_STEP_S, projects=counts)


@router.get("/{job_id}")
def show(project_id: Id, job_id: Id, context: Member) -> Job:
    """One job with its input and its result."""
    return Job.of_job(context.read(lambda conn: jobs.get(conn, project_id, job_id)), context)


@router.post("/{job_id}/cancel", response_model=JobSummary)
def cancel(project_id: Id, job_id: Id, context: Member) -> JSONResponse:
    """Cancel a job that has not ended, or give up a dead letter. The result of a job that a worker
    runs does not count.
    """
    return context.write(
        lambda conn, _act: JobSummary.of_job(jobs.cancel(conn, project_id, job_id), context),
        counted=bool(idempotency_key(context.request.headers)),
    )


@own_router.get("")
def list_own(
    context: Holder,
    paging: Paging,
    status: Annotated[JobStatus | None, Query()] = None,
    model: Annotated[Name | None, Query()] = None,
) -> PageOf[JobSummary]:
    """The jobs of the token's project, the newest first."""
    return list_jobs(_own_project(context), context, paging, status, model)


@own_router.get("/{job_id}")
def show_own(job_id: Id, context: Holder) -> Job:
    """One job of the token's project with its input and its result."""
    return show(_own_project(context), job_id, context)


@own_router.post("/{job_id}/cancel", response_model=JobSummary)
def cancel_own(job_id: Id, context: Holder) -> JSONResponse:
    """Cancel a job of the token's project that has not ended, or give up a dead letter."""
    return cancel(_own_project(context), job_id, context)


class SetMaintenance(Reasoned):
    """Whether jobs are admitted and run."""

    mode: Literal["drain", "normal"]
    drain_deadline_s: Annotated[
        Integer,
        Field(ge=0, le=_DAY_S, description="Jobs that still run after this time are canceled."),
    ] = 300


class Maintenance(Answer):
    """The mode of the site. running: jobs that workers hold."""

    mode: Mode
    since: Moment
    reason: str
    changed_by: str
    deadline_at: Moment | None
    canceled_at: Moment | None
    running: int

    @classmethod
    def of_site(cls, conn: Connection) -> Self:
        return cls.of(control.read(conn), running=control.running(conn))


@control_router.get("/maintenance")
def maintenance(context: Admin) -> Maintenance:
    """Whether jobs are admitted and run, since when, and why not."""
    return context.read(Maintenance.of_site)


@control_router.post("/maintenance", response_model=Maintenance)
def set_maintenance(body: SetMaintenance, context: Admin) -> JSONResponse:
    """Drain the site of jobs, or admit them again.

    During a drain, new jobs are refused with `maintenance`, and workers take none. Jobs that run
    may end until the deadline, and are canceled then. `drained`: no job runs.
    """

    def work(conn: Connection, act: Act) -> Maintenance:
        if body.mode == "drain":
            control.drain(conn, act, body.drain_deadline_s)
        else:
            control.resume(conn, act)
        return Maintenance.of_site(conn)

    return context.write(work, body=body)


def _own_project(context: Context) -> str:
    projects = sorted(context.caller.projects)
    if len(projects) != 1:
        raise Problem(
            "project_required",
            422,
            expected="a token of exactly one project",
            found=f"one of {', '.join(projects)}" if projects else "one of none",
            remedy="use the routes of /projects/{project_id}/jobs",
        )
    return projects[0]


def _queue(
    context: Context,
    project_id: str,
    new: Sequence[NewJob],
    body: Body,
    answer: Callable[[Connection, list[str]], Answer],
) -> JSONResponse:
    """Queue jobs, and wake workers once they are committed."""
    # Measured before anything is done with an input that may be of any size.
    wishes = [
        jobs.NewJob(**vars(job), size=jobs.input_size(number, job.input))
        for number, job in enumerate(new)
    ]
    ids: list[str] = []

    def work(conn: Connection, act: Act) -> Answer:
        ids[:] = jobs.enqueue(conn, project_id, wishes, act)
        return answer(conn, ids)

    # The limits of jobs bound what is left.
    response = context.write(
        work,
        body=body,
        reason="requested by its project",
        status=201,
        counted=False,
        job_of=lambda: ids[-1],
    )
    if ids:
        context.request.app.state.waits.wake(project_id, [job.model for job in new])
        if streams := hints.of(context.settings.redis_url):
            streams.announce(ids)
    return response

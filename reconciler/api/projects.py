"""Projects, the owners of allocations."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Self

from fastapi import APIRouter
from fastapi.responses import JSONResponse
from pydantic import Field
from sqlalchemy import Connection

from reconciler.api.http import PageOf, Paging
from reconciler.api.models import Answer, Id, Integer, Moment, Name, Reasoned
from reconciler.api.security import Admin, Holder, Member
from reconciler.lifecycle import quota as quotas
from reconciler.model.act import Act
from reconciler.model.states import Role
from reconciler.pools import jobs
from reconciler.records import projects

router = APIRouter(tags=["projects"])


class NewProject(Reasoned):
    """`id` goes into paths; the service makes one when it is left out."""

    name: Name
    id: Name | None = None


class Project(Answer):
    """The owner of allocations."""

    id: str
    name: str
    created_at: Moment


Limit = Annotated[Integer, Field(ge=0, le=1_000_000)] | None


class Limits(Reasoned):
    """Limits of a project, or of the site for every project without a limit of its own.

    An allocation counts as a machine until it is released. A failure is a launch whose guest was
    not reachable in time. jobs_open: jobs that have not ended. jobs_kept: all stored jobs;
    jobs_mib: size of their inputs and results. Without them, the service's limits of jobs hold.
    jobs_timeout_s: the longest timeout_s of a job.
    """

    gpus: Limit = None
    machines: Limit = None
    open_requests: Limit = None
    launches_per_hour: Limit = None
    failures_per_hour: Limit = None
    jobs_open: Limit = None
    jobs_kept: Limit = None
    jobs_mib: Limit = None
    jobs_per_hour: Limit = None
    jobs_timeout_s: Limit = None


class Quota(Answer):
    """The limits of a project and the present use of each; without a limit only its use."""

    project_id: str
    limits: dict[str, int]
    own: dict[str, int] = Field(description="Those of the project; the others are the site's.")
    used: dict[str, int]

    @classmethod
    def read(cls, conn: Connection, project_id: str) -> Self:
        project = projects.get(conn, project_id)
        return cls(
            project_id=project_id,
            limits=jobs.limits(conn, project),
            own=project.quota,
            used=quotas.used(conn, project_id) | jobs.used(conn, project),
        )


class DefaultQuota(Answer):
    """The limits of the site, which hold where a project has none."""

    limits: dict[str, int]


@router.get("/projects/{project_id}/quota", name="quota")
def show_quota(project_id: Id, context: Member) -> Quota:
    """The limits of the project and their use."""
    return context.read(lambda conn: Quota.read(conn, project_id))


@router.put("/admin/projects/{project_id}/quota", response_model=Quota)
def limit(project_id: Id, body: Limits, context: Admin) -> JSONResponse:
    """Replace the limits of a project. What it holds already stays. For a limit that is left out,
    the site's limit holds.
    """

    def work(conn: Connection, act: Act) -> Quota:
        quotas.change(conn, project_id, _given(body), act)
        return Quota.read(conn, project_id)

    return context.write(work, body=body)


@router.patch("/admin/projects/{project_id}/quota", response_model=Quota, name="amend_quota")
def amend(project_id: Id, body: Limits, context: Admin) -> JSONResponse:
    """Change some limits of a project. A limit that is left out stays as it is, and null removes
    it, so that the site's limit holds.
    """

    def work(conn: Connection, act: Act) -> Quota:
        quotas.amend(conn, project_id, _named(body), act)
        return Quota.read(conn, project_id)

    return context.write(work, body=body)


@router.get("/admin/settings/default-quota", name="default_quota")
def show_defaults(context: Admin) -> DefaultQuota:
    """The limits of the site."""
    return DefaultQuota(limits=context.read(quotas.defaults))


@router.put(
    "/admin/settings/default-quota", response_model=DefaultQuota, name="change_default_quota"
)
def change_defaults(body: Limits, context: Admin) -> JSONResponse:
    """Replace the limits of the site. A limit that is left out is as shipped, and null removes it.

    They hold for every project without a limit of its own. A new site has limits that are shipped.
    """

    def work(conn: Connection, act: Act) -> DefaultQuota:
        quotas.change_defaults(conn, _named(body), act)
        return DefaultQuota(limits=quotas.defaults(conn))

    return context.write(work, body=body)


@router.patch(
    "/admin/settings/default-quota", response_model=DefaultQuota, name="amend_default_quota"
)
def amend_defaults(body: Limits, context: Admin) -> JSONResponse:
    """Change some limits of the site. A limit that is left out stays as it is; null removes it."""

    def work(conn: Connection, act: Act) -> DefaultQuota:
        quotas.amend_defaults(conn, _named(body), act)
        return DefaultQuota(limits=quotas.defaults(conn))

    return context.write(work, body=body)


def _given(body: Limits) -> dict[str, int]:
    return body.model_dump(exclude={"reason"}, exclude_none=True)


def _named(body: Limits) -> dict[str, int | None]:
    return body.model_dump(exclude={"reason"}, exclude_unset=True)


@router.post("/admin/projects", status_code=201, response_model=Project)
def create(body: NewProject, context: Admin) -> JSONResponse:
    """Add a project."""
    return context.write(
        lambda conn, act: Project.of(projects.create(conn, body.name, act, id=body.id)),
        body=body,
        status=201,
    )


@router.get("/admin/projects")
def list_projects(context: Admin, paging: Paging) -> PageOf[Project]:
    """All projects."""
    return context.page(paging, projects.ORDER, projects.every, Project.of)


@router.get("/projects", name="own")
def list_own_projects(context: Holder, paging: Paging) -> PageOf[Project]:
    """The caller's projects: a member's own, all of them for an admin."""
    caller = context.caller
    among = None if caller.role == Role.PLATFORM_ADMIN else sorted(caller.projects)
    return context.page(paging, projects.ORDER, partial(projects.every, among=among), Project.of)

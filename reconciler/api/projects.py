"""Projects: the owners of allocations."""

from __future__ import annotations

from functools import partial

from fastapi import APIRouter
from fastapi.responses import JSONResponse
from sqlalchemy import Connection

from reconciler.api.http import PageOf, Paging
from reconciler.api.models import Answer, Moment, Name, Reasoned
from reconciler.api.security import Admin, Holder
from reconciler.model.act import Act
from reconciler.model.errors import Problem
from reconciler.model.states import Role
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


@router.post("/admin/projects", status_code=201, response_model=Project)
def create(body: NewProject, context: Admin) -> JSONResponse:
    """Add a project."""

    def work(conn: Connection, act: Act) -> Project:
        if body.id in {row.id for row in projects.every(conn)}:
            raise Problem(
                "project_exists",
                409,
                expected="a new id",
                found=f"{body.id!r}, which a project has",
                remedy="use that project or another id",
            )
        return Project.of(projects.create(conn, body.name, act, id=body.id))

    return context.write(work, body=body, status=201)


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

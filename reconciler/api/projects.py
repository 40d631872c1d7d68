"""Projects: the owners of allocations."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse
from sqlalchemy import Connection

from reconciler.api.http import PageOf, Paging
from reconciler.api.models import Answer, Moment, Name, Reasoned
from reconciler.api.security import Admin, Holder
from reconciler.db.engine import reading
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
    act = context.act(body.reason)

    def work(conn: Connection) -> Project:
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
    page = paging.page(projects.ORDER)
    rows = context.read(lambda conn: projects.every(conn, page))
    return paging.answer(projects.ORDER, rows, Project.of)


@router.get("/projects", name="own")
def list_own_projects(request: Request, who: Holder, paging: Paging) -> PageOf[Project]:
    """The caller's projects: a member's own, all of them for an admin."""
    among = None if who.role == Role.PLATFORM_ADMIN else sorted(who.projects)
    page = paging.page(projects.ORDER)
    with reading(request.app.state.engine) as conn:
        rows = projects.every(conn, page, among=among)
    return paging.answer(projects.ORDER, rows, Project.of)

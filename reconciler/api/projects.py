"""Projects: whose allocations they are."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse
from sqlalchemy import Connection

from reconciler.api import views
from reconciler.api.models import Name, Reasoned
from reconciler.api.paging import Paging
from reconciler.api.security import Admin, Holder
from reconciler.db.engine import reading
from reconciler.model.errors import Problem
from reconciler.model.states import Role
from reconciler.records import projects

router = APIRouter(tags=["projects"])


class NewProject(Reasoned):
    """`id` goes into paths; one is made when it is left out."""

    name: Name
    id: Name | None = None


@router.post("/admin/projects", status_code=201)
def create(body: NewProject, context: Admin) -> JSONResponse:
    """Add a project."""
    act = context.act(body.reason)

    def work(conn: Connection) -> dict[str, Any]:
        if body.id in {row["id"] for row in projects.every(conn)}:
            raise Problem(
                "project_exists",
                409,
                expected="a new id",
                found=f"{body.id!r}, which a project has",
                remedy="use that project or another id",
            )
        return views.record(projects.create(conn, body.name, act, id=body.id))

    return context.write(work, body=body, status=201)


@router.get("/admin/projects")
def list_projects(context: Admin, part: Paging) -> dict[str, Any]:
    """All projects."""
    page = part.page(projects.ORDER)
    return part.told(projects.ORDER, context.read(lambda conn: projects.every(conn, page)))


@router.get("/projects")
def own(request: Request, who: Holder, part: Paging) -> dict[str, Any]:
    """The caller's projects: a member's own, an admin's all."""
    among = None if who.role == Role.PLATFORM_ADMIN else sorted(who.projects)
    page = part.page(projects.ORDER)
    with reading(request.app.state.engine) as conn:
        return part.told(projects.ORDER, projects.every(conn, page, among=among))

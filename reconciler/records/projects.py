"""Projects, the owners of allocations."""

from __future__ import annotations

from collections.abc import Collection

import sqlalchemy as sa

from reconciler.db import journal, rows
from reconciler.db.rows import Order, Page, part
from reconciler.db.schema import Project, projects
from reconciler.model.act import Act
from reconciler.model.errors import Problem

ORDER = Order(projects, ("name",))


def create(conn: sa.Connection, name: str, act: Act, *, id: str | None = None) -> Project:
    """Add a project with a new id and a new name."""
    for field, value in (("id", id), ("name", name)):
        if rows.first(conn, sa.select(projects.c.id).where(projects.c[field] == value)):
            raise Problem(
                "project_exists",
                expected=f"a new {field}",
                found=f"{value!r}, which a project has",
                remedy=f"use that project or another {field}",
            )
    record = rows.add(conn, Project, {"id": id or rows.new_id(), "name": name})
    journal.audit(conn, act, "admin.project.created", "project", record.id)
    return record


def get(conn: sa.Connection, id: str) -> Project:
    """The project with an id."""
    return rows.get(conn, Project, id)


def id_of(conn: sa.Connection, name: str) -> str:
    """The id of the project with this id or name; an unknown name stays as it is."""
    query = sa.select(projects.c.id).where(sa.or_(projects.c.id == name, projects.c.name == name))
    # Ids come first: the name of a project may be the id of another.
    query = query.order_by(sa.case((projects.c.id == name, 0), else_=1))
    return str(conn.execute(query).scalar() or name)


def every(
    conn: sa.Connection, page: Page | None = None, *, among: Collection[str] | None = None
) -> list[Project]:
    """Projects in the order of their names. among: limits them to these ids."""
    query = sa.select(projects)
    if among is not None:
        query = query.where(projects.c.id.in_(among))
    return rows.every(conn, part(query, ORDER, page), Project)

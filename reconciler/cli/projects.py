"""`gpuaas projects`, and the --project option of other commands."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer

from reconciler.cli import output, session
from reconciler.model.errors import Problem

app = typer.Typer(no_args_is_help=True, help="Projects own allocations.")


def project_id(context: typer.Context, name: str) -> str:
    """The id of the project with this id or name; an unknown name is left for the service."""
    if not name or context.resilient_parsing:
        return name
    projects = list(session.of(context).client.items("/projects", limit=1000))
    # Ids come first: the name of a project may be the id of another.
    if name in {row["id"] for row in projects}:
        return name
    return next((str(row["id"]) for row in projects if row["name"] == name), name)


@contextmanager
def suggesting(options: str = "--project P") -> Iterator[None]:
    """Tell a member which options to use, when the command without them is for admins only."""
    try:
        yield
    except Problem as problem:
        if problem.code != "role_required":
            raise
        raise Problem(
            problem.code,
            problem.status,
            expected=f"{problem.expected}, or {options}",
            found=problem.found,
            remedy=f"give {options}, a project of `gpuaas projects list`",
            detail=problem.detail,
        ) from problem


@app.command("list")
def list_projects(context: typer.Context) -> None:
    """List the caller's projects; admins see all projects."""
    here = session.of(context)
    output.rows(here, list(here.client.items("/projects")), "id", "name", "created_at")


@app.command()
def add(
    context: typer.Context,
    name: str,
    key: Annotated[str, typer.Option("--id", help="Default: generated.")] = "",
) -> None:
    """Add a project. Commands accept its name as well as its id."""
    here = session.of(context)
    body = {"name": name} | ({"id": key} if key else {})
    output.record(here, here.client.post("/admin/projects", body))

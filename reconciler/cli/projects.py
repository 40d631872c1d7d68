"""`gpuaas projects`, and which project a command means."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer

from reconciler.cli import session, show
from reconciler.model.errors import Problem

app = typer.Typer(no_args_is_help=True, help="Projects: whose allocations they are.")


def known(context: typer.Context, given: str) -> str:
    """The id of the project with this id or name; what nothing has is left for the service."""
    if not given or context.resilient_parsing:
        return given
    found = list(session.of(context).client.items("/projects", limit=1000))
    # An id first: a name may be what another project has for an id.
    if given in {row["id"] for row in found}:
        return given
    return next((str(row["id"]) for row in found if row["name"] == given), given)


@contextmanager
def or_name_one(options: str = "--project P") -> Iterator[None]:
    """What is for admins when no project is named: a member is told how members ask for it."""
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
    """The caller's projects; for an admin all of them."""
    here = session.of(context)
    show.rows(here, list(here.client.items("/projects")), "id", "name", "created_at")


@app.command()
def add(
    context: typer.Context,
    name: str,
    key: Annotated[str, typer.Option("--id", help="Made when it is left out.")] = "",
) -> None:
    """Add a project. Commands take its name as well as its id."""
    here = session.of(context)
    body = {"name": name} | ({"id": key} if key else {})
    show.record(here, here.client.post("/admin/projects", body))

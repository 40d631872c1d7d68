"""`gpuaas projects`."""

from __future__ import annotations

from typing import Annotated

import typer

from reconciler.cli import session, show

app = typer.Typer(no_args_is_help=True, help="Projects: whose allocations they are.")


@app.command("list")
def list_projects(context: typer.Context) -> None:
    """All projects."""
    here = session.of(context)
    show.rows(here, list(here.client.items("/admin/projects")), "id", "name", "created_at")


@app.command()
def add(
    context: typer.Context,
    name: str,
    key: Annotated[str, typer.Option("--id", help="Made when it is left out.")] = "",
) -> None:
    """Add a project."""
    here = session.of(context)
    body = {"name": name} | ({"id": key} if key else {})
    show.record(here, here.client.post("/admin/projects", body))

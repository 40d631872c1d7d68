"""`gpuaas projects`, and the --project option of other commands."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from reconciler.cli import output
from reconciler.cli.options import Reason, with_options
from reconciler.cli.session import client
from reconciler.model.errors import Problem

app = typer.Typer(no_args_is_help=True, help="Projects own allocations.")


def project_id(name: str) -> str:
    """The id of the project with this id or name; an unknown name is left for the service."""
    if not name:
        return name
    projects = list(client().items("/projects", limit=1000))
    # Ids come first: the name of a project may be the id of another.
    if name in {row["id"] for row in projects}:
        return name
    return next((str(row["id"]) for row in projects if row["name"] == name), name)


Project = Annotated[str, typer.Argument(callback=project_id, help="The project's id or name.")]


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
def list_projects() -> None:
    """List the caller's projects; admins see all projects."""
    output.rows(client().items("/projects"), "id", "name", "created_at")


_DEFAULTS = "/admin/settings/default-quota"
Limit = Annotated[int | None, typer.Option(min=0)]
SomeProject = Annotated[
    str, typer.Argument(callback=project_id, help="Left out: the site's limits for all projects.")
]


@dataclass(frozen=True)
class Limits:
    """Limits of a project, as the options of `set-quota`."""

    gpus: Limit = None
    machines: Limit = None
    open_requests: Limit = None
    launches_per_hour: Limit = None
    failures_per_hour: Limit = None
    jobs_open: Limit = None
    jobs_kept: Limit = None
    jobs_mib: Limit = None
    jobs_per_hour: Limit = None


@app.command()
def quota(project: SomeProject = "") -> None:
    """Show the limits of a project and their use."""
    _show_quota(client().get(f"/projects/{project}/quota" if project else _DEFAULTS))


@app.command("set-quota")
@with_options(Limits)
def set_quota(project: SomeProject = "", *, reason: Reason = "", **limits: Any) -> None:
    """Replace the limits of a project. An omitted limit is the site's, or none."""
    path = f"/admin/projects/{project}/quota" if project else _DEFAULTS
    _show_quota(client().put(path, limits | {"reason": reason}))


def _show_quota(document: dict[str, Any]) -> None:
    if output.in_json(document):
        return
    limits = document["limits"]
    used = document.get("used", dict.fromkeys(limits))
    table = [{"limit": key, "used": used[key], "allowed": limits.get(key)} for key in used]
    output.rows(table, "limit", "used", "allowed")


@app.command()
def add(
    name: str,
    key: Annotated[str, typer.Option("--id", help="Default: generated.")] = "",
) -> None:
    """Add a project. Commands accept its name as well as its id."""
    body = {"name": name} | ({"id": key} if key else {})
    output.record(client().post("/admin/projects", body))

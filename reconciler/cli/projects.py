"""`gpuaas projects`, and the --project option of other commands."""

from __future__ import annotations

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


def required_project(name: str) -> str:
    """The same; without a name the only project of the caller, or Problem `project_required`."""
    if name:
        return project_id(name)
    names = {str(row["id"]): str(row["name"]) for row in client().items("/projects", limit=1000)}
    if len(names) == 1:
        return next(iter(names))
    raise Problem(
        "project_required",
        422,
        expected="one of your projects, by --project or GPUAAS_PROJECT",
        found=f"none named, of {', '.join(sorted(names.values())[:10])}" if names else "no project",
        remedy="name it; `gpuaas projects list` shows them"
        if names
        else "ask the operators for a project",
    )


def project_option(text: str, *, required: bool = False) -> Any:
    """The option --project. required: a command that left it out acts on the only project."""
    return typer.Option(
        envvar="GPUAAS_PROJECT",
        callback=required_project if required else project_id,
        default_factory=str if required else None,
        show_default="your only project" if required else True,
        help=text,
    )


def own_project(problem: Problem, project: str = "") -> str:
    """The project of a member whom `problem` has refused what is for admins: the named project, or
    the only one.
    """
    if problem.code != "role_required":
        raise problem
    return project or required_project("")


@app.command("list")
def list_projects() -> None:
    """List the caller's projects; admins see all projects."""
    output.rows(client().items("/projects"), "id", "name", "created_at")


_DEFAULTS = "/admin/settings/default-quota"
Limit = int | None
SomeProject = Annotated[
    str, typer.Argument(callback=project_id, help="Left out: the site's limits for all projects.")
]


@dataclass(frozen=True)
class Limits:
    """Limits of a project, as the options of `set-quota`."""

    gpus: Annotated[Limit, typer.Option(min=0, help="GPUs of its allocations.")] = None
    machines: Annotated[Limit, typer.Option(min=0, help="Allocations that hold something.")] = None
    open_requests: Annotated[
        Limit, typer.Option(min=0, help="Launches and power actions under way.")
    ] = None
    launches_per_hour: Annotated[Limit, typer.Option(min=0, help="Launches within an hour.")] = None
    failures_per_hour: Annotated[
        Limit, typer.Option(min=0, help="Launches within an hour that failed by its own doing.")
    ] = None
    jobs_open: Annotated[Limit, typer.Option(min=0, help="Jobs that have not ended.")] = None
    jobs_kept: Annotated[Limit, typer.Option(min=0, help="Jobs altogether.")] = None
    jobs_mib: Annotated[
        Limit, typer.Option(min=0, help="MiB of the inputs and results of its jobs.")
    ] = None
    jobs_per_hour: Annotated[Limit, typer.Option(min=0, help="Jobs within an hour.")] = None
    jobs_timeout_s: Annotated[
        Limit, typer.Option(min=0, help="Longest time that a job may ask for, in seconds.")
    ] = None


@app.command()
def quota(project: SomeProject = "") -> None:
    """Show the limits of a project and their use. A member may leave out its only project."""
    if not project:
        try:
            _show_quota(client().get(_DEFAULTS))
        except Problem as problem:
            project = own_project(problem)
    if project:
        _show_quota(client().get(f"/projects/{project}/quota"))


@app.command("set-quota")
@with_options(Limits)
def set_quota(
    project: SomeProject = "",
    *,
    remove: Annotated[
        list[str] | None, typer.Option(help="Limit to remove, such as gpus; may be repeated.")
    ] = None,
    reason: Reason = "",
    **limits: Any,
) -> None:
    """Change limits of a project. A limit that is not named stays as it is.

    --remove takes a limit away from the project, and the site's limit holds, if there is one.
    """
    changes = {name: limit for name, limit in limits.items() if limit is not None}
    removed = {name.replace("-", "_") for name in remove or ()}
    if both := removed & set(changes):
        raise typer.BadParameter(f"{', '.join(sorted(both))}: set it or remove it")
    path = f"/admin/projects/{project}/quota" if project else _DEFAULTS
    # The reason first, so that the service refuses to remove it as any other name that is no limit.
    _show_quota(client().patch(path, {"reason": reason} | changes | dict.fromkeys(removed)))


def _show_quota(document: dict[str, Any]) -> None:
    if output.in_json(document):
        return
    limits, used = document["limits"], document.get("used", {})
    # Of some limits, such as that of a job's time, there is no use.
    table = [
        {"limit": key, "used": used.get(key), "allowed": limits.get(key)} for key in used | limits
    ]
    output.rows(table, "limit", "used", "allowed")


@app.command()
def add(
    name: Annotated[str, typer.Argument(help="Name for people.")],
    key: Annotated[
        str, typer.Option("--id", help="The API and the console show it. Default: a UUID.")
    ] = "",
) -> None:
    """Add a project. Commands accept its name as well as its id."""
    output.record(client().post("/admin/projects", {"name": name, "id": key or None}))

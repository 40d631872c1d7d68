"""`gpuaas apps`: applications on the allocations of a project."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from reconciler.cli import session, show
from reconciler.cli.allocations import Project, public_key

app = typer.Typer(no_args_is_help=True, help="Applications on the allocations of a project.")
Instance = Annotated[str, typer.Argument(help="The instance's id.")]


@app.command()
def create(
    context: typer.Context,
    name: str,
    *,
    project: Project,
    controller: Annotated[str, typer.Option(help="Id of the controller's allocation.")],
    worker: Annotated[
        list[str] | None, typer.Option(help="Id of a worker's allocation; may be repeated.")
    ] = None,
    key: Annotated[Path, typer.Option(help="File with the public key of the app's controller.")],
    slug: Annotated[str, typer.Option(help="Which application.")] = "slurm-reference",
) -> None:
    """An instance over active allocations; each of them gets the managed key."""
    here = session.of(context)
    body = {
        "slug": slug,
        "name": name,
        "managed_key": public_key(key),
        "controller_allocation_id": controller,
        "worker_allocation_ids": worker or [],
    }
    show.record(here, here.client.post(_at(project), body))


@app.command("list")
def list_instances(context: typer.Context, project: Project) -> None:
    """The project's instances."""
    here = session.of(context)
    found = list(here.client.items(_at(project)))
    show.rows(here, found, "id", "slug", "name", "status", "status_reason", "created_at")


@app.command("show")
def show_instance(context: typer.Context, instance: Instance, project: Project) -> None:
    """One instance, and what it waits for."""
    here = session.of(context)
    show.record(here, here.client.get(_at(project, instance)))


@app.command()
def members(context: typer.Context, instance: Instance, project: Project) -> None:
    """Its allocations: where they are reached, and until when its key is good there."""
    here = session.of(context)
    columns = ("role", "allocation_id", "status", "status_reason", "connection.host")
    more = ("adapter_detail.hostname", "adapter_detail.bootstrap_ssh", "adapter_detail.phase")
    found = list(here.client.items(f"{_at(project, instance)}/members"))
    show.rows(here, found, *columns, *more, "adapter_detail.key_expires_at")


@app.command()
def operations(context: typer.Context, instance: Instance, project: Project) -> None:
    """What was done with its members, and how it ended."""
    here = session.of(context)
    found = list(here.client.items(f"{_at(project, instance)}/member-operations"))
    _operations(here, found)


@app.command("reconcile-ssh")
def reconcile_ssh(context: typer.Context, instance: Instance, project: Project) -> None:
    """Put the managed key on every member again."""
    here = session.of(context)
    answer = here.client.post(f"{_at(project, instance)}/bootstrap-ssh/reconcile", {})
    _operations(here, answer["operations"])


@app.command()
def stop(
    context: typer.Context,
    instance: Instance,
    project: Project,
    reason: Annotated[str, typer.Option(help="Kept in the audit log.")] = "",
) -> None:
    """End an instance and take its keys away; its allocations stay."""
    here = session.of(context)
    show.record(here, here.client.post(f"{_at(project, instance)}/stop", {"reason": reason}))


def _at(project: str, *instance: str) -> str:
    return "/".join((f"/projects/{project}/app-instances", *instance))


def _operations(here: session.Session, found: list[show.Record]) -> None:
    columns = ("id", "kind", "status", "failure_code", "member_id", "task_id", "finished_at")
    show.rows(here, found, *columns)

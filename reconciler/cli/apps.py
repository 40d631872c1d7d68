"""`gpuaas apps`: applications on the allocations of a project."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from reconciler.cli import output, session
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
    slug: Annotated[str, typer.Option(help="The application.")] = "slurm-reference",
) -> None:
    """Create an instance over active allocations; each of them gets the managed key."""
    here = session.of(context)
    body = {
        "slug": slug,
        "name": name,
        "managed_key": public_key(key),
        "controller_allocation_id": controller,
        "worker_allocation_ids": worker or [],
    }
    output.record(here, here.client.post(_path(project), body))


@app.command("list")
def list_instances(context: typer.Context, project: Project) -> None:
    """List the project's instances."""
    here = session.of(context)
    instances = list(here.client.items(_path(project)))
    output.rows(here, instances, "id", "slug", "name", "status", "status_reason", "created_at")


@app.command("show")
def show_instance(context: typer.Context, instance: Instance, project: Project) -> None:
    """Show an instance, with the reason if it waits."""
    here = session.of(context)
    output.record(here, here.client.get(_path(project, instance)))


@app.command()
def members(context: typer.Context, instance: Instance, project: Project) -> None:
    """List the members of an instance with their SSH address and key expiry."""
    here = session.of(context)
    columns = ("role", "allocation_id", "status", "status_reason", "connection.host")
    detail = ("adapter_detail.hostname", "adapter_detail.bootstrap_ssh", "adapter_detail.phase")
    rows = list(here.client.items(f"{_path(project, instance)}/members"))
    output.rows(here, rows, *columns, *detail, "adapter_detail.key_expires_at")


@app.command()
def operations(context: typer.Context, instance: Instance, project: Project) -> None:
    """List operations on members and their results."""
    here = session.of(context)
    rows = list(here.client.items(f"{_path(project, instance)}/member-operations"))
    _print_operations(here, rows)


@app.command("reconcile-ssh")
def reconcile_ssh(context: typer.Context, instance: Instance, project: Project) -> None:
    """Install the managed key on every member again."""
    here = session.of(context)
    answer = here.client.post(f"{_path(project, instance)}/bootstrap-ssh/reconcile", {})
    _print_operations(here, answer["operations"])


@app.command()
def stop(
    context: typer.Context,
    instance: Instance,
    project: Project,
    reason: Annotated[str, typer.Option(help="Kept in the audit log.")] = "",
) -> None:
    """Stop an instance and remove its keys; its allocations stay."""
    here = session.of(context)
    output.record(here, here.client.post(f"{_path(project, instance)}/stop", {"reason": reason}))


def _path(project: str, *instance: str) -> str:
    return "/".join((f"/projects/{project}/app-instances", *instance))


def _print_operations(here: session.Session, operations: list[output.Record]) -> None:
    columns = ("id", "kind", "status", "failure_code", "member_id", "task_id", "finished_at")
    output.rows(here, operations, *columns)

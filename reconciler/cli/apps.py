"""`gpuaas apps`: applications on the allocations of a project."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer

from reconciler.cli import output
from reconciler.cli.allocations import Project, public_key
from reconciler.cli.options import Reason
from reconciler.cli.session import client

app = typer.Typer(no_args_is_help=True, help="Applications on the allocations of a project.")
Instance = Annotated[str, typer.Argument(help="The instance's id.")]


@app.command()
def create(
    name: Annotated[str, typer.Argument(help="Name for people.")],
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
    body = {
        "slug": slug,
        "name": name,
        "managed_key": public_key(key),
        "controller_allocation_id": controller,
        "worker_allocation_ids": worker or [],
    }
    output.record(client().post(_path(project), body))


@app.command("list")
def list_instances(project: Project) -> None:
    """List the project's instances."""
    columns = ("id", "slug", "name", "status", "status_reason", "created_at")
    output.rows(client().items(_path(project)), *columns)


@app.command("show")
def show_instance(instance: Instance, project: Project) -> None:
    """Show an instance, with the reason if it waits."""
    output.record(client().get(_path(project, instance)))


@app.command()
def members(instance: Instance, project: Project) -> None:
    """List the members of an instance with their SSH address and key expiry."""
    columns = ("role", "allocation_id", "status", "status_reason", "connection.host")
    detail = ("adapter_detail.hostname", "adapter_detail.bootstrap_ssh", "adapter_detail.phase")
    members = client().items(f"{_path(project, instance)}/members")
    output.rows(members, *columns, *detail, "adapter_detail.key_expires_at")


@app.command()
def operations(instance: Instance, project: Project) -> None:
    """List operations on members and their results."""
    _print_operations(client().items(f"{_path(project, instance)}/member-operations"))


@app.command("reconcile-ssh")
def reconcile_ssh(instance: Instance, project: Project) -> None:
    """Install the managed key on every member again."""
    answer = client().post(f"{_path(project, instance)}/bootstrap-ssh/reconcile", {})
    _print_operations(answer["operations"])


@app.command()
def stop(instance: Instance, project: Project, reason: Reason = "") -> None:
    """Stop an instance and remove its keys; its allocations stay."""
    output.record(client().post(f"{_path(project, instance)}/stop", {"reason": reason}))


def _path(project: str, *instance: str) -> str:
    return "/".join((f"/projects/{project}/app-instances", *instance))


def _print_operations(operations: Iterable[output.Record]) -> None:
    columns = ("id", "kind", "status", "failure_code", "member_id", "task_id", "finished_at")
    output.rows(operations, *columns)

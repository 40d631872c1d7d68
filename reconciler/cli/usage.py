"""`gpuaas usage`: what was had, for billing."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from reconciler.cli import session, show

COLUMNS = (
    "allocation_id",
    "project_id",
    "capacity_shape",
    "sku",
    "gpu_count",
    "started_at",
    "ended_at",
    "counted_seconds",
    "gpu_seconds",
)


def mount(app: typer.Typer) -> None:
    """Add the command."""
    app.command("usage")(usage)


def usage(
    context: typer.Context,
    start: Annotated[str, typer.Option("--from", help="RFC 3339, with a time zone.")] = "",
    end: Annotated[str, typer.Option("--to", help="RFC 3339; now if left out.")] = "",
    project: Annotated[str, typer.Option(help="Of one project.")] = "",
    member: Annotated[bool, typer.Option(help="As the project's member sees it.")] = False,
    csv: Annotated[bool, typer.Option("--csv", help="A table for programs.")] = False,
) -> None:
    """Seconds of every allocation that was active in the period."""
    here = session.of(context)
    if member and not project:
        raise typer.BadParameter("--member goes with --project")
    query = {"from": start, "to": end, "project": "" if member else project}
    query = {name: value for name, value in query.items() if value}
    path = f"/projects/{project}/usage" if member else "/admin/usage"
    if csv:
        sys.stdout.write(here.client.text(path, format="csv", **query))
        return
    show.rows(here, list(here.client.items(path, **query)), *COLUMNS)

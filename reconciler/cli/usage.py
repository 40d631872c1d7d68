"""`gpuaas usage`: billable seconds of allocations."""

from __future__ import annotations

import re
import sys
from typing import Annotated

import typer

from reconciler.cli import output, session
from reconciler.cli.projects import project_id, suggesting

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
    """Add the command to the program."""
    app.command("usage")(usage)


def usage(
    context: typer.Context,
    start: Annotated[
        str, typer.Option("--from", help="A date (from its beginning in UTC), or RFC 3339.")
    ] = "",
    end: Annotated[str, typer.Option("--to", help="The same, exclusive; default: now.")] = "",
    project: Annotated[
        str, typer.Option(callback=project_id, help="Only this project, by id or name.")
    ] = "",
    member: Annotated[bool, typer.Option(help="As a member of the project.")] = False,
    csv: Annotated[bool, typer.Option("--csv", help="Print CSV.")] = False,
) -> None:
    """List the usage of every allocation that was active in the period."""
    here = session.of(context)
    if member and not project:
        raise typer.BadParameter("--member goes with --project")
    query = {"from": _moment(start), "to": _moment(end), "project": "" if member else project}
    query = {name: value for name, value in query.items() if value}
    path = f"/projects/{project}/usage" if member else "/admin/usage"
    with suggesting("--member --project P"):
        if csv:
            sys.stdout.write(here.client.text(path, format="csv", **query))
            return
        rows = list(here.client.items(path, **query))
    output.rows(here, rows, *COLUMNS)


def _moment(text: str) -> str:
    """A date as a moment in UTC, so that a bill does not depend on the local time zone."""
    return f"{text}T00:00:00Z" if re.fullmatch(r"\d{4}-\d{2}-\d{2}", text) else text

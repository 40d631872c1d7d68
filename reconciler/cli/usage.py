"""`gpuaas usage`: what was had, for billing."""

from __future__ import annotations

import re
import sys
from typing import Annotated

import typer

from reconciler.cli import session, show
from reconciler.cli.projects import known, or_name_one

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
    start: Annotated[
        str, typer.Option("--from", help="A date (its beginning in UTC), or RFC 3339.")
    ] = "",
    end: Annotated[str, typer.Option("--to", help="The same, not included; or now.")] = "",
    project: Annotated[
        str, typer.Option(callback=known, help="Of one project, by id or name.")
    ] = "",
    member: Annotated[bool, typer.Option(help="As the project's member sees it.")] = False,
    csv: Annotated[bool, typer.Option("--csv", help="A table for programs.")] = False,
) -> None:
    """Seconds of every allocation that was active in the period."""
    here = session.of(context)
    if member and not project:
        raise typer.BadParameter("--member goes with --project")
    query = {"from": _moment(start), "to": _moment(end), "project": "" if member else project}
    query = {name: value for name, value in query.items() if value}
    path = f"/projects/{project}/usage" if member else "/admin/usage"
    with or_name_one("--member --project P"):
        if csv:
            sys.stdout.write(here.client.text(path, format="csv", **query))
            return
        found = list(here.client.items(path, **query))
    show.rows(here, found, *COLUMNS)


def _moment(text: str) -> str:
    """With a time zone, which the service asks for: bills are not to depend on where one types."""
    return f"{text}T00:00:00Z" if re.fullmatch(r"\d{4}-\d{2}-\d{2}", text) else text

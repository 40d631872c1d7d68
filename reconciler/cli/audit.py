"""`gpuaas audit`, `gpuaas trace` and the switch of the site."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from reconciler.cli import session, show


def mount(app: typer.Typer) -> None:
    """Add the commands of the site as a whole."""
    app.command("audit")(audit)
    app.command("trace")(trace)
    app.command("scheduling")(scheduling)


def audit(
    context: typer.Context,
    action: str = "",
    subject: Annotated[str, typer.Option(help="Id of a node, slot, allocation, …")] = "",
    correlation: Annotated[str, typer.Option(help="X-Correlation-Id of a request.")] = "",
    limit: int = 50,
) -> None:
    """Who used which power, and why; newest first."""
    here = session.of(context)
    wanted = {"action": action, "subject_id": subject, "correlation_id": correlation}
    query = {name: value for name, value in wanted.items() if value}
    found = here.client.get("/admin/audit", limit=limit, **query)["items"]
    show.rows(here, found, "at", "actor", "action", "subject_id", "reason", "correlation_id")


def trace(
    context: typer.Context,
    correlation: Annotated[str, typer.Argument(help="X-Correlation-Id of a request.")],
    limit: Annotated[int, typer.Option(help="At most so many entries.")] = 200,
) -> None:
    """All that followed from one request, oldest first: allocation, claims, slots, tasks, what
    their runs did on hosts, and audit.
    """
    here = session.of(context)
    path = f"/admin/correlations/{correlation}/timeline"
    found = here.client.get(path, limit=limit)["items"]
    show.timeline(here, found)
    if not found:
        show.line(f"nothing is known of {correlation}; `gpuaas audit` names such ids")
        raise typer.Exit(1)


def scheduling(
    context: typer.Context,
    switch: Annotated[Literal["show", "on", "off"], typer.Argument()] = "show",
    reason: Annotated[str, typer.Option(help="Kept in the audit log; on and off need one.")] = "",
) -> None:
    """Whether this site sells slices, or set it; each node has its own switch besides."""
    here = session.of(context)
    if switch != "show" and not reason:
        raise typer.BadParameter("on and off need --reason")
    path = "/admin/settings/slice-scheduling"
    body = {"enabled": switch == "on", "reason": reason}
    now = here.client.get(path) if switch == "show" else here.client.put(path, body)
    show.record(here, now)

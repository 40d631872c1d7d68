"""Commands for the whole site: `gpuaas audit`, `trace`, `scheduling` and `recovery-policy`."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from reconciler.cli import output, session

_RECOVERY_POLICY = "/admin/settings/recovery-policy"
Limit = Annotated[int | None, typer.Option(min=1, help="Most recoveries begun within an hour.")]


def mount(app: typer.Typer) -> None:
    """Add the commands to the program."""
    app.command("audit")(audit)
    app.command("trace")(trace)
    app.command("scheduling")(scheduling)
    app.command("recovery-policy")(recovery_policy)


def audit(
    context: typer.Context,
    action: str = "",
    subject: Annotated[str, typer.Option(help="Id of a node, slot, allocation, …")] = "",
    correlation: Annotated[str, typer.Option(help="X-Correlation-Id of a request.")] = "",
    limit: int = 50,
) -> None:
    """List administrative actions with actor and reason, newest first."""
    here = session.of(context)
    filters = {"action": action, "subject_id": subject, "correlation_id": correlation}
    query = {name: value for name, value in filters.items() if value}
    events = here.client.get("/admin/audit", limit=limit, **query)["items"]
    output.rows(here, events, "at", "actor", "action", "subject_id", "reason", "correlation_id")


def trace(
    context: typer.Context,
    correlation: Annotated[str, typer.Argument(help="X-Correlation-Id of a request.")],
    limit: Annotated[int, typer.Option(help="At most this many entries.")] = 200,
) -> None:
    """Show all effects of a request, oldest first.

    They include allocation, claims, slots, tasks, steps of runs on hosts, and audit.
    """
    here = session.of(context)
    path = f"/admin/correlations/{correlation}/timeline"
    events = here.client.get(path, limit=limit)["items"]
    output.timeline(here, events)
    if not events:
        output.line(f"nothing is known of {correlation}; `gpuaas audit` names such ids")
        raise typer.Exit(1)


def scheduling(
    context: typer.Context,
    switch: Annotated[Literal["show", "on", "off"], typer.Argument()] = "show",
    reason: Annotated[str, typer.Option(help="Kept in the audit log; required by on, off.")] = "",
) -> None:
    """Show or set whether this site sells slices. Each node has a switch of its own as well."""
    here = session.of(context)
    if switch != "show" and not reason:
        raise typer.BadParameter("on and off need --reason")
    path = "/admin/settings/slice-scheduling"
    body = {"enabled": switch == "on", "reason": reason}
    output.record(here, here.client.get(path) if switch == "show" else here.client.put(path, body))


def recovery_policy(
    context: typer.Context,
    switch: Annotated[
        Literal["show", "on", "off"], typer.Argument(help="Off by default.")
    ] = "show",
    per_node: Limit = None,
    per_hour: Limit = None,
    remove_leftovers: Annotated[
        bool | None, typer.Option(help="Recover also when the host still holds leftovers.")
    ] = None,
) -> None:
    """Show or set the automatic recovery of blocked slots, with its plan for each allocation."""
    here = session.of(context)
    policy = here.client.get(_RECOVERY_POLICY)
    if switch != "show":
        options = {
            "per_node": per_node,
            "per_hour": per_hour,
            "remove_leftovers": remove_leftovers,
        }
        body = {name: policy[name] if value is None else value for name, value in options.items()}
        policy = here.client.put(_RECOVERY_POLICY, body | {"enabled": switch == "on"})
    output.record(here, policy)

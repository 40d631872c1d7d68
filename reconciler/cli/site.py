"""Commands for the whole site: audit, trace, usage, scheduling, recovery policy."""

from __future__ import annotations

import re
import sys
import time
from typing import Annotated, Literal

import typer

from reconciler.cli import output
from reconciler.cli.options import Reason
from reconciler.cli.projects import own_project, project_option
from reconciler.cli.session import client
from reconciler.model.errors import Problem

commands = typer.Typer()

_RECOVERY_POLICY = "/admin/settings/recovery-policy"
Limit = Annotated[int | None, typer.Option(min=1, help="Recoveries begun within an hour, at most.")]


@commands.command()
def audit(
    action: Annotated[
        str, typer.Option(help="Only this action, such as admin.task.canceled.")
    ] = "",
    subject: Annotated[str, typer.Option(help="Id of a node, slot, allocation, …")] = "",
    correlation: Annotated[str, typer.Option(help="X-Correlation-Id of a request.")] = "",
    limit: Annotated[int, typer.Option(min=1, max=1000, help="At most this many.")] = 50,
) -> None:
    """List administrative actions with actor and reason, newest first."""
    filters = {"action": action, "subject_id": subject, "correlation_id": correlation}
    page = client().get("/admin/audit", limit=limit, **filters)
    columns = ("at", "actor", "action", "subject_id", "reason", "correlation_id")
    output.rows(page["items"], *columns)
    output.more(page, limit)


@commands.command()
def trace(
    correlation: Annotated[str, typer.Argument(help="X-Correlation-Id of a request.")],
    limit: Annotated[int, typer.Option(help="At most this many entries.")] = 200,
) -> None:
    """Show all effects of a request, oldest first.

    They include allocation, claims, slots, tasks, steps of runs on hosts, and audit.
    """
    path = f"/admin/correlations/{correlation}/timeline"
    events = client().get(path, limit=limit)["items"]
    output.timeline(events)
    if not events:
        output.line(f"nothing is known of {correlation}; `gpuaas audit` names such ids")
        raise typer.Exit(1)


@commands.command()
def usage(
    start: Annotated[
        str, typer.Option("--from", help="A date (from its beginning in UTC), or RFC 3339.")
    ] = "",
    end: Annotated[str, typer.Option("--to", help="The same, exclusive; default: now.")] = "",
    project: Annotated[str, project_option("Only this project, by id or name.")] = "",
    csv: Annotated[bool, typer.Option("--csv", help="Print CSV.")] = False,
) -> None:
    """List the usage of every allocation that was active in the period."""
    query = {"from": _moment(start), "to": _moment(end)}
    try:
        _print_usage("/admin/usage", query | {"project": project}, csv=csv)
    except Problem as problem:
        project = own_project(problem, project)
        _print_usage(f"/projects/{project}/usage", query, csv=csv)


def _print_usage(path: str, query: dict[str, str], *, csv: bool) -> None:
    if csv:
        sys.stdout.write(client().text(path, format="csv", **query))
        return
    rows = list(client().items(path, **query))
    columns = ("allocation_id", "project_id", "capacity_shape", "sku", "gpu_count", "started_at")
    cost = ("price", "price_kept", "cost", "currency")
    output.rows(rows, *columns, "ended_at", "counted_seconds", "gpu_seconds", *cost)


@commands.command()
def scheduling(
    switch: Annotated[
        Literal["show", "on", "off"], typer.Argument(help="Whether the site sells slices.")
    ] = "show",
    reason: Annotated[str, typer.Option(help="Kept in the audit log; required by on, off.")] = "",
) -> None:
    """Show or set whether this site sells slices. Each node has a switch of its own as well."""
    if switch != "show" and not reason:
        raise typer.BadParameter("on and off need --reason")
    path = "/admin/settings/slice-scheduling"
    body = {"enabled": switch == "on", "reason": reason}
    output.record(client().get(path) if switch == "show" else client().put(path, body))


@commands.command("recovery-policy")
def recovery_policy(
    switch: Annotated[
        Literal["show", "on", "off"],
        typer.Argument(help="Off by default, except for tenants' failures."),
    ] = "show",
    per_node: Limit = None,
    per_hour: Limit = None,
    remove_leftovers: Annotated[
        bool | None, typer.Option(help="Recover also when the host still holds leftovers.")
    ] = None,
    tenant_failures: Annotated[
        bool | None,
        typer.Option(help="Recover launches that failed by their tenant's doing, also while off."),
    ] = None,
) -> None:
    """Show or set the automatic recovery of blocked slots, with its plan for each allocation."""
    policy = client().get(_RECOVERY_POLICY)
    if switch != "show":
        options = {
            "per_node": per_node,
            "per_hour": per_hour,
            "remove_leftovers": remove_leftovers,
            "tenant_failures": tenant_failures,
        }
        body = {name: policy[name] if value is None else value for name, value in options.items()}
        policy = client().put(_RECOVERY_POLICY, body | {"enabled": switch == "on"})
    output.record(policy)


@commands.command()
def maintenance(
    switch: Annotated[
        Literal["show", "drain", "normal"], typer.Argument(help="drain: run no more jobs.")
    ] = "show",
    deadline: Annotated[
        int, typer.Option(min=0, help="Seconds after which jobs that still run are canceled.")
    ] = 300,
    wait: Annotated[bool, typer.Option(help="Wait until no job runs.")] = False,
    reason: Reason = "",
) -> None:
    """Show or set the maintenance of the site's jobs. Slices and their hosts are not concerned."""
    path = "/control/maintenance"
    state = client().get(path)
    if switch != "show":
        state = client().post(
            path, {"mode": switch, "drain_deadline_s": deadline, "reason": reason}
        )
    while wait and state["mode"] == "drain":
        time.sleep(0.5)
        state = client().get(path)
    output.record(state)


@commands.command()
def leader(
    switch: Annotated[
        Literal["show", "release"], typer.Argument(help="release: let another process be elected.")
    ] = "show",
    reason: Reason = "",
) -> None:
    """Show the process that leads, or end its term so that another process takes over."""
    if switch == "show":
        output.record(client().get("/status/leader"))
    else:
        output.record(client().post("/control/leader/release", {"reason": reason}))


def _moment(text: str) -> str:
    """A date as a moment in UTC, so that a bill does not depend on the local time zone."""
    return f"{text}T00:00:00Z" if re.fullmatch(r"\d{4}-\d{2}-\d{2}", text) else text

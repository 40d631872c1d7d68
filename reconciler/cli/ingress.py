"""`gpuaas ingress`: public ports that are forwarded to the guest of a slice."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from typing import Annotated

import typer

from reconciler.cli import output
from reconciler.cli.allocations import Allocation, Project, allocation_id
from reconciler.cli.session import client
from reconciler.model.errors import Problem
from reconciler.wait_timeout import WaitTimeout

app = typer.Typer(no_args_is_help=True, help="Public ports that lead to a slice.")
COLUMNS = ("id", "state", "public_address", "public_port", "guest_port", "sources", "expires_at")
Wait = Annotated[bool, typer.Option(help="Wait until the host has done it.")]


@app.command()
def add(
    allocation: Allocation,
    *,
    project: Project,
    address: Annotated[str, typer.Option(help="Public address of the site.")],
    port: Annotated[int, typer.Option(min=1, max=65_535, help="Public port.")],
    guest_port: Annotated[int, typer.Option(min=1, max=65_535, help="Port in the guest.")],
    source: Annotated[
        list[str], typer.Option(help="Network of clients, 0.0.0.0/0 for all; may be repeated.")
    ],
    hours: Annotated[float, typer.Option(min=0.01, max=2160, help="Life of the rule.")] = 24,
    reason: Annotated[str, typer.Option(help="Kept with the rule and in the audit log.")] = "",
    wait: Wait = True,
) -> None:
    """Forward a public port to the guest, in which a program must already answer."""
    body = {
        "public_address": address,
        "public_port": port,
        "guest_port": guest_port,
        "sources": source,
        "expires_at": (datetime.now(UTC) + timedelta(hours=hours)).isoformat(),
        "reason": reason,
    }
    rule = client().post(_path(project, allocation), body)
    if wait:
        rule = _wait_for(rule, project, "applied")
    output.record(rule)


@app.command("list")
def list_rules(allocation: Allocation, project: Project) -> None:
    """List the rules of an allocation, ended ones included."""
    output.rows(client().items(_path(project, allocation)), *COLUMNS, "failure_code")


@app.command()
def remove(
    allocation: Allocation,
    rule: Annotated[str, typer.Argument(help="The rule's id.")],
    project: Project,
    wait: Wait = True,
) -> None:
    """Stop forwarding and cut connections that are open."""
    document = client().delete(f"{_path(project, allocation)}/{rule}")
    if wait:
        document = _wait_for(document, project, "removed")
    output.record(document)


def _path(project: str, allocation: str) -> str:
    return f"/projects/{project}/allocations/{allocation_id(project, allocation)}/ingress"


def _wait_for(rule: output.Record, project: str, expected: str) -> output.Record:
    """The rule in the expected state, or in another in which it ends."""
    path, timeout = f"{_path(project, rule['allocation_id'])}/{rule['id']}", WaitTimeout()
    while rule["state"] not in (expected, "failed", "removed"):
        if timeout.ends(rule["state_since"], rule["deadline_at"]):
            raise Problem(
                "ingress_timeout",
                504,
                expected=f"rule {rule['id']} to be {expected} by now",
                found=rule["state"],
                remedy="look again with `gpuaas ingress list`; the service goes on by itself",
            )
        with output.waiting(f"rule {rule['id']}", "gpuaas ingress list"):
            time.sleep(1)
        rule = client().get(path)
    if rule["state"] == "failed" and expected == "applied":
        raise Problem(
            rule["failure_code"],
            expected=f"rule {rule['id']} to be applied",
            found="failed",
            remedy="start the service in the guest, then add the rule again",
        )
    return rule

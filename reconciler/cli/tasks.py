"""`gpuaas tasks`: what is being done, and how it went."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from reconciler.cli import session, show, waiting

if TYPE_CHECKING:
    from reconciler.client import Event

app = typer.Typer(no_args_is_help=True, help="Runs of playbooks, one task each.")

Task = Annotated[str, typer.Argument(help="The task's id.")]


@app.command("list")
def list_tasks(
    context: typer.Context,
    node: str = "",
    allocation: str = "",
    state: str = "",
    limit: int = 30,
) -> None:
    """The newest tasks."""
    here = session.of(context)
    wanted = {"node_id": node, "allocation_id": allocation, "state": state}
    query = {name: value for name, value in wanted.items() if value}
    found = here.client.get("/admin/tasks", limit=limit, **query)["items"]
    for row in found:
        row["why"] = (row["waits_for"] or row["error"]).get("code", "")
    show.rows(here, found, "id", "kind", "state", "node_id", "attempt", "created_at", "why")


@app.command("show")
def show_task(context: typer.Context, task: Task) -> None:
    """One task, with the end of its run's output."""
    here = session.of(context)
    found = here.client.get(f"/admin/tasks/{task}")
    if here.output == "json":
        show.document(found)
        return
    output = found.pop("output", "")
    events = found.pop("events", [])
    show.record(here, found)
    for event in events:
        show.line(f"{event['at']}  {event['document']}")
    sys.stdout.write(show.clean(output))


@app.command()
def cancel(context: typer.Context, task: Task, reason: str = "") -> None:
    """End a task that waits; ask a running one to stop."""
    here = session.of(context)
    found = here.client.post(f"/admin/tasks/{task}/cancel", {"reason": reason})
    show.record(here, found)
    if found["state"] not in ("canceled", "running"):
        show.line(f"nothing to cancel: it had {found['state']}")


@app.command()
def watch(context: typer.Context, task: Task) -> None:
    """Follow a task to its end."""
    here = session.of(context)
    show.record(here, waiting.follow(here, task)["result"])


@app.command()
def follow(context: typer.Context, task: Task) -> None:
    """Everything a task has done and does, as it comes, until it has ended."""
    here = session.of(context)
    for event in here.client.events(f"/admin/tasks/{task}/events"):
        if here.output == "json":
            sys.stdout.write(json.dumps({"event": event.name, **event.document}) + "\n")
            sys.stdout.flush()
        elif event.name != "end":
            show.line(_told(event))
        if event.name == "end":
            ended = event.document
            if ended["state"] != "succeeded":
                raise waiting.failed(ended)
            return


@app.command()
def output(
    context: typer.Context,
    task: Task,
    limit: Annotated[int, typer.Option(help="At most so many bytes of its end.")] = 20_000,
) -> None:
    """What the task's run printed, without secrets."""
    here = session.of(context)
    found = here.client.get(f"/admin/tasks/{task}/output", limit=limit)
    if here.output == "json":
        show.document(found)
        return
    if not found["here"]:
        show.line("nothing to show: no run has begun, or its files are on another machine")
    sys.stdout.write(show.clean(found["output"]))


def _told(event: Event) -> str:
    said = event.document
    if event.name == "state":
        reason = f": {said['reason']}" if said["reason"] else ""
        return f"{said['at']}  {said['target']}{reason}"
    code = f"  {said['code']}" if said.get("code") else ""
    return f"{said.get('at', '')}    {said.get('event', ''):<8} {said.get('task', '')}{code}"

"""`gpuaas allocation`: one of them, by its id; what tenants type every day is in allocations.py."""

from __future__ import annotations

from typing import Annotated

import typer

from reconciler.cli import session, show
from reconciler.cli.allocations import Allocation
from reconciler.cli.projects import known, or_name_one

app = typer.Typer(no_args_is_help=True, help="One allocation: look, and end what never answers.")


@app.command("show")
def show_allocation(
    context: typer.Context,
    allocation: Allocation,
    project: Annotated[
        str,
        typer.Option(
            envvar="GPUAAS_PROJECT", callback=known, help="As its members see it; without: all."
        ),
    ] = "",
) -> None:
    """One allocation; an admin also sees its claims, tasks, and all that happened to it."""
    here = session.of(context)
    where = f"/projects/{project}/allocations" if project else "/admin/allocations"
    with or_name_one():
        found = here.client.get(f"{where}/{allocation}")
    if here.output == "json" or project:
        show.record(here, found)
        return
    # As JSON in a cell they would be walls, with the one line that is looked for in them.
    claims, tasks, happened = (found.pop(name) for name in ("claims", "tasks", "timeline"))
    found.pop("task_ids", None)
    show.record(here, found)
    show.rows(here, claims, "slot_id", "state", "gpu_pci_address", "nvme_identity", "fence")
    show.rows(here, tasks, "id", "kind", "state", "created_at", "error.code")
    changes = [row for row in happened if row["type"] == "state"]
    show.rows(here, changes, "at", "entity", "source", "target", "actor", "reason")


@app.command("force-release")
def force_release(
    context: typer.Context,
    allocation: Allocation,
    reason: Annotated[str, typer.Option(help="Kept in history and audit.")],
    yes: Annotated[bool, typer.Option(help="Do not ask.")] = False,
) -> None:
    """End use and billing although the host never answers; its slots stay blocked."""
    here = session.of(context)
    if not yes:
        typer.confirm(
            f"{allocation} is over for its tenant, whatever runs. Go on?", abort=True, err=True
        )
    path = f"/admin/allocations/{allocation}/force-release"
    show.record(here, here.client.post(path, {"reason": reason}))

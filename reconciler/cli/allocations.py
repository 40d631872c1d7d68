"""Allocations: `gpuaas launch`, `release`, `allocations`, `allocation`, `explain`."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from reconciler.cli import output, session
from reconciler.cli.projects import project_id, suggesting
from reconciler.model.errors import Problem
from reconciler.wait_timeout import WaitTimeout

Project = Annotated[
    str,
    typer.Option(envvar="GPUAAS_PROJECT", callback=project_id, help="The project's id or name."),
]
Allocation = Annotated[str, typer.Argument(help="The allocation's id.")]
COLUMNS = ("id", "state", "gpu_count", "hostname", "connection.host", "created_at", "error_code")

app = typer.Typer(no_args_is_help=True, help="One allocation: show it, or force its release.")


def mount(parent: typer.Typer) -> None:
    """Add the commands to the program."""
    parent.add_typer(app, name="allocation")
    parent.command("launch")(launch)
    parent.command("release")(release)
    parent.command("allocations")(list_allocations)
    parent.command("explain")(explain)


def launch(
    context: typer.Context,
    *,
    project: Project,
    image: Annotated[str, typer.Option(help="Name of an image; required for a slice.")] = "",
    image_version: Annotated[str, typer.Option(help="Default: the newest.")] = "",
    key: Annotated[list[Path], typer.Option(help="File with a public SSH key; may be repeated.")],
    shape: Annotated[
        Literal["gpu_slice", "baremetal"],
        typer.Option(help="A VM with whole GPUs, or a whole machine."),
    ] = "gpu_slice",
    gpus: Annotated[int, typer.Option(min=1, help="GPUs of a slice.")] = 1,
    username: str = "ubuntu",
    hostname: str = "slice",
    region: str = "",
    pool: Annotated[str, typer.Option(help="Use only nodes of this pool.")] = "",
    wait: Annotated[bool, typer.Option(help="Wait until it can be used.")] = True,
) -> None:
    """Launch a virtual machine with whole GPUs, or a whole bare-metal machine."""
    here = session.of(context)
    body: dict[str, Any] = {
        "capacity_shape": shape,
        "username": username,
        "hostname": hostname,
        "region": region,
        "pool": pool,
        "image_version": image_version,
        "ssh_keys": [public_key(file) for file in key],
    }
    if shape == "gpu_slice":
        body["gpu_count"] = gpus
    if image:
        body["image"] = image
    try:
        allocation = here.client.post(f"/projects/{project}/allocations", body)
    except Problem as problem:
        _explain_refusal(here, problem, gpus)
        raise
    if wait:
        allocation = _wait_for(here, allocation, {"active", "failed"})
    output.record(here, allocation)


def release(
    context: typer.Context,
    allocation: Allocation,
    project: Project,
    wait: Annotated[bool, typer.Option(help="Wait until its disks are proven clean.")] = True,
) -> None:
    """Give an allocation back."""
    here = session.of(context)
    document = here.client.post(f"/projects/{project}/allocations/{allocation}/release")
    if wait:
        document = _wait_for(here, document, {"released", "failed"})
    output.record(here, document)


def list_allocations(
    context: typer.Context,
    project: Annotated[
        str,
        typer.Option(
            envvar="GPUAAS_PROJECT", callback=project_id, help="Default: all, for admins only."
        ),
    ] = "",
    state: Annotated[str, typer.Option(help="Only this state, such as active or failed.")] = "",
) -> None:
    """List the allocations of a project, or of all projects."""
    here = session.of(context)
    query = {"state": state} if state else {}
    if project:
        allocations = list(here.client.items(f"/projects/{project}/allocations", **query))
        output.rows(here, allocations, *COLUMNS)
        return
    with suggesting():
        allocations = list(here.client.items("/admin/allocations", **query))
    columns = ("id", "project_id", "state", "node_id", "gpu_count", "error.code")
    output.rows(here, allocations, *columns)


@app.command("show")
def show_allocation(
    context: typer.Context,
    allocation: Allocation,
    project: Annotated[
        str,
        typer.Option(
            envvar="GPUAAS_PROJECT",
            callback=project_id,
            help="Show what members see. Default: everything, for admins only.",
        ),
    ] = "",
) -> None:
    """Show an allocation; admins also see its claims, tasks and history."""
    here = session.of(context)
    path = f"/projects/{project}/allocations" if project else "/admin/allocations"
    with suggesting():
        document = here.client.get(f"{path}/{allocation}")
    if here.output == "json" or project:
        output.record(here, document)
        return
    # Lists get tables of their own: as JSON in a cell they would be unreadable.
    claims, tasks, events = (document.pop(name) for name in ("claims", "tasks", "timeline"))
    document.pop("task_ids", None)
    output.record(here, document)
    output.rows(here, claims, "slot_id", "state", "gpu_pci_address", "nvme_identity", "fence")
    output.rows(here, tasks, "id", "kind", "state", "created_at", "error.code")
    changes = [row for row in events if row["type"] == "state"]
    output.rows(here, changes, "at", "entity", "source", "target", "actor", "reason")


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
            f"{allocation} ends for its tenant, even if it still runs. Go on?",
            abort=True,
            err=True,
        )
    path = f"/admin/allocations/{allocation}/force-release"
    output.record(here, here.client.post(path, {"reason": reason}))


def explain(
    context: typer.Context,
    gpus: Annotated[int, typer.Option(min=1, help="GPUs of the slice.")] = 1,
    region: str = "",
    pool: str = "",
    node: Annotated[str, typer.Option(help="Consider only this node.")] = "",
) -> None:
    """Explain where a launch would be placed, and why not elsewhere. Reserves nothing."""
    here = session.of(context)
    filters = {"region": region, "pool": pool, "node_id": node}
    query = {name: value for name, value in filters.items() if value}
    document = here.client.get("/admin/placement/explain", gpus=gpus, **query)
    if here.output == "json":
        output.document(document)
        return
    summary = dict(document["explanation"])
    nodes = summary.pop("nodes")
    output.record(here, summary | (document["placement"] or {}))
    output.rows(here, nodes, "node_id", "slots", "free", "largest", "reasons")


def public_key(file: Path) -> str:
    """The public SSH key in a file; Problem `file_invalid`."""
    try:
        text = file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise _invalid_key(file, getattr(error, "strerror", None) or "no text") from error
    # A private key must not leave this machine, not even to be refused.
    if "PRIVATE KEY" in text:
        raise _invalid_key(file, "a private key")
    if len(text.splitlines()) != 1:
        raise _invalid_key(file, f"{len(text.splitlines())} lines")
    return text


def _explain_refusal(here: session.Session, problem: Problem, gpus: int) -> None:
    """Print what holds the GPUs that are not free; JSON output contains it already."""
    why = problem.detail.get("explanation")
    if here.output == "json" or not isinstance(why, dict) or not why.get("reasons"):
        return
    output.line("not free: " + ", ".join(f"{n} {code}" for code, n in why["reasons"].items()))
    if "nodes" in why:
        output.line(f"`gpuaas explain --gpus {gpus}` shows it by node")


def _wait_for(
    here: session.Session, allocation: dict[str, Any], states: set[str]
) -> dict[str, Any]:
    path = f"/projects/{allocation['project_id']}/allocations/{allocation['id']}"
    # As long as the service allows: eight disks are wiped one after another, some for hours.
    timeout, last_state = WaitTimeout(), ""
    while allocation["state"] not in states:
        if allocation["state"] != last_state:
            last_state = allocation["state"]
            output.line(f"allocation {allocation['id']} {last_state}")
        _refuse_failed_release(allocation)
        if timeout.ends(allocation["state_since"], allocation["deadline_at"]):
            raise _timed_out(allocation, states)
        time.sleep(1)
        allocation = here.client.get(path)
    if allocation["state"] == "failed":
        raise Problem(
            allocation["error_code"] or "allocation_failed",
            expected=f"allocation {allocation['id']} to be {' or '.join(states - {'failed'})}",
            found="failed",
            remedy="launch again; an operator sees the cause in"
            f" `gpuaas tasks list --allocation {allocation['id']}`",
        )
    return allocation


def _refuse_failed_release(allocation: dict[str, Any]) -> None:
    """A failed release goes on only after an operator has acted, so the command does not wait."""
    if allocation["state"] == "releasing" and allocation["error_code"]:
        raise Problem(
            allocation["error_code"],
            expected=f"allocation {allocation['id']} to be released",
            found="releasing: its clean-up has failed",
            remedy="leave it to the operators, who finish it with"
            f" `gpuaas recover {allocation['id']} --reason WHY`; `gpuaas allocations` shows when",
        )


def _timed_out(allocation: dict[str, Any], states: set[str]) -> Problem:
    return Problem(
        "allocation_timeout",
        504,
        expected=f"allocation {allocation['id']} to be {' or '.join(sorted(states))} by now",
        found=allocation["state"],
        remedy="look again with `gpuaas allocations`; the service goes on by itself",
    )


def _invalid_key(file: Path, found: str) -> Problem:
    return Problem(
        "file_invalid",
        422,
        expected="a file with one public SSH key, on one line",
        found=f"{file}: {found}",
        remedy="give the .pub file; --key may be repeated",
    )

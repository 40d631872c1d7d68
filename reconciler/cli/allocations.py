"""`gpuaas launch`, `release`, `allocations`, `recover`."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from reconciler.cli import runbook, session, show
from reconciler.cli.projects import known
from reconciler.domain.errors import Problem

Project = Annotated[
    str,
    typer.Option(envvar="GPUAAS_PROJECT", callback=known, help="The project's id or name."),
]
Allocation = Annotated[str, typer.Argument(help="The allocation's id.")]
COLUMNS = ("id", "state", "gpu_count", "hostname", "connection.host", "created_at", "error_code")
# A tenant's machine is ready or failed well before; the service goes on in any case.
DEADLINE_S = 3600


def mount(app: typer.Typer) -> None:
    """Add what tenants type, and what operators type when it went wrong."""
    app.command("launch")(launch)
    app.command("release")(release)
    app.command("allocations")(list_allocations)
    app.command("recover")(recover)


def launch(
    context: typer.Context,
    *,
    project: Project,
    image: Annotated[str, typer.Option(help="Name of an image; a slice needs one.")] = "",
    image_version: Annotated[str, typer.Option(help="The newest unless given.")] = "",
    key: Annotated[list[Path], typer.Option(help="File with a public SSH key; may be repeated.")],
    shape: Annotated[
        Literal["gpu_slice", "baremetal"], typer.Option(help="Whole GPUs in a VM, or a machine.")
    ] = "gpu_slice",
    gpus: Annotated[int, typer.Option(min=1, help="Of a slice.")] = 1,
    username: str = "ubuntu",
    hostname: str = "slice",
    region: str = "",
    pool: Annotated[str, typer.Option(help="Nodes of this pool only.")] = "",
    wait: Annotated[bool, typer.Option(help="Until it can be used.")] = True,
) -> None:
    """A virtual machine with whole GPUs, or a whole machine as it is installed."""
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
    made = here.client.post(f"/projects/{project}/allocations", body)
    show.record(here, _until(here, made, {"active", "failed"}) if wait else made)


def release(
    context: typer.Context,
    allocation: Allocation,
    project: Project,
    wait: Annotated[bool, typer.Option(help="Until its disks are proven clean.")] = True,
) -> None:
    """Give an allocation back."""
    here = session.of(context)
    ended = here.client.post(f"/projects/{project}/allocations/{allocation}/release")
    show.record(here, _until(here, ended, {"released", "failed"}) if wait else ended)


def list_allocations(
    context: typer.Context,
    project: Annotated[
        str,
        typer.Option(envvar="GPUAAS_PROJECT", callback=known, help="Without one: all, for admins."),
    ] = "",
    state: Annotated[str, typer.Option(help="Only those, such as active or failed.")] = "",
) -> None:
    """A project's allocations, or all of them."""
    here = session.of(context)
    query = {"state": state} if state else {}
    if project:
        found = list(here.client.items(f"/projects/{project}/allocations", **query))
        show.rows(here, found, *COLUMNS)
        return
    found = list(here.client.items("/admin/allocations", **query))
    show.rows(here, found, "id", "project_id", "state", "node_id", "gpu_count", "error.code")


def recover(
    context: typer.Context,
    allocation: Allocation,
    reason: Annotated[str, typer.Option(help="Kept in the audit log.")],
) -> None:
    """Bring the slots of a failed allocation back, with evidence at every step."""
    here = session.of(context)
    from reconciler import recovery

    def told(step: str, found: dict[str, Any]) -> None:
        show.line(f"  {step}")
        for line in runbook.lines(step, found):
            show.line(f"    {line}")

    show.record(here, recovery.recover(here.client, allocation, reason, told))


def _until(here: session.Session, allocation: dict[str, Any], states: set[str]) -> dict[str, Any]:
    path = f"/projects/{allocation['project_id']}/allocations/{allocation['id']}"
    end, told = time.monotonic() + DEADLINE_S, ""
    while allocation["state"] not in states:
        if allocation["state"] != told:
            told = allocation["state"]
            show.line(f"allocation {allocation['id']} {told}")
        if time.monotonic() > end:
            raise _stuck(allocation, states)
        time.sleep(1)
        allocation = here.client.get(path)
    if allocation["state"] == "failed":
        raise Problem(
            allocation["error_code"] or "allocation_failed",
            expected=f"allocation {allocation['id']} to be {' or '.join(states - {'failed'})}",
            found="failed",
            remedy="launch again; an operator sees the cause in `gpuaas tasks list --allocation`",
        )
    return allocation


def _stuck(allocation: dict[str, Any], states: set[str]) -> Problem:
    return Problem(
        "allocation_timeout",
        504,
        expected=f"allocation {allocation['id']} to be {' or '.join(sorted(states))} by now",
        found=allocation["state"],
        remedy="look again with `gpuaas allocations`; the service goes on by itself",
    )


def public_key(file: Path) -> str:
    """What is in it; Problem `file_invalid`."""
    try:
        return file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise Problem(
            "file_invalid",
            422,
            expected="a file with a public SSH key",
            found=f"{file}: {error}",
            remedy="give the .pub file",
        ) from error

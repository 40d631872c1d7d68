"""`gpuaas launch`, `release`, `allocations`."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from reconciler.cli import session, show
from reconciler.cli.projects import known, or_name_one
from reconciler.model.errors import Problem
from reconciler.wait_timeout import Patience

Project = Annotated[
    str,
    typer.Option(envvar="GPUAAS_PROJECT", callback=known, help="The project's id or name."),
]
Allocation = Annotated[str, typer.Argument(help="The allocation's id.")]
COLUMNS = ("id", "state", "gpu_count", "hostname", "connection.host", "created_at", "error_code")


def mount(app: typer.Typer) -> None:
    """Add the commands of a tenant."""
    app.command("launch")(launch)
    app.command("release")(release)
    app.command("allocations")(list_allocations)


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
    try:
        made = here.client.post(f"/projects/{project}/allocations", body)
    except Problem as problem:
        _say_why(here, problem, gpus)
        raise
    show.record(here, _until(here, made, {"active", "failed"}) if wait else made)


def _say_why(here: session.Session, refused: Problem, gpus: int) -> None:
    """What holds the GPUs that are not free, as the service counts it; JSON has it already."""
    why = refused.detail.get("explanation")
    if here.output == "json" or not isinstance(why, dict) or not why.get("reasons"):
        return
    show.line("not free: " + ", ".join(f"{n} {code}" for code, n in why["reasons"].items()))
    if "nodes" in why:
        show.line(f"`gpuaas explain --gpus {gpus}` shows it by node")


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
    with or_name_one():
        found = list(here.client.items("/admin/allocations", **query))
    show.rows(here, found, "id", "project_id", "state", "node_id", "gpu_count", "error.code")


def _until(here: session.Session, allocation: dict[str, Any], states: set[str]) -> dict[str, Any]:
    path = f"/projects/{allocation['project_id']}/allocations/{allocation['id']}"
    # As long as the service lets it take: eight disks are wiped one after another, some for hours.
    patience, told = Patience(), ""
    while allocation["state"] not in states:
        if allocation["state"] != told:
            told = allocation["state"]
            show.line(f"allocation {allocation['id']} {told}")
        _refuse_stranded(allocation)
        if patience.ends(allocation["state_since"], allocation["deadline_at"]):
            raise _stuck(allocation, states)
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


def _refuse_stranded(allocation: dict[str, Any]) -> None:
    """A release that has failed goes on when an operator looks after it: not while one waits."""
    if allocation["state"] == "releasing" and allocation["error_code"]:
        raise Problem(
            allocation["error_code"],
            expected=f"allocation {allocation['id']} to be released",
            found="releasing: its clean-up has failed",
            remedy="leave it to the operators, who bring it to its end with"
            f" `gpuaas recover {allocation['id']} --reason WHY`; `gpuaas allocations` shows when",
        )


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
        text = file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise _no_key(file, getattr(error, "strerror", None) or "no text") from error
    # A private key must not leave this machine, not even to be refused.
    if "PRIVATE KEY" in text:
        raise _no_key(file, "a private key")
    if len(text.splitlines()) != 1:
        raise _no_key(file, f"{len(text.splitlines())} lines")
    return text


def _no_key(file: Path, found: str) -> Problem:
    return Problem(
        "file_invalid",
        422,
        expected="a file with one public SSH key, on one line",
        found=f"{file}: {found}",
        remedy="give the .pub file; --key may be repeated",
    )

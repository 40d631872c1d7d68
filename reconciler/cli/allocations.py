"""Allocations: `gpuaas launch`, `release`, `start`, `stop`, `restart`, `reset`, `allocations`."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from reconciler.cli import output
from reconciler.cli.options import Yes, at_terminal, confirm, file_invalid, read_text
from reconciler.cli.projects import own_project, project_option
from reconciler.cli.session import client
from reconciler.model.act import require_idempotency_key
from reconciler.model.errors import Problem
from reconciler.model.recovery import finishing_command
from reconciler.model.states import LIVE_ALLOCATIONS, PowerAction
from reconciler.wait_timeout import WaitTimeout

Project = Annotated[str, project_option("The project's id or name.", required=True)]
AllocationId = Annotated[str, typer.Argument(help="The allocation's id.")]
Allocation = Annotated[
    str, typer.Argument(help="The allocation's id, or the machine's host name while it lives.")
]
_ID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_DEFAULT_PROJECT = "Default: for admins all, for others their only project."
COLUMNS = ("id", "state", "gpu_count", "hostname", "connection.host", "created_at", "error_code")

commands = typer.Typer()
app = typer.Typer(no_args_is_help=True, help="One allocation: show it, or force its release.")
commands.add_typer(app, name="allocation")


@commands.command()
def launch(
    *,
    project: Project,
    image: Annotated[
        str, typer.Option(help="Name, or name:version, of an image; required for a slice.")
    ] = "",
    image_version: Annotated[str, typer.Option(help="Default: the newest.")] = "",
    key: Annotated[list[Path], typer.Option(help="File with a public SSH key; may be repeated.")],
    shape: Annotated[
        Literal["gpu_slice", "baremetal"],
        typer.Option(help="A VM with whole GPUs, or a whole machine."),
    ] = "gpu_slice",
    gpus: Annotated[int, typer.Option(min=1, help="GPUs of a slice.")] = 1,
    sku: Annotated[str, typer.Option(help="Only this offer; `gpuaas catalog` lists them.")] = "",
    username: Annotated[str, typer.Option(help="Your account in the machine.")] = "ubuntu",
    hostname: Annotated[str, typer.Option(help="Name of the machine.")] = "slice",
    region: Annotated[str, typer.Option(help="Use only nodes of this region.")] = "",
    pool: Annotated[str, typer.Option(help="Use only nodes of this pool.")] = "",
    user_data: Annotated[
        Path | None, typer.Option(help="File with your own cloud-config, for a slice.")
    ] = None,
    terminal: Annotated[
        bool, typer.Option("--terminal", help="Let a slice accept the gateway's terminals.")
    ] = False,
    worker_pool: Annotated[
        str, typer.Option(help="Run the workers of this pool, by id or name, there.")
    ] = "",
    idempotency_key: Annotated[
        str | None,
        typer.Option(help="A second launch with this key returns the first allocation."),
    ] = None,
    wait: Annotated[bool, typer.Option(help="Wait until it can be used.")] = True,
) -> None:
    """Launch a virtual machine with whole GPUs, or a whole bare-metal machine."""
    # As `gpuaas images cache` names it. No name of an image has a colon.
    image, _, version = image.partition(":")
    if version and image_version:
        raise typer.BadParameter("give the version either in --image or as --image-version")
    # An empty key, as of a variable that is not set, would let the same launch happen twice.
    if idempotency_key is not None:
        require_idempotency_key(idempotency_key)
    body = {
        "capacity_shape": shape,
        "gpu_count": gpus if shape == "gpu_slice" else None,
        "image": image or None,
        "username": username,
        "hostname": hostname,
        "region": region,
        "pool": pool,
        "sku": sku,
        "image_version": version or image_version,
        "ssh_keys": [public_key(file) for file in key],
        "terminal": terminal,
        "worker_pool": worker_pool,
    }
    if user_data:
        expected = "a file with cloud-config, in UTF-8"
        body["user_data"] = read_text(user_data, expected, "correct the path or the file")
    try:
        path = f"/projects/{project}/allocations"
        allocation = client().post(path, body, key=idempotency_key or "")
    except Problem as problem:
        _explain_refusal(problem, gpus)
        raise
    if wait:
        allocation = _wait_for(allocation, "active")
    output.record(allocation)


@commands.command()
def catalog() -> None:
    """List what can be launched: sizes and price of each offer, and how many GPUs are free now."""
    document = client().get("/catalog")
    if output.in_json(document):
        return
    free = _free(document["skus"])
    shown = []
    for sku in document["skus"]:
        price = sku["gpu_hour_price"]
        words = f"{price} {document['currency']}" if price else ""
        needs = ", ".join(sku["image_runtime"])
        gpus = ", ".join(map(str, sku["gpu_counts"]))
        more = {"gpus": gpus, "gpu_hour": words, "image_contains": needs}
        shown.append(sku | more | {"free_gpus": free.get(sku["name"], "unknown")})
    columns = ("name", "title", "capacity_shape", "gpus", "vcpus_per_gpu", "memory_mib_per_gpu")
    output.rows(shown, *columns, "gpu_hour", "free_gpus", "image_contains")
    regions = [
        {
            "region": region["name"] or "none named",
            "title": region["title"],
            "now": region["reason"] or "available",
        }
        for region in document["regions"]
    ]
    output.rows(regions, "region", "title", "now")


def _free(skus: Sequence[dict[str, Any]]) -> dict[str, int]:
    """GPUs that are free now, by offer; without offers that cannot be judged at the moment."""
    free: dict[str, int] = {}
    whole: dict[str, int] = {}
    for sku in skus:
        name, sizes = sku["name"], sku["gpu_counts"]
        if sku["capacity_shape"] != "gpu_slice":
            whole[name] = sizes[0]
        elif sizes:
            with suppress(Problem):
                judged = client().get("/catalog/availability", gpus=sizes[0], sku=name)
                free[name] = judged["free"]
    with suppress(Problem):
        counts = client().get("/catalog/machines")["counts"]
        free |= dict.fromkeys(whole, 0)
        for row in counts:
            free[row["sku"]] = free.get(row["sku"], 0) + row["free"] * whole.get(row["sku"], 0)
    return free


@commands.command()
def release(
    allocation: Allocation,
    project: Project,
    yes: Yes = False,
    wait: Annotated[bool, typer.Option(help="Wait until its disks are proven clean.")] = True,
) -> None:
    """Give an allocation back: its machine ends, and its disks are wiped. Asks at a terminal."""
    id = allocation_id(project, allocation)
    # Programs release as well, and their input is no terminal.
    if not yes and at_terminal():
        what = id if id == allocation else f"{allocation} ({id})"
        confirm(f"Everything on the disks of {what} is lost. Go on?")
    document = client().post(f"/projects/{project}/allocations/{id}/release")
    if wait:
        document = _wait_for(document, "released")
    output.record(document)


# A member's answer names no deadline of the action. Hardware profiles allow a guest's shutdown and
# start much less; the rest is for tasks of the same host that come first.
_POWER_S = 7200


def _power(action: PowerAction) -> Callable[..., None]:
    def change(
        allocation: Allocation,
        project: Project,
        wait: Annotated[bool, typer.Option(help="Wait until it is done.")] = True,
    ) -> None:
        path = f"/projects/{project}/allocations/{allocation_id(project, allocation)}"
        document = client().post(f"{path}/power", {"action": action.value})
        timeout = WaitTimeout(_POWER_S)
        while wait and document["power_action"]:
            if timeout.ends(None, None):
                raise Problem(
                    "power_timeout",
                    504,
                    expected=f"{action.value} of allocation {allocation} to have ended by now",
                    found=f"{document['power_action']} under way for {_POWER_S // 60} minutes",
                    remedy="look again with `gpuaas allocations`; the service goes on by itself."
                    " If it lasts, the operators see what it waits for",
                )
            with output.waiting(f"{action.value} of {allocation}", "gpuaas allocations"):
                time.sleep(1)
            document = client().get(path)
        if wait and document["error_code"]:
            raise Problem(
                document["error_code"],
                expected=f"{action.value} of allocation {allocation}",
                found="its run failed",
                remedy="ask again; an operator sees the cause in"
                f" `gpuaas tasks list --allocation {document['id']}`",
            )
        output.record(document)

    change.__doc__ = action.meaning
    return change


for _action in PowerAction:
    commands.command(_action.value)(_power(_action))


@commands.command("allocations")
def list_allocations(
    project: Annotated[str, project_option(_DEFAULT_PROJECT)] = "",
    state: Annotated[str, typer.Option(help="Only this state, such as active or failed.")] = "",
) -> None:
    """List the allocations of a project, or of all projects."""
    if not project:
        columns = ("id", "project_id", "state", "node_id", "gpu_count", "error.code")
        try:
            output.rows(client().items("/admin/allocations", state=state), *columns)
        except Problem as problem:
            project = own_project(problem)
        else:
            return
    output.rows(client().items(f"/projects/{project}/allocations", state=state), *COLUMNS)


@app.command("show")
def show_allocation(
    allocation: Allocation,
    project: Annotated[str, project_option(f"Show what members see. {_DEFAULT_PROJECT}")] = "",
) -> None:
    """Show an allocation; admins also see its claims, tasks and history."""
    document: dict[str, Any] = {}
    if not project:
        try:
            id = allocation_id("", allocation)
            document = client().get(f"/admin/allocations/{id}")
        except Problem as problem:
            project = own_project(problem)
    if project:
        id = allocation_id(project, allocation)
        document = client().get(f"/projects/{project}/allocations/{id}")
    if output.is_json() or project:
        output.record(document)
        return
    # Lists get tables of their own: as JSON in a cell they would be unreadable.
    claims, tasks, events = (document.pop(name) for name in ("claims", "tasks", "timeline"))
    document.pop("task_ids", None)
    refused = sorted(document.pop("refused_packets").items())
    output.record(document)
    if refused:
        output.rows([{"refused": kind, "packets": n} for kind, n in refused], "refused", "packets")
    output.rows(claims, "slot_id", "state", "gpu_pci_address", "nvme_identity", "fence")
    output.rows(tasks, "id", "kind", "state", "created_at", "error.code")
    changes = [row for row in events if row["type"] == "state"]
    output.rows(changes, "at", "entity", "source", "target", "actor", "reason")


@app.command()
def telemetry(
    allocation: Allocation,
    project: Project,
    minutes: Annotated[int, typer.Option(min=1, max=1440, help="For JSON: how far back.")] = 60,
) -> None:
    """Show the newest telemetry of a slice: measured by its host, and reported by its guest."""
    id = allocation_id(project, allocation)
    document = client().get(f"/projects/{project}/allocations/{id}/telemetry", minutes=minutes)
    if output.in_json(document):
        return
    latest = document["latest"]
    if latest is None:
        output.line("no telemetry in the last minutes")
        return
    guest = latest["guest"] or {}
    gpus = guest.pop("gpus", [])
    output.line(f"measured at {latest['at']}")
    for values in filter(None, (latest["host"], guest)):
        output.record(values)
    if gpus:
        output.rows(gpus, *gpus[0])


@app.command("force-release")
def force_release(
    allocation: AllocationId,
    reason: Annotated[str, typer.Option(help="Kept in history and audit.")],
    yes: Yes = False,
) -> None:
    """End use and billing although the host never answers; its slots stay blocked."""
    if not yes:
        confirm(f"{allocation} ends for its tenant, even if it still runs. Go on?")
    path = f"/admin/allocations/{allocation}/force-release"
    output.record(client().post(path, {"reason": reason}))


@commands.command()
def explain(
    gpus: Annotated[int, typer.Option(min=1, help="GPUs of the slice.")] = 1,
    region: Annotated[str, typer.Option(help="Consider only this region.")] = "",
    pool: Annotated[str, typer.Option(help="Consider only this pool.")] = "",
    node: Annotated[str, typer.Option(help="Consider only this node.")] = "",
) -> None:
    """Explain where a launch would be placed, and why not elsewhere. Reserves nothing."""
    filters = {"region": region, "pool": pool, "node_id": node}
    document = client().get("/admin/placement/explain", gpus=gpus, **filters)
    if output.in_json(document):
        return
    summary = dict(document["explanation"])
    nodes = summary.pop("nodes")
    output.record(summary | (document["placement"] or {}))
    output.rows(nodes, "node_id", "slots", "free", "largest", "reasons")


def allocation_id(project: str, name: str) -> str:
    """The id of the project's allocation with this id, or of its machine with this host name.

    Without a project, for admins: of all projects.

    Problem `allocation_not_found`, `allocation_ambiguous` if several machines have the name, or
    `http_error` if the service's answer has no id.
    """
    if _ID.fullmatch(name):
        return name
    path = f"/projects/{project}/allocations" if project else "/admin/allocations"
    # A launch that goes on between two of these requests is met twice, and not missed.
    rows = (row for state in LIVE_ALLOCATIONS for row in client().items(path, state=state))
    ids = list({str(row["id"]): None for row in rows if row["hostname"] == name})
    if len(ids) == 1:
        if not _ID.fullmatch(ids[0]):
            # It becomes a word of ssh's command line, and ssh would take it for an option.
            raise suspicious_answer("an id for the allocation", ids[0])
        return ids[0]
    raise Problem(
        "allocation_ambiguous" if ids else "allocation_not_found",
        409 if ids else 404,
        expected="the id of an allocation, or a host name that a single machine has",
        found=f"{name!r}, the name of {', '.join(ids)}" if ids else f"{name!r}",
        remedy="see `gpuaas allocations`",
    )


def suspicious_answer(expected: str, found: object) -> Problem:
    """Problem `http_error` for an answer that must not become words or settings of a program."""
    return Problem(
        "http_error",
        expected=expected,
        found=repr(found)[:100],
        remedy="ask the operators: the service, or a proxy before it, may be taken over",
    )


def public_key(file: Path) -> str:
    """The public SSH key in a file; Problem `file_invalid`."""
    parts = (
        "a file with one public SSH key, on one line",
        "give the .pub file; --key may be repeated",
    )
    text = read_text(file, *parts).strip()
    # A private key must not leave this machine, not even to be refused.
    if "PRIVATE KEY" in text:
        raise file_invalid(file, "a private key", *parts)
    if len(text.splitlines()) != 1:
        raise file_invalid(file, f"{len(text.splitlines())} lines", *parts)
    return text


def _explain_refusal(problem: Problem, gpus: int) -> None:
    """Print what holds the GPUs that are not free; JSON output contains it already."""
    why = problem.detail.get("explanation")
    if output.is_json() or not isinstance(why, dict) or not why.get("reasons"):
        return
    output.line("not free: " + ", ".join(f"{n} {code}" for code, n in why["reasons"].items()))
    if "nodes" in why:
        output.line(f"`gpuaas explain --gpus {gpus}` shows it by node")


# Another launch of the same image and cloud-config would fail in the same way.
_BY_TENANT = (
    "the guest did not get its address, or did not answer SSH, in time: look at the image and at"
    " your cloud-config before you launch again"
)


def _wait_for(allocation: dict[str, Any], expected: str) -> dict[str, Any]:
    """The allocation in the expected state; a Problem when it fails or takes too long."""
    path = f"/projects/{allocation['project_id']}/allocations/{allocation['id']}"
    # As long as the service allows: eight disks are wiped one after another, some for hours.
    timeout, last_state, last_step = WaitTimeout(), "", ""
    while allocation["state"] not in (expected, "failed", "released"):
        if allocation["state"] != last_state:
            last_state = allocation["state"]
            output.line(f"allocation {allocation['id']} {last_state}")
        _refuse_failed_release(allocation)
        if timeout.ends(allocation["state_since"], allocation["deadline_at"]):
            raise Problem(
                "allocation_timeout",
                504,
                expected=f"allocation {allocation['id']} to be {expected} by now",
                found=allocation["state"],
                remedy="look again with `gpuaas allocations`; the service goes on by itself",
            )
        last_step = _show_step(path, last_step)
        with output.waiting(f"allocation {allocation['id']}", "gpuaas allocations"):
            time.sleep(1)
        allocation = client().get(path)
    if allocation["state"] == "released" != expected:
        raise Problem(
            "allocation_released",
            expected=f"allocation {allocation['id']} to be {expected}",
            found="released: it was given back meanwhile",
            remedy="launch again",
        )
    if allocation["state"] == "failed":
        code = allocation["error_code"] or "allocation_failed"
        first = _BY_TENANT if code == "readiness_failed" else "launch again"
        raise Problem(
            code,
            expected=f"allocation {allocation['id']} to be {expected}",
            found="failed",
            remedy=f"{first}; an operator sees the cause in"
            f" `gpuaas tasks list --allocation {allocation['id']}`",
        )
    return allocation


def _show_step(path: str, last: str) -> str:
    """Print the step of an allocation's run at a terminal, unless it is the last; returns it."""
    if output.is_json() or not sys.stderr.isatty():
        return last
    step = str(client().get(f"{path}/timeline")["step"])
    if step and step != last:
        output.line(f"  {step.replace('_', ' ')}")
    return step or last


def _refuse_failed_release(allocation: dict[str, Any]) -> None:
    """A failed release goes on only after an operator has acted, so the command does not wait."""
    if allocation["state"] == "releasing" and allocation["error_code"]:
        finish = finishing_command(allocation["id"], allocation["capacity_shape"])
        raise Problem(
            allocation["error_code"],
            expected=f"allocation {allocation['id']} to be released",
            found="releasing: its clean-up has failed",
            remedy=f"leave it to the operators, who finish it with `{finish}`; `gpuaas allocations`"
            " shows when",
        )

"""`gpuaas nodes`: add machines, prepare them as slice hosts, prove them, put them on sale."""

from __future__ import annotations

import dataclasses
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeVar, get_type_hints

import typer

from reconciler.cli import output, session, tasks
from reconciler.model.errors import Problem

app = typer.Typer(no_args_is_help=True, help="Machines: add, prepare, prove, sell.")

Node = Annotated[str, typer.Argument(help="The node's id.")]
Reason = Annotated[str, typer.Option(help="Kept in the audit log.")]
Wait = Annotated[bool, typer.Option(help="Follow the task to its end.")]
MAAS_TAG_HELP = 'A tag of the machine in MAAS; may be repeated, "" when it has none.'
COLUMNS = ("id", "state", "mode", "slice_scheduling", "health_state", "profile", "address")
# Columns of a discovery's candidates.
BUNDLE = ("gpu_pci_address", "nvme_device", "private_ip", "fabric_vf_pci_address", "numa_node")
# Partition tables, and the file shares of a bare-metal host. Other types must be named.
PLAIN_TYPES = frozenset({"gpt", "dos", "ext2", "ext3", "ext4", "xfs", "vfat"})

Command = TypeVar("Command", bound=Callable[..., None])


@dataclass(frozen=True, kw_only=True)
class NodeFields:
    """Fields of a node, as the options of `add` and `change`."""

    address: str = field(metadata={"help": "Address that SSH connects to."})
    profile: str = field(metadata={"help": "Hardware profile."})
    port: int = field(default=22, metadata={"help": "Port of SSH."})
    ssh_user: str = field(default="root", metadata={"help": "User of SSH."})
    region: str = field(default="", metadata={"help": "Region of the site."})
    pool: str = field(default="default", metadata={"help": "Pool that launches can select."})
    name: str = field(default="", metadata={"help": "Name for people; default: the id."})
    mode: Literal["slice", "baremetal"] = field(
        default="slice", metadata={"help": "How it will be sold."}
    )
    tenant_address: str = field(
        default="", metadata={"help": "Address for the tenant of the whole machine."}
    )
    fabric_interface: str = field(
        default="",
        metadata={"help": "The ibp* interface with the host's address on the InfiniBand fabric."},
    )
    fabric_address: str = field(default="", metadata={"help": "That address, with prefix length."})
    maas_tags: list[str] | None = field(
        default=None, metadata={"help": MAAS_TAG_HELP, "names": ("--maas-tag",)}
    )


# `gpuaas nodes convert` changes the mode.
_NOT_CHANGEABLE = frozenset({"mode"})


def _with_fields(*, change: bool) -> Callable[[Command], Command]:
    """Add an option for each node field to a command. In a change, all of them are optional."""

    def decorate(command: Command) -> Command:
        hints = get_type_hints(NodeFields)
        signature = inspect.signature(command, eval_str=True)
        parameters = [
            parameter
            for parameter in signature.parameters.values()
            if parameter.kind is not inspect.Parameter.VAR_KEYWORD
        ]
        for item in dataclasses.fields(NodeFields):
            if change and item.name in _NOT_CHANGEABLE:
                continue
            required = item.default is dataclasses.MISSING
            default = None if change else ... if required else item.default
            parameters.append(
                inspect.Parameter(
                    item.name,
                    inspect.Parameter.KEYWORD_ONLY,
                    default=typer.Option(
                        default, *item.metadata.get("names", ()), help=item.metadata["help"]
                    ),
                    annotation=hints[item.name] | None if change else hints[item.name],
                )
            )
        command.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        return command

    return decorate


@app.command()
@_with_fields(change=False)
def add(context: typer.Context, node: Node, **fields: Any) -> None:
    """Add a machine. It is trusted only after its userdata has enrolled it."""
    here = session.of(context)
    body = fields | {"id": node, "maas_tags": maas_tags(fields["maas_tags"])}
    body["name"] = body["name"] or node
    output.record(here, here.client.post("/admin/nodes", body))


@app.command()
@_with_fields(change=True)
def change(
    context: typer.Context,
    node: Node,
    *,
    reason: Reason = "",
    maas_tags_unknown: Annotated[
        bool, typer.Option("--maas-tags-unknown", help="Its tags in MAAS are no longer known.")
    ] = False,
    **fields: Any,
) -> None:
    """Change fields of a node. Omitted fields stay as they are, "" empties a field."""
    here = session.of(context)
    tags = maas_tags(fields["maas_tags"])
    if maas_tags_unknown and tags is not None:
        raise typer.BadParameter("give either --maas-tag or --maas-tags-unknown")
    body = {name: value for name, value in fields.items() if value is not None}
    if tags is not None or maas_tags_unknown:
        body["maas_tags"] = tags
    output.record(here, here.client.patch(f"/admin/nodes/{node}", body | {"reason": reason}))


def maas_tags(words: Sequence[str] | None) -> list[str] | None:
    """Tags in MAAS as typed: None when the option was not given, [] when it was empty."""
    return [word for word in words if word] if words else None


@app.command("list")
def list_nodes(context: typer.Context) -> None:
    """List all nodes."""
    here = session.of(context)
    nodes = list(here.client.items("/admin/nodes"))
    output.rows(here, nodes, *COLUMNS, "certificate_valid_until")


@app.command("show")
def show_node(context: typer.Context, node: Node) -> None:
    """Show a node."""
    here = session.of(context)
    output.record(here, here.client.get(f"/admin/nodes/{node}"))


@app.command()
def userdata(context: typer.Context, node: Node) -> None:
    """Print the script that enrols the machine. Its token is valid for 15 minutes."""
    answer = session.of(context).client.post(f"/admin/nodes/{node}/enrollment-token")
    output.line(f"good until {answer['expires_at']}")
    sys.stdout.write(answer["userdata"])


@app.command("renew-certificate")
def renew_certificate(context: typer.Context, node: Node, wait: Wait = True) -> None:
    """Renew the certificate of the host's SSH key now.

    The service renews it by itself when a third of its time is left. A host whose certificate has
    expired needs `gpuaas nodes userdata` instead.
    """
    _task(context, node, "certificate", {}, wait=wait)


@app.command()
def bootstrap(
    context: typer.Context,
    node: Node,
    allow_reboot: Annotated[bool, typer.Option(help="Allow a reboot to enable IOMMU.")] = False,
    wait: Wait = True,
) -> None:
    """Make the machine a slice host."""
    _task(context, node, "bootstrap", {"allow_reboot": allow_reboot}, wait=wait)


@app.command()
def convert(
    context: typer.Context,
    node: Node,
    to: Annotated[Literal["slice", "baremetal"], typer.Argument(help="The new mode.")],
    allow_reboot: Annotated[bool, typer.Option(help="Allow a reboot.")] = False,
    wait: Wait = True,
) -> None:
    """Convert a slice host to bare metal, or back. Refused while a slot is in use.

    To slice: approved slots are bound and proven as well; fails when they cannot be sold then.
    """
    body = {"to": to, "allow_reboot": allow_reboot}
    task = _task(context, node, "conversion", body, wait=wait)
    if wait and (task["result"].get("failures") or task["result"].get("closed")):
        output.line(f"not proven: `gpuaas nodes parity {node}` shows what is open")
        raise typer.Exit(1)


@app.command()
def discover(context: typer.Context, node: Node, wait: Wait = True) -> None:
    """Discover the host's devices and show the candidates for slots."""
    here = session.of(context)
    path = f"/admin/nodes/{node}/slice-topology/discovery"
    task = tasks.after(here, here.client.post(path), wait=wait)
    if not wait:
        output.record(here, task)
        return
    show_candidates(here, here.client.get(path)["document"])


def show_candidates(here: session.Session, discovery: dict[str, Any]) -> None:
    """The candidates of a discovery with their blockers."""
    if here.output == "json":
        output.document(discovery)
        return
    rows = [
        row | {"codes": ", ".join(blocker["code"] for blocker in row["blockers"])}
        for row in discovery["candidates"]
    ]
    output.rows(here, rows, "slot_index", *(f"bundle.{name}" for name in BUNDLE), "codes")
    blockers = discovery["candidate_summary"]["blockers"]
    output.line(f"node blockers: {', '.join(blockers) or 'none'}")


@app.command()
def transition(
    context: typer.Context,
    node: Node,
    *,
    device: Annotated[list[str], typer.Option(help="By-id path; may be repeated.")],
    apply: Annotated[bool, typer.Option(help="Erase the disks; default: a dry run.")] = False,
    yes: Annotated[bool, typer.Option(help="Do not ask.")] = False,
    filesystem: Annotated[
        list[str] | None,
        typer.Option(help="Another filesystem type that may be erased; may be repeated."),
    ] = None,
    wait: Wait = True,
) -> None:
    """Erase disks and hand them to slots. Uses the latest discovery. All data on them is lost."""
    here = session.of(context)
    body: dict[str, Any] = {"devices": device, "apply": apply}
    if apply:
        body["expected"] = _approvals(here, node, device, filesystem or [])
        for path, disk in body["expected"].items():
            output.line(approval_line(path, disk))
        if not yes:
            typer.confirm("Everything on these disks is lost. Go on?", abort=True, err=True)
    _task(context, node, "storage-transition", body, wait=wait)


@app.command()
def bind(context: typer.Context, node: Node, wait: Wait = True) -> None:
    """Bind the devices of the approved slots to vfio-pci."""
    _task(context, node, "bind-topology", {}, wait=wait)


@app.command()
def parity(context: typer.Context, node: Node, wait: Wait = True) -> None:
    """Check the host. If every check passes, its slots can be sold."""
    here = session.of(context)
    path = f"/admin/nodes/{node}/parity"
    task = tasks.after(here, here.client.post(path), wait=wait)
    if not wait:
        output.record(here, task)
        return
    report = here.client.get(path)["document"]
    if here.output == "json":
        output.document(report)
    else:
        not_passed = [row for row in report["checks"] if row["status"] != "PASS"]
        output.rows(here, not_passed, "status", "check", "detail", "remediation")
    output.line(f"failures {report['failures']}, warnings {report['warnings']}")
    if report["failures"]:
        raise typer.Exit(1)


@app.command()
def drift(context: typer.Context, node: Node, wait: Wait = True) -> None:
    """Compare the slices on the host with the records. Fails when they differ."""
    here = session.of(context)
    task = tasks.after(here, here.client.post(f"/admin/nodes/{node}/drift"), wait=wait)
    if not wait:
        output.record(here, task)
        return
    result = task["result"]
    if here.output == "json":
        output.document(result)
    else:
        output.rows(here, result["differences"], "severity", "slot_id", "code", "found")
        for part, reason in result["unknown"].items():
            output.line(f"not looked at: {part}: {reason}")
        if result["skipped"]:
            output.line(f"work in progress, not judged: {', '.join(result['skipped'])}")
    output.line(f"differences {len(result['differences'])}, unknown {len(result['unknown'])}")
    if result["differences"] or result["unknown"]:
        raise typer.Exit(1)


@app.command("clean-machine")
def clean_machine(
    context: typer.Context,
    node: Node,
    *,
    without_dead_disks: Annotated[
        bool,
        typer.Option(help="Write off disks that the latest discovery lacks; needs a reason."),
    ] = False,
    reason: Annotated[str, typer.Option(help="Kept in the audit log.")] = "",
    wait: Wait = True,
) -> None:
    """Remove the leftovers of the whole machine's last tenant, and prove it clean."""
    body = {"without_dead_disks": without_dead_disks, "reason": reason}
    _task(context, node, "clean-machine", body, wait=wait)


@app.command("accept-drift")
def accept_drift(context: typer.Context, node: Node, reason: Reason) -> None:
    """Put the machine on sale although its last tenant left differences."""
    here = session.of(context)
    body = {"reason": reason}
    output.record(here, here.client.post(f"/admin/nodes/{node}/accept-drift", body))


@app.command()
def scheduling(
    context: typer.Context, node: Node, switch: Literal["on", "off"], reason: Reason
) -> None:
    """Sell the node's slots, or stop."""
    here = session.of(context)
    body = {"enabled": switch == "on", "reason": reason}
    output.record(here, here.client.put(f"/admin/nodes/{node}/scheduling", body))


@app.command()
def drain(context: typer.Context, node: Node, reason: Reason) -> None:
    """Stop selling the node; running allocations stay until their tenants release them."""
    _move(context, node, "drain", reason)
    for line in _remaining(session.of(context), node):
        output.line(line)


@app.command()
def maintain(context: typer.Context, node: Node, reason: Reason) -> None:
    """Put an empty, drained node into maintenance."""
    _move(context, node, "maintain", reason)


@app.command()
def resume(context: typer.Context, node: Node, reason: Reason) -> None:
    """Put a drained node, or a node in maintenance, back into use."""
    _move(context, node, "resume", reason)


@app.command()
def retire(
    context: typer.Context,
    node: Node,
    reason: Reason,
    yes: Annotated[bool, typer.Option(help="Do not ask.")] = False,
) -> None:
    """Retire a node for good. It must be in maintenance, or must never have enrolled."""
    if not yes:
        typer.confirm(f"{node} never comes back under this id. Go on?", abort=True, err=True)
    _move(context, node, "retire", reason)


@app.command("timeline")
def node_timeline(
    context: typer.Context,
    node: Node,
    limit: Annotated[int, typer.Option(help="At most this many entries.")] = 50,
) -> None:
    """Show the latest events of the node, oldest first."""
    here = session.of(context)
    output.timeline(here, here.client.get(f"/admin/nodes/{node}/timeline", limit=limit)["items"])


def approval_of(disk: dict[str, Any], types: list[str]) -> dict[str, Any]:
    """The approval of a discovered disk; filesystem types beyond PLAIN_TYPES only if named."""
    discovered = sorted((disk.get("filesystems") or {}).values())
    return {
        "serial": disk["serial"],
        "eui": disk["eui"] or disk["nguid"],
        "mounts": sorted(disk.get("mounts") or []),
        "filesystems": [kind for kind in discovered if kind in PLAIN_TYPES or kind in types],
    }


def approval_line(path: str, approval: dict[str, Any]) -> str:
    """The question about a disk, as a line of text."""
    mounts = ", ".join(approval.get("mounts") or []) or "nowhere"
    kinds = ", ".join(approval.get("filesystems") or []) or "nothing"
    return (
        f"to be wiped: {path}  serial {approval['serial']}  eui {approval['eui']}"
        f"  mounted on {mounts}  carries {kinds}"
    )


def _move(context: typer.Context, node: str, verb: str, reason: str) -> None:
    here = session.of(context)
    output.record(here, here.client.post(f"/admin/nodes/{node}/{verb}", {"reason": reason}))


def _remaining(here: session.Session, node: str) -> Iterator[str]:
    """The allocations and slots that keep a drained node from maintenance."""
    occupied = False
    for state in ("requested", "provisioning", "active", "releasing"):
        for row in here.client.items("/admin/allocations", node_id=node, state=state):
            occupied = True
            yield f"still on it: allocation {row['id']} of project {row['project_id']}, {state}"
    for slot in here.client.items(f"/admin/nodes/{node}/resource-slots"):
        if slot["status"] in ("cleanup", "cleanup_blocked"):
            occupied = True
            yield f"still on it: slot {slot['id']}, {slot['status']}"
    after = "when these are gone" if occupied else "nothing is on it"
    yield f"{after}: `gpuaas nodes maintain {node} --reason WHY` takes it out of use"


def _task(
    context: typer.Context, node: str, noun: str, body: dict[str, Any], *, wait: bool
) -> dict[str, Any]:
    here = session.of(context)
    queued = here.client.post(f"/admin/nodes/{node}/{noun}", body)
    task = tasks.after(here, queued, wait=wait)
    output.record(here, task["result"] if wait else task)
    return task


def _approvals(
    here: session.Session, node: str, paths: list[str], types: list[str]
) -> dict[str, dict[str, Any]]:
    """Approvals from the latest discovery; the host compares them with the disk before it wipes."""
    latest = here.client.get(f"/admin/nodes/{node}/slice-topology/discovery")["document"] or {}
    disks = {row["by_id"]: row for row in latest.get("nvme", []) if row["by_id"]}
    unknown = [path for path in paths if path not in disks]
    if unknown:
        raise Problem(
            "disk_not_found",
            422,
            expected=f"by-id paths of the latest discovery: {', '.join(sorted(disks)) or 'none'}",
            found=", ".join(unknown),
            remedy=f"run `gpuaas nodes discover {node}` and use its names",
        )
    return {path: approval_of(disks[path], types) for path in paths}

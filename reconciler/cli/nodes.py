"""`gpuaas nodes`: from a deployed machine to a slice host."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import typer

from reconciler.cli import approvals, maastags, session, show, waiting
from reconciler.model.errors import Problem

app = typer.Typer(no_args_is_help=True, help="Machines: add, prepare, prove, sell.")

Node = Annotated[str, typer.Argument(help="The node's id.")]
Reason = Annotated[str, typer.Option(help="For the audit log, and for whoever finds it so.")]
FabricInterface = Annotated[
    str, typer.Option(help="The ibp* interface that owns its address on the InfiniBand fabric.")
]
Changed = Annotated[str | None, typer.Option()]
FabricAddress = Annotated[str, typer.Option(help="That address, with prefix length.")]
Wait = Annotated[bool, typer.Option(help="Follow the task to its end.")]


@app.command()
def add(
    context: typer.Context,
    node: Node,
    *,
    address: Annotated[str, typer.Option(help="Where SSH reaches it.")],
    profile: Annotated[str, typer.Option(help="Its hardware profile.")],
    port: int = 22,
    ssh_user: str = "root",
    region: str = "",
    pool: str = "default",
    name: Annotated[str, typer.Option(help="For people; the id unless given.")] = "",
    mode: Annotated[
        Literal["slice", "baremetal"], typer.Option(help="What it will be sold as.")
    ] = "slice",
    tenant_address: Annotated[
        str, typer.Option(help="Where the tenant of the whole machine reaches it.")
    ] = "",
    fabric_interface: FabricInterface = "",
    fabric_address: FabricAddress = "",
    maas_tag: maastags.Tags = None,
) -> None:
    """Add a machine. It is not trusted before its userdata has enrolled it."""
    here = session.of(context)
    body = {
        "id": node,
        "name": name or node,
        "address": address,
        "port": port,
        "ssh_user": ssh_user,
        "region": region,
        "pool": pool,
        "profile": profile,
        "mode": mode,
        "tenant_address": tenant_address,
        "fabric_interface": fabric_interface,
        "fabric_address": fabric_address,
        "maas_tags": maastags.said(maas_tag),
    }
    show.record(here, here.client.post("/admin/nodes", body))


@app.command()
def change(
    context: typer.Context,
    node: Node,
    *,
    reason: Reason = "",
    name: Changed = None,
    address: Changed = None,
    port: Annotated[int | None, typer.Option()] = None,
    ssh_user: Changed = None,
    region: Changed = None,
    pool: Changed = None,
    profile: Changed = None,
    tenant_address: Changed = None,
    fabric_interface: Changed = None,
    fabric_address: Changed = None,
    maas_tag: maastags.Tags = None,
    maas_tags_unknown: Annotated[
        bool, typer.Option("--maas-tags-unknown", help="Nobody knows its tags in MAAS any more.")
    ] = False,
) -> None:
    """Change what is known of a machine; what is left out stays, "" empties."""
    here, tags = session.of(context), maastags.said(maas_tag)
    if maas_tags_unknown and tags is not None:
        raise typer.BadParameter("give either --maas-tag or --maas-tags-unknown")
    given = {
        "name": name,
        "address": address,
        "port": port,
        "ssh_user": ssh_user,
        "region": region,
        "pool": pool,
        "profile": profile,
        "tenant_address": tenant_address,
        "fabric_interface": fabric_interface,
        "fabric_address": fabric_address,
        "maas_tags": tags,
    }
    body: dict[str, Any] = {field: value for field, value in given.items() if value is not None}
    if maas_tags_unknown:
        body["maas_tags"] = None
    show.record(here, here.client.patch(f"/admin/nodes/{node}", body | {"reason": reason}))


@app.command("list")
def list_nodes(context: typer.Context) -> None:
    """All nodes."""
    here = session.of(context)
    found = list(here.client.items("/admin/nodes"))
    columns = ("id", "state", "mode", "slice_scheduling", "health_state", "profile", "address")
    show.rows(here, found, *columns, "certificate_valid_until")


@app.command("show")
def show_node(context: typer.Context, node: Node) -> None:
    """One node."""
    here = session.of(context)
    show.record(here, here.client.get(f"/admin/nodes/{node}"))


@app.command()
def userdata(context: typer.Context, node: Node) -> None:
    """Print the script that enrols the machine; it holds a token that is good for 15 minutes."""
    answer = session.of(context).client.post(f"/admin/nodes/{node}/enrollment-token")
    show.line(f"good until {answer['expires_at']}")
    sys.stdout.write(answer["userdata"])


@app.command("renew-certificate")
def renew_certificate(context: typer.Context, node: Node, wait: Wait = True) -> None:
    """Certify the host's SSH key anew; it happens by itself when a third of the time is left.

    A host whose certificate has ended needs `gpuaas nodes userdata` instead.
    """
    _task(context, node, "certificate", {}, wait=wait)


@app.command()
def bootstrap(
    context: typer.Context,
    node: Node,
    allow_reboot: Annotated[bool, typer.Option(help="It may reboot to get IOMMU.")] = False,
    wait: Wait = True,
) -> None:
    """Make the machine a slice host."""
    _task(context, node, "bootstrap", {"allow_reboot": allow_reboot}, wait=wait)


@app.command()
def convert(
    context: typer.Context,
    node: Node,
    to: Annotated[Literal["slice", "baremetal"], typer.Argument(help="What it becomes.")],
    allow_reboot: Annotated[bool, typer.Option(help="It may reboot into it.")] = False,
    wait: Wait = True,
) -> None:
    """Make a slice host bare metal again, or the other way; refused while a slot is in use.

    To slice: approved slots are bound and proven as well; fails when they cannot be sold then.
    """
    body = {"to": to, "allow_reboot": allow_reboot}
    ended = _task(context, node, "conversion", body, wait=wait)
    if wait and (ended["result"].get("failures") or ended["result"].get("closed")):
        show.line(f"not proven: `gpuaas nodes parity {node}` shows what is open")
        raise typer.Exit(1)


@app.command()
def discover(context: typer.Context, node: Node, wait: Wait = True) -> None:
    """Look at the host and show the candidates for slots."""
    here = session.of(context)
    path = f"/admin/nodes/{node}/slice-topology/discovery"
    task = waiting.after(here, here.client.post(path), wait=wait)
    if not wait:
        show.record(here, task)
        return
    latest = here.client.get(path)["document"]
    if here.output == "json":
        show.document(latest)
        return
    bundle = ("gpu_pci_address", "nvme_device", "private_ip", "fabric_vf_pci_address", "numa_node")
    rows = [row | {"codes": _codes(row["blockers"])} for row in latest["candidates"]]
    columns = ("slot_index", *(f"bundle.{name}" for name in bundle), "codes")
    show.rows(here, rows, *columns)
    show.line(f"node blockers: {', '.join(latest['candidate_summary']['blockers']) or 'none'}")


@app.command()
def transition(
    context: typer.Context,
    node: Node,
    *,
    device: Annotated[list[str], typer.Option(help="By-id path; may be repeated.")],
    apply: Annotated[bool, typer.Option(help="Wipe them; without it a dry run.")] = False,
    yes: Annotated[bool, typer.Option(help="Do not ask.")] = False,
    filesystem: Annotated[
        list[str] | None,
        typer.Option(help="A type that may be lost beside plain shares; may be repeated."),
    ] = None,
    wait: Wait = True,
) -> None:
    """Take disks over for slots, as the latest discovery saw them. What is on them is lost."""
    here = session.of(context)
    body: dict[str, Any] = {"devices": device, "apply": apply}
    if apply:
        body["expected"] = _seen(here, node, device, filesystem or [])
        for name, disk in body["expected"].items():
            show.line(approvals.line(name, disk))
        if not yes:
            typer.confirm("Everything on these disks is lost. Go on?", abort=True, err=True)
    _task(context, node, "storage-transition", body, wait=wait)


@app.command()
def bind(context: typer.Context, node: Node, wait: Wait = True) -> None:
    """Bind the devices of the approved slots to vfio-pci."""
    _task(context, node, "bind-topology", {}, wait=wait)


@app.command()
def parity(context: typer.Context, node: Node, wait: Wait = True) -> None:
    """Measure the host; a pass opens the gate of its slots."""
    here = session.of(context)
    path = f"/admin/nodes/{node}/parity"
    task = waiting.after(here, here.client.post(path), wait=wait)
    if not wait:
        show.record(here, task)
        return
    report = here.client.get(path)["document"]
    if here.output == "json":
        show.document(report)
    else:
        open_points = [row for row in report["checks"] if row["status"] != "PASS"]
        show.rows(here, open_points, "status", "check", "detail", "remediation")
    show.line(f"failures {report['failures']}, warnings {report['warnings']}")
    if report["failures"]:
        raise typer.Exit(1)


@app.command()
def drift(context: typer.Context, node: Node, wait: Wait = True) -> None:
    """Compare what the host holds of slices with the records; fails when they differ."""
    here = session.of(context)
    task = waiting.after(here, here.client.post(f"/admin/nodes/{node}/drift"), wait=wait)
    if not wait:
        show.record(here, task)
        return
    found = task["result"]
    if here.output == "json":
        show.document(found)
    else:
        show.rows(here, found["differences"], "severity", "slot_id", "code", "found")
        for part, why in found["unknown"].items():
            show.line(f"not looked at: {part}: {why}")
        if found["skipped"]:
            show.line(f"work in progress, not judged: {', '.join(found['skipped'])}")
    show.line(f"differences {len(found['differences'])}, unknown {len(found['unknown'])}")
    if found["differences"] or found["unknown"]:
        raise typer.Exit(1)


@app.command("clean-machine")
def clean_machine(
    context: typer.Context,
    node: Node,
    *,
    without_dead_disks: Annotated[
        bool, typer.Option(help="Write off what the latest discovery lacks; needs a reason.")
    ] = False,
    reason: Annotated[str, typer.Option(help="Kept in the audit log.")] = "",
    wait: Wait = True,
) -> None:
    """Remove what the last tenant of the whole machine left, and prove it."""
    body = {"without_dead_disks": without_dead_disks, "reason": reason}
    _task(context, node, "clean-machine", body, wait=wait)


@app.command("accept-drift")
def accept_drift(
    context: typer.Context,
    node: Node,
    reason: Annotated[str, typer.Option(help="Kept in the audit log.")],
) -> None:
    """Give the machine away with the differences that its last tenant left."""
    here = session.of(context)
    body = {"reason": reason}
    show.record(here, here.client.post(f"/admin/nodes/{node}/accept-drift", body))


@app.command()
def scheduling(
    context: typer.Context, node: Node, switch: Literal["on", "off"], reason: Reason
) -> None:
    """Sell the node's slots, or stop."""
    here = session.of(context)
    body = {"enabled": switch == "on", "reason": reason}
    show.record(here, here.client.put(f"/admin/nodes/{node}/scheduling", body))


@app.command()
def drain(context: typer.Context, node: Node, reason: Reason) -> None:
    """Sell nothing new on it; what runs on it ends by itself."""
    _move(context, node, "drain", reason)
    for line in _still_on(session.of(context), node):
        show.line(line)


@app.command()
def maintain(context: typer.Context, node: Node, reason: Reason) -> None:
    """Take an empty, drained node out of use."""
    _move(context, node, "maintain", reason)


@app.command()
def resume(context: typer.Context, node: Node, reason: Reason) -> None:
    """Take a drained node, or one in maintenance, back into use."""
    _move(context, node, "resume", reason)


@app.command()
def retire(
    context: typer.Context,
    node: Node,
    reason: Reason,
    yes: Annotated[bool, typer.Option(help="Do not ask.")] = False,
) -> None:
    """Give a node up for good; it must be in maintenance, or have never enrolled."""
    if not yes:
        typer.confirm(f"{node} never comes back under this id. Go on?", abort=True, err=True)
    _move(context, node, "retire", reason)


@app.command("timeline")
def node_timeline(
    context: typer.Context,
    node: Node,
    limit: Annotated[int, typer.Option(help="At most so many entries.")] = 50,
) -> None:
    """What happened on the node, oldest first, up to now."""
    here = session.of(context)
    show.timeline(here, here.client.get(f"/admin/nodes/{node}/timeline", limit=limit)["items"])


def _move(context: typer.Context, node: str, verb: str, reason: str) -> None:
    here = session.of(context)
    show.record(here, here.client.post(f"/admin/nodes/{node}/{verb}", {"reason": reason}))


def _still_on(here: session.Session, node: str) -> Iterator[str]:
    """What a drained node waits for before it can be in maintenance."""
    kept = False
    for state in ("requested", "provisioning", "active", "releasing"):
        for row in here.client.items("/admin/allocations", node_id=node, state=state):
            kept = True
            yield f"still on it: allocation {row['id']} of project {row['project_id']}, {state}"
    for slot in here.client.items(f"/admin/nodes/{node}/resource-slots"):
        if slot["status"] in ("cleanup", "cleanup_blocked"):
            kept = True
            yield f"still on it: slot {slot['id']}, {slot['status']}"
    after = "when these are gone" if kept else "nothing is on it"
    yield f"{after}: `gpuaas nodes maintain {node} --reason WHY` takes it out of use"


def _task(
    context: typer.Context, node: str, noun: str, body: dict[str, Any], *, wait: bool
) -> dict[str, Any]:
    here = session.of(context)
    task = here.client.post(f"/admin/nodes/{node}/{noun}", body)
    ended = waiting.after(here, task, wait=wait)
    show.record(here, ended["result"] if wait else ended)
    return ended


def _seen(
    here: session.Session, node: str, devices: list[str], named: list[str]
) -> dict[str, dict[str, Any]]:
    """What the latest discovery saw under these names; the host compares before it wipes."""
    latest = here.client.get(f"/admin/nodes/{node}/slice-topology/discovery")["document"] or {}
    disks = {row["by_id"]: row for row in latest.get("nvme", []) if row["by_id"]}
    unknown = [name for name in devices if name not in disks]
    if unknown:
        raise Problem(
            "disk_not_found",
            422,
            expected=f"by-id paths of the latest discovery: {', '.join(sorted(disks)) or 'none'}",
            found=", ".join(unknown),
            remedy=f"run `gpuaas nodes discover {node}` and use its names",
        )
    return {name: approvals.seen(disks[name], named) for name in devices}


def _codes(blockers: list[dict[str, str]]) -> str:
    return ", ".join(blocker["code"] for blocker in blockers)

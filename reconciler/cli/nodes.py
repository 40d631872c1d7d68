"""`gpuaas nodes`: add machines, prepare them as slice hosts, prove them, put them on sale."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from reconciler.cli import output, tasks
from reconciler.cli.options import Reason, Yes, confirm, read_json, with_options
from reconciler.cli.session import client
from reconciler.model.approval import approval_of
from reconciler.model.errors import Problem
from reconciler.model.states import LIVE_ALLOCATIONS

app = typer.Typer(no_args_is_help=True, help="Machines: add, prepare, prove, sell.")

Node = Annotated[str, typer.Argument(help="The node's id.")]
Wait = Annotated[bool, typer.Option(help="Follow the task to its end.")]
MAAS_TAG_HELP = 'A tag of the machine in MAAS; may be repeated, "" when it has none.'
COLUMNS = ("id", "state", "mode", "slice_scheduling", "health_state", "profile", "address")
# Columns of a discovery's candidates.
BUNDLE = ("gpu_pci_address", "nvme_device", "private_ip", "fabric_vf_pci_address", "numa_node")


@dataclass(frozen=True, kw_only=True)
class NodeFields:
    """Fields of a node, as the options of `add` and `change`."""

    address: Annotated[str, typer.Option(help="Address that SSH connects to.")]
    profile: Annotated[str, typer.Option(help="Hardware profile.")]
    port: Annotated[int, typer.Option(help="SSH port.")] = 22
    ssh_user: Annotated[str, typer.Option(help="SSH user.")] = "root"
    region: Annotated[str, typer.Option(help="Region of the site.")] = ""
    pool: Annotated[str, typer.Option(help="Pool that launches can select.")] = "default"
    name: Annotated[str, typer.Option(help="Name for people; default: the id.")] = ""
    mode: Annotated[Literal["slice", "baremetal"], typer.Option(help="How it will be sold.")] = (
        "slice"
    )
    tenant_address: Annotated[
        str, typer.Option(help="Address for the tenant of the whole machine.")
    ] = ""
    fabric_interface: Annotated[
        str,
        typer.Option(help="The ibp* interface with the host's address on the InfiniBand fabric."),
    ] = ""
    fabric_address: Annotated[str, typer.Option(help="That address, with prefix length.")] = ""
    maas_tags: Annotated[list[str] | None, typer.Option("--maas-tag", help=MAAS_TAG_HELP)] = None


@app.command()
@with_options(NodeFields)
def add(node: Node, **fields: Any) -> None:
    """Add a machine. It is trusted only after its userdata has enrolled it."""
    body = fields | {"id": node, "maas_tags": maas_tags(fields["maas_tags"])}
    output.record(client().post("/admin/nodes", body))


@app.command()
# `gpuaas nodes convert` changes the mode.
@with_options(NodeFields, optional=True, without={"mode"})
def change(
    node: Node,
    *,
    reason: Reason = "",
    maas_tags_unknown: Annotated[
        bool, typer.Option("--maas-tags-unknown", help="Its tags in MAAS are no longer known.")
    ] = False,
    **fields: Any,
) -> None:
    """Change fields of a node. Omitted fields stay as they are, "" empties a field."""
    tags = maas_tags(fields["maas_tags"])
    if maas_tags_unknown and tags is not None:
        raise typer.BadParameter("give either --maas-tag or --maas-tags-unknown")
    body = {name: value for name, value in fields.items() if value is not None}
    if tags is not None or maas_tags_unknown:
        body["maas_tags"] = tags
    output.record(client().patch(f"/admin/nodes/{node}", body | {"reason": reason}))


def maas_tags(words: Sequence[str] | None) -> list[str] | None:
    """Tags in MAAS as typed: None when the option was not given, [] when it was empty."""
    return [word for word in words if word] if words else None


@app.command("list")
def list_nodes() -> None:
    """List all nodes."""
    output.rows(client().items("/admin/nodes"), *COLUMNS, "certificate_valid_until")


@app.command("show")
def show_node(node: Node) -> None:
    """Show a node."""
    output.record(client().get(f"/admin/nodes/{node}"))


@app.command()
def userdata(node: Node) -> None:
    """Print the script that enrols the machine. Its token is valid for 15 minutes."""
    answer = client().post(f"/admin/nodes/{node}/enrollment-token")
    if output.in_json(answer):
        return
    output.line(f"good until {answer['expires_at']}")
    sys.stdout.write(answer["userdata"])


@app.command("renew-certificate")
def renew_certificate(node: Node, wait: Wait = True) -> None:
    """Renew the certificate of the host's SSH key now.

    The service renews it by itself when a third of its time is left. A host whose certificate has
    expired needs `gpuaas nodes userdata` instead.
    """
    tasks.run(f"/admin/nodes/{node}/certificate", wait=wait)


@app.command()
def bootstrap(
    node: Node,
    allow_reboot: Annotated[bool, typer.Option(help="Allow a reboot to enable IOMMU.")] = False,
    wait: Wait = True,
) -> None:
    """Make the machine a slice host."""
    tasks.run(f"/admin/nodes/{node}/bootstrap", {"allow_reboot": allow_reboot}, wait=wait)


# Code of a slot whose disk has to be taken over again.
_AGAIN = "proof_missing"


@app.command()
def convert(
    node: Node,
    to: Annotated[Literal["slice", "baremetal"], typer.Argument(help="The new mode.")],
    allow_reboot: Annotated[bool, typer.Option(help="Allow a reboot.")] = False,
    wait: Wait = True,
) -> None:
    """Convert a slice host to bare metal, or back. Refused while a slot is in use.

    To slice: approved slots are bound and proven as well. Their disks must then be taken over
    again, because the conversion ends the proofs of all disks. Fails when anything else is open.
    """
    body = {"to": to, "allow_reboot": allow_reboot}
    task = tasks.run(f"/admin/nodes/{node}/conversion", body, wait=wait)
    result = task["result"] if task else {}
    closed = (result.get("closed") or {}).values()
    if not result.get("failures") and {row["code"] for rows in closed for row in rows} == {_AGAIN}:
        output.line(f"next: `gpuaas nodes onboard {node}` takes the disks of its slots over again")
    else:
        _require_proven(node, task)


@app.command()
def reboot(
    node: Node,
    reason: Reason,
    allocation: Annotated[
        list[str] | None,
        typer.Option(help="An allocation on the node, which will be stopped; repeat it for each."),
    ] = None,
    wait: Wait = True,
) -> None:
    """Restart the host, prove it again and start its slices. Refused unless every
    allocation on it is named.
    """
    body = {"reason": reason, "allocations": allocation or []}
    _require_proven(node, tasks.run(f"/admin/nodes/{node}/reboot", body, wait=wait))


@app.command("plan-firmware")
def plan_firmware(node: Node, wait: Wait = True) -> None:
    """Show the BIOS settings that must change for slices, and the digest that approves them. Fails
    if they could not be read, or cannot all be changed.
    """
    task = tasks.queue(f"/admin/nodes/{node}/firmware", wait=wait)
    if task is None:
        return
    result = task["result"]
    bios = result["bios"]
    # apply-firmware allows the power cycle.
    refusals = [
        row for row in bios.get("refusals", []) if row.get("code") != "power_cycle_not_allowed"
    ]
    # Jobs end, and hosts fall idle; these stay.
    fixed = [row for row in refusals if row.get("code", "").startswith("attribute_")]
    unplanned = fixed or ([] if result["digest"] else refusals)
    if not output.in_json(result) and bios:
        output.rows(bios.get("differences", []), "name", "subject", "before", "after")
        if refusals:
            output.rows(refusals, "code", "expected", "found", "remedy")
        if not unplanned:
            output.line(f"digest {result['digest'] or 'none: nothing to change'}")
    if unplanned:
        output.line(f"no plan: settings that cannot be changed: {len(unplanned)}")
        raise typer.Exit(1)
    for check in result["preflight"]["checks"] if not bios else ():
        if check.get("check") == "bios_settings":
            output.line(f"settings not read: {check.get('detail')}; {check.get('remediation')}")
            if check.get("status") == "FAIL":
                raise typer.Exit(1)


@app.command("apply-firmware")
def apply_firmware(
    node: Node,
    digest: Annotated[str, typer.Option(help="The digest that `plan-firmware` has shown.")],
    reason: Reason,
    acknowledged_job: Annotated[
        list[str] | None,
        typer.Option(help="A failed job of the BMC that you have examined; may be repeated."),
    ] = None,
    wait: Wait = True,
) -> None:
    """Change the approved BIOS settings, with a power cycle, and prove the host again. Refused
    while anything is on the node.
    """
    body = {
        "apply": True,
        "digest": digest,
        "reason": reason,
        "acknowledged_jobs": acknowledged_job or [],
    }
    _require_proven(node, tasks.run(f"/admin/nodes/{node}/firmware", body, wait=wait))


@app.command()
def discover(node: Node, wait: Wait = True) -> None:
    """Discover the host's devices and show the candidates for slots."""
    path = f"/admin/nodes/{node}/slice-topology/discovery"
    if tasks.queue(path, wait=wait):
        show_candidates(client().get(path)["document"])


def show_candidates(discovery: dict[str, Any]) -> None:
    """The candidates of a discovery with their blockers."""
    if output.in_json(discovery):
        return
    rows = [
        row | {"codes": ", ".join(blocker["code"] for blocker in row["blockers"])}
        for row in discovery["candidates"]
    ]
    output.rows(rows, "slot_index", *(f"bundle.{name}" for name in BUNDLE), "codes")
    blockers = discovery["candidate_summary"]["blockers"]
    output.line(f"node blockers: {', '.join(blockers) or 'none'}")
    for fault in discovery["candidate_summary"].get("degraded", []):
        output.line(f"degraded: {fault['code']}, {fault['detail']}")


@app.command()
def transition(
    node: Node,
    *,
    device: Annotated[list[str], typer.Option(help="By-id path; may be repeated.")],
    apply: Annotated[bool, typer.Option(help="Erase the disks; default: a dry run.")] = False,
    yes: Yes = False,
    filesystem: Annotated[
        list[str] | None,
        typer.Option(help="Another filesystem type that may be erased; may be repeated."),
    ] = None,
    wait: Wait = True,
) -> None:
    """Erase disks and hand them to slots. Uses the latest discovery. All data on them is lost."""
    body: dict[str, Any] = {"devices": device, "apply": apply}
    if apply:
        body["expected"] = _approvals(node, device, filesystem or [])
        show_approvals(body["expected"], ask=not yes)
    tasks.run(f"/admin/nodes/{node}/storage-transition", body, wait=wait)


@app.command()
def bind(node: Node, wait: Wait = True) -> None:
    """Bind the devices of the approved slots to vfio-pci."""
    tasks.run(f"/admin/nodes/{node}/bind-topology", wait=wait)


@app.command()
def parity(node: Node, wait: Wait = True) -> None:
    """Check the host. If every check passes, its slots can be sold."""
    path = f"/admin/nodes/{node}/parity"
    if not tasks.queue(path, wait=wait):
        return
    report = client().get(path)["document"]
    show_checks(report)
    require_passed(report)


def show_checks(report: dict[str, Any]) -> None:
    """The checks of a parity report that did not pass."""
    if output.in_json(report):
        return
    not_passed = [row for row in report["checks"] if row["status"] != "PASS"]
    output.rows(not_passed, "status", "check", "detail", "remediation")


def require_passed(report: dict[str, Any]) -> None:
    """Exit with an error when a check of a parity report failed."""
    output.line(f"failures {report['failures']}, warnings {report['warnings']}")
    if report["failures"]:
        raise typer.Exit(1)


@app.command()
def drift(
    node: Node,
    *,
    latest: Annotated[bool, typer.Option(help="Show the latest comparison instead.")] = False,
    wait: Wait = True,
) -> None:
    """Repair the host's baseline, and compare its slices with the records. Fails if a difference
    remains, or if comparisons later than the latest one shown failed.
    """
    path = f"/admin/nodes/{node}/drift"
    answer = client().get(path) if latest else {"task": tasks.queue(path, wait=wait)}
    task, failed = answer["task"], answer.get("failed")
    if failed:
        code = (failed["error"] or {}).get("code") or failed["state"]
        output.line(f"later comparisons failed: {code}, `gpuaas tasks show {failed['id']}`")
    if task is None:
        if latest and not output.in_json(None):
            output.line("never compared")
        if failed:
            raise typer.Exit(1)
        return
    result = task["result"]
    if not output.in_json(result):
        output.line(f"compared at {task['finished_at']}")
        output.rows(result["differences"], "severity", "slot_id", "code", "found")
        for part, reason in result["unknown"].items():
            output.line(f"not looked at: {part}: {reason}")
        if result["skipped"]:
            output.line(f"work in progress, not judged: {', '.join(result['skipped'])}")
        if repairs := result.get("repairs"):
            output.line("mended by the host since its boot:")
            output.rows(repairs, "last_at", "times", "step")
    output.line(f"differences {len(result['differences'])}, unknown {len(result['unknown'])}")
    if result["differences"] or result["unknown"] or failed:
        raise typer.Exit(1)


@app.command("clean-machine")
def clean_machine(
    node: Node,
    *,
    without_dead_disks: Annotated[
        bool, typer.Option(help="Write off disks that the latest discovery lacks; needs a reason.")
    ] = False,
    reason: Reason = "",
    wait: Wait = True,
) -> None:
    """Remove the leftovers of the whole machine's last tenant, and prove it clean."""
    body = {"without_dead_disks": without_dead_disks, "reason": reason}
    tasks.run(f"/admin/nodes/{node}/clean-machine", body, wait=wait)


@app.command("accept-drift")
def accept_drift(node: Node, reason: Reason) -> None:
    """Put the machine on sale although its last tenant left differences."""
    _post(node, "accept-drift", reason)


@app.command()
def firmware(node: Node) -> None:
    """Show how the firmware differs from before the last tenant. Fails if it differs."""
    row = client().get(f"/admin/nodes/{node}")
    differences = row["firmware_differences"]
    if not output.in_json(differences):
        output.rows(differences, "section", "name", "change", "before", "after")
    if differences or row["firmware_unverified"]:
        output.line(f"differences {len(differences)}; not sold until they are gone or accepted")
        raise typer.Exit(1)


@app.command("record-bmc")
def record_bmc(
    node: Node,
    file: Annotated[
        Path, typer.Argument(help="Output of scripts/ops/redfish_firmware_inventory.py.")
    ],
    reason: Reason = "",
) -> None:
    """Record what the machine's BMC reports of firmware, users and boot settings."""
    report = read_json(
        file,
        "report_invalid",
        "the BMC's report",
        "make it with scripts/ops/redfish_firmware_inventory.py",
    )
    body = {**report, "reason": reason} if isinstance(report, dict) else report
    output.record(client().put(f"/admin/nodes/{node}/bmc-firmware", body))


@app.command("accept-firmware")
def accept_firmware(node: Node, reason: Reason) -> None:
    """Put the machine on sale with the differences that `firmware` names."""
    _post(node, "accept-firmware", reason)


@app.command()
def scheduling(
    node: Node,
    switch: Annotated[Literal["on", "off"], typer.Argument(help="Whether its slots are sold.")],
    reason: Reason,
) -> None:
    """Sell the node's slots, or stop."""
    body = {"enabled": switch == "on", "reason": reason}
    output.record(client().put(f"/admin/nodes/{node}/scheduling", body))


@app.command()
def drain(node: Node, reason: Reason) -> None:
    """Stop selling the node; running allocations stay until their tenants release them."""
    _post(node, "drain", reason)
    for line in _remaining(node):
        output.line(line)


@app.command()
def maintain(node: Node, reason: Reason) -> None:
    """Put an empty, drained node into maintenance."""
    _post(node, "maintain", reason)


@app.command()
def resume(node: Node, reason: Reason) -> None:
    """Put a drained node, or a node in maintenance, back into use."""
    _post(node, "resume", reason)


@app.command()
def retire(node: Node, reason: Reason, yes: Yes = False) -> None:
    """Retire a node for good. It must be in maintenance, or must never have enrolled."""
    if not yes:
        confirm(f"{node} never comes back under this id. Go on?")
    _post(node, "retire", reason)


@app.command("timeline")
def node_timeline(
    node: Node, limit: Annotated[int, typer.Option(help="At most this many entries.")] = 50
) -> None:
    """Show the latest events of the node, oldest first."""
    output.timeline(client().get(f"/admin/nodes/{node}/timeline", limit=limit)["items"])


def approval_line(path: str, approval: dict[str, Any]) -> str:
    """The question about a disk, as a line of text."""
    mounts = ", ".join(approval.get("mounts") or []) or "nowhere"
    kinds = ", ".join(approval.get("filesystems") or []) or "nothing"
    return (
        f"to be wiped: {path}  serial {approval['serial']}  eui {approval['eui']}"
        f"  mounted on {mounts}  carries {kinds}"
    )


def show_approvals(
    approvals: Mapping[str, dict[str, Any]], *, ask: bool, instead: str = "--yes"
) -> None:
    """Print what is lost on each disk. ask: end unless a person agrees, or gave `instead`."""
    for path, approval in approvals.items():
        output.line(approval_line(path, approval))
    if ask:
        confirm("Everything on these disks is lost. Go on?", instead=instead)


def _require_proven(node: str, task: dict[str, Any] | None) -> None:
    """Exit with an error when the last task of a chain leaves slots that cannot be sold."""
    if task and (task["result"].get("failures") or task["result"].get("closed")):
        output.line(f"not proven: `gpuaas nodes parity {node}` shows what is open")
        raise typer.Exit(1)


def _post(node: str, verb: str, reason: str) -> None:
    output.record(client().post(f"/admin/nodes/{node}/{verb}", {"reason": reason}))


def _remaining(node: str) -> Iterator[str]:
    """The allocations and slots that keep a drained node from maintenance."""
    occupied = False
    for state in LIVE_ALLOCATIONS:
        for row in client().items("/admin/allocations", node_id=node, state=state):
            occupied = True
            yield f"still on it: allocation {row['id']} of project {row['project_id']}, {state}"
    for slot in client().items(f"/admin/nodes/{node}/resource-slots"):
        if slot["status"] in ("cleanup", "cleanup_blocked"):
            occupied = True
            yield f"still on it: slot {slot['id']}, {slot['status']}"
    after = "when these are gone" if occupied else "nothing is on it"
    yield f"{after}: `gpuaas nodes maintain {node} --reason WHY` takes it out of use"


def _approvals(node: str, paths: list[str], types: list[str]) -> dict[str, dict[str, Any]]:
    """Approvals from the latest discovery; the host compares them with the disk before it wipes."""
    latest = client().get(f"/admin/nodes/{node}/slice-topology/discovery")["document"] or {}
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

"""`gpuaas slots`: approve, disable, enable and repair the slots of a node."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from reconciler.cli import output, session, tasks
from reconciler.cli.nodes import Node, Wait
from reconciler.model.errors import Problem

app = typer.Typer(no_args_is_help=True, help="Slots: approve, disable, enable, repair.")

Slot = Annotated[str, typer.Argument(help="The slot's id, or its index on the node.")]
Reason = Annotated[str, typer.Option(help="Kept in history and audit.")]
# Entries of the history in a table; JSON has all entries.
SHOWN = 10
COLUMNS = (
    "slot_index",
    "id",
    "status",
    "health_state",
    "gpu_pci_address",
    "nvme_device",
    "private_ip",
    "status_reason",
)


@app.command("list")
def list_slots(context: typer.Context, node: Node) -> None:
    """List the node's approved slots."""
    here = session.of(context)
    output.rows(here, list(here.client.items(_path(node))), *COLUMNS)


@app.command("show")
def show_slot(context: typer.Context, node: Node, slot: Slot) -> None:
    """Show a slot, the reasons why its gate is closed, its history and its disk's proofs."""
    here = session.of(context)
    path = f"{_path(node)}/{_id(here, node, slot)}"
    document = here.client.get(path)
    older, more_proofs = (document.pop(name, None) for name in ("history_next", "proofs_next"))
    if here.output == "json":
        document["history"][:0] = reversed(_rest(here, f"{path}/history", older))
        document["proofs"] += _rest(here, f"{path}/proofs", more_proofs)
        output.document(document)
        return
    gate, history, proofs = (document.pop(name) for name in ("gate", "history", "proofs"))
    output.record(here, document)
    output.rows(here, gate, "code", "detail")
    output.line("gate open" if not gate else f"gate closed by {len(gate)}")
    output.rows(here, history[-SHOWN:], "at", "source", "target", "event", "actor", "reason")
    count = f"more than {len(proofs)}" if more_proofs else f"{len(proofs)}"
    output.line(f"{count} proofs by its own wipes; --output json has all of them")


@app.command()
def approve(
    context: typer.Context,
    node: Node,
    reason: Reason,
    file: Annotated[
        Path | None, typer.Argument(help="JSON: a bundle, or a list of them.", dir_okay=False)
    ] = None,
    from_candidates: Annotated[
        str, typer.Option(help="Slot indexes of the latest discovery, such as 0,1.")
    ] = "",
) -> None:
    """Approve bundles as slots, all or none. They stay disabled until parity has passed."""
    here = session.of(context)
    if (file is None) is not bool(from_candidates):
        raise typer.BadParameter("give either FILE or --from-candidates")
    bundles = _read(file) if file else _candidates(here, node, from_candidates)
    answer = here.client.post(_path(node), {"slots": bundles, "reason": reason})
    output.rows(here, answer["items"], *COLUMNS)


@app.command()
def disable(context: typer.Context, node: Node, slot: Slot, reason: Reason) -> None:
    """Stop selling a slot. A slot in use is disabled once it is free again."""
    _switch(context, node, slot, "disable", reason)


@app.command()
def enable(context: typer.Context, node: Node, slot: Slot, reason: Reason) -> None:
    """Sell a slot again as soon as its gate is open."""
    _switch(context, node, slot, "enable", reason)


@app.command()
def withdraw(context: typer.Context, node: Node, slot: Slot, reason: Reason) -> None:
    """Withdraw the approval of a disabled slot, or of a blocked slot with a dead disk or GPU."""
    _switch(context, node, slot, "withdraw", reason)


@app.command()
def repair(
    context: typer.Context, node: Node, slot: Slot, reason: Reason = "", wait: Wait = True
) -> None:
    """Clean a blocked slot: remove leftovers, wipe the disk, verify."""
    here = session.of(context)
    path = f"{_path(node)}/{_id(here, node, slot)}/repair"
    task = tasks.after(here, here.client.post(path, {"reason": reason}), wait=wait)
    output.record(here, task["result"] if wait else task)


@app.command("remove-orphan")
def remove_orphan(
    context: typer.Context,
    node: Node,
    slot: Slot,
    *,
    allocation: Annotated[str, typer.Option(help="The id in the name of the machine on the host.")],
    reason: Reason,
    wait: Wait = True,
) -> None:
    """Remove a machine without a record from an idle slot, wipe the disk, verify."""
    here = session.of(context)
    path = f"{_path(node)}/{_id(here, node, slot)}/remove-orphan"
    body = {"allocation_id": allocation, "reason": reason}
    task = tasks.after(here, here.client.post(path, body), wait=wait)
    output.record(here, task["result"] if wait else task)


def _switch(context: typer.Context, node: str, slot: str, action: str, reason: str) -> None:
    here = session.of(context)
    path = f"{_path(node)}/{_id(here, node, slot)}/{action}"
    document = here.client.post(path, {"reason": reason})
    output.rows(here, [document], *COLUMNS)
    if action == "enable" and document["status"] in ("disabled", "cleanup_blocked"):
        output.line(f"not on sale yet: `gpuaas slots show {node} {slot}` shows the reason")


def _rest(here: session.Session, path: str, cursor: str | None) -> list[Any]:
    return list(here.client.items(path, cursor=cursor)) if cursor else []


def _path(node: str) -> str:
    return f"/admin/nodes/{node}/resource-slots"


def _id(here: session.Session, node: str, slot: str) -> str:
    if not slot.isdigit():
        return slot
    for row in here.client.items(_path(node)):
        if row["slot_index"] == int(slot):
            return str(row["id"])
    raise Problem(
        "slot_not_found",
        404,
        expected=f"an approved slot of node {node}",
        found=f"index {slot}",
        remedy=f"see `gpuaas slots list {node}`",
    )


def _read(file: Path) -> list[Any]:
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise Problem(
            "file_invalid",
            422,
            expected="a JSON file with bundles",
            found=f"{file}: {error}",
            remedy="write one bundle, or a list of bundles, as the discovery shows them",
        ) from error
    return document if isinstance(document, list) else [document]


def _candidates(here: session.Session, node: str, words: str) -> list[Any]:
    path = f"/admin/nodes/{node}/slice-topology/discovery"
    document = here.client.get(path)["document"] or {}
    bundles = {str(row["slot_index"]): row["bundle"] for row in document.get("candidates", [])}
    indexes = [word.strip() for word in words.split(",") if word.strip()]
    unknown = [index for index in indexes if index not in bundles]
    if unknown:
        raise Problem(
            "candidate_not_found",
            404,
            expected=f"slot indexes of the latest discovery: {', '.join(bundles) or 'none'}",
            found=", ".join(unknown),
            remedy=f"run `gpuaas nodes discover {node}`",
        )
    return [bundles[index] for index in indexes]

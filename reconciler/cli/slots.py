"""`gpuaas slots`: approve, disable, enable and repair the slots of a node."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from reconciler.cli import output, tasks
from reconciler.cli.nodes import Node, Wait
from reconciler.cli.options import read_json
from reconciler.cli.session import client
from reconciler.model.errors import Problem

app = typer.Typer(no_args_is_help=True, help="Slots: approve, disable, enable, repair.")

Slot = Annotated[str, typer.Argument(help="The slot's id, or its index on the node.")]
Reason = Annotated[str, typer.Option(help="Kept in history and audit.")]
# Entries of the history in a table; JSON has all entries.
SHOWN = 10
_DEVICES = ("gpu_pci_address", "nvme_device", "private_ip")
COLUMNS = ("slot_index", "id", "status", "health_state", *_DEVICES, "status_reason")
_OF_SITE = ("node_id", *COLUMNS[:4], "allocation_id", "status_reason")


@app.command("list")
def list_slots(
    node: Annotated[str, typer.Argument(help="The node's id; left out: all nodes.")] = "",
    blocked: Annotated[
        bool, typer.Option("--blocked", help="Only slots that wait for recovery.")
    ] = False,
) -> None:
    """List approved slots: of a node with their devices, or of the site with their allocations."""
    if node:
        slots = list(client().items(_path(node)))
    else:
        nodes = client().items("/admin/fleet", blocked=blocked)
        slots = [{"node_id": row["id"], **slot} for row in nodes for slot in row["slots"]]
    if blocked:
        slots = [slot for slot in slots if slot["status"] == "cleanup_blocked"]
    output.rows(slots, *(COLUMNS if node else _OF_SITE))


@app.command("show")
def show_slot(node: Node, slot: Slot) -> None:
    """Show a slot, the reasons why its gate is closed, its history and its disk's proofs."""
    path = _slot_path(node, slot)
    document = client().get(path)
    older, more_proofs = (document.pop(name, None) for name in ("history_next", "proofs_next"))
    if output.is_json():
        document["history"][:0] = reversed(_rest(f"{path}/history", older))
        document["proofs"] += _rest(f"{path}/proofs", more_proofs)
        output.record(document)
        return
    gate, history, proofs = (document.pop(name) for name in ("gate", "history", "proofs"))
    output.record(document)
    output.rows(gate, "code", "detail")
    output.line("gate open" if not gate else f"gate closed by {len(gate)}")
    output.rows(history[-SHOWN:], "at", "source", "target", "event", "actor", "reason")
    count = f"more than {len(proofs)}" if more_proofs else f"{len(proofs)}"
    output.line(f"{count} proofs by its own wipes; --output json has all of them")


@app.command()
def approve(
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
    if (file is None) is not bool(from_candidates):
        raise typer.BadParameter("give either FILE or --from-candidates")
    if file:
        document = read_json(
            file,
            "file_invalid",
            "JSON with bundles",
            "write one bundle, or a list of bundles, as the discovery shows them",
        )
        bundles = document if isinstance(document, list) else [document]
    else:
        bundles = _candidates(node, from_candidates)
    answer = client().post(_path(node), {"slots": bundles, "reason": reason})
    output.rows(answer["items"], *COLUMNS)


@app.command()
def disable(node: Node, slot: Slot, reason: Reason) -> None:
    """Stop selling a slot. A slot in use is disabled once it is free again."""
    _switch(node, slot, "disable", reason)


@app.command()
def enable(node: Node, slot: Slot, reason: Reason) -> None:
    """Sell a slot again as soon as its gate is open."""
    _switch(node, slot, "enable", reason)


@app.command()
def withdraw(node: Node, slot: Slot, reason: Reason) -> None:
    """Withdraw the approval of a disabled slot, or of a blocked slot with a dead disk or GPU."""
    _switch(node, slot, "withdraw", reason)


@app.command()
def repair(node: Node, slot: Slot, reason: Reason = "", wait: Wait = True) -> None:
    """Clean a blocked slot: remove leftovers, wipe the disk, verify."""
    tasks.run(f"{_slot_path(node, slot)}/repair", {"reason": reason}, wait=wait)


@app.command("remove-orphan")
def remove_orphan(
    node: Node,
    slot: Slot,
    *,
    allocation: Annotated[str, typer.Option(help="The id in the name of the machine on the host.")],
    reason: Reason,
    wait: Wait = True,
) -> None:
    """Remove a machine without a record from an idle slot, wipe the disk, verify."""
    body = {"allocation_id": allocation, "reason": reason}
    tasks.run(f"{_slot_path(node, slot)}/remove-orphan", body, wait=wait)


def _switch(node: str, slot: str, action: str, reason: str) -> None:
    document = client().post(f"{_slot_path(node, slot)}/{action}", {"reason": reason})
    output.rows([document], *COLUMNS)
    if action == "enable" and document["status"] in ("disabled", "cleanup_blocked"):
        output.line(f"not on sale yet: `gpuaas slots show {node} {slot}` shows the reason")


def _rest(path: str, cursor: str | None) -> list[Any]:
    return list(client().items(path, cursor=cursor)) if cursor else []


def _path(node: str) -> str:
    return f"/admin/nodes/{node}/resource-slots"


def _slot_path(node: str, slot: str) -> str:
    if not slot.isdigit():
        return f"{_path(node)}/{slot}"
    for row in client().items(_path(node)):
        if row["slot_index"] == int(slot):
            return f"{_path(node)}/{row['id']}"
    raise Problem(
        "slot_not_found",
        404,
        expected=f"an approved slot of node {node}",
        found=f"index {slot}",
        remedy=f"see `gpuaas slots list {node}`",
    )


def _candidates(node: str, words: str) -> list[Any]:
    path = f"/admin/nodes/{node}/slice-topology/discovery"
    document = client().get(path)["document"] or {}
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

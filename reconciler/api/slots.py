"""Approved slots of a node: approve, switch, repair, look."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter
from fastapi.responses import JSONResponse
from pydantic import Field, StringConstraints
from sqlalchemy import Connection

from reconciler.api import guards, views
from reconciler.api.guards import IfMatch
from reconciler.api.models import Body, Bytes, Id, Reason, Reasoned, Text
from reconciler.api.paging import Paging, Part
from reconciler.api.security import Admin
from reconciler.db import journal
from reconciler.lifecycle import gate, recovery
from reconciler.lifecycle import slots as slot_life
from reconciler.model.bundle import Bundle
from reconciler.model.errors import Problem, not_found
from reconciler.model.proof import DEFAULT_POLICY
from reconciler.profiles import hardware_profile
from reconciler.records import nodes, proofs
from reconciler.records import slots as slot_records

router = APIRouter(prefix="/admin/nodes/{node_id}/resource-slots", tags=["slots"])

Record = dict[str, Any]
Action = Literal["disable", "enable", "withdraw"]
# What a slot is shown with of lists that only grow. A tenant makes about five changes.
_NEWEST = Part(20, "")
_ACTIONS = {
    "disable": slot_life.disable,
    "enable": slot_life.enable,
    "withdraw": slot_life.withdraw,
}


class BundleBody(Body):
    """One slot's devices and addresses; what is left out is refused as an incomplete bundle."""

    slot_index: Annotated[int, Field(ge=0, le=255)]
    gpu_pci_address: Text = ""
    nvme_device: Text = ""
    nvme_serial: Text = ""
    nvme_eui: Text = ""
    nvme_size_bytes: Bytes = 0
    management_mac: Text = ""
    private_ip: Text = ""
    fabric_vf_pci_address: Text = ""
    numa_node: Annotated[int, Field(ge=-1, le=1023)] = -1


class Orphan(Body):
    """Whose machine the host says it is: the id in its name, which no live allocation has."""

    allocation_id: Annotated[
        str,
        StringConstraints(
            pattern=r"^[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}$"
        ),
    ]
    reason: Annotated[Reason, Field(min_length=1)]


class Approval(Body):
    """All of them or none; an approval needs a reason that audit can show."""

    slots: Annotated[list[BundleBody], Field(min_length=1, max_length=64)]
    reason: Annotated[Reason, Field(min_length=1)]


@router.get("")
def list_slots(node_id: Id, context: Admin, part: Paging) -> Record:
    """The node's approved slots, each with its last proof."""
    page = part.page(slot_records.ORDER)
    rows = context.read(lambda conn: slot_records.of_node(conn, node_id, page))
    return part.told(slot_records.ORDER, rows, _listed)


@router.post("", status_code=201)
def approve(node_id: Id, body: Approval, context: Admin) -> JSONResponse:
    """Approve bundles of the latest discovery; they stay disabled until the gate opens."""
    act = context.act(body.reason)

    def work(conn: Connection) -> Record:
        profile = _profile(context, nodes.get(conn, node_id))
        for wanted in body.slots:
            bundle = Bundle.of(wanted.model_dump())
            metadata = _from_profile(profile, bundle)
            try:
                slot_life.approve(conn, node_id, bundle, act, capacity_metadata=metadata)
            except Problem as problem:
                problem.detail.setdefault("slot_index", wanted.slot_index)
                raise
        mine = {wanted.slot_index for wanted in body.slots}
        rows = slot_records.of_node(conn, node_id)
        return {"items": [_listed(row) for row in rows if row["slot_index"] in mine]}

    return context.write(work, body=body, status=201)


def _listed(slot: Record) -> Record:
    """With its id under the name that the recovery runbook reads it by."""
    return {**views.record(slot), "slot_id": slot["id"]}


@router.get("/{slot_id}")
def show(node_id: Id, slot_id: Id, context: Admin) -> JSONResponse:
    """One slot: what keeps its gate closed, its newest history, the last change at the end, and the
    newest proofs of its disk. `history_next` and `proofs_next` go on in the lists of all of them.
    """

    def read(conn: Connection) -> Record:
        slot = _of(conn, node_id, slot_id)
        changes = _changes(conn, slot_id, _NEWEST)
        proven = _proofs(conn, slot_id, _NEWEST)
        return views.record(slot) | {
            "gate": [blocker.document() for blocker in gate.gate(conn, slot_id)],
            "history": changes["items"][::-1],
            "history_next": changes["next"],
            "proofs": proven["items"],
            "proofs_next": proven["next"],
        }

    return guards.tagged(context.read(read))


@router.get("/{slot_id}/history")
def list_history(node_id: Id, slot_id: Id, context: Admin, part: Paging) -> Record:
    """Every change of the slot's state, newest first."""

    def read(conn: Connection) -> Record:
        _of(conn, node_id, slot_id)
        return _changes(conn, slot_id, part)

    return context.read(read)


@router.get("/{slot_id}/proofs")
def list_proofs(node_id: Id, slot_id: Id, context: Admin, part: Paging) -> Record:
    """Every proof of the disk as the slot's, newest first, whether or not it still counts."""

    def read(conn: Connection) -> Record:
        _of(conn, node_id, slot_id)
        return _proofs(conn, slot_id, part)

    return context.read(read)


@router.post("/{slot_id}/repair", status_code=202)
def repair(
    node_id: Id,
    slot_id: Id,
    context: Admin,
    guard: IfMatch,
    body: Reasoned | None = None,
) -> JSONResponse:
    """Clean a blocked slot: remove what is left, wipe, verify. Answers with the task."""
    body = body or Reasoned()
    act = context.act(body.reason)

    def work(conn: Connection) -> Record:
        _of(conn, node_id, slot_id)
        guard.check(conn, "slot", slot_id)
        return views.record(recovery.repair(conn, slot_id, act))

    return context.write(work, body=body, status=202)


@router.post("/{slot_id}/remove-orphan", status_code=202)
def remove_orphan(
    node_id: Id, slot_id: Id, context: Admin, guard: IfMatch, body: Orphan
) -> JSONResponse:
    """Remove from an idle slot a machine that no record knows; wipe, verify. Answers the task."""
    act = context.act(body.reason)

    def work(conn: Connection) -> Record:
        _of(conn, node_id, slot_id)
        guard.check(conn, "slot", slot_id)
        return views.record(recovery.remove_orphan(conn, slot_id, body.allocation_id, act))

    return context.write(work, body=body, status=202)


@router.post("/{slot_id}/{action}")
def switch(
    node_id: Id,
    slot_id: Id,
    action: Action,
    context: Admin,
    guard: IfMatch,
    body: Reasoned | None = None,
) -> JSONResponse:
    """Take a slot out of sale, let it back in, or take its approval back."""
    body = body or Reasoned()
    act = context.act(body.reason)

    def work(conn: Connection) -> Record:
        _of(conn, node_id, slot_id)
        guard.check(conn, "slot", slot_id)
        return views.record(_ACTIONS[action](conn, slot_id, act))

    return context.write(work, body=body)


def _profile(context: Admin, node: Record) -> Record:
    if not node["profile"]:
        return {}
    return hardware_profile(context.settings.profiles_dir, node["profile"])


def _from_profile(profile: Record, bundle: Bundle) -> Record:
    """Kept with the slot: a later change of the profile does not change what was approved."""
    if not profile:
        return {}
    found: Record = {"destructive_wipe_policy": profile.get("wipe_policy", DEFAULT_POLICY)}
    gpu = profile.get("gpu", {})
    if gpu.get("nvlink_sets"):
        found["nvlink_sets"] = gpu["nvlink_sets"]
    module = gpu.get("module_ids", {}).get(bundle.gpu_pci_address)
    return found if module is None else {**found, "gpu_module_id": module}


def _changes(conn: Connection, slot_id: str, wanted: Part) -> Record:
    page = wanted.page(journal.HISTORY_ORDER)
    return wanted.told(journal.HISTORY_ORDER, journal.history_page(conn, "slot", slot_id, page))


def _proofs(conn: Connection, slot_id: str, wanted: Part) -> Record:
    page = wanted.page(proofs.ORDER)
    return wanted.told(proofs.ORDER, proofs.of_slot(conn, slot_id, page))


def _of(conn: Connection, node_id: str, slot_id: str) -> Record:
    slot = slot_records.get(conn, slot_id)
    if slot["node_id"] != node_id:
        raise not_found("slot", slot_id)
    return slot

"""Approved slots of a node: approval, sale, repair, history and proofs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Annotated, Literal

from fastapi import APIRouter
from fastapi.responses import JSONResponse
from pydantic import Field
from sqlalchemy import Connection

from reconciler.api.http import Guard, IfMatch, PageOf, PageRequest, Paging, tagged
from reconciler.api.models import (
    Answer,
    Body,
    Bytes,
    Devices,
    Document,
    Id,
    Integer,
    Moment,
    Reasoned,
    Record,
    RequiredReason,
    Text,
)
from reconciler.api.nodework import AllocationId
from reconciler.api.security import Admin, Context
from reconciler.api.tasks import Task
from reconciler.api.timeline import Change
from reconciler.db import journal, schema
from reconciler.lifecycle import gate, recovery
from reconciler.lifecycle import slots as slot_life
from reconciler.model.act import Act
from reconciler.model.bundle import Bundle
from reconciler.model.errors import Problem, not_found
from reconciler.model.proof import DEFAULT_POLICY
from reconciler.model.states import HealthState, ProofKind, SharingMechanism, SlotState
from reconciler.profiles import hardware_profile
from reconciler.records import nodes, proofs
from reconciler.records import slots as slot_records

router = APIRouter(prefix="/admin/nodes/{node_id}/resource-slots", tags=["slots"])

Action = Literal["disable", "enable", "withdraw"]
# How much of its growing lists a slot is shown with. A tenant makes about five changes.
_NEWEST = PageRequest(20, "")
_ACTIONS = {
    "disable": slot_life.disable,
    "enable": slot_life.enable,
    "withdraw": slot_life.withdraw,
}


class BundleBody(Body):
    """The devices and addresses of one slot. An incomplete bundle is refused."""

    slot_index: Annotated[Integer, Field(ge=0, le=255)]
    gpu_pci_address: Text = ""
    nvme_device: Text = ""
    nvme_serial: Text = ""
    nvme_eui: Text = ""
    nvme_size_bytes: Bytes = 0
    management_mac: Text = ""
    private_ip: Text = ""
    fabric_vf_pci_address: Text = ""
    numa_node: Annotated[Integer, Field(ge=-1, le=1023)] = -1


class Orphan(Body):
    """The allocation id in the name of the machine on the host. No live allocation may have it."""

    allocation_id: AllocationId
    reason: RequiredReason


class Approval(Body):
    """The slots to approve: all or none. The reason goes into the audit log."""

    slots: Annotated[list[BundleBody], Field(min_length=1, max_length=64)]
    reason: RequiredReason


class Slot(Devices):
    """What may be sold of a node: one bundle of its devices."""

    id: str
    node_id: str
    parent_slot_id: str | None
    sharing_mechanism: SharingMechanism
    capacity_metadata: Document
    status: SlotState
    status_reason: str
    status_since: Moment
    deadline_at: Moment | None
    generation: int
    wanted: str
    health_state: HealthState
    health_detail: Document
    available_proof_id: str | None
    last_proof_id: str | None
    approved_discovery_id: int | None
    approved_at: Moment
    approved_by: str
    retired_at: Moment | None


class Proof(Answer):
    """Why a disk counts as clean."""

    id: str
    kind: ProofKind
    node_id: str
    slot_id: str | None
    allocation_id: str | None
    task_id: str | None
    disk_identity: str
    disk_generation: int
    install_id: str
    method: str
    document: Document
    created_at: Moment


class ListedSlot(Slot):
    """A slot with its last proof. `slot_id` is its id, under the name that the runbook uses."""

    slot_id: str
    last_proof: Proof | None


class Slots(Answer):
    """The slots of an approval."""

    items: list[ListedSlot]


class Blocker(Answer):
    """Why something is not sold."""

    code: str
    detail: str


_CONTINUED = "The `cursor` at which the whole list continues; null at its end."


class SlotDetail(Slot):
    """A slot with its gate, its newest history and the newest proofs of its disk."""

    gate: list[Blocker]
    history: list[Change]
    history_next: str | None = Field(description=_CONTINUED)
    proofs: list[Proof]
    proofs_next: str | None = Field(description=_CONTINUED)


@router.get("")
def list_slots(node_id: Id, context: Admin, paging: Paging) -> PageOf[ListedSlot]:
    """The node's approved slots, each with its last proof."""
    rows = partial(slot_records.of_node, node_id=node_id)
    return context.page(paging, slot_records.ORDER, rows, _listed)


@router.post("", status_code=201, response_model=Slots)
def approve(node_id: Id, body: Approval, context: Admin) -> JSONResponse:
    """Approve bundles of the latest discovery. The slots stay disabled until their gate opens."""

    def work(conn: Connection, act: Act) -> Slots:
        profile = _profile(context, nodes.get(conn, node_id))
        for request in body.slots:
            bundle = Bundle.of(request.model_dump())
            metadata = _capacity_metadata(profile, bundle)
            try:
                slot_life.approve(
                    conn, node_id, bundle, act, capacity_metadata=metadata, profile=profile
                )
            except Problem as problem:
                problem.detail.setdefault("slot_index", request.slot_index)
                raise
        indexes = {request.slot_index for request in body.slots}
        rows = slot_records.of_node(conn, node_id)
        return Slots(items=[_listed(row) for row in rows if row.slot_index in indexes])

    return context.write(work, body=body, status=201)


@router.get("/{slot_id}", response_model=SlotDetail)
def show(node_id: Id, slot_id: Id, context: Admin) -> JSONResponse:
    """One slot: why its gate is closed, its newest history with the last change at the end, and the
    newest proofs of its disk. `history_next` and `proofs_next` continue in the lists of all.
    """

    def read(conn: Connection) -> SlotDetail:
        slot = _slot_of(conn, node_id, slot_id)
        changes = _changes(conn, slot_id, _NEWEST)
        proven = _proofs(conn, slot_id, _NEWEST)
        return SlotDetail.of(
            slot,
            gate=[blocker.document() for blocker in gate.gate(conn, slot_id)],
            history=changes.items[::-1],
            history_next=changes.next,
            proofs=proven.items,
            proofs_next=proven.next,
        )

    return tagged(context.read(read))


@router.get("/{slot_id}/history")
def list_history(node_id: Id, slot_id: Id, context: Admin, paging: Paging) -> PageOf[Change]:
    """Every change of the slot's state, the newest first."""

    def read(conn: Connection) -> PageOf[Change]:
        _slot_of(conn, node_id, slot_id)
        return _changes(conn, slot_id, paging)

    return context.read(read)


@router.get("/{slot_id}/proofs")
def list_proofs(node_id: Id, slot_id: Id, context: Admin, paging: Paging) -> PageOf[Proof]:
    """Every proof of the slot's disk, the newest first, including outdated ones."""

    def read(conn: Connection) -> PageOf[Proof]:
        _slot_of(conn, node_id, slot_id)
        return _proofs(conn, slot_id, paging)

    return context.read(read)


@router.post("/{slot_id}/repair", status_code=202, response_model=Task)
def repair(
    node_id: Id, slot_id: Id, context: Admin, guard: IfMatch, body: Reasoned | None = None
) -> JSONResponse:
    """Clean a blocked slot: remove what is left, wipe, verify. Answers with the task."""
    return _change(context, node_id, slot_id, body, guard, recovery.repair)


@router.post("/{slot_id}/remove-orphan", status_code=202, response_model=Task)
def remove_orphan(
    node_id: Id, slot_id: Id, context: Admin, guard: IfMatch, body: Orphan
) -> JSONResponse:
    """Remove a machine without a record from an idle slot; wipe, verify. Answers with the task."""
    remove = partial(recovery.remove_orphan, allocation_id=body.allocation_id)
    return _change(context, node_id, slot_id, body, guard, remove)


@router.post("/{slot_id}/{action}", response_model=Slot)
def switch(
    node_id: Id,
    slot_id: Id,
    action: Action,
    context: Admin,
    guard: IfMatch,
    body: Reasoned | None = None,
) -> JSONResponse:
    """Take a slot off sale, put it back on sale, or withdraw its approval."""
    return _change(
        context, node_id, slot_id, body, guard, _ACTIONS[action], answer=Slot, status=200
    )


def _change(
    context: Context,
    node_id: str,
    slot_id: str,
    body: Body | None,
    guard: Guard,
    change: Callable[..., schema.Row],
    *,
    answer: type[Slot | Task] = Task,
    status: int = 202,
) -> JSONResponse:
    def work(conn: Connection, act: Act) -> Slot | Task:
        _slot_of(conn, node_id, slot_id)
        guard.check(conn, "slot", slot_id)
        return answer.of(change(conn, slot_id, act=act))

    return context.write(work, body=body, status=status)


def _listed(slot: schema.Slot) -> ListedSlot:
    return ListedSlot.of(slot, slot_id=slot.id)


def _profile(context: Context, node: schema.Node) -> Record:
    if not node.profile:
        return {}
    return hardware_profile(context.settings.profiles_dir, node.profile)


def _capacity_metadata(profile: Record, bundle: Bundle) -> Record:
    """Metadata copied into the slot, so that later changes of the profile do not affect it."""
    if not profile:
        return {}
    metadata: Record = {"destructive_wipe_policy": profile.get("wipe_policy", DEFAULT_POLICY)}
    gpu = profile.get("gpu", {})
    if gpu.get("nvlink_sets"):
        metadata["nvlink_sets"] = gpu["nvlink_sets"]
    module = gpu.get("module_ids", {}).get(bundle.gpu_pci_address)
    if module is not None:
        metadata["gpu_module_id"] = module
    return metadata


def _changes(conn: Connection, slot_id: str, paging: PageRequest) -> PageOf[Change]:
    page = paging.page(journal.HISTORY_ORDER)
    rows = journal.history_of(conn, "slot", slot_id, page)
    return paging.answer(journal.HISTORY_ORDER, rows, map(Change.of, rows))


def _proofs(conn: Connection, slot_id: str, paging: PageRequest) -> PageOf[Proof]:
    rows = proofs.of_slot(conn, slot_id, paging.page(proofs.ORDER))
    return paging.answer(proofs.ORDER, rows, map(Proof.of, rows))


def _slot_of(conn: Connection, node_id: str, slot_id: str) -> schema.Slot:
    slot = slot_records.get(conn, slot_id)
    if slot.node_id != node_id:
        raise not_found("slot", slot_id)
    return slot

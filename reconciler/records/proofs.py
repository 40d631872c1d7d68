"""Proofs that a disk is clean. They are kept for ever."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import sqlalchemy as sa

from reconciler.db import journal, rows
from reconciler.db.rows import Order, Page, part
from reconciler.db.schema import Node, Proof, Slot, nodes, proofs, slots
from reconciler.model import gate
from reconciler.model.act import Act
from reconciler.model.errors import Problem
from reconciler.model.gate import Failures
from reconciler.model.proof import DEFAULT_POLICY, check_proof
from reconciler.model.states import ProofKind, SlotState

ORDER = Order(proofs, ("created_at", "id"), descending=True)


def record(
    conn: sa.Connection,
    slot: Slot,
    kind: ProofKind,
    document: Mapping[str, Any],
    *,
    allocation_id: str | None = None,
    task_id: str | None = None,
) -> Proof:
    """A proof for a slot's disk as it is since its last claim."""
    if kind is ProofKind.WIPE:
        check_proof(
            document,
            identity=slot.nvme_identity,
            serial=slot.nvme_serial,
            size_bytes=slot.nvme_size_bytes,
            policy=policy(slot),
        )
    return rows.add(
        conn,
        Proof,
        {
            "id": rows.new_id(),
            "kind": kind.value,
            "node_id": slot.node_id,
            "slot_id": slot.id,
            "allocation_id": allocation_id,
            "task_id": task_id,
            "disk_identity": slot.nvme_identity,
            "disk_generation": slot.disk_generation,
            "install_id": _sold_under(conn, slot)
            if kind is ProofKind.UNTOUCHED
            else _installation(conn, slot.node_id),
            "method": str(document.get("method") or ""),
            "document": dict(document),
        },
    )


def record_transition(
    conn: sa.Connection,
    node_id: str,
    proof: Mapping[str, Any],
    act: Act,
    *,
    task_id: str | None = None,
    manifest: str = "",
) -> Proof:
    """The proof of a storage transition, which may come before there is a slot.

    manifest: the file on the host that has the disk's former use and the proof.
    """
    identity = str(proof.get("disk") or proof.get("identity") or "")
    check_proof(proof, identity=identity)
    query = sa.select(slots).where(slots.c.nvme_identity == identity, slots.c.retired_at.is_(None))
    slot = rows.first(conn, query, Slot)
    if slot is not None and slot.status != SlotState.DISABLED:
        raise Problem(
            "disk_in_use",
            409,
            expected=f"{identity} in no slot, or in one that is disabled",
            found=f"slot {slot.id} is {slot.status}",
            remedy="disable the slot before its disk is taken over",
        )
    if slot is not None and manifest:
        told = {**slot.capacity_metadata, "storage_transition_manifest": manifest}
        update = sa.update(slots).where(slots.c.id == slot.id)
        conn.execute(update.values(generation=slots.c.generation + 1, capacity_metadata=told))
    return rows.add(
        conn,
        Proof,
        {
            "id": rows.new_id(),
            "kind": ProofKind.TRANSITION.value,
            "node_id": node_id,
            "slot_id": slot.id if slot else None,
            "task_id": task_id,
            "disk_identity": identity,
            "disk_generation": generation(conn, identity),
            "install_id": _installation(conn, node_id),
            "method": str(proof["method"]),
            "document": {**proof, "actor": act.actor, "manifest": manifest},
        },
    )


def record_disk(
    conn: sa.Connection,
    node_id: str,
    disk: Mapping[str, Any],
    document: Mapping[str, Any] | None,
    *,
    policy: str,
    allocation_id: str,
    task_id: str | None = None,
) -> Proof:
    """The proof for a disk that went with a whole machine."""
    identity = f"eui.{disk['nvme_eui']}"
    if document is None:
        raise Problem(
            "proof_missing",
            409,
            expected=f"a wipe proof for {identity}",
            found="none",
            remedy="treat the run as failed; clean the node again",
        )
    check_proof(
        document,
        identity=identity,
        serial=disk["nvme_serial"],
        size_bytes=disk["nvme_size_bytes"],
        policy=policy,
    )
    return rows.add(
        conn,
        Proof,
        {
            "id": rows.new_id(),
            "kind": ProofKind.WIPE.value,
            "node_id": node_id,
            "allocation_id": allocation_id,
            "task_id": task_id,
            "disk_identity": identity,
            "disk_generation": generation(conn, identity),
            "install_id": _installation(conn, node_id),
            "method": str(document["method"]),
            "document": dict(document),
        },
    )


def policy(slot: Slot) -> str:
    """What a wipe of the slot's disk must be; a gate judges transition proofs by it as well."""
    return str(slot.capacity_metadata.get("destructive_wipe_policy") or DEFAULT_POLICY)


def generation(conn: sa.Connection, identity: str) -> int:
    """How often the disk has been given to a tenant, in any slot it was ever part of."""
    query = sa.select(sa.func.max(slots.c.disk_generation))
    found = conn.execute(query.where(slots.c.nvme_identity == identity)).scalar_one()
    return int(found or 0)


def manifest(conn: sa.Connection, node_id: str, identity: str) -> str:
    """The manifest of the disk's last transition on the node; "" when none is known."""
    query = sa.select(proofs).where(
        proofs.c.disk_identity == identity,
        proofs.c.node_id == node_id,
        proofs.c.kind == ProofKind.TRANSITION,
    )
    found = rows.first(conn, query.order_by(proofs.c.created_at.desc()), Proof)
    return str(found.document.get("manifest") or "") if found else ""


def taken_over(conn: sa.Connection, node: Node) -> frozenset[str]:
    """Disks whose storage transition was approved for this installation of the node.

    Whether the proof still stands is the host's to say: its ledger knows every write since.
    """
    query = sa.select(proofs.c.disk_identity).where(
        proofs.c.node_id == node.id,
        proofs.c.kind == ProofKind.TRANSITION,
        proofs.c.install_id == node.install_id,
    )
    return frozenset(conn.execute(query).scalars())


def current(conn: sa.Connection, slot: Slot) -> Proof | None:
    """The newest proof that still counts: made since the disk's last claim."""
    query = sa.select(proofs).where(
        proofs.c.disk_identity == slot.nvme_identity,
        proofs.c.disk_generation == slot.disk_generation,
        proofs.c.node_id == slot.node_id,
    )
    return rows.first(conn, query.order_by(proofs.c.created_at.desc()), Proof)


def latest(conn: sa.Connection, slot_id: str) -> Proof | None:
    """The newest proof of a slot, whether or not it still counts."""
    query = sa.select(proofs).where(proofs.c.slot_id == slot_id)
    return rows.first(conn, query.order_by(proofs.c.created_at.desc()), Proof)


def of_slot(conn: sa.Connection, slot_id: str, page: Page | None = None) -> list[Proof]:
    """Newest first."""
    # There is an index by disk; that a slot keeps its disk is the schema's to see to.
    disk = sa.select(slots.c.nvme_identity).where(slots.c.id == slot_id).scalar_subquery()
    query = sa.select(proofs).where(proofs.c.disk_identity == disk, proofs.c.slot_id == slot_id)
    return rows.every(conn, part(query, ORDER, page), Proof)


def of_disk(conn: sa.Connection, identity: str) -> list[Proof]:
    """Newest first, on whatever node the disk was."""
    query = sa.select(proofs).where(proofs.c.disk_identity == identity)
    return rows.every(conn, query.order_by(proofs.c.created_at.desc()), Proof)


def get(conn: sa.Connection, proof_id: str) -> Proof:
    """The proof with an id."""
    return rows.get(conn, Proof, proof_id)


def _installation(conn: sa.Connection, node_id: str) -> str:
    query = sa.select(nodes.c.install_id).where(nodes.c.id == node_id)
    return str(conn.execute(query).scalar_one())


def _sold_under(conn: sa.Connection, slot: Slot) -> str:
    """An untouched disk is as clean as it was sold, and to the installation that had proven it:
    the host may have been reimaged since.
    """
    last = slot.last_proof_id
    return str(get(conn, last).install_id) if last else ""


SLOT_ENABLED = "admin.slot.enabled"
_FAILURE_CODE = "failure"


def with_failure(evidence: Mapping[str, Any], code: str) -> dict[str, Any]:
    """What the proof of an untouched disk holds: of whose failure it tells, if of the host's."""
    return {**evidence, _FAILURE_CODE: code} if gate.fails_on_host(code) else dict(evidence)


def launch_failures(conn: sa.Connection, slot: Slot) -> Failures:
    """Those that stand between the slot and the next tenant."""
    of_disk = sa.and_(
        proofs.c.disk_identity == slot.nvme_identity, proofs.c.node_id == slot.node_id
    )
    cleaned = sa.select(sa.func.max(proofs.c.created_at)).where(
        of_disk, proofs.c.kind != ProofKind.UNTOUCHED
    )
    since = float(conn.execute(cleaned).scalar() or 0.0)
    query = sa.select(proofs).where(
        of_disk, proofs.c.kind == ProofKind.UNTOUCHED, proofs.c.created_at > since
    )
    found = rows.every(conn, query.order_by(proofs.c.created_at), Proof)
    found = [proof for proof in found if proof.document.get(_FAILURE_CODE)]
    if found:
        let_in = journal.audit_rows(conn, action=SLOT_ENABLED, subject_id=slot.id)
        at = let_in[0].at if let_in else 0.0
        found = [proof for proof in found if proof.created_at > at]
    if not found:
        return Failures()
    last = found[-1]
    return Failures(len(found), last.created_at, str(last.document[_FAILURE_CODE]))

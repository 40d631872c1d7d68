"""Disk proofs: evidence that a disk is clean. Proofs are never removed."""

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
from reconciler.model.identity import disk_identity
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
    """Record a proof for a slot's disk at its current generation."""
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
    """Record the proof of a disk takeover, which may come before its slot exists.

    manifest: the file on the host with the disk's former use and the proof.
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
    """Record the wipe proof of a disk of a whole-machine claim."""
    identity = disk_identity(disk["nvme_eui"])
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
    """Wipe policy of the slot's disk. The gate applies it to takeover proofs as well."""
    return str(slot.capacity_metadata.get("destructive_wipe_policy") or DEFAULT_POLICY)


def generation(conn: sa.Connection, identity: str) -> int:
    """Highest generation of the disk over all slots that it was ever part of."""
    query = sa.select(sa.func.max(slots.c.disk_generation))
    found = conn.execute(query.where(slots.c.nvme_identity == identity)).scalar_one()
    return int(found or 0)


def manifest(conn: sa.Connection, node_id: str, identity: str) -> str:
    """Manifest of the disk's last takeover on the node; "" without any."""
    query = sa.select(proofs).where(
        proofs.c.disk_identity == identity,
        proofs.c.node_id == node_id,
        proofs.c.kind == ProofKind.TRANSITION,
    )
    found = rows.first(conn, query.order_by(proofs.c.created_at.desc()), Proof)
    return str(found.document.get("manifest") or "") if found else ""


def taken_over(conn: sa.Connection, node: Node) -> frozenset[str]:
    """Disks with a takeover proof under the current installation of the node.

    The host decides whether the proof still holds, because its ledger has every later write.
    """
    query = sa.select(proofs.c.disk_identity).where(
        proofs.c.node_id == node.id,
        proofs.c.kind == ProofKind.TRANSITION,
        proofs.c.install_id == node.install_id,
    )
    return frozenset(conn.execute(query).scalars())


def current(conn: sa.Connection, slot: Slot) -> Proof | None:
    """The newest proof at the disk's current generation, or None."""
    query = sa.select(proofs).where(
        proofs.c.disk_identity == slot.nvme_identity,
        proofs.c.disk_generation == slot.disk_generation,
        proofs.c.node_id == slot.node_id,
    )
    return rows.first(conn, query.order_by(proofs.c.created_at.desc()), Proof)


def latest(conn: sa.Connection, slot_id: str) -> Proof | None:
    """The newest proof of a slot, even if it is outdated."""
    query = sa.select(proofs).where(proofs.c.slot_id == slot_id)
    return rows.first(conn, query.order_by(proofs.c.created_at.desc()), Proof)


def of_slot(conn: sa.Connection, slot_id: str, page: Page | None = None) -> list[Proof]:
    """Proofs of a slot, newest first."""
    # Query by disk, because it has an index. The schema ensures that a slot keeps its disk.
    disk = sa.select(slots.c.nvme_identity).where(slots.c.id == slot_id).scalar_subquery()
    query = sa.select(proofs).where(proofs.c.disk_identity == disk, proofs.c.slot_id == slot_id)
    return rows.every(conn, part(query, ORDER, page), Proof)


def of_disk(conn: sa.Connection, identity: str) -> list[Proof]:
    """Proofs of a disk on all nodes, newest first."""
    query = sa.select(proofs).where(proofs.c.disk_identity == identity)
    return rows.every(conn, query.order_by(proofs.c.created_at.desc()), Proof)


def get(conn: sa.Connection, proof_id: str) -> Proof:
    """The proof with an id."""
    return rows.get(conn, Proof, proof_id)


def _installation(conn: sa.Connection, node_id: str) -> str:
    query = sa.select(nodes.c.install_id).where(nodes.c.id == node_id)
    return str(conn.execute(query).scalar_one())


def _sold_under(conn: sa.Connection, slot: Slot) -> str:
    """Installation of the slot's last proof. An untouched disk is as clean as at its sale, and only
    for that installation, because the host may have been reimaged since.
    """
    last = slot.last_proof_id
    return str(get(conn, last).install_id) if last else ""


SLOT_ENABLED = "admin.slot.enabled"
_FAILURE_CODE = "failure"


def with_failure(evidence: Mapping[str, Any], code: str) -> dict[str, Any]:
    """Document of an untouched proof. It has the failure code if the cause may be on the host."""
    return {**evidence, _FAILURE_CODE: code} if gate.fails_on_host(code) else dict(evidence)


def launch_failures(conn: sa.Connection, slot: Slot) -> Failures:
    """Launches that failed on the host since the slot's last wipe, takeover or enabling."""
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

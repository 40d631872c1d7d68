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
from reconciler.model.bundle import disk_identity
from reconciler.model.errors import Problem
from reconciler.model.gate import Failures
from reconciler.model.proof import DEFAULT_POLICY, check_gpu, check_proof
from reconciler.model.states import ProofKind, SlotState

# Key of the GPU's evidence in the document of a slot's proof.
GPU = "gpu"
ORDER = Order(proofs, ("created_at", "id"), descending=True)
# The id decides between proofs of the same millisecond.
_LATEST = (proofs.c.created_at.desc(), proofs.c.id.desc())


def record(
    conn: sa.Connection,
    slot: Slot,
    kind: ProofKind,
    document: Mapping[str, Any],
    *,
    allocation_id: str | None = None,
) -> Proof:
    """Record a proof for a slot's disk at its current generation.

    A wipe proof also needs the evidence of the GPU's reset. An untouched slot keeps that of its
    last proof, because no guest has had the GPU since.
    """
    if kind is ProofKind.WIPE:
        check_proof(
            document,
            identity=slot.nvme_identity,
            serial=slot.nvme_serial,
            size_bytes=slot.nvme_size_bytes,
            policy=policy(slot),
        )
        link = slot.capacity_metadata.get("gpu_link") or {}
        check_gpu(document.get(GPU), address=slot.gpu_pci_address, link=link)
    columns = {}
    if kind is ProofKind.UNTOUCHED and slot.last_proof_id:
        last = get(conn, slot.last_proof_id)
        # The disk is as clean as at its sale, and only for that installation, because the host may
        # have been reimaged since.
        columns["install_id"] = last.install_id
        document = {**document, **{k: v for k, v in last.document.items() if k == GPU}}
    return _add(
        conn,
        kind,
        slot.node_id,
        document,
        identity=slot.nvme_identity,
        slot_id=slot.id,
        allocation_id=allocation_id,
        disk_generation=slot.disk_generation,
        **columns,
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
    # A host answers for its own slots only.
    if slot is not None and (slot.node_id, slot.status) != (node_id, SlotState.DISABLED):
        raise Problem(
            "disk_in_use",
            expected=f"{identity} in no slot, or in a disabled one of node {node_id}",
            found=f"slot {slot.id} of node {slot.node_id} is {slot.status}",
            remedy="disable the slot before its disk is taken over",
        )
    if slot is not None and manifest:
        metadata = {**slot.capacity_metadata, "storage_transition_manifest": manifest}
        update = sa.update(slots).where(slots.c.id == slot.id)
        conn.execute(update.values(generation=slots.c.generation + 1, capacity_metadata=metadata))
    return _add(
        conn,
        ProofKind.TRANSITION,
        node_id,
        {**proof, "actor": act.actor, "manifest": manifest},
        identity=identity,
        slot_id=slot.id if slot else None,
        task_id=task_id,
    )


def record_disk(
    conn: sa.Connection,
    node_id: str,
    disk: Mapping[str, Any],
    document: Mapping[str, Any] | None,
    *,
    policy: str,
    allocation_id: str,
    task_id: str | None,
) -> None:
    """Record the wipe proof of a disk of a whole-machine claim."""
    identity = disk_identity(disk["nvme_eui"])
    if document is None:
        raise Problem(
            "proof_missing",
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
    made_by = {"allocation_id": allocation_id, "task_id": task_id}
    _add(conn, ProofKind.WIPE, node_id, document, identity=identity, **made_by)


def _add(
    conn: sa.Connection,
    kind: ProofKind,
    node_id: str,
    document: Mapping[str, Any],
    *,
    identity: str,
    **values: Any,
) -> Proof:
    """Insert a proof, by default at the disk's highest generation and the current installation."""
    if "disk_generation" not in values:
        values["disk_generation"] = generation(conn, identity)
    if "install_id" not in values:
        query = sa.select(nodes.c.install_id).where(nodes.c.id == node_id)
        values["install_id"] = str(conn.execute(query).scalar_one())
    fixed = {
        "id": rows.ordered_id(),
        "kind": kind.value,
        "node_id": node_id,
        "disk_identity": identity,
        "method": str(document.get("method") or ""),
        "document": dict(document),
    }
    return rows.add(conn, Proof, fixed | values)


def policy(slot: Slot) -> str:
    """Wipe policy of the slot's disk. The gate applies it to takeover proofs as well."""
    return str(slot.capacity_metadata.get("destructive_wipe_policy") or DEFAULT_POLICY)


def generation(conn: sa.Connection, identity: str) -> int:
    """Highest generation of the disk over all slots that it was ever part of."""
    query = sa.select(sa.func.max(slots.c.disk_generation))
    highest = conn.execute(query.where(slots.c.nvme_identity == identity)).scalar_one()
    return int(highest or 0)


def manifest(conn: sa.Connection, node_id: str, identity: str) -> str:
    """Manifest of the disk's last takeover on the node; "" without any."""
    query = sa.select(proofs).where(
        proofs.c.disk_identity == identity,
        proofs.c.node_id == node_id,
        proofs.c.kind == ProofKind.TRANSITION,
    )
    proof = rows.first(conn, query.order_by(*_LATEST), Proof)
    return str(proof.document.get("manifest") or "") if proof else ""


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
    return rows.first(conn, query.order_by(*_LATEST), Proof)


def of_slot(conn: sa.Connection, slot_id: str, page: Page | None = None) -> list[Proof]:
    """Proofs of a slot, newest first."""
    # Query by disk, because it has an index. The schema ensures that a slot keeps its disk.
    disk = sa.select(slots.c.nvme_identity).where(slots.c.id == slot_id).scalar_subquery()
    query = sa.select(proofs).where(proofs.c.disk_identity == disk, proofs.c.slot_id == slot_id)
    return rows.every(conn, part(query, ORDER, page), Proof)


def get(conn: sa.Connection, proof_id: str) -> Proof:
    """The proof with an id."""
    return rows.get(conn, Proof, proof_id)


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
    untouched = rows.every(conn, query.order_by(proofs.c.created_at, proofs.c.id), Proof)
    failed = [proof for proof in untouched if proof.document.get(_FAILURE_CODE)]
    if failed:
        let_in = journal.audit_rows(conn, action=SLOT_ENABLED, subject_id=slot.id)
        at = let_in[0].at if let_in else 0.0
        failed = [proof for proof in failed if proof.created_at > at]
    if not failed:
        return Failures()
    last = failed[-1]
    return Failures(len(failed), last.created_at, str(last.document[_FAILURE_CODE]))

"""Approved slots of a node: reading, health."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import sqlalchemy as sa

from reconciler.db import journal, rows
from reconciler.db.rows import Order, Page, part
from reconciler.db.schema import Node, Slot, slots
from reconciler.model.act import Act
from reconciler.model.bundle import run_bundle
from reconciler.model.states import HealthState
from reconciler.records import proofs

ORDER = Order(slots, ("slot_index",))


def get(conn: sa.Connection, id: str) -> Slot:
    """The slot with an id."""
    return rows.get(conn, Slot, id)


def of_node(conn: sa.Connection, node_id: str, page: Page | None = None) -> list[Slot]:
    """The node's approved slots, each with its `last_proof`."""
    rows.get(conn, Node, node_id)
    return [
        replace(slot, last_proof=proofs.get(conn, slot.last_proof_id))
        if slot.last_proof_id
        else slot
        for slot in rows.every(conn, _approved(node_id, page), Slot)
    ]


def bundles(conn: sa.Connection, node_id: str) -> list[dict[str, Any]]:
    """Bundles of all approved slots in the form of the run contract, without fences."""
    approved = rows.every(conn, _approved(node_id), Slot)
    return [run_bundle(vars(slot), fence=False) for slot in approved]


def fabric_identities(conn: sa.Connection, bundles: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """The approved MAC or GUID of each fabric function, by PCI address, of these slots."""
    ids = [bundle["slot_id"] for bundle in bundles]
    query = sa.select(slots.c.fabric_vf_pci_address, slots.c.fabric_identity).where(
        slots.c.id.in_(ids), slots.c.fabric_identity != ""
    )
    return {row.fabric_vf_pci_address: row.fabric_identity for row in conn.execute(query)}


def set_health(
    conn: sa.Connection, slot_id: str, health: HealthState, detail: Mapping[str, Any], act: Act
) -> Slot:
    """Record the health that drift reconciliation found, with history. The state is unchanged."""
    slot = rows.get(conn, Slot, slot_id, lock=True)
    if slot.health_state == health and slot.health_detail == detail:
        return slot
    update(conn, slot_id, health_state=health.value, health_detail=dict(detail))
    health_act = act.because(act.reason, {**act.evidence, "detail": dict(detail)})
    source, target = slot.health_state, health.value
    journal.write_health(conn, "slot_health", slot, health_act, source=source, target=target)
    return get(conn, slot_id)


def _approved(node_id: str, page: Page | None = None) -> sa.Select[Any]:
    query = sa.select(slots).where(slots.c.node_id == node_id, slots.c.retired_at.is_(None))
    return part(query, ORDER, page)


def void_proofs(conn: sa.Connection, node_id: str) -> None:
    """Give disks of the node's approved slots a new generation, for which no proof counts (I4)."""
    approved = (slots.c.node_id == node_id, slots.c.retired_at.is_(None))
    void = sa.update(slots).where(*approved)
    conn.execute(void.values(disk_generation=slots.c.disk_generation + 1))


def update(conn: sa.Connection, slot_id: str, **values: Any) -> None:
    update = sa.update(slots).where(slots.c.id == slot_id)
    conn.execute(update.values(generation=slots.c.generation + 1, **values))

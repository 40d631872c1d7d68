"""What a host says about itself, and what follows when it is not the same as before."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import sqlalchemy as sa

from reconciler.domain.act import Act
from reconciler.domain.identity import install_id
from reconciler.domain.states import SlotState
from reconciler.store import clock, looks, rows
from reconciler.store.lifecycle import advance
from reconciler.store.rows import Record
from reconciler.store.tables import nodes, slots


def contacted(conn: sa.Connection, node_id: str) -> None:
    """The host has answered just now."""
    conn.execute(sa.update(nodes).where(nodes.c.id == node_id).values(last_contact_at=clock.now()))


def observed(
    conn: sa.Connection,
    node_id: str,
    act: Act,
    *,
    identity: Mapping[str, Any],
    reboot_required: bool | None = None,
    began: float | None = None,
) -> bool:
    """Remember boot and installation; True when they changed, and then the gate is closed.

    began: when the look began, by the database's clock; None for just now. One that tells of
    another host than is known, and began before that was learned, may have seen the host before or
    after: neither is believed, and the host is looked at again.
    """
    node = rows.get(conn, nodes, node_id, "node", lock=True)
    known = {
        name: str(identity.get(name) or node[name])
        for name in ("boot_id", "machine_id", "host_key")
    }
    install = install_id(known["machine_id"], known["host_key"])
    changed = [
        name
        for name, value in (("boot", known["boot_id"]), ("installation", install))
        if value != node["boot_id" if name == "boot" else "install_id"]
    ]
    learned = node["boot_learned_at"] or 0.0
    if changed and began is not None and began < learned:
        _doubt(conn, node, act.because(f"gate closed: another {' and '.join(changed)}, seen late"))
        return True
    values: dict[str, Any] = {**known, "install_id": install, "last_contact_at": clock.now()}
    if changed:
        values["boot_learned_at"] = clock.now()
    if reboot_required is not None:
        values["reboot_required"] = reboot_required
    conn.execute(sa.update(nodes).where(nodes.c.id == node_id).values(**values))
    if changed or reboot_required:
        reason = f"new {' and '.join(changed)}" if changed else "the host must be rebooted"
        close_gate(conn, node_id, act.because(f"gate closed: {reason}", {"identity": known}))
    return bool(changed)


def restarted(conn: sa.Connection, node_id: str, act: Act, *, since: str) -> bool:
    """The host runs under another boot than `since`; which one is known when it is discovered.

    Until then nothing that was proven counts: the gate is closed. False when this is old news.
    """
    node = rows.get(conn, nodes, node_id, "node", lock=True)
    if node["boot_id"] != since:
        return False
    _forget_boot(conn, node_id)
    close_gate(conn, node_id, act.because("gate closed: new boot", {"boot_id_was": since}))
    return True


def close_gate(conn: sa.Connection, node_id: str, act: Act) -> list[str]:
    """Take the node's available slots off sale. What is wanted of them stays as it was."""
    query = sa.select(slots.c.id).where(
        slots.c.node_id == node_id, slots.c.status == SlotState.AVAILABLE
    )
    # Locked, in the order of everybody else: what a launch has taken meanwhile is no more on sale.
    locked = conn.execute(query.order_by(slots.c.id).with_for_update())
    closed = [str(slot) for slot in locked.scalars()]
    for slot_id in closed:
        advance(conn, "slot", slot_id, "disable", act, columns={"available_proof_id": None})
    return closed


def _doubt(conn: sa.Connection, node: Record, act: Act) -> None:
    contacted(conn, node["id"])
    if node["boot_id"]:
        _forget_boot(conn, node["id"])
    close_gate(conn, node["id"], act.because(act.reason, {"boot_id_was": node["boot_id"]}))
    looks.at(conn, node, act)


def _forget_boot(conn: sa.Connection, node_id: str) -> None:
    unknown = {"boot_id": "", "boot_learned_at": clock.now()}
    conn.execute(sa.update(nodes).where(nodes.c.id == node_id).values(**unknown))

"""Giving up what is dead: a slot, or a disk, whose device will never prove anything any more.

Nothing is believed clean by it. The disk gets the next generation, for which there is no proof:
should it come back, in whatever slot, it must be taken over and wiped before anybody gets it.
"""

from __future__ import annotations

from collections.abc import Mapping
from operator import itemgetter
from typing import Any

import sqlalchemy as sa

from reconciler.domain import discovery as seen
from reconciler.domain import drift
from reconciler.domain.act import Act, require_reason
from reconciler.domain.errors import Problem
from reconciler.domain.states import LIVE_CLAIMS, SlotState
from reconciler.store import clock, rows, sightings
from reconciler.store.claims import last_holder, of_allocation
from reconciler.store.lifecycle import advance
from reconciler.store.rows import Record
from reconciler.store.tables import history, nodes, slots

# What is given up is given up by somebody.
WHY = "say why this is given up"
# As many as a host takes in one conversion; it has given up those of earlier ones before.
_LEASES = 256


def dead_slot(conn: sa.Connection, slot: Record, act: Act) -> Record:
    """Take a blocked slot out of recovery; only where the host shows that a device of it is gone.

    Problem `reason_required`, `claim_live`, or `slot_in_use` while disk and GPU are there.
    """
    require_reason(act, WHY)
    holder = last_holder(conn, slot["id"])
    claimed = [claim for claim in of_allocation(conn, holder) if claim["slot_id"] == slot["id"]]
    if any(claim["state"] in LIVE_CLAIMS for claim in claimed):
        raise Problem(
            "claim_live",
            409,
            expected="a slot whose last claim has ended",
            found=f"the claim of allocation {holder}",
            remedy=f"end it first: `gpuaas recover {holder}`, or force its release",
        )
    latest = _after(conn, slot["node_id"], slot["status_since"])
    document = latest["document"] if latest else {}
    missing = [
        name
        for name, device in (
            ("disk", seen.disk_by_identity(document, slot["nvme_identity"])),
            ("gpu", seen.gpu(document, slot["gpu_pci_address"])),
        )
        if latest and device is None
    ]
    if latest is None or not missing:
        raise Problem(
            "slot_in_use",
            409,
            expected="a disabled slot, or a blocked one whose disk or GPU has died",
            found="cleanup_blocked, its disk and GPU are there"
            if latest
            else "cleanup_blocked, and no discovery since then under the host's present boot",
            remedy="recover the slot; if a device has died, discover the node and ask again",
        )
    evidence = {"discovery_id": latest["id"], "missing": missing, "allocation_id": holder}
    return _withdraw(conn, slot, act, _died(missing), evidence)


def slots_of(conn: sa.Connection, node_id: str, act: Act) -> list[str]:
    """All slots of a node that goes for good: their devices and addresses are free for others."""
    query = sa.select(slots).where(slots.c.node_id == node_id, slots.c.retired_at.is_(None))
    given_up = []
    # Locked in the order of everybody else, written off in the machine's.
    held = rows.every(conn, query.order_by(slots.c.id).with_for_update())
    for slot in sorted(held, key=itemgetter("slot_index")):
        if slot["status"] == SlotState.CLEANUP_BLOCKED:
            evidence = {"allocation_id": last_holder(conn, slot["id"])}
            _withdraw(conn, slot, act, "the node goes with whatever is left on it", evidence)
            given_up.append(str(slot["id"]))
        elif doubted(slot):
            distrust = sa.update(slots).where(slots.c.id == slot["id"])
            conn.execute(distrust.values(disk_generation=slots.c.disk_generation + 1))
    update = sa.update(slots).where(slots.c.node_id == node_id, slots.c.retired_at.is_(None))
    gone = {"retired_at": clock.now(), "wanted": SlotState.DISABLED.value}
    conn.execute(update.values(generation=slots.c.generation + 1, **gone))
    return given_up


def dead_disks(conn: sa.Connection, node_id: str, disks: list[Record], since: float) -> list[str]:
    """Those of a whole machine's disks that its latest discovery, after `since`, does not have."""
    latest = _after(conn, node_id, since)
    if latest is None:
        return []
    identities = [f"eui.{disk['nvme_eui']}" for disk in disks]
    return [one for one in identities if seen.disk_by_identity(latest["document"], one) is None]


def leases(conn: sa.Connection, node_id: str) -> list[dict[str, Any]]:
    """What a host may still hold in the name of dead slots of its node: nobody gives it back.

    Each with its fence since then, the allocation that had it last, and what has died; the newest
    first. The reason is ours: what a person has written does not go to the host.
    """
    query = sa.select(history.c.evidence, slots.c.id, slots.c.fence).where(
        history.c.node_id == node_id,
        history.c.entity == "slot",
        history.c.event == "withdraw",
        slots.c.id == history.c.entity_id,
        slots.c.retired_at.is_not(None),
    )
    return [
        {
            "slot_id": row["id"],
            "fence": row["fence"],
            "allocation_id": row["evidence"]["allocation_id"],
            "reason": _died(row["evidence"].get("missing", [])),
        }
        for row in rows.every(conn, query.order_by(history.c.id.desc()).limit(_LEASES))
        if row["evidence"].get("allocation_id")
    ]


def doubted(slot: Record) -> bool:
    """Whether the host was last seen to hold something in an idle slot.

    Only the slot's own gate knows that: before the slot is retired, its disk gets the next
    generation, or the proof from before would count in the slot that gets the disk next.
    """
    return bool(slot["health_detail"].get("step") == drift.STEP)


def _died(devices: list[str]) -> str:
    return f"no {' and no '.join(devices)} any more" if devices else "given up with its node"


def _withdraw(
    conn: sa.Connection, slot: Record, act: Act, why: str, evidence: Mapping[str, object]
) -> Record:
    # The next fence: a run that is still alive somewhere has no word in this any more. The disk's
    # next generation: one that was idle when it was blocked still has its proof.
    own = act.because(f"{act.reason}; written off: {why}", {**act.evidence, **evidence})
    columns = {"fence": slot["fence"] + 1, "disk_generation": slot["disk_generation"] + 1}
    return advance(conn, "slot", slot["id"], "withdraw", own, columns=columns)


def _after(conn: sa.Connection, node_id: str, since: float) -> Record | None:
    """The latest discovery, if it is of the host's present boot and was begun after `since`."""
    node = rows.get(conn, nodes, node_id, "node")
    latest = sightings.latest(conn, node_id)
    if latest is None or not node["boot_id"] or latest["observed_at"] < since:
        return None
    now = (node["boot_id"], node["install_id"])
    return latest if (latest["boot_id"], latest["install_id"]) == now else None

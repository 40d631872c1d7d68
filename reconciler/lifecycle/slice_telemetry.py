"""Telemetry of slices: a ring of 24 hours per allocation, a sample per minute; refused packets.

A minute of the day has one place, so the table cannot grow with time. Samples of ended allocations
are deleted a day later (`retention`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import sqlalchemy as sa

from reconciler.db import clock, rows
from reconciler.db.schema import (
    Allocation,
    Node,
    TelemetrySample,
    allocations,
    nodes,
    telemetry_samples,
)
from reconciler.model.drift import SILENT_S
from reconciler.model.slice_telemetry import Snapshot, is_silent
from reconciler.model.states import AllocationState, CapacityShape, NodeState

PERIOD_S = 60.0
RING = 24 * 60
KEPT_S = RING * PERIOD_S
# A sample counts as current for so many minutes: a host may miss some turns.
CURRENT = 4
# State of a machine without power.
_OFF = "shut off"
# Kinds of packets that the guards of slices refuse. Kinds and numbers are a host's word: they
# decide nothing, and both are bounded.
REFUSED = frozenset(
    [
        *("arp", "connections", "denied_network", "dhcp_forged", "dhcp_server", "fragment"),
        *(
            "host_address",
            "host_connections",
            "host_service",
            "inbound",
            "ip_spoofed",
            "ipv6",
            "mac_spoofed",
        ),
        *("name_queries", "neighbour", "packet_rate", "private_network", "protocol", "vlan"),
    ]
)
# The largest number that every reader of JSON keeps exactly.
MOST_REFUSED = 2**53 - 1

_ACTIVE = sa.and_(
    allocations.c.state == AllocationState.ACTIVE,
    allocations.c.capacity_shape == CapacityShape.GPU_SLICE,
)


def due(conn: sa.Connection) -> list[Node]:
    """Hosts of active slices without a sample of this minute, by any process of the service."""
    since = clock.read(conn) - (PERIOD_S - 5)
    fresh = sa.exists().where(
        telemetry_samples.c.allocation_id == allocations.c.id,
        # The only places of samples since then, so that not all of them are read.
        telemetry_samples.c.minute.in_([_place(since), _place(since + PERIOD_S)]),
        telemetry_samples.c.at > since,
    )
    waiting = sa.exists().where(allocations.c.node_id == nodes.c.id, _ACTIVE, ~fresh)
    query = sa.select(nodes).where(waiting, nodes.c.state != NodeState.UNREACHABLE)
    return rows.every(conn, query, Node)


def record(conn: sa.Connection, node_id: str, snapshot: Snapshot) -> int:
    """Store a host's snapshot for its own active slices; returns their number."""
    by_id = {part.allocation_id: part for part in snapshot.slices}
    query = sa.select(allocations.c.id, allocations.c.gpu_count).where(
        allocations.c.id.in_(sorted(by_id)), allocations.c.node_id == node_id, _ACTIVE
    )
    counts = {row.id: row.gpu_count for row in conn.execute(query.order_by(allocations.c.id))}
    now = clock.read(conn)
    for allocation_id, gpus in counts.items():
        part = by_id[allocation_id]
        host = part.host.model_dump(mode="json", exclude_none=True)
        host["refused_packets"] = {
            kind: packets for kind, packets in part.host.refused_packets.items() if kind in REFUSED
        }
        guest = part.guest and part.guest.model_dump(mode="json", exclude_none=True)
        if guest:
            # Each is a series of the metrics.
            guest["gpus"] = [gpu for gpu in guest["gpus"] if gpu["index"] < gpus]
        values = {"at": now, "host": host, "guest": guest}
        place = {"allocation_id": allocation_id, "minute": _place(now)}
        insert = rows.conflict_insert(conn.dialect.name, telemetry_samples)
        row = insert.values(**place, **values)
        conn.execute(row.on_conflict_do_update(index_elements=list(place), set_=values))
    refused = [{"allocation_id": key, "refused": by_id[key].host.refused_packets} for key in counts]
    record_refused(conn, node_id, {"found": refused})
    return len(counts)


def _place(at: float) -> int:
    """The minute of the day."""
    return int(at // PERIOD_S) % RING


def switched_off(
    conn: sa.Connection, node_id: str, snapshot: Snapshot, *, again: bool = False
) -> list[str]:
    """Running slices of a host that the snapshot shows off, and their newest samples did not.

    A value of telemetry decides nothing, but it is a reason to compare the host with the records.
    Without an order of its project, a guest has powered itself off, or it was lost. again: also
    slices that were off before.
    """
    off = [part.allocation_id for part in snapshot.slices if part.host.state == _OFF]
    mine = sa.select(allocations.c.id).where(
        allocations.c.id.in_(sorted(off)),
        allocations.c.node_id == node_id,
        allocations.c.power_action == "",
        ~allocations.c.stopped,
        _ACTIVE,
    )
    ids = sorted(conn.execute(mine).scalars()) if off else []
    if again:
        return ids
    # The newest may be old: a host that was restarted was silent meanwhile.
    newest = sa.select(telemetry_samples.c.host).order_by(telemetry_samples.c.at.desc()).limit(1)
    last = {
        key: conn.execute(newest.where(telemetry_samples.c.allocation_id == key)).scalar()
        for key in ids
    }
    return [key for key, host in last.items() if not host or host.get("state") != _OFF]


def silent(conn: sa.Connection, allocation_id: str, *, named: bool) -> bool:
    """Whether the guest of a running slice no longer answers.

    Guests of other images never give telemetry, so only one counts that has spoken within the ring.
    named: it counted as silent before, and may have spoken earlier than the ring remembers.
    """
    mine, now = telemetry_samples.c.allocation_id == allocation_id, clock.read(conn)
    query = sa.select(telemetry_samples).where(mine, telemetry_samples.c.at > now - SILENT_S)
    newest = rows.every(conn, query.order_by(telemetry_samples.c.at), TelemetrySample)
    times = {"since": now - SILENT_S, "until": now, "gap_s": CURRENT * PERIOD_S}
    if not is_silent([(row.at, row.host, row.guest) for row in newest], **times):
        return False
    spoke = sa.select(telemetry_samples.c.at).where(mine, telemetry_samples.c.guest.is_not(None))
    return named or rows.first(conn, spoke) is not None


def samples(conn: sa.Connection, allocation_id: str, minutes: int) -> list[TelemetrySample]:
    """Samples of the last minutes, the oldest first."""
    query = (
        sa.select(telemetry_samples)
        .where(
            telemetry_samples.c.allocation_id == allocation_id,
            telemetry_samples.c.at > clock.now() - minutes * PERIOD_S,
        )
        .order_by(telemetry_samples.c.at)
    )
    return rows.every(conn, query, TelemetrySample)


def current(conn: sa.Connection) -> Iterator[tuple[Allocation, TelemetrySample]]:
    """The newest sample of each active slice that has one."""
    query = (
        sa.select(telemetry_samples)
        .join(allocations, allocations.c.id == telemetry_samples.c.allocation_id)
        .where(_ACTIVE, telemetry_samples.c.at > clock.now() - CURRENT * PERIOD_S)
        .order_by(telemetry_samples.c.at)
    )
    newest = {row.allocation_id: row for row in rows.every(conn, query, TelemetrySample)}
    named = sa.select(allocations).where(allocations.c.id.in_(sorted(newest)))
    for allocation in rows.every(conn, named, Allocation):
        yield allocation, newest[allocation.id]


def record_refused(
    conn: sa.Connection, node_id: str, refused: Mapping[str, Any], *, since: float | None = None
) -> None:
    """Add a host's counters to its active allocations; those of others are ignored. A counter
    begins again with each load of a guard.

    since: when the host began to read them; allocations with a sample since then are left alone,
    because an older number, which is smaller, would count as one that began again.
    """
    counted = {row["allocation_id"]: row["refused"] for row in refused.get("found", ())}
    query = sa.select(allocations).where(
        allocations.c.id.in_(sorted(counted)),
        allocations.c.node_id == node_id,
        allocations.c.state == AllocationState.ACTIVE,
    )
    if since is not None:
        newer = sa.exists().where(
            telemetry_samples.c.allocation_id == allocations.c.id, telemetry_samples.c.at > since
        )
        query = query.where(~newer)
    # In the order of all that lock several.
    query = query.order_by(allocations.c.id).with_for_update(key_share=True)
    for allocation in rows.every(conn, query, Allocation):
        readings = {
            kind: min(packets, MOST_REFUSED)
            for kind, packets in counted[allocation.id].items()
            if kind in REFUSED
        }
        if readings == allocation.refused_readings:
            continue
        totals = dict(allocation.refused_packets)
        for kind, packets in readings.items():
            before = allocation.refused_readings.get(kind, 0)
            # A smaller counter began again.
            more = packets - before if packets >= before else packets
            totals[kind] = min(totals.get(kind, 0) + more, MOST_REFUSED)
        update = sa.update(allocations).where(allocations.c.id == allocation.id)
        conn.execute(update.values(refused_packets=totals, refused_readings=readings))


def refused_by_kind(conn: sa.Connection) -> Counter[str]:
    """Refused packets of the active allocations."""
    query = sa.select(allocations.c.refused_packets).where(
        allocations.c.state == AllocationState.ACTIVE
    )
    total: Counter[str] = Counter(dict.fromkeys(sorted(REFUSED), 0))
    for packets in conn.execute(query).scalars():
        total.update(packets)
    return total

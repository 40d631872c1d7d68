"""Table of nodes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from reconciler.db.schema.base import (
    Row,
    document,
    flag,
    key,
    lifecycle,
    maybe_list,
    metadata,
    moment,
    number,
    one_of,
    row_of,
    stamp,
    text,
)
from reconciler.model.states import HealthState, NodeMode, NodeState

nodes = sa.Table(
    "nodes",
    metadata,
    key(),
    text("name", None),
    text("address"),
    number("port", 22),
    text("ssh_user", "root"),
    # Address for the tenant of the whole machine; never the transport or BMC address.
    text("tenant_address"),
    number("tenant_port", 22),
    text("telemetry_url"),
    # The node's own values for the InfiniBand fabric. Empty: the value of the profile applies.
    text("fabric_interface"),
    text("fabric_address"),
    text("region"),
    text("pool", "default"),
    text("profile"),
    # Tags of the machine in MAAS. Null: unknown, or the site has no MAAS; []: MAAS has no tags.
    maybe_list("maas_tags"),
    text("mode", None),
    text("mode_reason"),
    stamp("mode_since"),
    moment("mode_deadline_at"),
    *lifecycle(),
    flag("slice_scheduling"),
    # Grows with every claim and every release of the whole machine.
    number("fence"),
    # Allocation of the whole machine whose traces may still be on it.
    text("unclean_allocation_id"),
    text("health_state", HealthState.UNKNOWN.value),
    document("health_detail"),
    text("machine_id"),
    text("host_key"),
    text("boot_id"),
    text("install_id"),
    # When boot_id was learned, or was found to be unknown. A report that began earlier and shows
    # another boot is not trusted.
    moment("boot_learned_at"),
    flag("reboot_required"),
    moment("last_contact_at"),
    stamp(),
    one_of("state", NodeState),
    one_of("mode", NodeMode),
    one_of("health_state", HealthState),
    sa.UniqueConstraint("name"),
    # Live claims refer to (id, mode). So the database refuses a change of mode under a live claim,
    # and bare-metal and slice claims on the same node (I2).
    sa.UniqueConstraint("id", "mode"),
)


@row_of(nodes, "node")
@dataclass(frozen=True, kw_only=True)
class Node(Row):
    """A node: the record of a server and of its host."""

    id: str
    name: str
    address: str
    port: int
    ssh_user: str
    tenant_address: str
    tenant_port: int
    telemetry_url: str
    fabric_interface: str
    fabric_address: str
    region: str
    pool: str
    profile: str
    maas_tags: list[Any] | None
    mode: str
    mode_reason: str
    mode_since: float
    mode_deadline_at: float | None
    state: str
    state_reason: str
    state_since: float
    deadline_at: float | None
    generation: int
    slice_scheduling: bool
    fence: int
    unclean_allocation_id: str
    health_state: str
    health_detail: dict[str, Any]
    machine_id: str
    host_key: str
    boot_id: str
    install_id: str
    boot_learned_at: float | None
    reboot_required: bool
    last_contact_at: float | None
    created_at: float

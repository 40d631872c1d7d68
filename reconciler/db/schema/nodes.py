"""Tables of nodes, and of the reports of their hosts, which are separate from approved slots."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import sqlalchemy as sa

from reconciler.db.schema.base import Default, NodeId, Number, Row, StateRow, Text, table
from reconciler.model.states import HealthState, NodeMode, NodeState


@table(
    "nodes",
    "node",
    sa.UniqueConstraint("name"),
    # Live claims refer to (id, mode). So the database refuses a change of mode under a live claim,
    # and bare-metal and slice claims on the same node (I2).
    sa.UniqueConstraint("id", "mode"),
)
class Node(StateRow):
    """A node: the record of a server and of its host."""

    name: str
    address: Text
    port: Annotated[int, Default(22)]
    ssh_user: Annotated[str, Default("root")]
    # Address for the tenant of the whole machine; never the transport or BMC address.
    tenant_address: Text
    tenant_port: Annotated[int, Default(22)]
    telemetry_url: Text
    # The node's own values for the InfiniBand fabric. Empty: the value of the profile applies.
    fabric_interface: Text
    fabric_address: Text
    region: Text
    pool: Annotated[str, Default("default")]
    profile: Text
    # Tags of the machine in MAAS. Null: unknown, or the site has no MAAS; []: MAAS has no tags.
    maas_tags: list[Any] | None
    # The machine in MAAS that is this node; null without one. `system_id`, and `identity` of its
    # hardware. `purpose`: the last by which its tags agreed. `locked`: by this service. `series`:
    # last deployed. `returned`: from the request of a release to a deployment of ours. `tenant`:
    # from the release of a tenant to the erasure of the disks by MAAS or the next installation.
    maas: dict[str, Any] | None
    # `vendor`, `product` and `serial` of its discovery; while the installation is a tenant's, those
    # from before the tenant. `first_serial`: the first that its installation reported, if it is
    # another; "" before the first report. Null: not discovered yet.
    hardware: dict[str, Any] | None
    # `device_id`, `asset_tag` and `bmc_address` of its device in NetBox. Null: none is known.
    netbox: dict[str, Any] | None
    mode: Annotated[str, NodeMode]
    mode_reason: Text
    mode_since: float
    mode_deadline_at: float | None
    state: Annotated[str, NodeState]
    slice_scheduling: bool
    # Grows with every claim and every release of the whole machine.
    fence: Number
    # Allocation of the whole machine whose traces may still be on it.
    unclean_allocation_id: Text
    health_state: Annotated[str, HealthState, Default(HealthState.UNKNOWN.value)]
    health_detail: dict[str, Any]
    machine_id: Text
    host_key: Text
    # Machine ids that the host had since a tenant was root on it. While there are any, the machine
    # needs a new installation with a new host key.
    tenant_machine_ids: list[Any]
    # Firmware before a tenant was root, until a new installation shows the same or a person accepts
    # the differences. Null: nothing to compare; {}: it was never recorded.
    firmware_before: dict[str, Any] | None
    firmware_differences: list[Any]
    # Partitions of the slots' fabric functions as the subnet manager showed them: `slots` that were
    # compared, `problems` by slot, `error`. Null: the fabric has no partitions.
    fabric_reading: dict[str, Any] | None
    # The BMC's report of the firmware since then, or before the tenant. Null: none.
    firmware_bmc: dict[str, Any] | None
    boot_id: Text
    install_id: Text
    # When boot_id was learned, or was found to be unknown. A report that began earlier and shows
    # another boot is not trusted.
    boot_learned_at: float | None
    reboot_required: bool
    last_contact_at: float | None
    created_at: float


@dataclass(frozen=True, kw_only=True)
class Report(Row):
    """A report of a host."""

    id: int
    node_id: NodeId
    task_id: str | None
    boot_id: Text
    install_id: Text
    document: dict[str, Any]
    # When the reporting run started, by the database's clock. The host's clock is not trusted.
    observed_at: float | None
    created_at: float


@table("topology_discoveries", "discovery", sa.Index("ix_topology_discoveries_node_id", "node_id"))
class Discovery(Report):
    """A discovery report."""

    reboot_required: bool


@table("parity_reports", "parity", sa.Index("ix_parity_reports_node_id", "node_id"))
class Parity(Report):
    """A parity report."""

    intent: Annotated[str, Default("slice")]
    failures: Number
    warnings: Number


@table("host_baselines", "baseline", sa.Index("ix_host_baselines_allocation_id", "allocation_id"))
class Baseline(Report):
    """A host's state before a tenant had the whole machine."""

    allocation_id: str


@table("absence_reports", "absence", sa.Index("ix_absence_reports_allocation_id", "allocation_id"))
class Absence(Report):
    """A report of the traces of an allocation on its host."""

    allocation_id: str
    absent: bool


nodes = Node.TABLE
discoveries = Discovery.TABLE
parities = Parity.TABLE
baselines = Baseline.TABLE
absences = Absence.TABLE

"""Tables of capacity: images, disk proofs, slots, allocations, claims and usage."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import sqlalchemy as sa

from reconciler.db.schema.base import (
    KEY,
    AllocationId,
    Default,
    NodeId,
    Number,
    ProjectId,
    Reference,
    Row,
    StateRow,
    StatusRow,
    TaskId,
    Text,
    in_states,
    partial,
    table,
    unique,
)
from reconciler.model.fabric import Isolation
from reconciler.model.states import (
    LIVE_ALLOCATIONS,
    LIVE_CLAIMS,
    LIVE_INGRESS,
    AllocationState,
    CapacityShape,
    ClaimKind,
    ClaimState,
    HealthState,
    IngressProtocol,
    IngressState,
    ProofKind,
    SharingMechanism,
    SlotState,
)

LIVE = in_states(LIVE_CLAIMS)
_LIVE_INGRESS = in_states(LIVE_INGRESS)
_LIVE_SLICE = f"kind = 'slice' AND {LIVE}"
APPROVED = "retired_at IS NULL"
# Slots that a launch may take, and slots in use: the conditions of two partial indexes, by which
# `lifecycle.placement` finds candidate nodes without counting all slots.
FREE = f"{APPROVED} AND status = '{SlotState.AVAILABLE}'"
BUSY = f"{APPROVED} AND status NOT IN ('{SlotState.AVAILABLE}', '{SlotState.DISABLED}')"


@dataclass(frozen=True, kw_only=True)
class BundleRow(Row):
    """Row with the devices and addresses of a slot."""

    slot_index: Number
    gpu_pci_address: Text
    nvme_device: Text
    nvme_identity: Text
    nvme_serial: Text
    nvme_eui: Text
    nvme_size_bytes: Number
    management_mac: Text
    private_ip: Text
    fabric_vf_pci_address: Text
    numa_node: Annotated[int, Default(-1)]
    fence: Number
    disk_generation: Number


@table("images", "image", sa.UniqueConstraint("name", "version"))
class Image(Row):
    """An image of the catalogue."""

    id: str
    name: str
    version: str
    digest: str
    size_bytes: int
    minimum_disk_bytes: Number
    url: str
    url_digest: Text
    compression: Annotated[str, Default("none")]
    guest_profile: Text
    runtime: list[str]
    created_at: float


@table(
    "wipe_proofs",
    "proof",
    sa.UniqueConstraint("id", "disk_identity", "disk_generation"),
    sa.Index("ix_wipe_proofs_disk", "disk_identity", "disk_generation"),
)
class Proof(Row):
    """Evidence that a disk is clean."""

    id: str
    kind: Annotated[str, ProofKind]
    node_id: NodeId
    # These three refer to no row, because a proof outlives those rows, and a transition proof
    # exists before its slot.
    slot_id: str | None
    allocation_id: str | None
    task_id: str | None
    disk_identity: str
    disk_generation: int
    # Installation that gave the proof. A reimaged host does not know its earlier proofs.
    install_id: Text
    method: Text
    document: dict[str, Any]
    created_at: float


@table(
    "node_resource_slots",
    "slot",
    # An available slot needs a proof of this disk that is newer than its last claim (I4). Every
    # claim raises disk_generation, so an older proof no longer matches. Triggers refuse to lower
    # disk_generation, to insert a claim without raising it, and to prove a disk or sell a slot
    # under a live claim. They also refuse a tenant on a whole machine while a disk of its slots is
    # still proven. The schema does not check the wipe method against the slot's policy. That check
    # is in `model.gate`, which every event that leads to `available` passes (`lifecycle.gate`).
    sa.ForeignKeyConstraint(
        ["available_proof_id", "nvme_identity", "disk_generation"],
        ["wipe_proofs.id", "wipe_proofs.disk_identity", "wipe_proofs.disk_generation"],
        name="fk_node_resource_slots_available_proof",
    ),
    sa.CheckConstraint(
        "status <> 'available' OR available_proof_id IS NOT NULL", name="available_needs_proof"
    ),
    partial("ix_slots_free", "node_id", "numa_node", where=FREE),
    partial("ix_slots_busy", "node_id", where=BUSY),
    unique("uq_slots_index", "node_id", "slot_index", where=APPROVED),
    unique("uq_slots_gpu", "node_id", "gpu_pci_address", where=APPROVED),
    unique("uq_slots_disk", "nvme_identity", where=APPROVED),
    unique("uq_slots_fabric", "node_id", "fabric_vf_pci_address", where=APPROVED),
    unique(
        "uq_slots_fabric_identity", "fabric_identity", where=f"{APPROVED} AND fabric_identity <> ''"
    ),
    unique("uq_slots_mac", "management_mac", where=APPROVED),
    unique("uq_slots_ip", "node_id", "private_ip", where=APPROVED),
)
class Slot(StatusRow, BundleRow):
    """An approved slot: a GPU with its disk, addresses and fabric function."""

    node_id: NodeId
    parent_slot_id: Annotated[str, Reference("node_resource_slots")] | None
    sharing_mechanism: Annotated[
        str, SharingMechanism, Default(SharingMechanism.EXCLUSIVE_DEVICE.value)
    ]
    capacity_metadata: dict[str, Any]
    status: Annotated[str, SlotState]
    wanted: Annotated[str, Default(SlotState.AVAILABLE.value)]
    health_state: Annotated[str, HealthState, Default(HealthState.UNKNOWN.value)]
    health_detail: dict[str, Any]
    available_proof_id: str | None
    last_proof_id: Annotated[str, Reference("wipe_proofs")] | None
    # MAC or GUID of the fabric function when it was approved. Partitions are made of it, and not of
    # a later word of the host.
    fabric_identity: Text
    approved_discovery_id: int | None
    approved_at: float
    approved_by: Text
    retired_at: float | None
    last_proof: Proof | None = None


# A claim has its own copy of the bundle, so that later changes of the slot do not change the record
# of the sale.
@table(
    "allocation_resource_claims",
    "claim",
    sa.CheckConstraint("kind <> 'slice' OR slot_id IS NOT NULL", name="slice_has_slot"),
    sa.ForeignKeyConstraint(
        ["node_id", "live_mode"], ["nodes.id", "nodes.mode"], name="fk_claims_live_mode"
    ),
    sa.Index("ix_claims_allocation_id", "allocation_id"),
    sa.Index("ix_claims_node_id", "node_id"),
    partial("ix_claims_deadline_at", "deadline_at", where="deadline_at IS NOT NULL"),
    unique("uq_claims_live_node", "node_id", where=f"kind = 'node_exclusive' AND {LIVE}"),
    unique("uq_claims_live_slot", "slot_id", where=_LIVE_SLICE),
    unique("uq_claims_live_gpu", "node_id", "gpu_pci_address", where=_LIVE_SLICE),
    unique("uq_claims_live_disk", "nvme_identity", where=_LIVE_SLICE),
    unique("uq_claims_live_fabric", "node_id", "fabric_vf_pci_address", where=_LIVE_SLICE),
    unique("uq_claims_live_mac", "management_mac", where=_LIVE_SLICE),
    unique("uq_claims_live_ip", "node_id", "private_ip", where=_LIVE_SLICE),
)
class Claim(StateRow, BundleRow):
    """Claim of an allocation on a slot or on the whole machine."""

    allocation_id: AllocationId
    kind: Annotated[str, ClaimKind]
    node_id: NodeId
    slot_id: Annotated[str, Reference("node_resource_slots")] | None
    position: Number
    # The disks of a whole-machine claim, by identity.
    disks: list[Any]
    state: Annotated[str, ClaimState]
    live_mode: Annotated[
        str | None,
        sa.Computed(
            f"CASE WHEN {LIVE} THEN"
            " CASE kind WHEN 'slice' THEN 'slice' ELSE 'baremetal' END ELSE NULL END",
            persisted=True,
        ),
    ]
    created_at: float
    ended_at: float | None


@table(
    "allocations",
    "allocation",
    sa.Index("ix_allocations_project_id", "project_id", "created_at", "id"),
    sa.Index("ix_allocations_node_id", "node_id"),
    sa.Index("ix_allocations_created_at", "created_at", "id"),
    partial("ix_allocations_live", "project_id", where=in_states(LIVE_ALLOCATIONS)),
    partial("ix_allocations_deadline_at", "deadline_at", where="deadline_at IS NOT NULL"),
    partial("ix_allocations_failed", "project_id", "created_at", where="state = 'failed'"),
)
class Allocation(StateRow):
    """An allocation: the capacity that a tenant requested and has."""

    project_id: ProjectId
    # A read model; the claims are the authority for the node of an allocation. Never null, although
    # the column allows it: an allocation is written once it has a place.
    node_id: Annotated[str, Reference("nodes", null=True)]
    capacity_shape: Annotated[str, CapacityShape, Default(CapacityShape.BAREMETAL.value)]
    sku: Text
    region: Text
    pool: Text
    gpu_count: Number
    # Of a GPU hour when it was launched, "" for none. A null currency: it is older than its price.
    price: Text
    currency: str | None
    name: Text
    hostname: Text
    username: Text
    ssh_keys: list[Any]
    image_id: Annotated[str, Reference("images")] | None
    runtime_profile: Text
    parameters: dict[str, Any]
    state: Annotated[str, AllocationState]
    # Whether the project has stopped its slice, the power action under way, and the host's boot
    # under which it was started last. It starts again under a new boot, unless it was stopped.
    stopped: bool
    power_action: Text
    started_boot_id: Text
    # What a slice keeps from its launch: vcpus, memory_mib and firmware. The site may change its
    # profile at any time, but the disk may not boot by other firmware, and the host may be full.
    machine: dict[str, Any]
    # Packets that the guard of the slice refused, by kind, and the host's last counters of them.
    refused_packets: dict[str, Any]
    refused_readings: dict[str, Any]
    connection: dict[str, Any]
    error: dict[str, Any]
    # Actor, and by which sessions with the keys of the launch are counted.
    requested_by: Text
    owner: Text
    correlation_id: Text
    created_at: float
    activated_at: float | None
    ended_at: float | None
    claims: tuple[Claim, ...] = ()
    task_ids: tuple[str, ...] = ()


# A record is opened when an allocation becomes active and closed when its claims end. Triggers
# refuse every other change and every removal. The record refers to the allocation and has its own
# copy of the sold capacity.
@table(
    "usage_records",
    "usage",
    sa.CheckConstraint(
        f"(ended_at IS NULL AND end_state = '') OR (ended_at >= started_at AND"
        f" end_state IN ('{ClaimState.RELEASED}', '{ClaimState.FAILED}'))",
        name="ended_with_state",
    ),
    sa.Index("ix_usage_records_project_id", "project_id", "started_at"),
    sa.Index("ix_usage_records_ended_at", "ended_at"),
)
class Usage(Row):
    """Use of capacity by an allocation, for billing."""

    allocation_id: Annotated[str, Reference("allocations"), KEY]
    project_id: ProjectId
    node_id: NodeId
    capacity_shape: Annotated[str, CapacityShape]
    sku: Text
    region: Text
    pool: Text
    gpu_count: int
    # As in the allocation.
    price: Text
    currency: str | None
    # Copy of the claims: kind, slot, index and disk size.
    claims: list[Any]
    started_at: float
    ended_at: float | None
    end_state: Text


@table(
    "fabric_segments",
    "segment",
    sa.PrimaryKeyConstraint("kind", "number"),
    sa.UniqueConstraint("project_id", "kind", "first_number"),
)
class Segment(Row):
    """A project's VLAN or partition key on the fabric. first_number: of the range it is from."""

    kind: Annotated[str, Isolation]
    number: int
    project_id: ProjectId
    first_number: int
    used_at: float


@table("telemetry_samples", "telemetry_sample", sa.Index("ix_telemetry_samples_at", "at"))
class TelemetrySample(Row):
    """Telemetry of a slice in a minute of the day, which replaces that of the day before.

    host, guest: by source; guest is None while the guest says nothing.
    """

    allocation_id: Annotated[AllocationId, KEY]
    minute: Annotated[int, KEY]
    at: float
    host: dict[str, Any]
    guest: dict[str, Any] | None


@table(
    "ingress_rules",
    "ingress_rule",
    sa.Index("ix_ingress_rules_allocation_id", "allocation_id", "created_at"),
    partial("ix_ingress_rules_deadline_at", "deadline_at", where="deadline_at IS NOT NULL"),
    unique(
        "uq_ingress_rules_listener",
        "public_address",
        "protocol",
        "public_port",
        where=_LIVE_INGRESS,
    ),
)
class IngressRule(StateRow):
    """A rule by which a host forwards a public address and port to the guest of a slice."""

    allocation_id: AllocationId
    project_id: ProjectId
    protocol: Annotated[str, IngressProtocol]
    public_address: str
    public_port: int
    guest_port: int
    sources: list[str]
    reason: Text
    expires_at: float
    state: Annotated[str, IngressState]
    # {} unless the rule failed: code, expected, found, remedy.
    failure: dict[str, Any]
    # The last task that applies or removes it.
    task_id: TaskId | None
    requested_by: Text
    correlation_id: Text
    created_at: float
    ended_at: float | None


images = Image.TABLE
proofs = Proof.TABLE
slots = Slot.TABLE
allocations = Allocation.TABLE
claims = Claim.TABLE
usage = Usage.TABLE
segments = Segment.TABLE
telemetry_samples = TelemetrySample.TABLE
ingress_rules = IngressRule.TABLE

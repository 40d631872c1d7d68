"""Tables of capacity: images, disk proofs, slots, allocations and claims."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from reconciler.db.schema.base import (
    Row,
    document,
    key,
    lifecycle,
    metadata,
    moment,
    number,
    one_of,
    partial,
    reference,
    row_of,
    stamp,
    text,
    unique,
)
from reconciler.model.states import (
    LIVE_CLAIMS,
    AllocationState,
    CapacityShape,
    ClaimKind,
    ClaimState,
    HealthState,
    ProofKind,
    SharingMechanism,
    SlotState,
)

LIVE = "state IN ({})".format(", ".join(f"'{state.value}'" for state in LIVE_CLAIMS))
APPROVED = "retired_at IS NULL"
# Slots that a launch may take, and slots in use: the conditions of two partial indexes, by which
# `lifecycle.placement` finds candidate nodes without counting all slots.
FREE = f"{APPROVED} AND status = '{SlotState.AVAILABLE}'"
BUSY = f"{APPROVED} AND status NOT IN ('{SlotState.AVAILABLE}', '{SlotState.DISABLED}')"


def _bundle() -> list[sa.Column[Any]]:
    return [
        number("slot_index"),
        text("gpu_pci_address"),
        text("nvme_device"),
        text("nvme_identity"),
        text("nvme_serial"),
        text("nvme_eui"),
        number("nvme_size_bytes"),
        text("management_mac"),
        text("private_ip"),
        text("fabric_vf_pci_address"),
        number("numa_node", -1),
        number("fence"),
        number("disk_generation"),
    ]


images = sa.Table(
    "images",
    metadata,
    key(),
    text("name", None),
    text("version", None),
    text("digest", None),
    number("size_bytes", None),
    number("minimum_disk_bytes"),
    text("url", None),
    text("url_digest"),
    text("compression", "none"),
    text("guest_profile"),
    stamp(),
    sa.UniqueConstraint("name", "version"),
)

# slot_id, allocation_id and task_id are plain text, because a proof outlives those rows, and a
# transition proof exists before its slot.
proofs = sa.Table(
    "wipe_proofs",
    metadata,
    key(),
    text("kind", None),
    reference("node_id", "nodes"),
    sa.Column("slot_id", sa.Text),
    sa.Column("allocation_id", sa.Text),
    sa.Column("task_id", sa.Text),
    text("disk_identity", None),
    number("disk_generation", None),
    # Installation that gave the proof. A reimaged host does not know its earlier proofs.
    text("install_id"),
    text("method"),
    document("document"),
    stamp(),
    one_of("kind", ProofKind),
    sa.UniqueConstraint("id", "disk_identity", "disk_generation"),
    sa.Index("ix_wipe_proofs_disk", "disk_identity", "disk_generation"),
)

slots = sa.Table(
    "node_resource_slots",
    metadata,
    key(),
    reference("node_id", "nodes"),
    reference("parent_slot_id", "node_resource_slots", required=False),
    text("sharing_mechanism", SharingMechanism.EXCLUSIVE_DEVICE.value),
    *_bundle(),
    document("capacity_metadata"),
    *lifecycle("status"),
    text("wanted", SlotState.AVAILABLE.value),
    text("health_state", HealthState.UNKNOWN.value),
    document("health_detail"),
    sa.Column("available_proof_id", sa.Text),
    reference("last_proof_id", "wipe_proofs", required=False),
    sa.Column("approved_discovery_id", sa.BigInteger),
    stamp("approved_at"),
    text("approved_by"),
    moment("retired_at"),
    one_of("status", SlotState),
    one_of("sharing_mechanism", SharingMechanism),
    one_of("health_state", HealthState),
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
    unique("uq_slots_mac", "management_mac", where=APPROVED),
    unique("uq_slots_ip", "node_id", "private_ip", where=APPROVED),
)

allocations = sa.Table(
    "allocations",
    metadata,
    key(),
    reference("project_id", "projects"),
    # A read model; the claims are the authority for the node of an allocation.
    reference("node_id", "nodes", required=False),
    text("capacity_shape", CapacityShape.BAREMETAL.value),
    text("sku"),
    text("region"),
    text("pool"),
    number("gpu_count"),
    text("name"),
    text("hostname"),
    text("username"),
    document("ssh_keys", list),
    reference("image_id", "images", required=False),
    text("runtime_profile"),
    document("parameters"),
    *lifecycle(),
    document("connection"),
    document("error"),
    text("requested_by"),
    text("correlation_id"),
    stamp(),
    moment("activated_at"),
    moment("ended_at"),
    one_of("state", AllocationState),
    one_of("capacity_shape", CapacityShape),
    sa.Index("ix_allocations_project_id", "project_id"),
    sa.Index("ix_allocations_node_id", "node_id"),
)

# A claim has its own copy of the bundle, so that later changes of the slot do not change the record
# of the sale.
claims = sa.Table(
    "allocation_resource_claims",
    metadata,
    key(),
    reference("allocation_id", "allocations"),
    text("kind", None),
    reference("node_id", "nodes"),
    reference("slot_id", "node_resource_slots", required=False),
    number("position"),
    *_bundle(),
    # The disks of a whole-machine claim, by identity.
    document("disks", list),
    *lifecycle(),
    sa.Column(
        "live_mode",
        sa.Text,
        sa.Computed(
            f"CASE WHEN {LIVE} THEN"
            " CASE kind WHEN 'slice' THEN 'slice' ELSE 'baremetal' END ELSE NULL END",
            persisted=True,
        ),
    ),
    stamp(),
    moment("ended_at"),
    one_of("kind", ClaimKind),
    one_of("state", ClaimState),
    sa.CheckConstraint("kind <> 'slice' OR slot_id IS NOT NULL", name="slice_has_slot"),
    sa.ForeignKeyConstraint(
        ["node_id", "live_mode"],
        ["nodes.id", "nodes.mode"],
        name="fk_claims_live_mode",
    ),
    sa.Index("ix_claims_allocation_id", "allocation_id"),
    sa.Index("ix_claims_node_id", "node_id"),
    unique("uq_claims_live_node", "node_id", where=f"kind = 'node_exclusive' AND {LIVE}"),
    unique("uq_claims_live_slot", "slot_id", where=f"kind = 'slice' AND {LIVE}"),
    unique("uq_claims_live_gpu", "node_id", "gpu_pci_address", where=f"kind = 'slice' AND {LIVE}"),
    unique("uq_claims_live_disk", "nvme_identity", where=f"kind = 'slice' AND {LIVE}"),
    unique(
        "uq_claims_live_fabric",
        "node_id",
        "fabric_vf_pci_address",
        where=f"kind = 'slice' AND {LIVE}",
    ),
    unique("uq_claims_live_mac", "management_mac", where=f"kind = 'slice' AND {LIVE}"),
    unique("uq_claims_live_ip", "node_id", "private_ip", where=f"kind = 'slice' AND {LIVE}"),
)


@row_of(proofs, "proof")
@dataclass(frozen=True, kw_only=True)
class Proof(Row):
    """Evidence that a disk is clean."""

    id: str
    kind: str
    node_id: str
    slot_id: str | None
    allocation_id: str | None
    task_id: str | None
    disk_identity: str
    disk_generation: int
    install_id: str
    method: str
    document: dict[str, Any]
    created_at: float


@row_of(slots, "slot")
@dataclass(frozen=True, kw_only=True)
class Slot(Row):
    """An approved slot: a GPU with its disk, addresses and fabric function."""

    id: str
    node_id: str
    parent_slot_id: str | None
    sharing_mechanism: str
    slot_index: int
    gpu_pci_address: str
    nvme_device: str
    nvme_identity: str
    nvme_serial: str
    nvme_eui: str
    nvme_size_bytes: int
    management_mac: str
    private_ip: str
    fabric_vf_pci_address: str
    numa_node: int
    fence: int
    disk_generation: int
    capacity_metadata: dict[str, Any]
    status: str
    status_reason: str
    status_since: float
    deadline_at: float | None
    generation: int
    wanted: str
    health_state: str
    health_detail: dict[str, Any]
    available_proof_id: str | None
    last_proof_id: str | None
    approved_discovery_id: int | None
    approved_at: float
    approved_by: str
    retired_at: float | None
    last_proof: Proof | None = None


@row_of(claims, "claim")
@dataclass(frozen=True, kw_only=True)
class Claim(Row):
    """Claim of an allocation on a slot or on the whole machine."""

    id: str
    allocation_id: str
    kind: str
    node_id: str
    slot_id: str | None
    position: int
    slot_index: int
    gpu_pci_address: str
    nvme_device: str
    nvme_identity: str
    nvme_serial: str
    nvme_eui: str
    nvme_size_bytes: int
    management_mac: str
    private_ip: str
    fabric_vf_pci_address: str
    numa_node: int
    fence: int
    disk_generation: int
    disks: list[Any]
    state: str
    state_reason: str
    state_since: float
    deadline_at: float | None
    generation: int
    live_mode: str | None
    created_at: float
    ended_at: float | None


@row_of(allocations, "allocation")
@dataclass(frozen=True, kw_only=True)
class Allocation(Row):
    """An allocation: the capacity that a tenant requested and has."""

    id: str
    project_id: str
    # Never null, although the column allows it: an allocation is written once it has a place.
    node_id: str
    capacity_shape: str
    sku: str
    region: str
    pool: str
    gpu_count: int
    name: str
    hostname: str
    username: str
    ssh_keys: list[Any]
    image_id: str | None
    runtime_profile: str
    parameters: dict[str, Any]
    state: str
    state_reason: str
    state_since: float
    deadline_at: float | None
    generation: int
    connection: dict[str, Any]
    error: dict[str, Any]
    requested_by: str
    correlation_id: str
    created_at: float
    activated_at: float | None
    ended_at: float | None
    claims: tuple[Claim, ...] = ()
    task_ids: tuple[str, ...] = ()


@row_of(images, "image")
@dataclass(frozen=True, kw_only=True)
class Image(Row):
    """An image of the catalogue."""

    id: str
    name: str
    version: str
    digest: str
    size_bytes: int
    minimum_disk_bytes: int
    url: str
    url_digest: str
    compression: str
    guest_profile: str
    created_at: float

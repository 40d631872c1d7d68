"""Tables of capacity: images, proofs, slots, allocations, claims."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from reconciler.db.migrations.columns import (
    LIVE,
    documents,
    moments,
    numbers,
    one_of,
    optional,
    points,
    stamps,
    texts,
    unique,
)

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    """Tables in the order in which they refer to each other."""
    _images()
    _wipe_proofs()
    _node_resource_slots()
    _one_slot_per_device()
    _allocations()
    _allocation_resource_claims()


def _images() -> None:
    op.create_table(
        "images",
        *texts("id", "name", "version", "digest"),
        *numbers("size_bytes", "minimum_disk_bytes"),
        *texts("url", "url_digest", "compression", "guest_profile"),
        *stamps("created_at"),
        sa.PrimaryKeyConstraint("id", name="pk_images"),
        sa.UniqueConstraint("name", "version", name="uq_images_name_version"),
    )


def _wipe_proofs() -> None:
    op.create_table(
        "wipe_proofs",
        *texts("id", "kind", "node_id"),
        *optional("slot_id", "allocation_id", "task_id"),
        *texts("disk_identity"),
        *numbers("disk_generation"),
        *texts("method"),
        *documents("document"),
        *stamps("created_at"),
        one_of("ck_wipe_proofs_kind", "kind", "transition wipe untouched"),
        points("fk_wipe_proofs_node_id", "node_id", "nodes"),
        sa.PrimaryKeyConstraint("id", name="pk_wipe_proofs"),
        sa.UniqueConstraint(
            "id",
            "disk_identity",
            "disk_generation",
            name="uq_wipe_proofs_id_disk_identity_disk_generation",
        ),
    )
    op.create_index("ix_wipe_proofs_disk", "wipe_proofs", ["disk_identity", "disk_generation"])


def _node_resource_slots() -> None:
    op.create_table(
        "node_resource_slots",
        *texts("id", "node_id"),
        *optional("parent_slot_id"),
        *texts("sharing_mechanism"),
        *numbers("slot_index"),
        *texts("gpu_pci_address", "nvme_device", "nvme_identity", "nvme_serial", "nvme_eui"),
        *numbers("nvme_size_bytes"),
        *texts("management_mac", "private_ip", "fabric_vf_pci_address"),
        *numbers("numa_node", "fence", "disk_generation"),
        *documents("capacity_metadata"),
        *texts("status", "status_reason"),
        *stamps("status_since"),
        *moments("deadline_at"),
        *numbers("generation"),
        *texts("wanted", "health_state"),
        *documents("health_detail"),
        *optional("available_proof_id", "last_proof_id"),
        sa.Column("approved_discovery_id", sa.BigInteger(), nullable=True),
        *stamps("approved_at"),
        *texts("approved_by"),
        *moments("retired_at"),
        one_of(
            "ck_node_resource_slots_health_state",
            "health_state",
            "unknown healthy degraded failed",
        ),
        one_of(
            "ck_node_resource_slots_sharing_mechanism",
            "sharing_mechanism",
            "exclusive_device mig_partition mdev_vgpu time_sliced mps software_shared",
        ),
        sa.CheckConstraint(
            "status <> 'available' OR available_proof_id IS NOT NULL",
            name=op.f("ck_node_resource_slots_available_needs_proof"),
        ),
        one_of(
            "ck_node_resource_slots_status",
            "status",
            "disabled available reserved provisioning active releasing cleanup cleanup_blocked",
        ),
        sa.ForeignKeyConstraint(
            ["available_proof_id", "nvme_identity", "disk_generation"],
            ["wipe_proofs.id", "wipe_proofs.disk_identity", "wipe_proofs.disk_generation"],
            name="fk_node_resource_slots_available_proof",
        ),
        points("fk_node_resource_slots_last_proof_id", "last_proof_id", "wipe_proofs"),
        points("fk_node_resource_slots_node_id", "node_id", "nodes"),
        points("fk_node_resource_slots_parent_slot_id", "parent_slot_id", "node_resource_slots"),
        sa.PrimaryKeyConstraint("id", name="pk_node_resource_slots"),
    )


def _one_slot_per_device() -> None:
    for name, columns in {
        "disk": "nvme_identity",
        "fabric": "node_id fabric_vf_pci_address",
        "gpu": "node_id gpu_pci_address",
        "index": "node_id slot_index",
        "ip": "node_id private_ip",
        "mac": "management_mac",
    }.items():
        unique(f"uq_slots_{name}", "node_resource_slots", columns, "retired_at IS NULL")


def _allocations() -> None:
    op.create_table(
        "allocations",
        *texts("id", "project_id"),
        *optional("node_id"),
        *texts("capacity_shape", "sku", "region", "pool"),
        *numbers("gpu_count"),
        *texts("name", "hostname", "username"),
        *documents("ssh_keys"),
        *optional("image_id"),
        *texts("runtime_profile"),
        *documents("parameters"),
        *texts("state", "state_reason"),
        *stamps("state_since"),
        *moments("deadline_at"),
        *numbers("generation"),
        *documents("connection", "error"),
        *texts("requested_by", "correlation_id"),
        *stamps("created_at"),
        *moments("activated_at", "ended_at"),
        one_of("ck_allocations_capacity_shape", "capacity_shape", "baremetal gpu_slice"),
        one_of(
            "ck_allocations_state",
            "state",
            "requested provisioning active releasing released failed",
        ),
        points("fk_allocations_image_id", "image_id", "images"),
        points("fk_allocations_node_id", "node_id", "nodes"),
        points("fk_allocations_project_id", "project_id", "projects"),
        sa.PrimaryKeyConstraint("id", name="pk_allocations"),
    )
    op.create_index("ix_allocations_node_id", "allocations", ["node_id"])
    op.create_index("ix_allocations_project_id", "allocations", ["project_id"])


def _allocation_resource_claims() -> None:
    op.create_table(
        "allocation_resource_claims",
        *texts("id", "allocation_id", "kind", "node_id"),
        *optional("slot_id"),
        *numbers("position", "slot_index"),
        *texts("gpu_pci_address", "nvme_device", "nvme_identity", "nvme_serial", "nvme_eui"),
        *numbers("nvme_size_bytes"),
        *texts("management_mac", "private_ip", "fabric_vf_pci_address"),
        *numbers("numa_node", "fence", "disk_generation"),
        *texts("state", "state_reason"),
        *stamps("state_since"),
        *moments("deadline_at"),
        *numbers("generation"),
        sa.Column(
            "live_mode",
            sa.Text(),
            sa.Computed(
                f"CASE WHEN {LIVE} THEN"
                " CASE kind WHEN 'slice' THEN 'slice' ELSE 'baremetal' END ELSE NULL END",
                persisted=True,
            ),
            nullable=True,
        ),
        *stamps("created_at"),
        *moments("ended_at"),
        sa.CheckConstraint(
            "kind <> 'slice' OR slot_id IS NOT NULL",
            name=op.f("ck_allocation_resource_claims_slice_has_slot"),
        ),
        one_of("ck_allocation_resource_claims_kind", "kind", "slice node_exclusive"),
        one_of(
            "ck_allocation_resource_claims_state",
            "state",
            "reserved provisioning active releasing released failed",
        ),
        points("fk_allocation_resource_claims_allocation_id", "allocation_id", "allocations"),
        sa.ForeignKeyConstraint(
            ["node_id", "live_mode"], ["nodes.id", "nodes.mode"], name="fk_claims_live_mode"
        ),
        points("fk_allocation_resource_claims_node_id", "node_id", "nodes"),
        points("fk_allocation_resource_claims_slot_id", "slot_id", "node_resource_slots"),
        sa.PrimaryKeyConstraint("id", name="pk_allocation_resource_claims"),
    )
    op.create_index("ix_claims_allocation_id", "allocation_resource_claims", ["allocation_id"])
    op.create_index("ix_claims_node_id", "allocation_resource_claims", ["node_id"])
    for name, columns in {
        "slot": "slot_id",
        "disk": "nvme_identity",
        "fabric": "node_id fabric_vf_pci_address",
        "gpu": "node_id gpu_pci_address",
        "ip": "node_id private_ip",
        "mac": "management_mac",
    }.items():
        one = f"kind = 'slice' AND {LIVE}"
        unique(f"uq_claims_live_{name}", "allocation_resource_claims", columns, one)
    whole = f"kind = 'node_exclusive' AND {LIVE}"
    unique("uq_claims_live_node", "allocation_resource_claims", "node_id", whole)

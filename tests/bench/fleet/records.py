"""Fleet of slice hosts with every slot on sale, written directly into the database."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

from reconciler.db import clock, settings
from reconciler.db.engine import open_engine, transaction
from reconciler.db.migrations import migrate
from reconciler.db.schema import nodes, proofs, slots
from reconciler.model.act import Act
from reconciler.model.states import HealthState, NodeMode, NodeState, ProofKind, Role, SlotState
from reconciler.records import images, projects, tokens

ACT = Act("bench", "a fleet for the benchmark")
PROJECT = "bench"
IMAGE = "bench"
KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAILw6MHUfBS0BkklFB8Qsked8rLaWhYoJ7HQ8JG+KpgdX bench"


def make(url: str, count: int, slots_each: int) -> str:
    """Fill an empty database with a site of `count` nodes; return an admin token's secret."""
    engine = open_engine(url)
    try:
        migrate(engine)
        with transaction(engine) as conn:
            projects.create(conn, PROJECT, ACT, id=PROJECT)
            images.register(
                conn,
                ACT,
                name=IMAGE,
                version="1",
                digest=f"sha256:{'a' * 64}",
                size_bytes=1 << 20,
                url="https://images.invalid/bench.raw",
            )
            settings.set_site_scheduling(conn, True, ACT)
            # Launches without a quota, because a quota adds a count of the project's rows.
            settings.store(conn, "default_quota", {})
            _, secret = tokens.issue(conn, ACT, name="bench", role=Role.PLATFORM_ADMIN)
            _rows(conn, count, slots_each)
        with engine.connect() as conn:
            # As on a site that has run for longer.
            conn.execution_options(isolation_level="AUTOCOMMIT").exec_driver_sql("VACUUM ANALYZE")
    finally:
        engine.dispose()
    return secret


def member(url: str) -> str:
    """Return the secret of a member's token in the project, as its tenants have it."""
    engine = open_engine(url)
    try:
        with transaction(engine) as conn:
            return tokens.issue(
                conn, ACT, name="tenant", role=Role.PROJECT_MEMBER, project_id=PROJECT
            )[1]
    finally:
        engine.dispose()


def _rows(conn: sa.Connection, count: int, slots_each: int) -> None:
    now = clock.read(conn)
    hosts: list[dict[str, Any]] = []
    proven: list[dict[str, Any]] = []
    sold: list[dict[str, Any]] = []
    for number in range(count):
        node = f"node-{number:05}"
        hosts.append(
            {
                "id": node,
                "name": node,
                "address": f"10.{number >> 8}.{number & 255}.1",
                "profile": "lab",
                "mode": NodeMode.SLICE.value,
                "state": NodeState.READY.value,
                "health_state": HealthState.HEALTHY.value,
                "slice_scheduling": True,
                "boot_id": "boot",
            }
        )
        for index in range(slots_each):
            proof, slot = _slot(node, number, index, slots_each, now)
            proven.append(proof)
            sold.append(slot)
    for table, rows in ((nodes, hosts), (proofs, proven), (slots, sold)):
        conn.execute(sa.insert(table), rows)


def _slot(
    node: str, number: int, index: int, slots_each: int, now: float
) -> tuple[dict[str, Any], dict[str, Any]]:
    serial = number * slots_each + index
    eui = f"{serial:016x}"
    id = f"{node}-{index}"
    proof = {
        "id": f"proof-{id}",
        "kind": ProofKind.TRANSITION.value,
        "node_id": node,
        "disk_identity": f"eui.{eui}",
        "disk_generation": 0,
        "method": "user_data_erase",
        "document": {"verified": True},
    }
    # Two sockets with two switches each, as in a server with eight GPUs.
    half = max(1, slots_each // 2)
    function = f"0000:{index + 129:02x}:00.1"
    slot = {
        "id": id,
        "node_id": node,
        "slot_index": index,
        "gpu_pci_address": f"0000:{index + 16:02x}:00.0",
        "nvme_device": f"/dev/disk/by-id/nvme-eui.{eui}",
        "nvme_identity": f"eui.{eui}",
        "nvme_serial": f"S{serial:08}",
        "nvme_eui": eui,
        "nvme_size_bytes": 1 << 40,
        "management_mac": "52:54:{:02x}:{:02x}:{:02x}:{:02x}".format(*serial.to_bytes(4, "big")),
        "private_ip": f"10.100.0.{index + 10}",
        "fabric_vf_pci_address": function,
        "numa_node": index // half,
        "capacity_metadata": {
            "fabric_claim_mode": "per_slot_vf",
            "fabric_vf_pci_address": function,
            "pcie_switch": f"0000:{index // 2:02x}:00.0",
        },
        "status": SlotState.AVAILABLE.value,
        "health_state": HealthState.HEALTHY.value,
        "available_proof_id": proof["id"],
        "last_proof_id": proof["id"],
        "approved_at": now,
    }
    return proof, slot

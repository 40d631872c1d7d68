"""Results of a host for tests: wiped disks, reset GPUs, and its fabric."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import sqlalchemy as sa

from reconciler.db import rows
from reconciler.db.schema import Proof
from reconciler.db.schema import proofs as table
from reconciler.records import claims

# Parity's row for a fabric whose functions are kept apart, without which nothing is sold.
ISOLATED = {
    **{"check": "fabric_isolation", "status": "PASS", "detail": "2 functions with their VLAN"},
    **{"remediation": "", "playbook": "", "role": ""},
}


def gpu(address: str) -> dict[str, Any]:
    """Evidence of the reset of a GPU."""
    return {
        "address": address,
        "method": "flr",
        "scrub": {"method": "none"},
        "link": {},
        "finished_at": "2026-05-01T10:00:04+00:00",
        "verified": True,
    }


def proven(discovery: Mapping[str, Any]) -> dict[str, Any]:
    """Part of a parity report of a host whose GPUs are all reset and whose fabric is isolated."""
    reset = [device["address"] for device in discovery["gpu"]]
    return {"identity": discovery["identity"], "reset_gpus": reset, "checks": [ISOLATED]}


def proofs(conn: sa.Connection, allocation_id: str) -> dict[str, dict[str, Any]]:
    """Of each disk of the allocation, by slot."""
    return {
        claim.slot_id: {
            "disk": claim.nvme_identity,
            "serial": claim.nvme_serial,
            "size_bytes": claim.nvme_size_bytes,
            "method": "user_data_erase",
            "slot_id": claim.slot_id,
            "started_at": "2026-05-01T10:00:00+00:00",
            "finished_at": "2026-05-01T10:00:04+00:00",
            "verified": True,
            "gpu": gpu(claim.gpu_pci_address),
        }
        for claim in claims.of_allocation(conn, allocation_id)
    }


def proofs_of_disk(conn: sa.Connection, identity: str) -> list[Proof]:
    """Proofs of a disk on all nodes, newest first."""
    query = sa.select(table).where(table.c.disk_identity == identity)
    return rows.every(conn, query.order_by(table.c.created_at.desc()), Proof)

"""What a host says of the disks that it wiped."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

from reconciler.db import rows
from reconciler.db.schema import Proof
from reconciler.db.schema import proofs as table
from reconciler.records import claims


def proofs(conn: sa.Connection, allocation_id: str) -> dict[str, dict[str, Any]]:
    """Of each disk of the allocation, by slot."""
    return {
        claim.slot_id: {
            "disk": claim.nvme_identity,
            "serial": claim.nvme_serial,
            "size_bytes": claim.nvme_size_bytes,
            "method": "user_data_erase",
            "verified": True,
        }
        for claim in claims.of_allocation(conn, allocation_id)
    }


def proofs_of_disk(conn: sa.Connection, identity: str) -> list[Proof]:
    """Proofs of a disk on all nodes, newest first."""
    query = sa.select(table).where(table.c.disk_identity == identity)
    return rows.every(conn, query.order_by(table.c.created_at.desc()), Proof)

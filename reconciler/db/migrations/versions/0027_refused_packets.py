"""Packets that the guard of a slice refused, by kind, with the host's last counters."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0027"
down_revision = "0026"

DOCUMENT = sa.JSON().with_variant(postgresql.JSONB(), "postgresql")


def upgrade() -> None:
    for name in ("refused_packets", "refused_readings"):
        op.add_column("allocations", sa.Column(name, DOCUMENT, nullable=False, server_default="{}"))

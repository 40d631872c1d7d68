"""Machines of MAAS, and tickets that fetch an enrolment token."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0036"
down_revision = "0035"

DOCUMENT = sa.JSON(none_as_null=True).with_variant(
    postgresql.JSONB(none_as_null=True), "postgresql"
)


def upgrade() -> None:
    op.add_column("nodes", sa.Column("maas", DOCUMENT, nullable=True))
    op.add_column("enrolment_tokens", sa.Column("ticket", DOCUMENT, nullable=True))

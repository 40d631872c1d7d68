"""Tokens that people make for themselves, and the price of an allocation."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0045"
down_revision = "0044"


def upgrade() -> None:
    # Alembic adds no constraint to a table of SQLite, which takes this one with its column.
    op.execute(
        "ALTER TABLE api_tokens ADD COLUMN parent_id TEXT"
        " CONSTRAINT fk_api_tokens_parent_id REFERENCES api_tokens (id)"
    )
    op.add_column("api_tokens", sa.Column("owner", sa.Text()))
    op.add_column(
        "api_tokens", sa.Column("issued_by", sa.Text(), nullable=False, server_default="")
    )
    for name, columns in (("parent_id", ["parent_id"]), ("owner", ["owner", "created_at"])):
        condition = sa.text(f"{name} IS NOT NULL")
        op.create_index(
            *(f"ix_api_tokens_{name}", "api_tokens", columns),
            sqlite_where=condition,
            postgresql_where=condition,
        )
    for table in ("allocations", "usage_records"):
        op.add_column(table, sa.Column("price", sa.Text(), nullable=False, server_default=""))
        op.add_column(table, sa.Column("currency", sa.Text()))
    refuse = "BEGIN SELECT RAISE(ABORT, 'usage_records keeps what was sold'); END"
    if op.get_bind().dialect.name == "postgresql":
        refuse = "EXECUTE FUNCTION usage_records_keep()"
    op.execute(
        "CREATE TRIGGER usage_records_keep_price BEFORE UPDATE OF price, currency"
        f" ON usage_records FOR EACH ROW {refuse}"
    )

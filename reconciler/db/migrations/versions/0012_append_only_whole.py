"""Append-only triggers against emptying a table and against replacing a row by an insert."""

from __future__ import annotations

from alembic import op

revision = "0012"
down_revision = "0011"

# Whether a row with the key of the new row exists already.
TABLES = {
    "state_history": "SELECT 1 FROM state_history WHERE id = NEW.id",
    "audit_log": "SELECT 1 FROM audit_log WHERE id = NEW.id",
    "wipe_proofs": "SELECT 1 FROM wipe_proofs WHERE id = NEW.id",
}


def upgrade() -> None:
    """Triggers per row see neither PostgreSQL's TRUNCATE nor SQLite's INSERT OR REPLACE."""
    for table, there in TABLES.items():
        if op.get_bind().dialect.name == "postgresql":
            op.execute(
                f"CREATE TRIGGER {table}_no_truncate BEFORE TRUNCATE ON {table}"
                " FOR EACH STATEMENT EXECUTE FUNCTION gpuaas_append_only()"
            )
        else:
            op.execute(
                f"CREATE TRIGGER {table}_no_replace BEFORE INSERT ON {table} FOR EACH ROW"
                f" WHEN EXISTS ({there})"
                f" BEGIN SELECT RAISE(ABORT, '{table} is append-only'); END"
            )

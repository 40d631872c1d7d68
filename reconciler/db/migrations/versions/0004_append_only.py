"""Append-only triggers for history, audit and proofs."""

from __future__ import annotations

from alembic import op

revision = "0004"
down_revision = "0003"

TABLES = ("state_history", "audit_log", "wipe_proofs")


def upgrade() -> None:
    """Create a trigger per table and verb."""
    postgresql = op.get_bind().dialect.name == "postgresql"
    if postgresql:
        op.execute(
            "CREATE FUNCTION gpuaas_append_only() RETURNS trigger LANGUAGE plpgsql AS $$"
            " BEGIN RAISE EXCEPTION '% is append-only', TG_TABLE_NAME; END $$"
        )
    for table in TABLES:
        for verb in ("UPDATE", "DELETE"):
            head = f"CREATE TRIGGER {table}_no_{verb.lower()} BEFORE {verb} ON {table} FOR EACH ROW"
            if postgresql:
                op.execute(f"{head} EXECUTE FUNCTION gpuaas_append_only()")
            else:
                op.execute(f"{head} BEGIN SELECT RAISE(ABORT, '{table} is append-only'); END")

"""Triggers that let a disk's generation only grow and keep the disk of a slot.

An available slot has a proof of its disk's current generation. A lowered generation would make an
old proof count again, although the disk has had a tenant since.
"""

from __future__ import annotations

from alembic import op

revision = "0007"
down_revision = "0006"

SLOTS = "node_resource_slots"
TOLD = "a disk generation only grows, and a slot keeps its disk"
CHANGED = "NEW.disk_generation < OLD.disk_generation OR NEW.nvme_identity <> OLD.nvme_identity"
# Retired slots count as well, because their disk may become part of a new slot.
OLDER = (
    "NEW.disk_generation < (SELECT max(disk_generation) FROM node_resource_slots"
    " WHERE nvme_identity = NEW.nvme_identity)"
)


def upgrade() -> None:
    """Create a trigger per verb. A migration that recreates the table must recreate them too."""
    changing = f"BEFORE UPDATE OF disk_generation, nvme_identity ON {SLOTS} FOR EACH ROW"
    adding = f"BEFORE INSERT ON {SLOTS} FOR EACH ROW"
    for name, head, wrong in (
        ("disk_generation_grows", changing, CHANGED),
        ("disk_generation_begins", adding, OLDER),
    ):
        if op.get_bind().dialect.name == "postgresql":
            # integrity_constraint_violation, as SQLite reports it too.
            op.execute(
                f"CREATE FUNCTION gpuaas_{name}() RETURNS trigger LANGUAGE plpgsql AS $$"
                f" BEGIN IF {wrong} THEN RAISE EXCEPTION '{TOLD}' USING ERRCODE = '23000';"
                " END IF; RETURN NEW; END $$"
            )
            op.execute(f"CREATE TRIGGER {SLOTS}_{name} {head} EXECUTE FUNCTION gpuaas_{name}()")
        else:
            refuse = f"SELECT RAISE(ABORT, '{TOLD}') WHERE {wrong};"
            op.execute(f"CREATE TRIGGER {SLOTS}_{name} {head} BEGIN {refuse} END")

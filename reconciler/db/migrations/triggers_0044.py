"""Triggers of the first schema, which refuse what no constraint can. Frozen, as migration 0044.

Append-only logs: rows of history, audit and proofs are neither changed nor removed.

Sold capacity: the copy of a bundle in a claim and the usage records stay as they were written.

Disk generations: an available slot has a proof of its disk's current generation. A lowered
generation would make an old proof count again, although the disk has had a tenant since.

Proofs after claims (I4): a claim is accepted only at a generation without a proof, and no proof of
its disk is accepted while it is live. So the proof that makes the slot available again is newer
than the claim. The slot is never available while the claim is live.

A claim on a whole machine does not name its slots. Its tenant is let in only when the generation of
every slot's disk is newer than every proof. No proof is accepted from the preparation of the
machine until the claim has ended. A claim that ended before its tenant was let in leaves older
proofs valid. A run for it may have written to the disks, so `lifecycle.baremetal` raises the
generations as soon as such a run starts.

A migration that recreates a table must recreate its triggers.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

CLAIMS = "allocation_resource_claims"
SLOTS = "node_resource_slots"
PROOFS = "wipe_proofs"
USAGE = "usage_records"
LOGS = ("state_history", "audit_log", PROOFS)

# Columns that are never changed once a row is written.
SOLD = {
    CLAIMS: (
        "id allocation_id kind node_id slot_id position slot_index gpu_pci_address nvme_device"
        " nvme_identity nvme_serial nvme_eui nvme_size_bytes management_mac private_ip"
        " fabric_vf_pci_address numa_node fence disk_generation disks created_at"
    ),
    USAGE: (
        "allocation_id project_id node_id capacity_shape sku region pool gpu_count claims"
        " started_at"
    ),
}

GROWS = "a disk generation only grows, and a slot keeps its disk"
CHANGED = "NEW.disk_generation < OLD.disk_generation OR NEW.nvme_identity <> OLD.nvme_identity"
# Retired slots count as well, because their disk may become part of a new slot.
OLDER = (
    "NEW.disk_generation < (SELECT max(disk_generation) FROM node_resource_slots"
    " WHERE nvme_identity = NEW.nvme_identity)"
)

LIVE = "('reserved', 'provisioning', 'active', 'releasing')"
# BEGUN: from the preparation of the machine on. ENTERED: from the entry of the tenant on.
BEGUN = "('provisioning', 'active', 'releasing')"
ENTERED = "('active', 'releasing')"
SLICE = f"NEW.kind = 'slice' AND NEW.state IN {LIVE}"
WHOLE = f"NEW.kind = 'node_exclusive' AND NEW.state IN {LIVE}"
TENANT = f"NEW.kind = 'node_exclusive' AND NEW.state IN {ENTERED}"

TOO_LATE = "a claim needs a disk generation of which there is no proof yet"
# A retired slot's disk may be part of another slot by now.
PROVEN = """
NOT EXISTS (SELECT 1 FROM node_resource_slots s WHERE s.id = NEW.slot_id
  AND s.retired_at IS NULL AND s.disk_generation = NEW.disk_generation)
OR EXISTS (SELECT 1 FROM node_resource_slots s JOIN wipe_proofs p
  ON p.disk_identity = s.nvme_identity AND p.disk_generation >= s.disk_generation
  WHERE s.id = NEW.slot_id)
"""
# A transaction with a claim and a transaction with a proof cannot see each other's rows yet, so
# they take turns by locking the slot's row. The proof's lock waits for the claim's lock, which is
# the lock that reserving the slot takes anyway.
TURN = "PERFORM 1 FROM node_resource_slots WHERE id = NEW.slot_id FOR NO KEY UPDATE;"

ON_SALE = "a claim on a whole machine needs its slots off sale"
OFFERED = """
EXISTS (SELECT 1 FROM node_resource_slots WHERE node_id = NEW.node_id
  AND retired_at IS NULL AND status = 'available')
"""

NOT_PAST = "the tenant of a whole machine needs the disks of its slots past every proof"
ENTERING = """
PERFORM 1 FROM node_resource_slots WHERE node_id = NEW.node_id AND retired_at IS NULL
  ORDER BY id FOR NO KEY UPDATE;
"""
STANDING = """
EXISTS (SELECT 1 FROM node_resource_slots s JOIN wipe_proofs p
  ON p.disk_identity = s.nvme_identity AND p.disk_generation >= s.disk_generation
  WHERE s.node_id = NEW.node_id AND s.retired_at IS NULL)
"""

EARLY = "a disk under a live claim is not proven clean"
PROVING = """
PERFORM 1 FROM node_resource_slots WHERE nvme_identity = NEW.disk_identity
  AND retired_at IS NULL FOR SHARE;
"""
# By the claim's own disk and by the disk of its slot, in case they differ.
IN_USE = """
EXISTS (SELECT 1 FROM allocation_resource_claims WHERE nvme_identity = NEW.disk_identity
  AND kind = 'slice' AND state IN ANY_LIVE)
OR EXISTS (SELECT 1 FROM node_resource_slots s JOIN allocation_resource_claims c
  ON c.slot_id = s.id AND c.kind = 'slice' AND c.state IN ANY_LIVE
  WHERE s.nvme_identity = NEW.disk_identity AND s.retired_at IS NULL)
OR EXISTS (SELECT 1 FROM node_resource_slots s JOIN allocation_resource_claims c
  ON c.node_id = s.node_id AND c.kind = 'node_exclusive' AND c.state IN ANY_BEGUN
  WHERE s.nvme_identity = NEW.disk_identity AND s.retired_at IS NULL)
""".replace("ANY_LIVE", LIVE).replace("ANY_BEGUN", BEGUN)

HELD = "a slot under a live claim is not available"
# Each condition uses the unique index of such claims.
CLAIMED = """
EXISTS (SELECT 1 FROM allocation_resource_claims WHERE slot_id = NEW.id
  AND kind = 'slice' AND state IN ANY_LIVE)
OR EXISTS (SELECT 1 FROM allocation_resource_claims WHERE nvme_identity = NEW.nvme_identity
  AND kind = 'slice' AND state IN ANY_LIVE)
OR EXISTS (SELECT 1 FROM allocation_resource_claims WHERE node_id = NEW.node_id
  AND kind = 'node_exclusive' AND state IN ANY_LIVE)
""".replace("ANY_LIVE", LIVE)


def create_triggers() -> None:
    """Create every trigger, and in PostgreSQL the functions that they call."""
    if _postgresql():
        _function("gpuaas_append_only", "RAISE EXCEPTION '% is append-only', TG_TABLE_NAME;")
    for table in LOGS:
        refuse = f"BEGIN SELECT RAISE(ABORT, '{table} is append-only'); END"
        _protect(
            table,
            "EXECUTE FUNCTION gpuaas_append_only()" if _postgresql() else refuse,
            "id",
            ("no_update", "no_delete", "no_truncate", "no_replace"),
        )
    for table, columns in SOLD.items():
        changed = " OR ".join(f"NEW.{name} {_differs()} OLD.{name}" for name in columns.split())
        _protect(
            table,
            _refusal(f"{table}_keep", f"{table} keeps what was sold"),
            columns.split()[0],
            ("keep_update", "keep_delete", "keep_all", "keep_replace"),
            changed=f"{changed} OR OLD.ended_at IS NOT NULL" if table == USAGE else changed,
        )
    for name, verb, wrong in (
        ("disk_generation_grows", "UPDATE OF disk_generation, nvme_identity", CHANGED),
        ("disk_generation_begins", "INSERT", OLDER),
    ):
        _trigger(f"{SLOTS}_{name}", verb, SLOTS, _refusal(f"gpuaas_{name}", GROWS, wrong))
    # An ended claim that becomes live again counts as a new claim.
    claiming = {"INSERT": "true", "UPDATE OF state": f"OLD.state NOT IN {LIVE}"}
    entering = {"INSERT": "true", "UPDATE OF state": f"OLD.state NOT IN {ENTERED}"}
    selling = {"INSERT": "true", "UPDATE OF status": "true"}
    available = "NEW.status = 'available'"
    for table, name, verbs, row, message, wrong, first in (
        (CLAIMS, "proven", claiming, SLICE, TOO_LATE, PROVEN, TURN),
        (CLAIMS, "on_sale", claiming, WHOLE, ON_SALE, OFFERED, ""),
        (CLAIMS, "past_proofs", entering, TENANT, NOT_PAST, STANDING, ENTERING),
        (PROOFS, "unclaimed", {"INSERT": "true"}, "true", EARLY, IN_USE, PROVING),
        (SLOTS, "claimed", selling, available, HELD, CLAIMED, ""),
    ):
        action = _refusal(f"{table}_{name}", message, wrong, first)
        for verb, moved in verbs.items():
            trigger = f"{table}_{name}_{verb.partition(' ')[0].lower()}"
            _trigger(trigger, verb, table, action, when=f"{moved} AND {row}")


def _protect(
    table: str, action: str, key: str, names: tuple[str, str, str, str], changed: str = ""
) -> None:
    """Triggers that refuse to change rows, to remove them, to empty the table, to replace a row.

    Row triggers see neither PostgreSQL's TRUNCATE nor SQLite's INSERT OR REPLACE.
    """
    update, delete, truncate, replace = (f"{table}_{name}" for name in names)
    _trigger(update, "UPDATE", table, action, when=changed)
    _trigger(delete, "DELETE", table, action)
    if _postgresql():
        op.execute(f"CREATE TRIGGER {truncate} BEFORE TRUNCATE ON {table} {action}")
    else:
        same = sa.text(f"{key} = NEW.{key}")
        rows = sa.select(sa.text("1")).select_from(sa.table(table)).where(same)
        _trigger(replace, "INSERT", table, action, when=f"EXISTS ({rows})")


def _trigger(name: str, verb: str, table: str, action: str, when: str = "") -> None:
    condition = f" WHEN ({when})" if when else ""
    op.execute(f"CREATE TRIGGER {name} BEFORE {verb} ON {table} FOR EACH ROW{condition} {action}")


def _refusal(function: str, message: str, wrong: str = "", first: str = "") -> str:
    """Action of a trigger that refuses a row: any row, or rows for which `wrong` holds.

    first: locks that PostgreSQL takes before it evaluates the condition.
    """
    if not _postgresql():
        condition = f" WHERE {wrong}" if wrong else ""
        return f"BEGIN SELECT RAISE(ABORT, '{message}'){condition}; END"
    if wrong:
        # integrity_constraint_violation, as SQLite reports it too.
        error = f"RAISE EXCEPTION '{message}' USING ERRCODE = '23000'"
        _function(function, f"{first} IF {wrong} THEN {error}; END IF; RETURN NEW;")
    else:
        _function(function, f"RAISE EXCEPTION '{message}';")
    return f"EXECUTE FUNCTION {function}()"


def _function(name: str, body: str) -> None:
    op.execute(
        f"CREATE FUNCTION {name}() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN {body} END $$"
    )


def _differs() -> str:
    return "IS DISTINCT FROM" if _postgresql() else "IS NOT"


def _postgresql() -> bool:
    return op.get_bind().dialect.name == "postgresql"

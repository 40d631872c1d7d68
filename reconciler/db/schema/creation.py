"""Creation of a new database: its tables, their triggers, and the rows that every site has.

The triggers refuse what no constraint can:

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

from reconciler.db.schema.base import metadata, sql_list
from reconciler.db.schema.capacity import claims, proofs, slots, usage
from reconciler.db.schema.jobs import control, pool_hosts, totals
from reconciler.model.jobs import Mode
from reconciler.model.pools import APART
from reconciler.model.states import LIVE_CLAIMS

CLAIMS, SLOTS, PROOFS, USAGE = (table.name for table in (claims, slots, proofs, usage))
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

LIVE = sql_list(LIVE_CLAIMS)
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


def create(conn: sa.Connection) -> None:
    """Make the newest schema in an empty database."""
    metadata.create_all(conn, checkfirst=False)
    _Triggers(conn).create()
    # Claims lock the row of control, so it exists from the beginning.
    for table, row in ((control, {"mode": Mode.NORMAL.value}), (totals, {})):
        conn.execute(sa.insert(table).values(id="jobs", **row))
    # Of pools whose workers are elsewhere and in slices. They report nothing, so no other pool is
    # placed there.
    nothing = {"boot_id": "", "memory_bytes": 0, "memory_used_bytes": 0, "isolation": ""}
    for host in APART:
        conn.execute(sa.insert(pool_hosts).values(id=host, name=host, seen_at=0, **nothing))


class _Triggers:
    """Triggers of SQLite; of PostgreSQL with the functions that they call."""

    def __init__(self, conn: sa.Connection) -> None:
        self._conn = conn
        self._postgresql = conn.dialect.name == "postgresql"

    def create(self) -> None:
        """Create every trigger."""
        if self._postgresql:
            body = "RAISE EXCEPTION '% is append-only', TG_TABLE_NAME;"
            self._function("gpuaas_append_only", body)
        for table in LOGS:
            refuse = f"BEGIN SELECT RAISE(ABORT, '{table} is append-only'); END"
            self._protect(
                table,
                "EXECUTE FUNCTION gpuaas_append_only()" if self._postgresql else refuse,
                "id",
                ("no_update", "no_delete", "no_truncate", "no_replace"),
            )
        differs = "IS DISTINCT FROM" if self._postgresql else "IS NOT"
        for table, columns in SOLD.items():
            changed = " OR ".join(f"NEW.{name} {differs} OLD.{name}" for name in columns.split())
            action = self._refusal(f"{table}_keep", f"{table} keeps what was sold")
            self._protect(
                table,
                action,
                columns.split()[0],
                ("keep_update", "keep_delete", "keep_all", "keep_replace"),
                changed=f"{changed} OR OLD.ended_at IS NOT NULL" if table == USAGE else changed,
            )
            if table == USAGE:
                self._trigger(f"{USAGE}_keep_price", "UPDATE OF price, currency", USAGE, action)
        for name, verb, wrong in (
            ("disk_generation_grows", "UPDATE OF disk_generation, nvme_identity", CHANGED),
            ("disk_generation_begins", "INSERT", OLDER),
        ):
            action = self._refusal(f"gpuaas_{name}", GROWS, wrong)
            self._trigger(f"{SLOTS}_{name}", verb, SLOTS, action)
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
            action = self._refusal(f"{table}_{name}", message, wrong, first)
            for verb, moved in verbs.items():
                trigger = f"{table}_{name}_{verb.partition(' ')[0].lower()}"
                self._trigger(trigger, verb, table, action, when=f"{moved} AND {row}")

    def _protect(
        self,
        table: str,
        action: str,
        key: str,
        names: tuple[str, str, str, str],
        changed: str = "",
    ) -> None:
        """Refuse to change rows, to remove them, to empty the table, to replace a row.

        Row triggers see neither PostgreSQL's TRUNCATE nor SQLite's INSERT OR REPLACE.
        """
        update, delete, truncate, replace = (f"{table}_{name}" for name in names)
        self._trigger(update, "UPDATE", table, action, when=changed)
        self._trigger(delete, "DELETE", table, action)
        if self._postgresql:
            self._execute(f"CREATE TRIGGER {truncate} BEFORE TRUNCATE ON {table} {action}")
        else:
            same = sa.text(f"{key} = NEW.{key}")
            rows = sa.select(sa.text("1")).select_from(sa.table(table)).where(same)
            self._trigger(replace, "INSERT", table, action, when=f"EXISTS ({rows})")

    def _trigger(self, name: str, verb: str, table: str, action: str, when: str = "") -> None:
        condition = f" WHEN ({when})" if when else ""
        row = f"FOR EACH ROW{condition} {action}"
        self._execute(f"CREATE TRIGGER {name} BEFORE {verb} ON {table} {row}")

    def _refusal(self, function: str, message: str, wrong: str = "", first: str = "") -> str:
        """Action of a trigger that refuses a row: any row, or rows for which `wrong` holds.

        first: locks that PostgreSQL takes before it evaluates the condition.
        """
        if not self._postgresql:
            condition = f" WHERE {wrong}" if wrong else ""
            return f"BEGIN SELECT RAISE(ABORT, '{message}'){condition}; END"
        if wrong:
            # integrity_constraint_violation, as SQLite reports it too.
            error = f"RAISE EXCEPTION '{message}' USING ERRCODE = '23000'"
            self._function(function, f"{first} IF {wrong} THEN {error}; END IF; RETURN NEW;")
        else:
            self._function(function, f"RAISE EXCEPTION '{message}';")
        return f"EXECUTE FUNCTION {function}()"

    def _function(self, name: str, body: str) -> None:
        kind = "RETURNS trigger LANGUAGE plpgsql"
        self._execute(f"CREATE FUNCTION {name}() {kind} AS $$ BEGIN {body} END $$")

    def _execute(self, statement: str) -> None:
        self._conn.execute(sa.text(statement))

"""Triggers that allow `available` only with a proof newer than the last claim (I4).

An available slot has a proof of its disk's current generation, which never falls (0007). Therefore
a claim is accepted only at a generation without a proof, and no proof of its disk is accepted while
it is live. So the proof that makes the slot available again is newer than the claim. The slot is
never available while the claim is live.

A claim on a whole machine does not name its slots. Its tenant is let in only when the generation of
every slot's disk is newer than every proof. No proof is accepted from the preparation of the
machine until the claim has ended. A claim that ended before its tenant was let in leaves older
proofs valid. A run for it may have written to the disks, so `lifecycle.baremetal` raises the
generations as soon as such a run starts.
"""

from __future__ import annotations

from alembic import op

revision = "0019"
down_revision = "0018"

CLAIMS = "allocation_resource_claims"
SLOTS = "node_resource_slots"
PROOFS = "wipe_proofs"
LIVE = "('reserved', 'provisioning', 'active', 'releasing')"
SLICE = f"NEW.kind = 'slice' AND NEW.state IN {LIVE}"
# BEGUN: from the preparation of the machine on. ENTERED: from the entry of the tenant on.
BEGUN = "('provisioning', 'active', 'releasing')"
ENTERED = "('active', 'releasing')"
WHOLE = f"NEW.kind = 'node_exclusive' AND NEW.state IN {LIVE}"
TENANT = f"NEW.kind = 'node_exclusive' AND NEW.state IN {ENTERED}"
SOLD = "NEW.status = 'available'"

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

# Tenants on a whole machine from a version that did not raise the generations of its disks.
MOVED_ON = """
UPDATE node_resource_slots SET disk_generation = disk_generation + 1, available_proof_id = NULL
WHERE retired_at IS NULL AND status <> 'available' AND node_id IN (
  SELECT node_id FROM allocation_resource_claims
  WHERE kind = 'node_exclusive' AND state IN ('provisioning', 'active', 'releasing'))
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


def upgrade() -> None:
    """Create the triggers. A migration that recreates a table must recreate its triggers."""
    op.execute(MOVED_ON)
    # An ended claim that becomes live again counts as a new claim.
    claiming = {"INSERT": "true", "UPDATE OF state": f"OLD.state NOT IN {LIVE}"}
    entering = {"INSERT": "true", "UPDATE OF state": f"OLD.state NOT IN {ENTERED}"}
    selling = {"INSERT": "true", "UPDATE OF status": "true"}
    _refuse(CLAIMS, "proven", (claiming, SLICE), (TURN, PROVEN, TOO_LATE))
    _refuse(CLAIMS, "on_sale", (claiming, WHOLE), ("", OFFERED, ON_SALE))
    _refuse(CLAIMS, "past_proofs", (entering, TENANT), (ENTERING, STANDING, NOT_PAST))
    _refuse(PROOFS, "unclaimed", ({"INSERT": "true"}, "true"), (PROVING, IN_USE, EARLY))
    _refuse(SLOTS, "claimed", (selling, SOLD), ("", CLAIMED, HELD))


def _refuse(
    table: str, name: str, about: tuple[dict[str, str], str], rule: tuple[str, str, str]
) -> None:
    """Create a trigger per verb that refuses rows for which the condition of the rule holds."""
    verbs, row = about
    first, wrong, told = rule
    name = f"{table}_{name}"
    if op.get_bind().dialect.name == "postgresql":
        # integrity_constraint_violation, as SQLite reports it too.
        op.execute(
            f"CREATE FUNCTION {name}() RETURNS trigger LANGUAGE plpgsql AS $$"
            f" BEGIN {first} IF {wrong} THEN RAISE EXCEPTION '{told}' USING ERRCODE = '23000';"
            " END IF; RETURN NEW; END $$"
        )
        act = f"EXECUTE FUNCTION {name}()"
    else:
        act = f"BEGIN SELECT RAISE(ABORT, '{told}') WHERE {wrong}; END"
    for verb, moved in verbs.items():
        head = f"{name}_{verb.partition(' ')[0].lower()} BEFORE {verb} ON {table}"
        op.execute(f"CREATE TRIGGER {head} FOR EACH ROW WHEN ({moved} AND {row}) {act}")

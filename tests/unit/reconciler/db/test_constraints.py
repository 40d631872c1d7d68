"""Constraints of the schema on both engines: rows that bypass every function of ours."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from typing import Any

import pytest
import sqlalchemy as sa

from reconciler.db import rows
from reconciler.db import schema as tables
from reconciler.db.engine import open_engine, transaction
from reconciler.db.schema import Proof, Slot
from reconciler.model.states import LIVE_CLAIMS, ClaimState, NodeMode
from reconciler.records import nodes, proofs
from tests.unit.reconciler.conftest import Site

# Values that two live claims must not share, and whether only within a node.
EXCLUSIVE = {
    "slot": ("slot_id", False),
    "gpu": ("gpu_pci_address", True),
    "disk": ("nvme_identity", False),
    "fabric": ("fabric_vf_pci_address", True),
    "ip": ("private_ip", True),
    "mac": ("management_mac", False),
}
EARLY = "a disk under a live claim is not proven clean"
ENDED = [state for state in ClaimState if state not in LIVE_CLAIMS]


@pytest.fixture(scope="module", params=["sqlite", pytest.param("pg", marks=pytest.mark.postgres)])
def claimed(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Iterator[sa.Engine]:
    """Two slots of node n1, the first with a live claim; n2 is a node of its own."""
    if request.param == "sqlite":
        file = tmp_path_factory.mktemp("constraints") / "store.db"
        shutil.copy(request.getfixturevalue("template"), file)
        engine = open_engine(f"sqlite:///{file}")
    else:
        engine = request.getfixturevalue("postgres_database").restore()
    site = Site(engine)
    site.node()
    with transaction(engine) as conn:
        site.allocate(conn)
        nodes.create(conn, site.act, id="n2", mode=NodeMode.SLICE)
    yield engine
    engine.dispose()


@pytest.fixture
def conn(claimed: sa.Engine) -> Iterator[sa.Connection]:
    """A transaction that is rolled back."""
    with claimed.connect() as conn, conn.begin() as work:
        yield conn
        work.rollback()


@contextlib.contextmanager
def refused(conn: sa.Connection, *words: str) -> Iterator[None]:
    """The statement breaks a rule of the schema: the rule that the engine's message names."""
    with pytest.raises(sa.exc.IntegrityError) as caught, conn.begin_nested():
        yield
    assert any(word in str(caught.value.orig) for word in words), caught.value.orig


def stored(conn: sa.Connection, slot_id: str) -> dict[str, Any]:
    """The columns of a slot, to be written again with some of them changed."""
    query = sa.select(tables.slots).where(tables.slots.c.id == slot_id)
    return dict(conn.execute(query).mappings().one())


def second_claim(conn: sa.Connection, **same: Any) -> dict[str, Any]:
    """A second claim that has nothing in common with the first but the given values."""
    (first,) = rows.every(conn, sa.select(tables.claims))
    query = sa.select(tables.slots).where(tables.slots.c.id != first["slot_id"])
    (slot,) = rows.every(conn, query)
    fresh: dict[str, Any] = {column: f"{first[column]}-other" for column, _ in EXCLUSIVE.values()}
    fresh |= {"id": rows.new_id(), "slot_id": slot["id"]}
    if "slot_id" not in same:
        fresh["disk_generation"] = unproven(conn, slot)
    del first["live_mode"]  # the engine computes it
    return first | fresh | {name: first.get(name, value) for name, value in same.items()}


def unproven(conn: sa.Connection, slot: dict[str, Any]) -> int:
    """The generation of the slot's disk, once it is off sale and as if claimed again."""
    off_sale = {"status": "reserved", "available_proof_id": None}
    change(conn, slot, disk_generation=slot["disk_generation"] + 1, **off_sale)
    return int(slot["disk_generation"]) + 1


def insert(conn: sa.Connection, claim: dict[str, Any]) -> None:
    conn.execute(sa.insert(tables.claims).values(**claim))


@pytest.mark.covers("I1", "CTRL-2")
@pytest.mark.parametrize("name", EXCLUSIVE)
def test_no_two_live_claims_have_it_in_common(conn: sa.Connection, name: str) -> None:
    column, on_node = EXCLUSIVE[name]
    claim = second_claim(conn, **{column: None})
    for state in LIVE_CLAIMS:
        with refused(conn, f"uq_claims_live_{name}", f"claims.{column}"):
            insert(conn, claim | {"state": state.value})
    elsewhere = claim | {"node_id": "n2", "state": ClaimState.ACTIVE.value}
    if on_node:
        insert(conn, elsewhere)
    else:
        with refused(conn, f"uq_claims_live_{name}", f"claims.{column}"):
            insert(conn, elsewhere)


@pytest.mark.covers("I1")
@pytest.mark.parametrize("name", EXCLUSIVE)
def test_an_ended_claim_is_in_nobodys_way(conn: sa.Connection, name: str) -> None:
    for state in ENDED:
        claim = second_claim(conn, **{EXCLUSIVE[name][0]: None})
        # A claim cannot be deleted, only never have been.
        with conn.begin_nested() as attempt:
            insert(conn, claim | {"state": state.value})
            attempt.rollback()
    # A live claim with resources of its own is accepted.
    insert(conn, second_claim(conn))


def second(conn: sa.Connection) -> dict[str, Any]:
    """The slot that is on sale."""
    query = sa.select(tables.slots).where(tables.slots.c.status == "available")
    (slot,) = rows.every(conn, query)
    return slot


def change(conn: sa.Connection, slot: dict[str, Any], **values: Any) -> None:
    conn.execute(sa.update(tables.slots).where(tables.slots.c.id == slot["id"]).values(**values))


@pytest.mark.covers("I4")
def test_available_needs_the_proof_of_its_own_disk_as_it_is_now(conn: sa.Connection) -> None:
    """I4: no proof, another disk's, an older proof of this disk, a missing proof."""
    slot = second(conn)
    (theirs,) = rows.every(
        conn, sa.select(tables.proofs).where(tables.proofs.c.disk_identity != slot["nvme_identity"])
    )
    key = ("fk_node_resource_slots_available_proof", "FOREIGN KEY")
    with refused(conn, "available_needs_proof"):
        change(conn, slot, available_proof_id=None)
    for proof in (theirs["id"], "no-such-proof"):
        with refused(conn, *key):
            change(conn, slot, available_proof_id=proof)
    with refused(conn, *key):
        change(conn, slot, disk_generation=slot["disk_generation"] + 1)
    change(conn, slot, status="disabled", available_proof_id=None)
    change(conn, slot, disk_generation=slot["disk_generation"] + 1)
    with refused(conn, *key):
        change(conn, slot, status="available", available_proof_id=slot["available_proof_id"])
    slot = stored(conn, slot["id"])
    proof = proofs.record_transition(
        conn, "n1", {"disk": slot["nvme_identity"], "method": "discard", "verified": True}, Site.act
    )
    change(conn, slot, status="available", available_proof_id=proof.id)


@pytest.mark.covers("I4")
def test_a_disks_generation_only_grows(conn: sa.Connection) -> None:
    """Taken back, it would make the proof from before the last tenant count again."""
    slot = second(conn)
    message = "a disk generation only grows"
    change(conn, slot, status="disabled", available_proof_id=None, disk_generation=7)
    change(conn, slot, disk_generation=7, status_reason="the same is no step back")
    with refused(conn, message):
        change(conn, slot, disk_generation=6)
    with refused(conn, message):
        change(conn, slot, nvme_identity="eui.another")
    # Nor does the disk begin anew in a new slot.
    change(conn, slot, retired_at=1.0)
    again = stored(conn, slot["id"]) | {"retired_at": None}
    again |= {"id": rows.new_id(), "status": "disabled"}
    with refused(conn, message):
        rows.add(conn, Slot, again | {"disk_generation": 6})
    assert rows.add(conn, Slot, again).disk_generation == 7


def prove(conn: sa.Connection, slot: dict[str, Any], generation: int) -> str:
    """The slot's first proof once more, as if made at this generation of its disk."""
    same_disk = tables.proofs.c.disk_identity == slot["nvme_identity"]
    proof = rows.every(conn, sa.select(tables.proofs).where(same_disk))[0]
    proof |= {"id": rows.new_id(), "disk_generation": generation}
    return str(rows.add(conn, Proof, proof).id)


def move(conn: sa.Connection, claim: dict[str, Any], state: ClaimState) -> None:
    update = sa.update(tables.claims).where(tables.claims.c.id == claim["id"])
    conn.execute(update.values(state=state.value))


@pytest.mark.covers("I4")
def test_no_claim_goes_in_at_a_generation_that_is_proven(conn: sa.Connection) -> None:
    """The proof from before it would make the slot available again as soon as it has ended."""
    message = "a claim needs a disk generation of which there is no proof yet"
    slot = second(conn)
    with conn.begin_nested() as attempt:
        claim = second_claim(conn)
        attempt.rollback()
    # The slot is on sale, at the generation of its proof; the claim says so, or it lies.
    for generation in (slot["disk_generation"], claim["disk_generation"]):
        with refused(conn, message):
            insert(conn, claim | {"disk_generation": generation})
    generation = unproven(conn, slot)
    for ahead in (True, False):
        with conn.begin_nested() as attempt:
            if ahead:
                prove(conn, slot, generation + 1)
            else:
                change(conn, slot, retired_at=1.0)
            with refused(conn, message):
                insert(conn, claim)
            attempt.rollback()
    insert(conn, claim)
    move(conn, claim, ClaimState.RELEASED)
    with refused(conn, "fk_node_resource_slots_available_proof", "FOREIGN KEY"):
        change(conn, slot, status="available", available_proof_id=slot["available_proof_id"])
    move(conn, claim, ClaimState.ACTIVE)
    move(conn, claim, ClaimState.RELEASED)
    change(conn, slot, status="available", available_proof_id=prove(conn, slot, generation))
    with refused(conn, message):
        move(conn, claim, ClaimState.ACTIVE)


@pytest.mark.covers("I4")
def test_no_slot_is_available_under_a_live_claim(conn: sa.Connection) -> None:
    message = "a slot under a live claim is not available"
    slot = second(conn)
    claim = second_claim(conn) | {"nvme_identity": slot["nvme_identity"]}
    generation = claim["disk_generation"]
    insert(conn, claim)
    # The trigger speaks before the key does: which proof it would be is all the same.
    fresh = {"status": "available", "available_proof_id": slot["available_proof_id"]}
    for state in LIVE_CLAIMS:
        move(conn, claim, state)
        with refused(conn, message):
            change(conn, slot, **fresh)
    # Nor is its disk in a slot that has come after it.
    with conn.begin_nested() as attempt:
        change(conn, slot, retired_at=1.0)
        again = stored(conn, slot["id"]) | {"id": rows.new_id()}
        with refused(conn, message):
            rows.add(conn, Slot, again | {"retired_at": None} | fresh)
        attempt.rollback()
    move(conn, claim, ClaimState.FAILED)
    change(conn, slot, status="available", available_proof_id=prove(conn, slot, generation))


@pytest.mark.covers("I4")
@pytest.mark.parametrize("by", ["disk", "slot"])
def test_no_disk_is_proven_under_a_live_claim(conn: sa.Connection, by: str) -> None:
    """No proof of a disk that a tenant may still write to: it would count after the claim."""
    slot = second(conn)
    claim = second_claim(conn)
    if by == "disk":
        claim["nvme_identity"] = slot["nvme_identity"]
    insert(conn, claim)
    if by == "disk":
        change(conn, slot, retired_at=1.0)
    for state in LIVE_CLAIMS:
        move(conn, claim, state)
        for generation in (0, claim["disk_generation"], claim["disk_generation"] + 1):
            with refused(conn, EARLY):
                prove(conn, slot, generation)
    for state in ENDED:
        move(conn, claim, state)
        prove(conn, slot, claim["disk_generation"] - 1)


def whole(conn: sa.Connection, slot: dict[str, Any]) -> dict[str, Any]:
    """A claim on a whole machine to which the slot now belongs; it is not in yet."""
    nodes.create(conn, Site.act, id="n3", mode=NodeMode.BAREMETAL)
    change(conn, slot, node_id="n3")
    (claim,) = rows.every(conn, sa.select(tables.claims))
    del claim["live_mode"]
    same = {"kind": "node_exclusive", "node_id": "n3", "slot_id": None, "nvme_identity": ""}
    return claim | same | {"id": rows.new_id(), "state": ClaimState.RESERVED.value}


@pytest.mark.covers("I2", "I4")
def test_a_claim_on_a_whole_machine_holds_its_slots_too(conn: sa.Connection) -> None:
    slot = second(conn)
    claim = whole(conn, slot)
    with refused(conn, "a claim on a whole machine needs its slots off sale"):
        insert(conn, claim)
    change(conn, slot, status="disabled")
    insert(conn, claim)
    with refused(conn, "a slot under a live claim is not available"):
        change(conn, slot, status="available")
    # Withdrawn: no tenant was let in.
    move(conn, claim, ClaimState.RELEASED)
    change(conn, slot, status="available")
    with refused(conn, "a claim on a whole machine needs its slots off sale"):
        move(conn, claim, ClaimState.RESERVED)


@pytest.mark.covers("I2", "I4")
@pytest.mark.parametrize("state", [ClaimState.ACTIVE, ClaimState.RELEASING])
def test_a_whole_machines_tenant_enters_past_every_proof(
    conn: sa.Connection, state: ClaimState
) -> None:
    """The proof from before him would make its slot available as soon as he has left."""
    message = "the tenant of a whole machine needs the disks of its slots past every proof"
    slot = second(conn)
    claim = whole(conn, slot)
    change(conn, slot, status="disabled")
    with refused(conn, message):
        insert(conn, claim | {"state": state.value})
    insert(conn, claim)
    for at in (ClaimState.RESERVED, ClaimState.PROVISIONING, ClaimState.RELEASED):
        move(conn, claim, at)
        with refused(conn, message):
            move(conn, claim, state)
    generation = unproven(conn, slot)
    change(conn, slot, status="disabled")
    # Retired slots have no part in it: their disks may be elsewhere by now.
    with conn.begin_nested() as attempt:
        prove(conn, slot, generation + 1)
        with refused(conn, message):
            move(conn, claim, state)
        change(conn, slot, retired_at=1.0)
        move(conn, claim, state)
        attempt.rollback()
    for at in (ClaimState.RESERVED, ClaimState.PROVISIONING, state):
        move(conn, claim, at)
    move(conn, claim, ClaimState.RELEASED)
    with refused(conn, "fk_node_resource_slots_available_proof", "FOREIGN KEY"):
        change(conn, slot, status="available", available_proof_id=slot["available_proof_id"])
    change(conn, slot, status="available", available_proof_id=prove(conn, slot, generation))


@pytest.mark.covers("I2", "I4")
def test_no_disk_is_proven_while_its_whole_machine_has_a_tenant(conn: sa.Connection) -> None:
    slot = second(conn)
    claim = whole(conn, slot)
    generation = unproven(conn, slot)
    insert(conn, claim)
    for state in (ClaimState.PROVISIONING, ClaimState.ACTIVE, ClaimState.RELEASING):
        move(conn, claim, state)
        with refused(conn, EARLY):
            prove(conn, slot, generation)
    move(conn, claim, ClaimState.FAILED)
    prove(conn, slot, generation)


@pytest.mark.covers("HOST-10")
def test_unknown_tags_of_a_node_are_null(conn: sa.Connection) -> None:
    """An empty list would close the gate of every host at the next parity run."""
    node = tables.nodes.c.id == "n2"
    query = sa.select(tables.nodes.c.maas_tags, tables.nodes.c.maas_tags.is_(None)).where(node)
    assert conn.execute(query).one() == (None, True)
    conn.execute(sa.update(tables.nodes).where(node).values(maas_tags=["a", "b"]))
    assert conn.execute(query).one() == (["a", "b"], False)
    conn.execute(sa.update(tables.nodes).where(node).values(maas_tags=None))
    assert conn.execute(query).one() == (None, True)


@pytest.mark.covers("CTRL-6")
@pytest.mark.parametrize(("column", "word"), [("health_state", "unhealthy"), ("status", "free")])
def test_a_word_that_is_no_state_is_refused(conn: sa.Connection, column: str, word: str) -> None:
    """The seeds' clean-up once wrote `unhealthy`, which nothing that reads health knows."""
    with refused(conn, column):
        change(conn, second(conn), **{column: word})

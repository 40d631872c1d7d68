"""Many at once: every slot goes to one tenant, every task to one worker (I1 to I3)."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import sqlalchemy as sa

from reconciler.db import rows
from reconciler.db import schema as tables
from reconciler.db.engine import retrying, transaction
from reconciler.db.schema import Claim, Slot
from reconciler.lifecycle import host, launch
from reconciler.model.errors import Problem
from reconciler.model.proof import accepts
from reconciler.model.states import LIVE_CLAIMS, NodeMode, ProofKind
from reconciler.records import allocations, leasing, nodes, proofs, tokens
from tests.unit.reconciler.conftest import Site

THREADS = 8
# Kernel-side names and private addresses repeat from node to node, the others nowhere.
SOLD_ONCE = (
    ("slot_id",),
    ("nvme_identity",),
    ("management_mac",),
    ("node_id", "gpu_pci_address"),
    ("node_id", "fabric_vf_pci_address"),
    ("node_id", "private_ip"),
)


def check_invariants(conn: sa.Connection) -> None:
    """I1 to I4 over the whole database."""
    live = rows.every(
        conn, sa.select(tables.claims).where(tables.claims.c.state.in_(LIVE_CLAIMS)), Claim
    )
    for columns in SOLD_ONCE:
        given = Counter(tuple(getattr(claim, column) for column in columns) for claim in live)
        assert max(given.values(), default=0) <= 1, columns
    states = {row.id: row for row in rows.every(conn, sa.select(tables.slots), Slot)}
    for claim in live:
        slot = states[claim.slot_id]
        assert slot.disk_generation == claim.disk_generation
        assert slot.status in ("reserved", "provisioning", "active", "releasing")
    held = {claim.slot_id for claim in live}
    for slot in states.values():
        if slot.status == "available":
            proof = proofs.get(conn, str(slot.available_proof_id))
            seen = (proof.disk_identity, proof.disk_generation)
            assert seen == (slot.nvme_identity, slot.disk_generation)
            untouched = proof.kind == ProofKind.UNTOUCHED
            assert untouched or accepts(proofs.policy(slot), proof.method)
        assert (slot.status == "reserved") == (slot.id in held)
    for entity, table in (("slot", tables.slots), ("allocation", tables.allocations)):
        for row in rows.every(conn, sa.select(table)):
            query = sa.select(sa.func.count()).select_from(tables.history)
            written = conn.execute(
                query.where(
                    tables.history.c.entity == entity, tables.history.c.entity_id == row["id"]
                )
            ).scalar_one()
            assert written == row["generation"] + 1


@pytest.fixture
def crowded(site: Site) -> Any:
    """Two nodes with three slots each."""
    for number, node in enumerate(("n1", "n2")):
        site.node(node, (0, 1, 3), number)
    return site


@pytest.mark.covers("CTRL-4", "I1", "I3", "I4", "I20")
def test_slots_are_given_once(crowded: Site) -> None:
    def client(seed: int) -> str:
        try:
            allocated = retrying(
                crowded.engine, lambda conn: crowded.allocate(conn, 2 if seed % 3 == 0 else 1)
            )
            if seed % 4 == 1:
                retrying(crowded.engine, lambda conn: launch.release(conn, allocated, crowded.act))
            return "placed"
        except Problem as problem:
            return problem.code

    with ThreadPoolExecutor(THREADS) as pool:
        answers = Counter(pool.map(client, range(16)))
    assert set(answers) <= {"placed", "no_capacity"}
    with transaction(crowded.engine) as conn:
        check_invariants(conn)


@pytest.mark.covers("CTRL-4", "I2")
def test_conversion_and_allocation_exclude_each_other(crowded: Site) -> None:
    def convert(node: str) -> str:
        try:
            retrying(
                crowded.engine,
                lambda conn: host.convert(conn, node, NodeMode.BAREMETAL, crowded.act),
            )
            return "converted"
        except Problem as problem:
            return problem.code

    def client(_: int) -> str:
        try:
            return retrying(crowded.engine, lambda conn: crowded.allocate(conn) and "placed")
        except Problem as problem:
            return problem.code

    with ThreadPoolExecutor(THREADS) as pool:
        jobs = [pool.submit(client, number) for number in range(4)]
        jobs += [pool.submit(convert, node) for node in ("n1", "n2")]
        for job in jobs:
            assert job.result() in {"placed", "no_capacity", "converted", "node_in_use"}
    with transaction(crowded.engine) as conn:
        check_invariants(conn)
        modes = {node.id: node.mode for node in nodes.every(conn)}
        for allocation in allocations.every(conn):
            assert modes[allocation.node_id] == "slice"


@pytest.mark.covers("CTRL-9")
def test_tasks_and_tokens_go_to_one(crowded: Site) -> None:
    with transaction(crowded.engine) as conn:
        for _ in range(4):
            crowded.allocate(conn)
        _, secret = tokens.issue_enrolment(conn, "n1", crowded.act)

    def worker(number: int) -> list[str]:
        taken = retrying(crowded.engine, lambda conn: leasing.lease(conn, f"w{number}", limit=1))
        return [task.id for task in taken]

    def enrol(number: int) -> bool:
        try:
            used = {"by": number}
            retrying(
                crowded.engine,
                lambda conn: tokens.redeem_enrolment(conn, "n1", secret, used_by=used),
            )
            return True
        except Problem:
            return False

    with ThreadPoolExecutor(THREADS) as pool:
        leased = [task for taken in pool.map(worker, range(6)) for task in taken]
        winners = sum(pool.map(enrol, range(4)))
    assert len(leased) == len(set(leased)) == 4
    assert winners == 1

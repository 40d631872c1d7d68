"""A claim and a proof in concurrent transactions on PostgreSQL."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest
import sqlalchemy as sa

from reconciler.db import rows
from reconciler.db import schema as tables
from reconciler.db.engine import transaction
from reconciler.db.schema import Slot
from reconciler.lifecycle import slices
from reconciler.model.states import ClaimState, ProofKind
from reconciler.records import claims, proofs
from tests.unit.reconciler.conftest import ADMIN, Site
from tests.unit.reconciler.db import test_constraints
from tests.unit.reconciler.lifecycle import test_races_postgres

pytestmark = pytest.mark.postgres
engine = test_races_postgres.engine
beside = test_races_postgres.beside
A_WHILE_S, SOON_S = test_races_postgres.A_WHILE_S, test_races_postgres.SOON_S
Beside = Callable[[Callable[[], Any]], Future[Any]]
Writes = Callable[[sa.Connection], None]


@pytest.mark.covers("I4")
@pytest.mark.parametrize("first", ["claim", "proof"])
def test_a_claim_and_a_sale_take_turns(engine: sa.Engine, beside: Beside, first: str) -> None:
    """Each write would be valid by itself, from any writer: the second is refused."""
    site = Site(engine)
    site.node(indexes=(0,))
    with transaction(engine) as conn:
        key = site.allocate(conn)
        (claim,) = claims.of_allocation(conn, key)
        slices.move_claims(conn, key, "fail", ADMIN)
        slot = rows.get(conn, Slot, claim.slot_id)
    values = vars(claim) | {"id": rows.new_id()}
    del values["live_mode"]

    def claim_it(conn: sa.Connection) -> None:
        conn.execute(sa.insert(tables.claims).values(values))

    def sell_it(conn: sa.Connection) -> None:
        proof = proofs.record(conn, slot, ProofKind.UNTOUCHED, {})
        sold = {"status": "available", "available_proof_id": proof.id}
        mine = tables.slots.c.id == slot.id
        conn.execute(sa.update(tables.slots).where(mine).values(sold))

    order = (claim_it, sell_it) if first == "claim" else (sell_it, claim_it)
    _take_turns(engine, beside, *order, refused=r"live claim|is no proof yet")


@pytest.mark.covers("I4")
@pytest.mark.parametrize("first", ["tenant", "proof"])
def test_a_tenant_of_the_whole_machine_and_a_proof_take_turns(
    engine: sa.Engine, beside: Beside, first: str
) -> None:
    """The proof would be from before the tenant, and sell the slot after it."""
    site = Site(engine)
    site.node()
    with transaction(engine) as conn:
        site.allocate(conn)
        slot = test_constraints.second(conn)
        claim = test_constraints.whole(conn, slot)
        generation = test_constraints.unproven(conn, slot)
        test_constraints.change(conn, slot, status="disabled")
        test_constraints.insert(conn, claim)

    def enter(conn: sa.Connection) -> None:
        test_constraints.move(conn, claim, ClaimState.ACTIVE)

    def prove(conn: sa.Connection) -> None:
        test_constraints.prove(conn, slot, generation)

    order = (enter, prove) if first == "tenant" else (prove, enter)
    _take_turns(engine, beside, *order, refused=r"live claim|past every proof")


def _take_turns(
    engine: sa.Engine, beside: Beside, first: Writes, other: Writes, *, refused: str
) -> None:
    def late() -> None:
        with transaction(engine) as conn:
            other(conn)

    with transaction(engine) as conn:
        first(conn)
        second = beside(late)
        with pytest.raises(TimeoutError):
            second.result(A_WHILE_S)
    with pytest.raises(sa.exc.IntegrityError, match=refused):
        second.result(SOON_S)

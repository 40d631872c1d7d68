"""Enrolment tokens under two simultaneous uses, on PostgreSQL."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import sqlalchemy as sa

from reconciler.db.engine import transaction
from reconciler.model.errors import Problem
from reconciler.records import nodes, tokens
from tests.unit.reconciler.conftest import Site
from tests.unit.reconciler.db import test_postgres

pytestmark = [pytest.mark.postgres, pytest.mark.covers("P7")]
engine = test_postgres.engine


@pytest.mark.parametrize("commits", [True, False])
def test_of_two_uses_at_once_a_single_use_succeeds(
    engine: sa.Engine, site: Site, commits: bool
) -> None:
    """The second use waits for the first; it succeeds only when the first is taken back."""
    with transaction(engine) as conn:
        nodes.create(conn, site.act, id="n1", address="192.0.2.7")
        _, secret = tokens.issue_enrolment(conn, "n1", site.act)

    def redeem(user: str, conn: sa.Connection) -> Any:
        return tokens.redeem_enrolment(conn, "n1", secret, used_by={"by": user}).used_by

    def second() -> Any:
        with transaction(engine) as conn:
            return redeem("second", conn)

    with ThreadPoolExecutor(1) as pool, engine.connect() as conn:
        redeem("first", conn)
        waiting: Future[Any] = pool.submit(second)
        with pytest.raises(TimeoutError):
            waiting.result(0.3)
        if commits:
            conn.commit()
            with pytest.raises(Problem, match="token_invalid"):
                waiting.result(20)
        else:
            conn.rollback()
            assert waiting.result(20) == {"by": "second"}

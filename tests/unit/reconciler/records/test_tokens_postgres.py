"""Tokens under simultaneous uses, and lines of tokens, on PostgreSQL."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import sqlalchemy as sa

from reconciler.db.engine import transaction
from reconciler.model.errors import Problem
from reconciler.model.states import Role
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


@pytest.mark.parametrize("role", [Role.PLATFORM_ADMIN, Role.PROJECT_MEMBER])
def test_of_two_requests_at_once_a_single_one_gets_the_last_place(
    engine: sa.Engine, site: Site, monkeypatch: pytest.MonkeyPatch, role: Role
) -> None:
    """The second counts the token of the first, whether that ends with it or not."""
    monkeypatch.setattr(tokens, "MOST", 1)
    with transaction(engine) as conn:
        project = site.project if role is Role.PROJECT_MEMBER else None
        member: dict[str, Any] = {"role": role, "project_id": project}
        first, _ = tokens.issue(conn, site.act, name="first", **member)

    def make(conn: sa.Connection) -> Any:
        names = {"parent_id": first.id, "owner": first.id, "until": None, "ttl_s": 600}
        return tokens.issue_own(conn, site.act, name="own", **names, **member)

    def second() -> Any:
        with transaction(engine) as conn:
            return make(conn)

    with ThreadPoolExecutor(1) as pool, engine.connect() as conn:
        child, secret = make(conn)
        waiting: Future[Any] = pool.submit(second)
        with pytest.raises(TimeoutError):
            waiting.result(0.3)
        conn.commit()
        with pytest.raises(Problem, match="too_many_tokens"):
            waiting.result(20)
    with transaction(engine) as conn:
        assert tokens.authenticate(conn, secret) == child
        assert [token.name for token in tokens.of_holder(conn, holder=first.id)] == ["own", "first"]
        tokens.revoke(conn, first.id, site.act)
        assert tokens.authenticate(conn, secret) is None
        assert tokens.valid(conn, ids=[child.id]) == []

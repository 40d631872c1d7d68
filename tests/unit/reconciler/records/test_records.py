"""Enrolment tokens, keys that repeat nothing, images, and logs that cannot be changed."""

from __future__ import annotations

from typing import Any

import pytest
import sqlalchemy as sa

from reconciler.db import clock, idempotency, journal, rows, settings
from reconciler.db import schema as tables
from reconciler.db.engine import reading, retrying, transaction
from reconciler.db.idempotency import Answer, Call, once
from reconciler.model.act import Act
from reconciler.model.errors import Problem
from reconciler.records import images, nodes, projects, proofs, tokens
from tests.unit.reconciler import relay
from tests.unit.reconciler.conftest import Site, code

ALICE = Act("admin:alice")


@pytest.mark.covers("P7")
def test_enrolment_token_is_used_once_by_its_node_in_time(site: Site) -> None:
    with transaction(site.engine) as conn:
        for node in ("n1", "n2"):
            nodes.create(conn, site.act, id=node)
        redeem = tokens.redeem_enrolment
        record, secret = tokens.issue_enrolment(conn, "n1", site.act, ttl_s=10**6)
        assert record.expires_at - record.created_at < 15 * 60 + 1
        assert code(redeem, conn, "n2", secret, used_by={}) == "token_invalid"
        assert redeem(conn, "n1", secret, used_by={"ip": "::1"}).used_by == {"ip": "::1"}
        assert code(redeem, conn, "n1", secret, used_by={}) == "token_invalid"
        _, older = tokens.issue_enrolment(conn, "n1", site.act)
        _, newer = tokens.issue_enrolment(conn, "n1", site.act)
        assert code(redeem, conn, "n1", older, used_by={}) == "token_invalid"
        assert redeem(conn, "n1", newer, used_by={})
        _, late = tokens.issue_enrolment(conn, "n1", site.act, ttl_s=-1)
        assert code(redeem, conn, "n1", late, used_by={}) == "token_invalid"


@pytest.mark.covers("I21")
def test_once(engine: sa.Engine) -> None:
    calls: list[int] = []

    def work(conn: sa.Connection) -> Answer:
        calls.append(1)
        settings.write(conn, "n", len(calls), ALICE)
        return Answer(201, {"n": len(calls)})

    call = Call("POST /x alice", "k1", {"a": 1, "b": 2})
    assert once(engine, call, work) == Answer(201, {"n": 1})
    repeated = Call("POST /x alice", "k1", {"b": 2, "a": 1})
    assert once(engine, repeated, work) == Answer(201, {"n": 1}, replayed=True)
    assert code(once, engine, Call(call.scope, "k1", {"a": 2}), work) == "idempotency_key_reused"
    assert code(once, engine, Call(call.scope, "", {}), work) == "idempotency_key_required"
    assert once(engine, Call("POST /x bob", "k1", {}), work).body == {"n": 2}


def test_a_refusal_is_not_remembered(engine: sa.Engine) -> None:
    def refuse(conn: sa.Connection) -> Answer:
        settings.write(conn, "n", 1, ALICE)
        raise Problem("no_capacity", expected="a", found="b", remedy="c")

    call = Call("s", "k", {})
    assert code(once, engine, call, refuse) == "no_capacity"
    with transaction(engine) as conn:
        assert settings.read(conn, "n") is None
    assert once(engine, call, lambda _: Answer(201, {})).status == 201


@pytest.mark.covers("I21")
def test_in_flight_and_taken_over(engine: sa.Engine) -> None:
    call = Call("s", "k", {})

    def slow(conn: sa.Connection) -> Answer:
        with pytest.raises(Problem) as caught:
            idempotency._take(conn, call, "other")
        assert caught.value.code == "idempotency_in_flight"
        # Another call takes the key over while this call is still at work.
        keys = tables.idempotency_keys
        conn.execute(sa.update(keys).values(expires_at=clock.now() - 1))
        assert idempotency._take(conn, call, "other") is None
        return Answer(201, {})

    assert code(once, engine, call, slow) == "idempotency_in_flight"


def test_images(site: Site) -> None:
    with transaction(site.engine) as conn:
        (image,) = images.every(conn)
        same = {
            key: getattr(image, key) for key in ("name", "version", "digest", "size_bytes", "url")
        }
        assert images.register(conn, site.act, **same).id == image.id
        other = {**same, "digest": f"sha256:{'b' * 64}"}
        assert code(images.register, conn, site.act, **other) == "image_exists"
        bad = {**same, "digest": "md5:1"}
        assert code(images.register, conn, site.act, **bad) == "digest_invalid"
        assert code(projects.create, conn, "p1", site.act) == "project_exists"


@pytest.mark.covers("I20")
@pytest.mark.parametrize(
    "statement",
    [
        sa.update(tables.history).values(reason="changed"),
        sa.update(tables.audit_log).values(reason="changed"),
        sa.update(tables.proofs).values(method="changed"),
        sa.delete(tables.history),
        sa.delete(tables.audit_log),
        sa.delete(tables.proofs),
        sa.text("INSERT OR REPLACE INTO state_history SELECT * FROM state_history LIMIT 1"),
        sa.text("INSERT OR REPLACE INTO audit_log SELECT * FROM audit_log LIMIT 1"),
        sa.text("INSERT OR REPLACE INTO wipe_proofs SELECT * FROM wipe_proofs LIMIT 1"),
    ],
    ids=str,
)
def test_logs_are_append_only(sold: Site, statement: Any) -> None:
    with pytest.raises(sa.exc.DatabaseError, match="append-only"), transaction(sold.engine) as conn:
        conn.execute(statement)


def test_outbox_is_relayed(sold: Site) -> None:
    with transaction(sold.engine) as conn:
        waiting = relay.pending_events(conn, 3)
        relay.mark_published(conn, [row.id for row in waiting])
        assert relay.pending_events(conn, 1)[0].id > waiting[-1].id


def test_generations(sold: Site) -> None:
    with transaction(sold.engine) as conn:
        node = nodes.get(conn, "n1")
        stale = {"expect_generation": node.generation - 1}
        advance = journal.advance
        assert code(advance, conn, tables.Node, "n1", "drain", sold.act, **stale) == (
            "generation_conflict"
        )
        assert code(advance, conn, tables.Node, "n1", "activate", sold.act) == "transition_refused"
        after = advance(conn, tables.Node, "n1", "drain", sold.act)
        assert after.generation == node.generation + 1
        assert journal.audit_rows(conn, subject_id="n1")


def test_retrying(engine: sa.Engine) -> None:
    tries: list[int] = []

    def work(conn: sa.Connection) -> int:
        tries.append(1)
        if len(tries) < 3:
            raise Problem("generation_conflict", expected="a", found="b", remedy="c")
        return len(tries)

    assert retrying(engine, work) == 3
    tries.clear()
    assert code(retrying, engine, work, attempts=2) == "generation_conflict"
    with reading(engine) as conn:
        assert clock.iso(clock.read(conn)) is not None


def test_of_proofs_of_one_millisecond_the_last_is_the_newest(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The database's clock has whole milliseconds with SQLite."""
    add = rows.add

    def at_once(conn: sa.Connection, kind: Any, values: dict[str, Any]) -> Any:
        return add(conn, kind, {**values, "created_at": 1000.0})

    monkeypatch.setattr(rows, "add", at_once)
    proof = {"disk": "eui.1", "method": "discard", "verified": True}
    with transaction(site.engine) as conn:
        nodes.create(conn, site.act, id="n1")
        for number in range(12):
            manifest = f"/var/lib/{number}.json"
            proofs.record_transition(conn, "n1", proof, site.act, manifest=manifest)
            assert proofs.manifest(conn, "n1", "eui.1") == manifest

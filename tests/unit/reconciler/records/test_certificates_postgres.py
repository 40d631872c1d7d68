"""Whose certificate is ending, as PostgreSQL answers it."""

from __future__ import annotations

import pytest
import sqlalchemy as sa

from reconciler.db import clock
from reconciler.db.engine import transaction
from reconciler.lifecycle import host
from reconciler.model.states import TaskKind
from reconciler.records import certificates, nodes, queue, tokens
from tests.unit.reconciler.conftest import Site
from tests.unit.reconciler.db import test_postgres

pytestmark = [pytest.mark.postgres, pytest.mark.covers("HOST-13")]
engine = test_postgres.engine
DAY = 86_400.0


def test_whose_certificate_is_ending(engine: sa.Engine, site: Site) -> None:
    with transaction(engine) as conn:
        for node_id in ("n1", "n2", "n3"):
            nodes.create(conn, site.act, id=node_id, address="10.0.2.15")
        for node_id in ("n1", "n2"):
            host.enrolled(conn, node_id, site.act, machine_id=node_id, host_key=node_id)
        for node_id, days in (("n1", 20), ("n1", 25), ("n2", 10), ("n3", 10)):
            tokens.record_certificate(
                conn,
                node_id,
                site.act,
                serial=str(days),
                public_key=node_id,
                certificate="as signed",
                principals=[node_id],
                valid_until=clock.read(conn) + days * DAY,
            )
    with transaction(engine) as conn:
        # n3 has not enrolled as far as its state says.
        assert host.certificates_ending(conn, 30 * DAY) == ["n2", "n1"]
        assert host.certificates_ending(conn, 15 * DAY) == ["n2"]
        queue.add(conn, queue.Enqueue(TaskKind.NODE_ENROL, "n2", "node", "n2"), site.act)
        assert host.certificates_ending(conn, 30 * DAY) == ["n1"]
        assert certificates.ends(conn, ["n1"])["n1"] > clock.read(conn) + 24 * DAY
        assert certificates.current(conn, "n1").serial == "25"

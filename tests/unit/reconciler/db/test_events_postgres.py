"""The outbox where transactions overlap: what is written first may be seen last."""

from __future__ import annotations

import pytest
import sqlalchemy as sa

from reconciler.db import journal
from reconciler.db.engine import transaction
from tests.unit.reconciler import relay
from tests.unit.reconciler.db import test_postgres

pytestmark = [pytest.mark.postgres, pytest.mark.covers("CTRL-8", "I3")]
engine = test_postgres.engine


def test_a_relay_misses_nothing_that_commits_late(engine: sa.Engine) -> None:
    taken: list[str] = []

    def deliver() -> None:
        with transaction(engine) as conn:
            pending = relay.pending_events(conn)
            relay.mark_published(conn, [event.id for event in pending])
        taken.extend(event.subject_id for event in pending)

    with transaction(engine) as slow:
        journal.emit(slow, "slot.available", "slot", "late", payload={})
        with transaction(engine) as conn:
            journal.emit(conn, "slot.reserved", "slot", "early", payload={})
        deliver()
    deliver()
    assert taken == ["early", "late"]
    deliver()
    assert taken == ["early", "late"], "each once, where nothing fails"

"""A discovery takes off sale what it speaks against, and the next one lets back what is well."""

from __future__ import annotations

from typing import Any

import pytest
import sqlalchemy as sa

from reconciler.db.engine import transaction
from reconciler.model.states import TaskKind, TaskState
from reconciler.records import leasing, nodes, queue, slots
from reconciler.settings import Settings
from reconciler.work.handler import Work
from reconciler.work.kinds import node
from tests.unit.reconciler.conftest import ADMIN, Site


@pytest.mark.covers("CTRL-3", "I16")
def test_off_sale_and_back_by_discoveries_alone(sold: Site) -> None:
    with transaction(sold.engine) as conn:
        mounted = sold.document(0)
        own = slots.of_node(conn, "n1")[0].nvme_identity
        (disk,) = (one for one in mounted["nvme"] if one["identity"] == own)
        disk["blockers"] = [{"code": "mounted", "detail": "/mnt"}]
        assert _discovered(conn, mounted) == ["disabled", "available"]
        assert _discovered(conn, sold.document(0)) == ["available", "available"]
        # Of another boot: only parity shows that the host still is what it was.
        rebooted = sold.document(0)
        rebooted["identity"]["boot_id"] = "another"
        assert _discovered(conn, rebooted) == ["disabled", "disabled"]


def _discovered(conn: sa.Connection, document: dict[str, Any]) -> list[str]:
    kind = TaskKind.SLICE_TOPOLOGY_DISCOVER
    queue.enqueue(conn, queue.Enqueue(kind, "n1", "node", "n1"), ADMIN)
    (task,) = leasing.lease(conn, "worker")
    work = Work(conn, task, nodes.get(conn, "n1"), {}, Settings())
    node.discover_succeeded(work, {"discovery": document})
    queue.finish(conn, task.id, task.lease_token, TaskState.SUCCEEDED, ADMIN)
    return [str(slot.status) for slot in slots.of_node(conn, "n1")]

"""Discovery: it closes slots that it contradicts, and a later discovery opens them again."""

from __future__ import annotations

from typing import Any

import pytest
import sqlalchemy as sa

from reconciler.db import schema as tables
from reconciler.db.engine import transaction
from reconciler.model.states import TaskKind, TaskState
from reconciler.records import leasing, nodes, queue, slots
from reconciler.settings import Settings
from reconciler.work.handler import Work
from reconciler.work.kinds import node
from tests.unit.reconciler.conftest import ADMIN, Site
from tests.unit.reconciler.whole_machines import Machines


@pytest.mark.covers("CTRL-3", "I16")
def test_off_sale_and_back_by_discoveries_alone(sold: Site) -> None:
    with transaction(sold.engine) as conn:
        mounted = sold.document(0)
        identity = slots.of_node(conn, "n1")[0].nvme_identity
        (disk,) = (disk for disk in mounted["nvme"] if disk["identity"] == identity)
        disk["blockers"] = [{"code": "mounted", "detail": "/mnt"}]
        assert _discovered(conn, mounted) == ["disabled", "available"]
        assert _discovered(conn, sold.document(0)) == ["available", "available"]
        # Of another boot: only parity shows that the host is unchanged.
        rebooted = sold.document(0)
        rebooted["identity"]["boot_id"] = "another"
        assert _discovered(conn, rebooted) == ["disabled", "disabled"]


def with_gpus(document: dict[str, Any], count: int) -> dict[str, Any]:
    """The report of a host that lists so many GPUs, and nothing against itself."""
    gpu = document["gpu"][0]
    more = [{**gpu, "address": f"0000:{0x80 + number:x}:00.0"} for number in range(count)]
    return {**document, "gpu": [*document["gpu"], *more][:count]}


@pytest.mark.covers("P1")
def test_a_host_that_lists_more_gpus_than_its_profile_has_sells_none(sold: Site) -> None:
    """An honest host reports that itself."""
    with transaction(sold.engine) as conn:
        assert _discovered(conn, with_gpus(sold.document(0), 64), 4) == ["disabled", "disabled"]
        fault = nodes.get(conn, "n1").health_detail
        assert fault["code"] == "gpu_count_mismatch"
        assert "64" in fault["reason"] and "4" in fault["reason"]
        assert _discovered(conn, sold.document(0), 4) == ["available", "available"]
        assert nodes.get(conn, "n1").health_detail == {}
        # A missing GPU degrades the node, and the others stay on sale.
        assert _discovered(conn, with_gpus(sold.document(0), 3), 4) == ["available", "available"]
        assert nodes.get(conn, "n1").health_detail["reason"] == "3 of 4 GPUs are present"
        # A profile without a number compares nothing.
        assert _discovered(conn, with_gpus(sold.document(0), 64)) == ["available", "available"]


@pytest.mark.covers("P1")
def test_no_tenant_pays_for_gpus_of_a_whole_machine_that_its_profile_has_not(sold: Site) -> None:
    machines = Machines(sold)
    machines.machine()
    with transaction(sold.engine) as conn:
        _discovered(conn, with_gpus(sold.document(1), 64), 4, node_id="m1")
        assert machines.reasons(conn)["m1"] == "node_degraded"
        # A fault of another kind hides that fault, and ends.
        healthy = {"health_state": "healthy", "health_detail": {}}
        conn.execute(sa.update(tables.nodes).where(tables.nodes.c.id == "m1").values(**healthy))
        assert machines.reasons(conn)["m1"] == "gpu_count_mismatch"
        _discovered(conn, sold.document(1), 4, node_id="m1")
        assert machines.launch(conn).gpu_count == 4


def _discovered(
    conn: sa.Connection, document: dict[str, Any], expected: int = 0, *, node_id: str = "n1"
) -> list[str]:
    kind = TaskKind.SLICE_TOPOLOGY_DISCOVER
    queue.enqueue(conn, queue.Enqueue(kind, node_id, "node", node_id), ADMIN)
    (task,) = leasing.lease(conn, "worker", kinds=[kind])
    profile = {"gpu": {"expected": expected}} if expected else {}
    work = Work(conn, task, nodes.get(conn, node_id), profile, Settings())
    node.discover_succeeded(work, {"discovery": document})
    queue.finish(conn, task.id, task.lease_token, TaskState.SUCCEEDED, ADMIN)
    return [str(slot.status) for slot in slots.of_node(conn, node_id)]

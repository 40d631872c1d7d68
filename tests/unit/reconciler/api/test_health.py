"""Health and metrics: correct also when a part of the site is missing."""

from __future__ import annotations

from pathlib import Path

import pytest
import sqlalchemy as sa
from fastapi.testclient import TestClient

from reconciler.api.app import create_app
from reconciler.db import leader
from reconciler.db import schema as tables
from reconciler.db.engine import open_engine, transaction
from reconciler.service import process
from reconciler.settings import Settings
from tests.unit.reconciler.api.stack import Stack


def test_ready_needs_a_schema(new: Stack, tmp_path: Path) -> None:
    client = new.client()
    assert client.get("http://test/healthz").json() == {"status": "ok"}
    assert client.get("http://test/readyz").json()["schema"]

    empty = Stack(Settings(state_dir=tmp_path), open_engine(f"sqlite:///{tmp_path / 'empty.db'}"))
    answer = empty.client().get("http://test/readyz")
    assert (answer.status_code, answer.json()["code"]) == (503, "schema_missing")
    empty.engine.dispose()


def test_ready_needs_this_version_of_the_schema(new: Stack) -> None:
    with transaction(new.engine) as conn:
        conn.exec_driver_sql("UPDATE alembic_version SET version_num = '0004'")
    answer = new.client().get("http://test/readyz")
    assert (answer.status_code, answer.json()["code"]) == (503, "schema_outdated")
    assert answer.json()["found"] == "0004"


@pytest.mark.covers("I22")
def test_a_site_is_ready_when_somebody_works_and_leads(new: Stack) -> None:
    app = create_app(new.settings, new.engine)
    app.state.needed = process.NEEDED
    client = TestClient(app, base_url="http://test")

    def readiness() -> tuple[int, str]:
        answer = client.get("/readyz")
        return answer.status_code, answer.json().get("code", "")

    assert readiness() == (503, "process_missing")
    with transaction(new.engine) as conn:
        leader.record_process(conn, "p1", ["worker", "loops"], host="h", pid=1, version="1")
    assert readiness() == (503, "leader_missing")
    with transaction(new.engine) as conn:
        leader.campaign(conn, leader.LOOPS, "p1", 3600)
    assert readiness() == (200, "")
    with transaction(new.engine) as conn:
        old = tables.service_processes.c.seen_at - leader.STALE_S
        conn.execute(sa.update(tables.service_processes).values(seen_at=old))
    assert readiness() == (503, "process_missing")
    assert client.get("/healthz").status_code == 200, "the process itself lives"


def test_numbers_are_for_admins_and_name_nobody(selling: Stack) -> None:
    assert selling.client().get("http://test/metrics").status_code == 401
    assert selling.client("member").get("http://test/metrics").status_code == 403
    admin = selling.client("admin")
    admin.get("admin/nodes/no-such-node-canary")
    admin.get("http://test/no/such/route-canary")
    answer = admin.get("http://test/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    lines = answer.text.splitlines()
    for line in (
        'gpuaas_slots{health_state="healthy",status="available"} 2.0',
        "gpuaas_leader 0.0",
        'gpuaas_service_processes{role="worker"} 0.0',
        "gpuaas_tasks_overdue 0.0",
    ):
        assert line in lines, line
    assert any(line.startswith("process_resident_memory_bytes ") for line in lines)
    # The site uses neither.
    assert not [line for line in lines if "gpuaas_netbox" in line or "gpuaas_maas" in line]
    counted = [line for line in lines if "seconds_count" in line]
    assert any('route="/admin/nodes/{node_id}",status="404"' in line for line in counted)
    # Neither request contents nor host addresses.
    assert "canary" not in answer.text
    assert "192.0.2.7" not in answer.text

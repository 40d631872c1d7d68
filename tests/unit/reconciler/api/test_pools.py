"""Pools through the API: for operators only, refused by name, listed with workers and leases."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
import sqlalchemy as sa

from reconciler.db import clock
from reconciler.db.engine import transaction
from reconciler.db.schema import pool_hosts
from reconciler.model.pools import PoolState
from reconciler.pools import leases, pools, workers
from tests.unit.reconciler.api.refusals import refused
from tests.unit.reconciler.api.stack import ACT, Stack
from tests.unit.reconciler.api.test_operator import local
from tests.unit.reconciler.pools import test_pools

__all__ = ["local"]

pytestmark = pytest.mark.covers("ORCH-1", "ORCH-3")

HOST: dict[str, Any] = {
    **test_pools.HOST,
    "models": ["digits"],
    "devices": [{"id": "GPU-0", "memory_bytes": 4 << 30, "memory_used_bytes": 1 << 30}],
}
POOL: dict[str, Any] = {"name": "a", "models": ["digits"], "devices": ["GPU-0"]}


def with_host(stack: Stack) -> None:
    with transaction(stack.engine) as conn:
        workers.report(conn, HOST, {})


def started(stack: Stack) -> str:
    """A pool that runs, with a worker."""
    with_host(stack)
    with transaction(stack.engine) as conn:
        pool = pools.start(conn, pools.NewPool(**POOL), ACT, most=1)
        workers.move(conn, pool, "begin", ACT)
        pool = pools.get(conn, pool.id)
        workers.add(conn, pool, "w1", host="control", boot_id="b", cgroup="")
        workers.report(conn, HOST, {"w1": (5 << 20, 2)})
    return pool.id


def test_a_pool_is_started_shown_and_ended(new: Stack) -> None:
    with_host(new)
    admin = new.client("admin", base="/")
    answer = admin.post("pools", json=POOL | {"reason": "try"})
    assert answer.status_code == 201, answer.text
    pool = answer.json()
    assert (pool["state"], pool["replicas"], pool["workers"]) == ("requested", 1, [])
    assert (pool["memory_mib"], pool["grace_s"], pool["kill_on_oom"]) == (2048, 30, False)
    assert admin.get("pools/a").json() == admin.get(f"pools/{pool['id']}").json() == pool
    (host,) = admin.get("pools/hosts").json()["hosts"]
    assert (host["name"], host["models"], host["devices"]) == (
        *("control", ["digits"]),
        HOST["devices"],
    )
    (lease,) = admin.get("leases").json()["items"]
    assert (lease["device"], lease["pool_id"], lease["until"]) == ("GPU-0", pool["id"], None)
    stopped = admin.post("pools/stop-all", json={"reason": "night"}).json()["items"]
    assert [each["state"] for each in stopped] == ["stopped"]
    assert admin.get("leases").json()["items"] == []
    assert admin.get("leases", params={"ended": True}).json()["items"][0]["until"]
    assert admin.get("pools/a").status_code == 404, "the name is free again"
    assert admin.get("pools", params={"state": "running"}).json()["items"] == []
    listed = [admin.get("pools", params={"live": live}).json()["items"] for live in (True, False)]
    assert [[each["id"] for each in items] for items in listed] == [[], [pool["id"]]]
    changes = admin.get(f"pools/{pool['id']}/history").json()["items"]
    assert [row["target"] for row in changes] == ["stopped", "requested"]
    assert admin.get("pools/a/history").status_code == 404
    rows = new.client("admin").get("admin/audit", params={"subject_id": pool["id"]}).json()
    assert [(row["action"], row["reason"]) for row in rows["items"]] == [
        ("pool.stopped", "night"),
        ("pool.started", "try"),
    ]


def test_workers_are_shown_with_their_memory(new: Stack) -> None:
    id = started(new)
    with transaction(new.engine) as conn:
        workers.report(conn, HOST | {"id": "gone"}, {})
        gone = sa.update(pool_hosts).where(pool_hosts.c.id == "gone")
        conn.execute(gone.values(seen_at=clock.now() - 60))
    admin = new.client("admin", base="/")
    pool = admin.get(f"pools/{id}").json()
    (worker,) = pool["workers"]
    assert (worker["memory_bytes"], worker["oom_kills"], worker["pid"]) == (5 << 20, 2, 0)
    assert (pool["memory_bytes"], pool["jobs"], worker["jobs"]) == (5 << 20, 0, 0)
    assert pool["gpus"] == [{**HOST["devices"][0], "above_percent": 0}]
    metrics = admin.get("metrics").text
    for line in (
        'gpu_orchestrator_worker_pools{state="starting"} 1.0',
        'gpu_orchestrator_worker_pool_memory_bytes{pool="a"} 5.24288e+06',
        'gpu_orchestrator_nvml_mem_util_pct{gpu="GPU-0",pool="a"} 25.0',
        "gpu_orchestrator_leases 1.0",
        "gpu_orchestrator_devices 1.0",
    ):
        assert f"{line}\n" in metrics, metrics
    for used, above in ((3480, 0), (3482, 85), (3687, 90)):
        full = [{"id": "GPU-0", "memory_bytes": 4 << 30, "memory_used_bytes": used << 20}]
        with transaction(new.engine) as conn:
            workers.report(conn, HOST | {"devices": full}, {})
        shown = admin.get(f"pools/{id}").json()["gpus"]
        assert shown == [{**full[0], "above_percent": above}]
    silent = sa.update(pool_hosts).where(pool_hosts.c.id == HOST["id"])
    with transaction(new.engine) as conn:
        conn.execute(silent.values(seen_at=clock.now() - 60))
    assert admin.get(f"pools/{id}").json()["gpus"] == [], "its host is silent"
    assert admin.post(f"pools/{id}/stop", json={}).json()["state"] == "draining"
    assert admin.post(f"pools/{id}/evict", json={}).json()["state"] == "stopping"
    assert "gpu_orchestrator_worker_pool_evictions_total 1.0\n" in admin.get("metrics").text
    assert 'gpu_orchestrator_worker_pools{state="failed"} 0.0\n' in admin.get("metrics").text
    with transaction(new.engine) as conn:
        workers.conclude(conn, pools.get(conn, id), ACT, PoolState.FAILED)
    assert 'gpu_orchestrator_worker_pools{state="failed"} 1.0\n' in admin.get("metrics").text


@pytest.mark.parametrize(
    ("changes", "status", "code"),
    [
        ({"replicas": 65}, 422, "request_invalid"),
        ({"memory_mib": 1}, 422, "request_invalid"),
        ({"memory_mib": True}, 422, "request_invalid"),
        ({"name": "../a"}, 422, "request_invalid"),
        ({"models": []}, 422, "request_invalid"),
        ({"models": ["os:system"]}, 422, "request_invalid"),
        ({"models": ["none"]}, 422, "model_unknown"),
        ({"devices": ["GPU-1"]}, 422, "device_unknown"),
        ({"memory_mib": 8193}, 422, "pool_memory_exceeded"),
        ({"host": "other"}, 409, "pool_host_missing"),
        ({"project_id": "none"}, 404, "project_not_found"),
        ({"command": "sh"}, 422, "request_invalid"),
    ],
)
def test_a_wrong_pool_is_refused_by_name(
    new: Stack, changes: dict[str, Any], status: int, code: str
) -> None:
    with_host(new)
    admin = new.client("admin", base="/")
    document = refused(new, lambda: admin.post("pools", json=POOL | changes))
    assert (document["status"], document["code"]) == (status, code)


def test_a_pool_that_is_not_there_is_refused_by_name(new: Stack) -> None:
    started(new)
    admin = new.client("admin", base="/")
    for ask in (
        lambda: admin.get("pools/none"),
        lambda: admin.get("pools/none/history"),
        lambda: admin.post("pools/none/stop", json={"reason": "night"}),
        lambda: admin.post("pools/none/evict", json={"reason": "it hangs"}),
        lambda: admin.post("pools/none/evict", json={"reason": "it burnt", "host_lost": True}),
        lambda: admin.post("pools/none/token", json={}),
    ):
        document = refused(new, ask)
        assert (document["status"], document["code"]) == (404, "pool_not_found")
        assert "none" in document["found"]


def test_the_site_has_no_more_pools_than_its_setting(new: Stack) -> None:
    started(new)
    new.settings = new.settings.model_copy(update={"gpu_pool_max_total": 1})
    admin = new.client("admin", base="/")
    second = POOL | {"name": "b", "devices": []}
    assert refused(new, lambda: admin.post("pools", json=second))["code"] == "pool_limit"


def test_members_have_no_pools(new: Stack) -> None:
    id = started(new)
    member = new.client("member", base="/")
    for path in ("pools", f"pools/{id}", f"pools/{id}/history", "pools/hosts", "leases"):
        assert member.get(path).status_code == 403
    for path in ("pools", f"pools/{id}/stop", f"pools/{id}/evict", "pools/stop-all"):
        assert refused(new, lambda path=path: member.post(path, json=POOL))["status"] == 403


def test_a_project_sees_its_own_pools_and_nothing_of_their_machine(new: Stack) -> None:
    with_host(new)
    with transaction(new.engine) as conn:
        wish = pools.NewPool(**POOL, project_id="demo")
        pool = pools.start(conn, wish, ACT.because("canary-reason"), most=9)
        workers.move(conn, pool, "begin", ACT)
        workers.add(conn, pools.get(conn, pool.id), "w1", host="control", boot_id="b", cgroup="")
        leases.enter(conn, "w1", pid=4711, start_ticks=1)
        leases.serve(conn, "w1", ["digits"], {})
        for name, project in (("b", "other"), ("c", None)):
            pools.start(conn, pools.NewPool(name, ["digits"], project_id=project), ACT, most=9)
    answer = new.client("member").get("projects/demo/pools")
    (mine,) = answer.json()["items"]
    assert (mine["name"], mine["target"], mine["workers"]) == ("a", "host", 1)
    for text in ("GPU-0", "4711", "canary", HOST["id"], HOST["name"]):
        assert text not in answer.text
    failure = {"code": "memory_exceeded", "expected": "a", "found": "93 % of the host"}
    with transaction(new.engine) as conn:
        pools.evict(conn, pool.id, ACT, failure)
    (mine,) = new.client("member").get("projects/demo/pools", params={"live": True}).json()["items"]
    assert (mine["state"], mine["failure_code"]) == ("stopping", "memory_exceeded")
    assert "of the host" not in str(mine)
    assert new.client("stranger").get("projects/demo/pools").status_code in (403, 404)


def test_operators_on_the_machine_need_no_token(new: Stack, local: httpx.Client) -> None:
    """Nor a body: `curl -X POST` alone ends a pool."""
    id = started(new)
    assert local.get("/pools").json()["items"][0]["id"] == id
    answer = local.post(f"/pools/{id}/stop")
    assert (answer.status_code, answer.json()["state"]) == (200, "draining"), answer.text
    assert local.get("/leases").json()["items"][0]["pool_id"] == id
    answer = local.post("/pools/stop-all")
    assert (answer.status_code, len(answer.json()["items"])) == (200, 1), answer.text
    answer = local.post(f"/pools/{id}/evict")
    assert (answer.status_code, answer.json()["state"]) == (200, "stopping"), answer.text

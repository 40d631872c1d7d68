"""Whole machines in the API: default shape, the tenant's view, the admin's operations."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from reconciler.db.engine import transaction
from reconciler.db.schema import Task
from reconciler.db.schema import nodes as node_table
from reconciler.lifecycle import baremetal, host, slices
from reconciler.model.states import NodeMode, TaskKind, TaskState
from reconciler.records import nodes, queue, reports, tokens
from reconciler.runs import contract
from reconciler.trust import ca
from reconciler.work import worker
from reconciler.work.handler import open_work
from reconciler.work.kinds import HANDLERS
from tests.unit.reconciler.api.stack import ACT, KEY, Stack, discovery
from tests.unit.reconciler.api.test_usage import priced
from tests.unit.reconciler.cli.conftest import Gpuaas, gpuaas

__all__ = ["gpuaas"]

PATH = "projects/demo/allocations"
ADMIN = "admin/nodes/metal"
# No capacity_shape: a whole machine is the default.
BODY = {"username": "tenant", "ssh_keys": [KEY], "hostname": "metal-1"}
NODE = {
    "id": "metal",
    "address": "192.0.2.9",
    "profile": "lab",
    "mode": "baremetal",
    "tenant_address": "203.0.113.9",
    "telemetry_url": "https://dash.example/metal",
}


@pytest.fixture
def metal(new: Stack) -> Stack:
    """A bare-metal machine that is enrolled and discovered."""
    assert new.client("admin").post("admin/nodes", json=NODE).status_code == 201
    with transaction(new.engine) as conn:
        assert nodes.get(conn, "metal").mode == NodeMode.BAREMETAL
        host.enrolled(conn, "metal", ACT, **discovery()["identity"])
        host.bootstrapped(conn, "metal", ACT, identity=discovery()["identity"])
        host.record_discovery(conn, "metal", discovery(), ACT)
    return new


def launch(stack: Stack, **changes: Any) -> Any:
    headers = {"Idempotency-Key": "k"}
    return stack.client("member").post(PATH, json=BODY | changes, headers=headers)


def let_in(stack: Stack, allocation_id: str) -> None:
    task = stack.lease()
    with transaction(stack.engine) as conn:
        slices.provision_started(conn, allocation_id, ACT)
        before = {"accounts": {"root": "1"}}
        baremetal.provision_succeeded(conn, allocation_id, ACT, baseline=before, task_id="t")
        queue.finish(conn, task.id, task.lease_token, TaskState.SUCCEEDED, ACT)


@pytest.mark.covers("CTRL-15", "CTRL-10")
def test_the_tenant_sees_its_own_address_and_nothing_of_the_machine(metal: Stack) -> None:
    answer = launch(metal)
    assert answer.status_code == 201, answer.text
    mine = answer.json()
    assert (mine["capacity_shape"], mine["gpu_count"]) == ("baremetal", 4)
    let_in(metal, mine["id"])
    shown = metal.client("member").get(f"{PATH}/{mine['id']}")
    assert shown.json()["connection"] == {
        "host": "203.0.113.9",
        "port": 22,
        "username": "tenant",
        "known_hosts": "",
    }
    assert shown.json()["telemetry_url"] == "https://dash.example/metal"
    for hidden in ("192.0.2.9", "5e0000000000a001", "LABNVME", "0000:"):
        assert hidden not in shown.text
    seen = metal.client("admin").get(f"admin/allocations/{mine['id']}").json()
    assert [claim["kind"] for claim in seen["claims"]] == ["node_exclusive"]
    assert [task["kind"] for task in seen["tasks"]] == ["baremetal.provision"]


def test_its_power_is_its_tenants(metal: Stack) -> None:
    """A task of ours would log in where the tenant is root."""
    mine = launch(metal).json()["id"]
    let_in(metal, mine)
    for action in ("stop", "start", "restart", "reset"):
        answer = metal.client("member").post(f"{PATH}/{mine}/power", json={"action": action})
        assert answer.json()["code"] == "power_of_whole_machine", action


@pytest.mark.covers("CTRL-15", "ORCH-1")
def test_a_machine_runs_the_workers_of_its_pool_until_its_release(
    metal: Stack, tmp_path: Path
) -> None:
    # Its name is in the networks of the site: the host itself reaches the API, unlike a guest.
    metal.settings = metal.settings.model_copy(
        update={"public_url": "https://10.1.2.3", "state_dir": tmp_path}
    )
    admin = metal.client("admin", base="/")
    wish = {"models": ["m"], "project_id": "demo", "target": "allocation", "replicas": 2}
    for name, memory in (("g", 256), ("large", 1 << 20)):
        made = admin.post("pools", json=wish | {"name": name, "memory_mib": memory})
        assert made.status_code == 201, made.text
    assert launch(metal, worker_pool="large").json()["code"] == "pool_memory_exceeded"
    mine = launch(metal, worker_pool="g").json()
    pool = admin.get("pools/g").json()
    assert (pool["allocation_id"], pool["image"], pool["devices"]) == (mine["id"], "", [])

    task = metal.lease()
    handler = HANDLERS[TaskKind.BAREMETAL_PROVISION]
    run_id = queue.run_id(task)
    spec = worker.prepare(metal.engine, metal.settings, handler, task, run_id)
    contract.check_vars("provision_baremetal", spec.variables)
    workers = spec.variables["slice_workers"]
    assert workers["replicas"] == 2 and "--api https://10.1.2.3 jobs worker" in workers["unit"]
    metal.secrets["workers"] = workers["token"]
    body = {"host": "another", "pid": 7, "models": ["m"]}
    assert metal.client("workers").post("worker/register", json=body).status_code == 200
    (shown,) = admin.get("pools/g").json()["workers"]
    assert shown["host"] == mine["id"], "it is not believed where it is"

    with transaction(metal.engine) as conn:
        baremetal.provision_succeeded(conn, mine["id"], ACT, baseline={}, task_id="t")
        queue.finish(conn, task.id, task.lease_token, TaskState.SUCCEEDED, ACT)
    assert metal.client("member").post(f"{PATH}/{mine['id']}/release").status_code == 200
    assert metal.client("workers").post("worker/register", json=body).status_code == 401
    assert admin.get("pools/g").json()["allocation_id"] is None


def test_the_catalogue_counts_free_machines_by_sku_and_region(metal: Stack) -> None:
    with transaction(metal.engine) as conn:
        conn.execute(sa.update(node_table).values(region="north"))
    # A region with only whole machines counts as open, not as planned.
    metal.settings = metal.settings.model_copy(update={"planned_regions": "north"})
    member = metal.client("member")

    def counts() -> Any:
        return member.get("catalog/machines").json()["counts"]

    def regions() -> Any:
        names = ("name", "enabled", "planned")
        rows = member.get("catalog").json()["regions"]
        return [tuple(row[name] for name in names) for row in rows]

    assert counts() == [{"sku": "lab", "region": "north", "free": 1}]
    assert regions() == [("north", True, False)]
    assert launch(metal).status_code == 201
    assert counts() == [{"sku": "lab", "region": "north", "free": 0}]
    assert regions() == [("north", False, False)]


@pytest.mark.covers("CTRL-14")
def test_a_whole_machine_has_an_sku_and_a_price_of_its_own(metal: Stack, tmp_path: Path) -> None:
    metal.settings = priced(metal, tmp_path, "2.49", machine_gpu_hour_price="1.99")
    member = metal.client("member")
    offers = member.get("catalog").json()["skus"]
    names = ("capacity_shape", "name", "gpu_hour_price")
    assert [tuple(offer[name] for name in names) for offer in offers] == [
        ("gpu_slice", "lab-edu-slice", "2.49"),
        ("baremetal", "lab", "1.99"),
    ]
    refused = launch(metal, sku="lab-edu-slice")
    assert (refused.status_code, refused.json()["code"]) == (422, "sku_unknown")
    let_in(metal, launch(metal, sku="lab").json()["id"])
    usage = member.get("projects/demo/usage").json()
    for row in (*usage["items"], *usage["totals"]):
        assert (row["sku"], row["price"]) == ("lab", "1.99")
        assert row["cost"] is not None
    with transaction(metal.engine) as conn:
        profile = open_work(conn, metal.settings, queue.every(conn)[0]).profile
    assert not {name for name in profile if "price" in name}, "a host needs no price"


def test_with_a_gateway_the_machine_is_behind_it(metal: Stack) -> None:
    metal.settings = metal.settings.model_copy(update={"member_address": "gate.example:2222"})
    ca.open_trust(metal.settings.state_dir)
    with transaction(metal.engine) as conn:
        tokens.record_certificate(
            conn, "metal", ACT, certificate="x", public_key=f"{KEY} host", principals=["metal"],
            serial="1", valid_until=4e9,
        )  # fmt: skip
    mine = launch(metal).json()["id"]
    let_in(metal, mine)
    connection = metal.client("member").get(f"{PATH}/{mine}").json()["connection"]
    assert (connection["host"], connection["port"]) == ("gate.example", 2222)
    gateway, machine = connection["known_hosts"].splitlines()
    assert gateway.startswith("@cert-authority ")
    assert machine == f"{mine} {' '.join(KEY.split()[:2])}"
    assert "203.0.113.9" not in str(connection) and "metal" not in str(connection)


@pytest.mark.parametrize(
    ("wish", "code"),
    [
        ({"image": "ubuntu"}, "request_invalid"),
        ({"gpu_count": 1}, "request_invalid"),
        ({"region": "elsewhere"}, "no_capacity"),
    ],
)
def test_wishes_that_a_whole_machine_does_not_grant(
    metal: Stack, wish: dict[str, Any], code: str
) -> None:
    answer = launch(metal, **wish)
    assert answer.json()["code"] == code, answer.text
    assert "metal" not in str(answer.json().get("explanation"))


def test_a_launch_reads_no_report_of_a_machine_in_use(
    metal: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A refused launch asks about every machine of the site, and counts nowhere."""
    assert launch(metal).status_code == 201

    def read(*_: Any) -> None:
        raise AssertionError("a report of a machine that is claimed")

    monkeypatch.setattr(reports, "latest_discovery", read)
    headers = {"Idempotency-Key": "another"}
    answer = metal.client("member").post(PATH, json=BODY, headers=headers)
    assert (answer.status_code, answer.json()["code"]) == (409, "no_capacity"), answer.text


@pytest.mark.covers("CTRL-15", "CTRL-7")
def test_force_release_and_cleaning(metal: Stack) -> None:
    admin, mine = metal.client("admin"), launch(metal).json()
    let_in(metal, mine["id"])
    at = f"admin/allocations/{mine['id']}"
    refused = admin.post(
        f"{at}/force-cleanup",
        json={"runtime_verified_absent": True, "reason": "x"},
        headers={"Idempotency-Key": "c"},
    )
    assert (refused.status_code, refused.json()["code"]) == (409, "allocation_baremetal")
    assert admin.post(f"{at}/verify-absent").json()["code"] == "allocation_baremetal"
    assert admin.post(f"{ADMIN}/clean-machine").json()["code"] == "machine_clean"
    with transaction(metal.engine) as conn:
        host.lost(conn, "metal", ACT)
    ended = admin.post(f"{at}/force-release", json={"reason": "the host is gone"})
    assert ended.json()["state"] == "released"
    with transaction(metal.engine) as conn:
        host.regained(conn, "metal", ACT)
    assert admin.get(ADMIN).json()["health_detail"]["step"] == "force_release"
    converted = admin.post(f"{ADMIN}/conversion", json={"to": "slice"})
    assert (converted.status_code, converted.json()["code"]) == (409, "machine_not_clean")
    task = admin.post(f"{ADMIN}/clean-machine")
    assert (task.status_code, task.json()["kind"]) == (202, "baremetal.release")
    assert admin.post(f"{ADMIN}/accept-drift", json={"reason": "x"}).json()["code"] == "no_drift"


@pytest.mark.parametrize("wrong", ["a b", "-x", "203.0.113.9\n", "{{ x }}"])
def test_a_tenants_address_is_an_address(metal: Stack, wrong: str) -> None:
    answer = metal.client("admin").patch(ADMIN, json={"tenant_address": wrong})
    assert answer.json()["code"] == "request_invalid"


def fail_release(stack: Stack, mine: str, error: dict[str, str]) -> None:
    """The run of a release fails while it wipes."""
    task = stack.lease()
    with transaction(stack.engine) as conn:
        fence = nodes.get(conn, "metal").fence
        assert baremetal.release_failed(conn, mine, ACT, fence=fence, step="wipe", error=error)
        queue.finish(conn, task.id, task.lease_token, TaskState.FAILED, ACT)


@pytest.mark.covers("CTRL-15", "I21")
def test_a_release_that_failed_is_news_to_who_would_force_it(metal: Stack) -> None:
    mine, admin = launch(metal).json()["id"], metal.client("admin")
    let_in(metal, mine)
    metal.client("member").post(f"{PATH}/{mine}/release")
    at, error = f"admin/allocations/{mine}", {"code": "disk_in_use"}
    before = admin.get(at).headers["ETag"]
    fail_release(metal, mine, error)
    shown = admin.get(at).json()
    assert (shown["state"], shown["error"]) == ("releasing", error)
    stale = admin.post(
        f"{at}/force-release", json={"reason": "it hangs"}, headers={"If-Match": before}
    )
    assert (stale.status_code, stale.json()["code"]) == (412, "precondition_failed")


@pytest.mark.covers("CTRL-15", "CTRL-7")
def test_a_failed_release_of_a_machine_names_the_command_that_cleans_it(
    metal: Stack, gpuaas: Gpuaas, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = launch(metal).json()["id"]
    let_in(metal, mine)
    error = {"code": "disk_in_use"}
    monkeypatch.setattr("time.sleep", lambda _seconds: fail_release(metal, mine, error))
    gpuaas.at(metal, "member")("release", mine, "--project", "demo", "--yes", "-o", "json")
    document = json.loads(gpuaas.err.partition("\n")[2])
    assert (gpuaas.status, document["code"]) == (1, "disk_in_use")
    assert "`gpuaas nodes clean-machine NODE`" in document["remedy"]


@pytest.mark.covers("CTRL-15")
def test_drift_is_accepted_as_it_was_read(metal: Stack) -> None:
    admin = metal.client("admin")
    _leaves(metal, "ours")
    seen = admin.get(ADMIN)
    _leaves(metal, "a_key_for_root")
    stale = {"json": {"reason": "it is ours"}, "headers": {"If-Match": seen.headers["ETag"]}}
    answer = admin.post(f"{ADMIN}/accept-drift", **stale)
    assert (answer.status_code, answer.json()["code"]) == (412, "precondition_failed")
    now = admin.get(ADMIN)
    assert now.json()["health_detail"]["drift"] == [{"access": True, "what": "a_key_for_root"}]
    fresh = {**stale, "headers": {"If-Match": now.headers["ETag"]}}
    assert admin.post(f"{ADMIN}/accept-drift", **fresh).status_code == 200


def _leaves(stack: Stack, what: str) -> None:
    """A tenant comes, goes, and leaves a difference."""
    with transaction(stack.engine) as conn:
        host.record_discovery(conn, "metal", discovery(), ACT)
    if stack.client("admin").get(ADMIN).json()["health_detail"]:
        stack.client("admin").post(f"{ADMIN}/accept-drift", json={"reason": "it is ours"})
    member, headers = stack.client("member"), {"Idempotency-Key": what}
    mine = member.post(PATH, json=BODY, headers=headers).json()["id"]
    let_in(stack, mine)
    assert member.post(f"{PATH}/{mine}/release").status_code == 200
    task = stack.lease()
    while task.kind != "baremetal.release":
        _finished(stack, task)
        task = stack.lease()
    absence = {"absent": True, "checks": {}}
    drift = [{"access": True, "what": what}]
    evidence = {"absence": absence, "proofs": {}, "drift": drift, "compared": True}
    with transaction(stack.engine) as conn:
        fence = nodes.get(conn, "metal").fence
        assert baremetal.release_succeeded(conn, mine, ACT, fence=fence, evidence=evidence)
    _finished(stack, task)


def _finished(stack: Stack, task: Task) -> None:
    with transaction(stack.engine) as conn:
        queue.finish(conn, task.id, task.lease_token, TaskState.SUCCEEDED, ACT)

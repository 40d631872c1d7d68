"""Launches with a worker pool: names open to a member, and refusals before any claim."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from reconciler.db.engine import transaction
from reconciler.lifecycle import guest_pool, host, restore
from reconciler.pools import remote
from reconciler.records import reports
from tests.unit.reconciler.api.refusals import kept, refused
from tests.unit.reconciler.api.stack import ACT, IMAGE, NODE, Stack, bundle
from tests.unit.reconciler.api.test_launches import PATH, activate, launch
from tests.unit.reconciler.service.service import until
from tests.unit.reconciler.silent_names import NAME, silent_name

pytestmark = pytest.mark.covers("ORCH-1", "ORCH-3")

KIT = IMAGE | {"version": "2", "runtime": [guest_pool.KIT]}
POOL: dict[str, Any] = {
    **{"name": "g", "models": ["digits"], "project_id": "demo", "target": "allocation"},
    "memory_mib": 256,
}


@pytest.fixture
def ready(selling: Stack) -> Stack:
    """A pool for slices, an image with the program, and an API that guests reach."""
    configured(selling, "https://8.8.8.8")
    admin = selling.client("admin")
    assert admin.post("admin/images", json=KIT).status_code == 201
    assert selling.client("admin", base="/").post("pools", json=POOL).status_code == 201
    return selling


def configured(stack: Stack, url: str, **values: Any) -> None:
    stack.settings = stack.settings.model_copy(update={"public_url": url, **values})


def with_pool(stack: Stack, key: str = "k", **changes: Any) -> Any:
    return launch(stack, key, **({"worker_pool": "g", "image_version": "2"} | changes))


def test_a_member_launches_a_slice_with_its_projects_pool(ready: Stack) -> None:
    answer = with_pool(ready)
    assert answer.status_code == 201, answer.text
    pool = ready.client("admin", base="/").get("pools/g").json()
    assert pool["allocation_id"] == answer.json()["id"]
    assert (pool["state"], pool["host_id"], pool["memory_mib"]) == ("running", "allocation", 256)
    assert (pool["image"], pool["image_digest"]) == ("ubuntu 2", IMAGE["digest"])
    addresses = {bundle(index)["gpu_pci_address"] for index in (1, 3)}
    assert len(pool["devices"]) == 1 and set(pool["devices"]) <= addresses
    assert ready.client("member", base="/").get("pools/g").status_code == 403
    rows = ready.client("admin").get("admin/audit", params={"subject_id": pool["id"]}).json()
    attached = next(row for row in rows["items"] if row["action"] == "pool.attached")
    assert attached["detail"]["image_digest"] == IMAGE["digest"]
    assert {row["project_id"] for row in rows["items"]} == {"demo"}
    again = refused(ready, lambda: with_pool(ready, "l"))
    assert (again["status"], again["code"]) == (409, "pool_in_use")
    activate(ready, answer.json()["id"])
    assert ready.client("member").post(f"{PATH}/{answer.json()['id']}/release").status_code == 200
    pool = ready.client("admin", base="/").get("pools/g").json()
    assert (pool["allocation_id"], pool["image"], pool["devices"]) == (None, "", [])


@pytest.mark.parametrize(
    ("url", "values"),
    [
        ("http://8.8.8.8:8080", {}),
        ("https://127.0.0.1", {}),
        ("https://localhost", {}),
        ("https://10.1.2.3", {}),
        ("https://192.0.2.7", {}),
        ("https://[2001:db8::1]", {}),
        ("https://8.8.8.8/$(reboot)", {}),
        ("https://8.8.8.8/%i", {}),
        ("https://gpu.example", {"public_address": "172.16.0.1"}),
        ("", {"listen": "0.0.0.0:8080"}),
    ],
)
def test_a_guest_must_reach_the_api(ready: Stack, url: str, values: dict[str, Any]) -> None:
    configured(ready, url, **values)
    answer = refused(ready, lambda: with_pool(ready))
    assert (answer["status"], answer["code"]) == (409, "pool_unreachable")
    assert "GPUAAS_PUBLIC_URL" in answer["remedy"]


def test_a_name_and_an_allowed_network_may_lead_to_the_api(
    ready: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    configured(ready, "https://gpu.example")
    addresses = ["10.30.0.9", "10.99.0.1"]  # The lab's profile allows the first.
    monkeypatch.setattr(
        *(socket, "getaddrinfo"),
        lambda *_: [(2, 1, 6, "", (address, 0)) for address in addresses],
    )
    assert "10.99.0.1" in refused(ready, lambda: with_pool(ready))["found"]
    addresses.pop()
    answer = refused(ready, lambda: with_pool(ready))
    assert (answer["code"], "nodes" in answer) == ("networks_not_applied", False)
    networks = {"allowed_networks": ["10.30.0.0/24"], "denied_networks": []}
    with transaction(ready.engine) as conn:
        latest = reports.latest_parity(conn, NODE)
        assert latest is not None
        host.record_parity(conn, NODE, latest.document | {"networks": networks}, ACT)
    assert with_pool(ready).status_code == 201

    def unknown(*_: object) -> Any:
        raise socket.gaierror("no such name")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    assert refused(ready, lambda: with_pool(ready, "l"))["code"] == "pool_unreachable"


def test_a_name_of_the_api_that_hangs_is_refused(
    ready: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guest_pool, "_LOOKUP_S", 0.2)
    configured(ready, f"https://{NAME}")
    with silent_name() as lookups:
        assert refused(ready, lambda: with_pool(ready))["code"] == "pool_unreachable"
        # Its thread may begin later than the limit.
        until(lambda: lookups.begun)
        assert (lookups.begun, lookups.ended) == (1, False)


def test_the_api_on_the_slices_own_machine_is_beyond_its_guests(ready: Stack) -> None:
    admin = ready.client("admin")
    assert admin.patch(f"admin/nodes/{NODE}", json={"address": "8.8.8.8"}).status_code == 200
    assert "8.8.8.8" in refused(ready, lambda: with_pool(ready))["found"]


def test_what_a_launch_may_not_have(ready: Stack) -> None:
    def code(**changes: Any) -> str:
        return str(refused(ready, lambda: with_pool(ready, **changes))["code"])

    assert code(image_version="1") == "image_runtime_missing"
    assert code(worker_pool="unknown") == "pool_not_found"
    admin = ready.client("admin", base="/")
    for name, changes in {
        "theirs": {"project_id": "other"},
        "large": {"memory_mib": 1 << 20},
        "away": {"target": "remote", "memory_mib": 2048},
        "old": {},
    }.items():
        made = admin.post("pools", json=POOL | {"name": name} | changes)
        assert made.status_code == 201, made.text
        if name == "theirs":
            assert code(worker_pool=made.json()["id"]) == "pool_not_found"
    assert code(worker_pool="theirs") == "pool_not_found", "as if there were none"
    assert code(worker_pool="large") == "pool_memory_exceeded"
    assert code(worker_pool="away") == "pool_not_for_slices"
    admin.post("pools/old/stop", json={})
    assert code(worker_pool="old") == "pool_ended"


@pytest.mark.parametrize("field", ["host", "devices", "kill_on_oom", "project_id"])
def test_a_pool_for_slices_refuses_what_has_no_effect(new: Stack, field: str) -> None:
    value = {"host": "h", "devices": ["GPU-0"], "kill_on_oom": True, "project_id": None}[field]
    admin = new.client("admin", base="/")
    answer = refused(new, lambda: admin.post("pools", json=POOL | {field: value}))
    assert (answer["status"], answer["code"]) == (422, "request_invalid")


def test_the_token_of_a_guest_opens_the_workers_routes_and_ends_with_a_restore(
    ready: Stack,
) -> None:
    allocation_id = with_pool(ready).json()["id"]
    secret = f"{remote.PREFIX}{'s' * 43}"
    with transaction(ready.engine) as conn:
        guest_pool.mint(conn, allocation_id, secret, ACT)
    ready.secrets["guest"] = secret
    guest = ready.client("guest")
    body = {"host": "another", "pid": 7, "models": ["digits"]}
    worker = guest.post("worker/register", json=body)
    assert worker.status_code == 200, worker.text
    (shown,) = ready.client("admin", base="/").get("pools/g").json()["workers"]
    assert (shown["host"], shown["pid"]) == (allocation_id, 7)
    before = kept(ready)
    for path in (PATH, f"{PATH}/{allocation_id}", "projects/demo/jobs", "images", "admin/nodes"):
        assert guest.get(path).status_code == 401, path
    assert ready.client("guest", base="/").get("pools").status_code == 401
    admin = ready.client("admin", base="/")
    assert admin.post("pools/g/token", json={}).json()["code"] == "pool_without_token"
    assert kept(ready) == before
    with transaction(ready.engine) as conn:
        restore.doubt(conn, ACT)
    assert guest.post("worker/register", json=body).status_code == 401

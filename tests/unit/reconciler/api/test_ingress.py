"""Public ingress through the API: every wrong request is refused by name and changes nothing."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from reconciler.db.engine import transaction
from reconciler.model.states import TaskKind
from reconciler.records import queue
from reconciler.settings import Settings
from tests.unit.reconciler.api.refusals import refused
from tests.unit.reconciler.api.stack import Stack
from tests.unit.reconciler.api.test_baremetal import launch as launch_metal
from tests.unit.reconciler.api.test_baremetal import let_in, metal
from tests.unit.reconciler.api.test_launches import activate, launch

pytestmark = pytest.mark.covers("SLICE-9")
__all__ = ["metal"]

ADDRESS, OTHER, MANAGED = "203.0.113.10", "203.0.113.11", "192.0.2.7"
SITE = f"{ADDRESS}, {OTHER},{MANAGED}"


def soon(**life: float) -> str:
    return (datetime.now(UTC) + timedelta(**life)).isoformat()


def body(**changes: Any) -> dict[str, Any]:
    return {
        "public_address": ADDRESS,
        "public_port": 443,
        "guest_port": 8443,
        "sources": ["198.51.100.0/24"],
        "expires_at": soon(hours=1),
        **changes,
    }


def path(allocation: str, project: str = "demo") -> str:
    return f"projects/{project}/allocations/{allocation}/ingress"


def add(
    stack: Stack, allocation: str, *, who: str = "member", key: str = "r", project: str = "demo",
    **changes: Any,
) -> Any:  # fmt: skip
    client = stack.client(who)
    headers = {"Idempotency-Key": key}
    return client.post(path(allocation, project), json=body(**changes), headers=headers)


def with_addresses(stack: Stack, text: str = SITE) -> Stack:
    stack.settings = stack.settings.model_copy(update={"ingress_addresses": text})
    return stack


@pytest.fixture
def site(selling: Stack) -> Stack:
    return with_addresses(selling)


@pytest.fixture
def slice_id(site: Stack) -> str:
    mine = str(launch(site).json()["id"])
    activate(site, mine)
    return mine


def test_a_rule_is_requested_shown_and_removed(site: Stack, slice_id: str) -> None:
    sources = ["198.51.100.128/25", "198.51.100.0/25", "192.0.2.1"]
    answer = add(site, slice_id, sources=sources, reason="a demo")
    assert answer.status_code == 201, answer.text
    rule = answer.json()
    assert (rule["state"], rule["reason"], rule["failure_code"]) == ("requested", "a demo", "")
    assert rule["sources"] == ["192.0.2.1/32", "198.51.100.0/24"], "separate, as the host needs it"
    member = site.client("member")
    assert member.get(path(slice_id)).json()["items"] == [rule]
    shown = member.get(f"{path(slice_id)}/{rule['id']}")
    assert shown.json() == rule
    (task,) = [t for t in _tasks(site) if t.kind == TaskKind.SLICE_INGRESS_APPLY]
    assert (task.id, task.allocation_id) == (rule["task_id"], slice_id)
    stale = member.delete(f"{path(slice_id)}/{rule['id']}", headers={"If-Match": '"7"'})
    assert stale.json()["code"] == "precondition_failed"
    gone = member.delete(f"{path(slice_id)}/{rule['id']}", headers={"If-Match": '"0"'})
    assert (gone.status_code, gone.json()["state"]) == (200, "removed"), gone.text
    again = member.delete(f"{path(slice_id)}/{rule['id']}")
    assert (again.status_code, again.json()["state"]) == (200, "removed")
    assert add(site, slice_id, key="next").status_code == 201, "its port is free"


def test_no_host_takes_the_address_of_a_rule(site: Stack, slice_id: str) -> None:
    rule = add(site, slice_id).json()
    admin = site.client("admin")
    (node,) = admin.get("admin/nodes").json()["items"]

    def move() -> Any:
        return admin.patch(f"admin/nodes/{node['id']}", json={"address": ADDRESS})

    def create() -> Any:
        return admin.post("admin/nodes", json={**new, "address": ADDRESS})

    new = {"id": "gpu-99", "profile": node["profile"], "mode": "slice"}
    for act in (move, create):
        assert refused(site, act)["code"] == "ingress_address_in_use"
    site.client("member").delete(f"{path(slice_id)}/{rule['id']}")
    assert move().status_code == 200, move().text


def _tasks(stack: Stack) -> list[Any]:
    with transaction(stack.engine) as conn:
        return queue.every(conn)


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"public_address": "203.0.113.99"}, "ingress_address_unknown"),
        ({"public_address": MANAGED}, "ingress_address_reserved"),
        ({"expires_at": soon(hours=-1)}, "ingress_expiry_invalid"),
        ({"expires_at": soon(days=91)}, "ingress_expiry_invalid"),
        ({"expires_at": "9999-12-31T23:59:59Z"}, "ingress_expiry_invalid"),
        ({"expires_at": "2030-01-01T00:00:00"}, "request_invalid"),
        ({"public_port": 0}, "request_invalid"),
        ({"public_port": 65_536}, "request_invalid"),
        ({"guest_port": 0}, "request_invalid"),
        ({"guest_port": True}, "request_invalid"),
        ({"guest_port": "22"}, "request_invalid"),
        ({"protocol": "udp"}, "request_invalid"),
        ({"protocol": "icmp"}, "request_invalid"),
        ({"sources": []}, "request_invalid"),
        ({"sources": ["198.51.100.7/24"]}, "request_invalid"),
        ({"sources": ["anywhere"]}, "request_invalid"),
        ({"sources": ["2001:db8::/32"]}, "request_invalid"),
        ({"sources": ["0.0.0.0/0 } accept #"]}, "request_invalid"),
        ({"sources": ["300.0.0.0/8"]}, "request_invalid"),
        ({"sources": [f"198.51.{n}.0/24" for n in range(33)]}, "request_invalid"),
        ({"public_address": "2001:db8::1"}, "request_invalid"),
        ({"public_address": "203.0.113.010"}, "request_invalid"),
        ({"slots": []}, "request_invalid"),
    ],
)
def test_bad_input_is_refused_by_name(
    site: Stack, slice_id: str, changes: dict[str, Any], code: str
) -> None:
    document = refused(site, lambda: add(site, slice_id, **changes))
    assert document["code"] == code
    if code == "request_invalid":
        assert next(iter(changes)) in document["found"]


def test_a_port_in_use_is_refused(site: Stack, slice_id: str) -> None:
    assert add(site, slice_id).status_code == 201
    taken = refused(site, lambda: add(site, slice_id, key="r2", guest_port=1))
    assert taken["code"] == "ingress_port_in_use"
    assert add(site, slice_id, key="r3", public_port=444).status_code == 201
    assert add(site, slice_id, key="r4", public_address=OTHER).status_code == 201
    for number in range(13):
        assert add(site, slice_id, key=f"n{number}", public_port=1000 + number).status_code == 201
    assert refused(site, lambda: add(site, slice_id, key="r5", public_port=9))["code"] == (
        "ingress_limit"
    )


def test_another_projects_allocation_is_not_found(site: Stack, slice_id: str) -> None:
    rule = add(site, slice_id).json()["id"]
    ask = [
        lambda: add(site, slice_id, who="stranger", project="other", key="s"),
        lambda: site.client("stranger").get(path(slice_id, "other")),
        lambda: site.client("stranger").get(f"{path(slice_id, 'other')}/{rule}"),
        lambda: site.client("stranger").delete(f"{path(slice_id, 'other')}/{rule}"),
    ]
    for each in ask:
        assert refused(site, each)["code"] == "allocation_not_found"
    second = str(launch(site, key="second").json()["id"])
    wrong = f"{path(second)}/{rule}"
    document = refused(site, lambda: site.client("member").delete(wrong))
    assert document["code"] == "ingress_rule_not_found", "of the same project"
    assert site.client("member").get(path(second)).json()["items"] == [], "each has its own"
    waiting = refused(site, lambda: add(site, second, key="w", public_port=9))
    assert waiting["code"] == "allocation_not_active"


def test_a_whole_machine_has_no_ingress(metal: Stack) -> None:
    mine = str(launch_metal(metal).json()["id"])
    let_in(metal, mine)
    with_addresses(metal)
    assert refused(metal, lambda: add(metal, mine))["code"] == "ingress_needs_slice"


def test_a_site_without_addresses_has_no_ingress(site: Stack, slice_id: str) -> None:
    with_addresses(site, "")
    assert refused(site, lambda: add(site, slice_id))["code"] == "ingress_off"


@pytest.mark.parametrize("text", ["127.0.0.1", "eth0", "203.0.113.0/24", "2001:db8::1", "0.0.0.0"])
def test_the_setting_takes_addresses_only(text: str) -> None:
    with pytest.raises(ValueError, match="ingress_addresses"):
        Settings(ingress_addresses=text)

"""Answers to project members: no device, disk or address of a host in any of them."""

from __future__ import annotations

import json
import re
from dataclasses import fields
from functools import cache
from typing import Any

import httpx
import pytest
import sqlalchemy as sa

from reconciler.db import schema as tables
from reconciler.db.engine import transaction
from reconciler.db.schema import nodes, slots
from reconciler.lifecycle import apps, host, ingress, power, slices
from reconciler.model.bundle import Bundle
from reconciler.model.states import TaskKind, TaskState
from reconciler.records import queue
from tests.unit.reconciler.api.conformity import operations, roles
from tests.unit.reconciler.api.stack import ACT, IMAGE, KEY, NODE, Stack, discovery
from tests.unit.reconciler.api.test_ingress import body as ingress_body
from tests.unit.reconciler.api.test_ingress import with_addresses
from tests.unit.reconciler.api.test_jobs import BODY as JOB
from tests.unit.reconciler.api.test_jobs import bury, with_model
from tests.unit.reconciler.api.test_launches import BODY, PATH, activate, launch

PLANTED = {
    "address": "canary-transport.invalid",
    "name": "canary-hostname",
    "machine_id": "canary-machine-id",
    "host_key": "ssh-ed25519 canary-host-key",
    "telemetry_url": "https://canary-telemetry.invalid",
    "state_reason": "canary-reason 0000:ca:fe.0",
}
BMC = "canary-bmc.invalid"
IDENTITIES = ("id", "boot_id", "install_id")
ERROR = {
    "code": "readiness_failed",
    "expected": "canary-expected on 0000:ca:fe.1",
    "found": f"canary-found /dev/disk/by-id/nvme-eui.canary {BMC}",
    "remedy": f"canary-remedy on {NODE}",
}


def canaries(stack: Stack) -> set[str]:
    """Every text of the node and its slots, and the canaries planted in stored texts."""
    with transaction(stack.engine) as conn:
        report = {"bmc": {"address": BMC}, **discovery()}
        host.record_discovery(conn, NODE, report, ACT)
        conn.execute(sa.update(nodes).where(nodes.c.id == NODE).values(**PLANTED))
        node = conn.execute(sa.select(nodes).where(nodes.c.id == NODE)).mappings().one()
        texts = {str(node[name]) for name in (*IDENTITIES, *PLANTED)}
        columns = [field.name for field in fields(Bundle) if field.type == "str"]
        for slot in conn.execute(sa.select(slots)).mappings():
            texts |= {str(slot[name]) for name in ("id", "nvme_identity", *columns)}
    texts |= {
        word for text in ERROR.values() for word in text.split() if ":" in word or "/" in word
    }
    texts |= {"canary", BMC, IMAGE["url"]}
    assert len(texts) > 25
    return {text.lower() for text in texts - {"", "None"} if len(text) > 3}


class Watch:
    """Records every answer to a member."""

    def __init__(self, stack: Stack) -> None:
        self.client = stack.client("member")
        self.answers: list[httpx.Response] = []

    def ask(self, verb: str, path: str, **options: Any) -> Any:
        answer = self.client.request(verb, path, **options)
        self.answers.append(answer)
        return answer.json()

    def look(self, allocation_id: str) -> Any:
        self.ask("GET", PATH)
        self.ask("GET", PATH, params={"limit": 1})
        self.ask("GET", "projects/demo/usage")
        self.ask("GET", "projects/demo/quota")
        self.ask("GET", "catalog")
        self.ask("GET", "catalog/machines")
        self.ask("GET", "catalog/availability", params={"gpus": 1})
        self.ask("GET", f"{PATH}/{allocation_id}/timeline")
        return self.ask("GET", f"{PATH}/{allocation_id}")


def fail(stack: Stack, allocation_id: str) -> None:
    task = stack.lease()
    with transaction(stack.engine) as conn:
        slices.provision_started(conn, allocation_id, ACT)
        slices.provision_failed(conn, allocation_id, ACT, step="slice_ready", error=ERROR)
        queue.finish(conn, task.id, task.lease_token, TaskState.FAILED, ACT, error=ERROR)


@pytest.mark.covers("CTRL-10", "P5")
def test_a_member_is_told_nothing_of_the_host(selling: Stack) -> None:
    with_model(selling)
    planted, member = canaries(selling), Watch(selling)
    first, second = (launch(selling, key).json()["id"] for key in ("a", "b"))
    for keyed in ("a", "c"):
        headers = {"Idempotency-Key": keyed}
        member.ask("POST", PATH, json=BODY, headers=headers)
        member.ask("POST", PATH, json=BODY | {"gpu_count": 64}, headers=headers)
        member.ask("POST", PATH, json={"gpu_count": "canary?"}, headers=headers)
        metal = {name: BODY[name] for name in ("username", "ssh_keys", "hostname", "image")}
        member.ask("POST", PATH, json=metal, headers={"Idempotency-Key": f"{keyed}-metal"})
    member.look(first)
    fail(selling, first)
    assert member.look(first)["error_code"] == ERROR["code"]
    member.ask("POST", f"{PATH}/{first}/release")
    activate(selling, second)
    gate = {"host": "gate.example", "port": 2200, "username": "tenant", "known_hosts": ""}
    assert member.look(second)["connection"] == gate
    member.ask("GET", f"{PATH}/{second}/telemetry")
    member.ask("POST", f"{PATH}/{second}/power", json={"action": "reset"})
    with transaction(selling.engine) as conn:
        (task,) = queue.every(conn, allocation_id=second, kind=TaskKind.SLICE_VM_POWER)
        power.failed(conn, task, ERROR)
    assert member.look(second)["error_code"] == ERROR["code"]
    deploy(selling, member, second)
    forward(selling, member, second)
    infer(selling, member)
    assert [row["id"] for row in member.ask("GET", "projects")["items"]] == ["demo"]
    assert member.ask("GET", "images")["items"]
    mine = member.ask("POST", "tokens", json={"name": "mine"})
    member.ask("GET", "tokens")
    member.ask("DELETE", f"tokens/{mine['id']}")
    key = {"public_key": KEY}
    for path in ("ssh-keys", "ssh-keys/revoke", "ssh-keys"):
        member.ask("POST", f"projects/demo/{path}", json=key)
    member.ask("POST", f"{PATH}/{second}/terminal")
    member.ask("PUT", f"{PATH}/{second}/terminal", json={"enabled": True})
    member.ask("PUT", "projects/demo/terminal-recording", json={"enabled": True})
    for path in ("ssh-keys", "ssh-sessions", "terminal-recording"):
        member.ask("GET", f"projects/demo/{path}")
    member.ask("POST", f"{PATH}/{second}/release")
    member.look(second)
    member.ask("GET", f"admin/nodes/{NODE}/resource-slots")
    for answer in member.answers:
        # The caller wrote the path itself.
        body = json.dumps({**answer.json(), "instance": ""}).lower()
        leaked = [canary for canary in planted if canary in body + str(answer.headers).lower()]
        assert not leaked, (str(answer.request.url), answer.status_code, leaked, body)
    assert used(member.answers) == permitted()


def infer(stack: Stack, member: Watch) -> None:
    """A job whose failure names files of its worker."""
    at = "projects/demo/jobs"
    bury(stack, detail=ERROR["found"])
    for path, body in (
        (at, JOB),
        (f"{at}/batch", {"jobs": [JOB]}),
        (at, JOB | {"model": "none"}),
        ("jobs", JOB),
        (f"{at}/dlq/reprocess", {"sample": 1}),
    ):
        member.ask("POST", path, json=body)
    for path in (f"{at}/depth", f"{at}/models", "projects/demo/pools"):
        member.ask("GET", path)
    for path in (at, "jobs"):
        for job in member.ask("GET", path)["items"]:
            member.ask("GET", f"{path}/{job['id']}")
            member.ask("POST", f"{path}/{job['id']}/cancel")
    member.ask("POST", f"{at}/cancel", json={"all": True})


def deploy(stack: Stack, member: Watch, allocation_id: str) -> None:
    """An application whose controller and operations report texts that tenants must not see."""
    at = "projects/demo/app-instances"
    body = {"slug": "slurm-reference", "name": "s", "managed_key": KEY}
    body["controller_allocation_id"] = allocation_id
    made = member.ask("POST", at, json=body, headers={"Idempotency-Key": "app"})
    planted = {"phase": "up", "host": PLANTED["address"], "bmc": BMC, "gpu": ERROR["expected"]}
    with transaction(stack.engine) as conn:
        (row,) = apps.members(conn, made["id"])
        apps.reported(conn, row["id"], planted, ACT, ready=False)
        failure = sa.update(tables.app_operations).values(failure=ERROR)
        conn.execute(failure)
    app = f"{at}/{made['id']}"
    for path in (at, f"{at}/machines", app, f"{app}/members", f"{app}/member-operations"):
        member.ask("GET", path)
    headers = {"Idempotency-Key": "ssh"}
    member.ask("POST", f"{app}/bootstrap-ssh/reconcile", headers=headers)
    member.ask("POST", f"{app}/stop")
    assert member.ask("GET", f"{app}/members")["items"][0]["adapter_detail"]["phase"] == "up"


def forward(stack: Stack, member: Watch, allocation_id: str) -> None:
    """A rule of ingress that its host refused, in words of the host."""
    with_addresses(stack).client()  # the shared application uses the new settings
    at, headers = f"{PATH}/{allocation_id}/ingress", {"Idempotency-Key": "ingress"}
    made = member.ask("POST", at, json=ingress_body(), headers=headers)
    with transaction(stack.engine) as conn:
        ingress.failed(conn, made["id"], ACT, ERROR, forwards=False)
    assert member.ask("GET", f"{at}/{made['id']}")["failure_code"] == ERROR["code"]
    member.ask("GET", at)
    member.ask("DELETE", f"{at}/{made['id']}")


def used(answers: list[httpx.Response]) -> set[str]:
    """Which operations of the contract that members may use were answered."""
    return {
        name
        for name, verb, path in member_operations()
        for answer in answers
        if answer.request.method.lower() == verb and path.fullmatch(answer.url.path)
    }


def permitted() -> set[str]:
    """Every operation open to members; a new operation must be added to the walk above."""
    return {name for name, _, _ in member_operations()}


@cache
def member_operations() -> list[tuple[str, str, re.Pattern[str]]]:
    return [
        (operation["operationId"], verb, re.compile(re.sub("{[^}]*}", "[^/]+", path)))
        for verb, path, operation in operations()
        if "project-member" in roles(operation)
    ]

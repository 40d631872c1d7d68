"""Every mutating operation of the contract under one key: done once, answered the same again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from http import HTTPStatus
from typing import Any

import pytest
import sqlalchemy as sa

from reconciler.api import contract
from reconciler.api.app import MUTATING
from reconciler.db import schema as tables
from reconciler.db.engine import transaction
from reconciler.lifecycle import host
from reconciler.records import proofs
from tests.unit.reconciler.api.refusals import kept, refused
from tests.unit.reconciler.api.test_allocations import failed
from tests.unit.reconciler.api.test_apps import body as app_body
from tests.unit.reconciler.api.test_apps import create, put_there
from tests.unit.reconciler.api.test_baremetal import NODE as MACHINE
from tests.unit.reconciler.api.test_baremetal import launch as launch_metal
from tests.unit.reconciler.api.test_baremetal import let_in, metal
from tests.unit.reconciler.api.test_enrolment import body as enrol_body
from tests.unit.reconciler.api.test_launches import BODY as LAUNCH
from tests.unit.reconciler.api.test_launches import activate, launch
from tests.unit.reconciler.api.test_nodework import DISK
from tests.unit.reconciler.api.world import ACT, FREE, IMAGE, NODE, World, bundle

__all__ = ["metal"]

# Its credential is a token that serves once, which the host cannot use a second time.
KEYLESS = {"enrolment_enrol"}
# Another answer for another body needs a body.
BODILESS = {"tokens_revoke"}
# Their first answer has a secret, which is kept nowhere: the repetition is told so.
SECRET = {"enrolment_issue", "tokens_issue"}
# Refused without a key, because repeating them unnoticed does harm.
KEY_REQUIRED = {
    *("allocations_create", "apps_create", "apps_reconcile"),
    *("recovery_force_cleanup", "recovery_recover"),
}
# What is no other wish by another reason, for it takes none.
OTHER = {"allocations_create": {"hostname": "other"}, "apps_create": {"name": "other"}}

Names = dict[str, str]
Body = dict[str, Any]
Prepare = Callable[[World], tuple[Names, Body]]


@dataclass(frozen=True)
class Row:
    """stage: the fixture to begin from. prepare: to where the request succeeds, and the request."""

    stage: str
    prepare: Prepare


def on(stage: str = "selling", names: Names | None = None, **body: Any) -> Row:
    """At this stage nothing is to be prepared."""
    return Row(stage, lambda _world: (names or {}, body))


def _slot(world: World) -> str:
    listed = world.client("admin").get(f"admin/nodes/{NODE}/resource-slots").json()
    return str(listed["items"][0]["id"])


def _enrolled(world: World) -> tuple[Names, Body]:
    answer = world.client().post(f"nodes/{NODE}/enrol", json=enrol_body(world))
    assert answer.is_success, answer.text
    return {}, {}


def _image(world: World) -> tuple[Names, Body]:
    return {}, {"image_id": world.client("admin").get("admin/images").json()["items"][0]["id"]}


def _approval(world: World) -> tuple[Names, Body]:
    with transaction(world.engine) as conn:
        for index in FREE:
            disk = f"eui.{bundle(index)['nvme_eui']}"
            proof = {"disk": disk, "verified": True, "method": "discard"}
            proofs.record_transition(conn, NODE, proof, ACT)
    return {}, {"slots": [bundle(index) for index in FREE], "reason": "test"}


def _blocked(world: World) -> tuple[Names, Body]:
    failed(world)
    listed = world.client("admin").get(f"admin/nodes/{NODE}/resource-slots").json()["items"]
    (slot,) = [one["id"] for one in listed if one["status"] == "cleanup_blocked"]
    return {"slot_id": slot}, {}


def _orphan(world: World) -> tuple[Names, Body]:
    slot = _slot(world)
    world.client("admin").post(f"admin/nodes/{NODE}/resource-slots/{slot}/disable")
    unknown = "23bd713b-6073-4ef7-8a51-2897e902365d"
    return {"slot_id": slot}, {"allocation_id": unknown, "reason": "restored"}


def _failed(**body: Any) -> Row:
    return Row("selling", lambda world: ({"allocation_id": failed(world)}, body))


def _active(world: World) -> str:
    made = str(launch(world).json()["id"])
    activate(world, made)
    return made


def _lost(world: World) -> tuple[Names, Body]:
    made = _active(world)
    with transaction(world.engine) as conn:
        host.lost(conn, NODE, ACT)
    return {"allocation_id": made}, {"reason": "the host is gone"}


def _task(world: World) -> tuple[Names, Body]:
    task = world.client("admin").post(f"admin/nodes/{NODE}/parity").json()
    return {"task_id": task["id"]}, {}


def _token(world: World) -> tuple[Names, Body]:
    body = {"role": "platform-admin", "name": "spare"}
    made = world.client("admin").post("admin/tokens", json=body).json()
    return {"token_id": made["id"]}, {}


def _after(*verbs: str) -> Row:
    """The node has gone this way."""

    def prepare(world: World) -> tuple[Names, Body]:
        for verb in verbs:
            answer = world.client("admin").post(f"admin/nodes/{NODE}/{verb}", json={"reason": "x"})
            assert answer.is_success, answer.text
        return {}, {"reason": "test"}

    return Row("selling", prepare)


def _unclean(world: World) -> tuple[Names, Body]:
    made, admin = launch_metal(world).json()["id"], world.client("admin")
    let_in(world, made)
    with transaction(world.engine) as conn:
        host.lost(conn, MACHINE["id"], ACT)
    admin.post(f"admin/allocations/{made}/force-release", json={"reason": "the host is gone"})
    with transaction(world.engine) as conn:
        host.regained(conn, MACHINE["id"], ACT)
    return {"node_id": MACHINE["id"]}, {}


def _drifted(world: World) -> tuple[Names, Body]:
    found = {"health_state": "degraded", "health_detail": {"code": "machine_drifted"}}
    with transaction(world.engine) as conn:
        here = tables.nodes.c.id == MACHINE["id"]
        conn.execute(sa.update(tables.nodes).where(here).values(found))
    return {"node_id": MACHINE["id"]}, {"reason": "known"}


def _machine(world: World) -> str:
    made = str(launch_metal(world).json()["id"])
    let_in(world, made)
    return made


def _app(world: World) -> tuple[Names, Body]:
    made = create(world, _machine(world)).json()["id"]
    put_there(world)
    return {"app_instance_id": made}, {}


ROWS = {
    "allocations_create": on(**LAUNCH),
    "allocations_release": Row("selling", lambda world: ({"allocation_id": _active(world)}, {})),
    "apps_create": Row("metal", lambda world: ({}, app_body(_machine(world)))),
    "apps_reconcile": Row("metal", _app),
    "apps_stop": Row("metal", _app),
    "bare_metal_accept_drift": Row("metal", _drifted),
    "bare_metal_clean_machine": Row("metal", _unclean),
    "enrolment_issue": on("new"),
    "enrolment_renew": Row("new", _enrolled),
    "images_register": on(**IMAGE | {"name": "another"}),
    "node_state_drain": _after(),
    "node_state_maintain": _after("drain"),
    "node_state_resume": _after("drain"),
    "node_state_retire": _after("drain", "maintain"),
    "node_work_bind": on(),
    "node_work_bootstrap": on(),
    "node_work_cache_image": Row("selling", _image),
    "node_work_convert": on(to="baremetal"),
    "node_work_transition": on(devices=[DISK]),
    "nodes_change": on(region="eu"),
    "nodes_create": on(id="n2", address="192.0.2.8", profile="lab"),
    "nodes_schedule": on(enabled=False),
    "nodes_schedule_site": on(enabled=False),
    "projects_create": on(name="another"),
    "recovery_force_cleanup": _failed(runtime_verified_absent=False, reason="test"),
    "recovery_force_release": Row("selling", _lost),
    "recovery_policy_change": on(enabled=True),
    "recovery_recover": _failed(reason="test"),
    "recovery_verify_absent": _failed(),
    "slots_approve": Row("prepared", _approval),
    "slots_remove_orphan": Row("selling", _orphan),
    "slots_repair": Row("selling", _blocked),
    "slots_switch": Row("selling", lambda world: ({"slot_id": _slot(world)}, {})),
    "tasks_cancel": Row("selling", _task),
    "tokens_issue": on(role="project-member", name="spare", project_id="demo"),
    "tokens_revoke": Row("selling", _token),
    "topology_compare": on(),
    "topology_discover": on(),
    "topology_measure": on(),
}


@cache
def mutating() -> dict[str, tuple[str, str, dict[str, Any]]]:
    """Verb, path and description of every operation that changes something, by its id."""
    return {
        operation["operationId"]: (verb, path, operation)
        for path, verbs in contract.contract()["paths"].items()
        for verb, operation in verbs.items()
        if verb in MUTATING
    }


def test_no_operation_is_without_a_key() -> None:
    keys = {"#/components/parameters/IdempotencyKey", "#/components/parameters/XIdempotencyKey"}
    told = {name: operation for name, (_, _, operation) in mutating().items()}
    assert set(told) == set(ROWS) | KEYLESS
    for name, operation in told.items():
        named = {one.get("$ref") for one in operation["parameters"]}
        assert name in KEYLESS or keys <= named, name
    assert {name for name, one in told.items() if "requestBody" not in one} == BODILESS


@pytest.mark.covers("I21", "CTRL-1")
@pytest.mark.parametrize("name", ROWS)
def test_one_key_is_one_effect_and_one_answer(request: pytest.FixtureRequest, name: str) -> None:
    verb, path, operation = mutating()[name]
    world: World = request.getfixturevalue(ROWS[name].stage)
    names, body = ROWS[name].prepare(world)
    at = path.format(**{"node_id": NODE, "project_id": "demo", "action": "disable"} | names)
    roles = operation["security"][0]["token"]
    client = world.client("member" if "project-member" in roles else "admin")

    def ask(key: str = "one", **changes: Any) -> Any:
        sent = {} if name in BODILESS else {"json": body | changes}
        headers = {"Idempotency-Key": key} if key else {}
        return client.request(verb, f"http://test{at}", headers=headers, **sent)

    if name in KEY_REQUIRED:
        keyless = refused(world, lambda: ask(key=""))
        assert (keyless["status"], keyless["code"]) == (400, "idempotency_key_required")
    before = kept(world)
    first = ask()
    assert first.is_success, first.text
    done = kept(world)
    assert {table for table in done if done[table] != before[table]} > {"idempotency_keys"}
    again = ask()
    if name in SECRET:
        told = again.json()
        assert (again.status_code, told["code"]) == (HTTPStatus.CONFLICT, "secret_shown_once")
    else:
        assert again.headers["Idempotency-Replayed"] == "true"
        assert (again.status_code, again.json()) == (first.status_code, first.json())
    if name not in BODILESS:
        other = refused(world, lambda: ask(**OTHER.get(name, {"reason": "another"})))
        assert (other["status"], other["code"]) == (422, "idempotency_key_reused")
    assert kept(world) == done

"""Each mutating operation under an idempotency key: done once, then answered the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from http import HTTPStatus
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from reconciler.api.app import MUTATING
from reconciler.db import leader
from reconciler.db import schema as tables
from reconciler.db.engine import transaction
from reconciler.lifecycle import host
from reconciler.records import console_sessions, nodes, proofs, tokens
from tests.unit.reconciler.api.conformity import operations, roles
from tests.unit.reconciler.api.refusals import kept, refused
from tests.unit.reconciler.api.stack import ACT, FREE, IMAGE, KEY, NODE, Stack, bundle
from tests.unit.reconciler.api.test_allocations import failed
from tests.unit.reconciler.api.test_apps import body as app_body
from tests.unit.reconciler.api.test_apps import create, put_there
from tests.unit.reconciler.api.test_baremetal import NODE as MACHINE
from tests.unit.reconciler.api.test_baremetal import launch as launch_metal
from tests.unit.reconciler.api.test_baremetal import let_in, metal
from tests.unit.reconciler.api.test_enrolment import body as enrol_body
from tests.unit.reconciler.api.test_ingress import body as ingress_body
from tests.unit.reconciler.api.test_ingress import with_addresses
from tests.unit.reconciler.api.test_jobs import BODY as JOB
from tests.unit.reconciler.api.test_jobs import bury, enqueue, with_model
from tests.unit.reconciler.api.test_launches import BODY as LAUNCH
from tests.unit.reconciler.api.test_launches import activate, launch
from tests.unit.reconciler.api.test_nodework import DISK
from tests.unit.reconciler.api.test_pools import POOL, started, with_host
from tests.unit.reconciler.api.test_terminals import recorded, with_terminal
from tests.unit.reconciler.api.test_worker import remote_pool

__all__ = ["metal"]

# The credential is a single-use token, so the host cannot repeat the request. Workers may repeat
# theirs: an outcome counts once, and a claim has a token of its own.
KEYLESS = {"enrolment_enrol", "enrolment_fetch"}
KEYLESS |= {f"worker_{act}" for act in ("register", "turn", "renew", "due", "leave")}
# Requests without a body.
BODILESS = {
    "ingress_remove",
    "jobs_cancel",
    "jobs_cancel_own",
    "tokens_revoke",
    "tokens_revoke_own",
}
# The first answer has a secret, which is not stored: a repetition is refused.
SECRET = {
    "enrolment_issue",
    "pools_issue_token",
    "terminals_open_terminal",
    "terminals_replay",
    "tokens_issue",
    "tokens_issue_own",
}
# Refused without a key, because repeating them unnoticed does harm.
KEY_REQUIRED = {
    *("allocations_create", "apps_create", "apps_reconcile", "ingress_create"),
    *("recovery_force_cleanup", "recovery_recover"),
}
# They change nothing, and each reading is audited.
AUDITED_READS = {"terminals_replay"}
# Bodies without a reason: another field makes the body different.
OTHER = {
    "allocations_create": {"hostname": "other"},
    "apps_create": {"name": "other"},
    "jobs_create": {"priority": 9},
    "jobs_create_own": {"priority": 9},
    "jobs_create_together": {"jobs": [JOB, JOB]},
}

Names = dict[str, str]
Body = dict[str, Any]
Prepare = Callable[[Stack], tuple[Names, Body]]


@dataclass(frozen=True)
class Row:
    """fixture: the state to begin from. prepare: makes the request possible and returns it."""

    fixture: str
    prepare: Prepare


def on(fixture: str = "selling", names: Names | None = None, **body: Any) -> Row:
    """A request that needs no preparation."""
    return Row(fixture, lambda _stack: (names or {}, body))


def _slot(stack: Stack) -> str:
    listed = stack.client("admin").get(f"admin/nodes/{NODE}/resource-slots").json()
    return str(listed["items"][0]["id"])


def _enrolled(stack: Stack) -> tuple[Names, Body]:
    answer = stack.client().post(f"nodes/{NODE}/enrol", json=enrol_body(stack))
    assert answer.is_success, answer.text
    return {}, {}


def _image(stack: Stack) -> tuple[Names, Body]:
    return {}, {"image_id": stack.client("admin").get("admin/images").json()["items"][0]["id"]}


def _approval(stack: Stack) -> tuple[Names, Body]:
    with transaction(stack.engine) as conn:
        for index in FREE:
            disk = f"eui.{bundle(index)['nvme_eui']}"
            proof = {"disk": disk, "verified": True, "method": "discard"}
            proofs.record_transition(conn, NODE, proof, ACT)
    return {}, {"slots": [bundle(index) for index in FREE], "reason": "test"}


def _blocked(stack: Stack) -> tuple[Names, Body]:
    failed(stack)
    listed = stack.client("admin").get(f"admin/nodes/{NODE}/resource-slots").json()["items"]
    (slot,) = [row["id"] for row in listed if row["status"] == "cleanup_blocked"]
    return {"slot_id": slot}, {}


def _orphan(stack: Stack) -> tuple[Names, Body]:
    slot = _slot(stack)
    stack.client("admin").post(f"admin/nodes/{NODE}/resource-slots/{slot}/disable")
    unknown = "23bd713b-6073-4ef7-8a51-2897e902365d"
    return {"slot_id": slot}, {"allocation_id": unknown, "reason": "restored"}


def _job(body: Body, *, dead: bool = False, queued: bool = False) -> Row:
    def prepare(stack: Stack) -> tuple[Names, Body]:
        with_model(stack)
        id = bury(stack) if dead else enqueue(stack) if queued else ""
        return {"job_id": id}, body

    return Row("new", prepare)


def _failed(**body: Any) -> Row:
    return Row("selling", lambda stack: ({"allocation_id": failed(stack)}, body))


def _active(stack: Stack) -> str:
    made = str(launch(stack).json()["id"])
    activate(stack, made)
    return made


def _lost(stack: Stack) -> tuple[Names, Body]:
    made = _active(stack)
    with transaction(stack.engine) as conn:
        host.lost(conn, NODE, ACT)
    return {"allocation_id": made}, {"reason": "the host is gone"}


def _task(stack: Stack) -> tuple[Names, Body]:
    task = stack.client("admin").post(f"admin/nodes/{NODE}/parity").json()
    return {"task_id": task["id"]}, {}


def _token(stack: Stack) -> tuple[Names, Body]:
    body = {"role": "platform-admin", "name": "spare"}
    made = stack.client("admin").post("admin/tokens", json=body).json()
    return {"token_id": made["id"]}, {}


def _own_token(stack: Stack) -> tuple[Names, Body]:
    return {
        "token_id": stack.client("member").post("tokens", json={"name": "spare"}).json()["id"]
    }, {}


def _session(stack: Stack) -> tuple[Names, Body]:
    with transaction(stack.engine) as conn:
        (token,) = [token.id for token in tokens.every(conn) if token.name == "member"]
        console_sessions.start(conn, ACT, address="", agent="", token_id=token)
    return {}, {"actor": f"member:member#{token}"}


def _after(*verbs: str) -> Row:
    """A request after these transitions of the node."""

    def prepare(stack: Stack) -> tuple[Names, Body]:
        for verb in verbs:
            answer = stack.client("admin").post(f"admin/nodes/{NODE}/{verb}", json={"reason": "x"})
            assert answer.is_success, answer.text
        return {}, {"reason": "test"}

    return Row("selling", prepare)


def _unclean(stack: Stack) -> tuple[Names, Body]:
    made, admin = launch_metal(stack).json()["id"], stack.client("admin")
    let_in(stack, made)
    with transaction(stack.engine) as conn:
        host.lost(conn, MACHINE["id"], ACT)
    admin.post(f"admin/allocations/{made}/force-release", json={"reason": "the host is gone"})
    with transaction(stack.engine) as conn:
        host.regained(conn, MACHINE["id"], ACT)
    return {"node_id": MACHINE["id"]}, {}


def _drifted(stack: Stack) -> tuple[Names, Body]:
    drifted = {"health_state": "degraded", "health_detail": {"code": "machine_drifted"}}
    with transaction(stack.engine) as conn:
        here = tables.nodes.c.id == MACHINE["id"]
        conn.execute(sa.update(tables.nodes).where(here).values(drifted))
    return {"node_id": MACHINE["id"]}, {"reason": "known"}


def _firmware(stack: Stack) -> tuple[Names, Body]:
    row = {"section": "bios", "name": "x", "change": "changed", "before": "1", "after": "2"}
    with transaction(stack.engine) as conn:
        here = tables.nodes.c.id == MACHINE["id"]
        changed = {"firmware_before": {}, "firmware_differences": [row]}
        conn.execute(sa.update(tables.nodes).where(here).values(changed))
    return {"node_id": MACHINE["id"]}, {"reason": "known"}


def _machine(stack: Stack) -> str:
    made = str(launch_metal(stack).json()["id"])
    let_in(stack, made)
    return made


def _app(stack: Stack) -> tuple[Names, Body]:
    made = create(stack, _machine(stack)).json()["id"]
    put_there(stack)
    return {"app_instance_id": made}, {}


def _ingress(stack: Stack) -> tuple[Names, Body]:
    return {"allocation_id": _active(with_addresses(stack))}, ingress_body()


def _rule(stack: Stack) -> tuple[Names, Body]:
    allocation = _active(stack)
    return {"allocation_id": allocation, "rule_id": stack.ingress_rule(allocation)}, {}


def _netbox(stack: Stack) -> tuple[Names, Body]:
    netbox = {"netbox_url": "https://netbox.example", "netbox_token_file": Path("token")}
    stack.settings = stack.settings.model_copy(update=netbox)
    return {}, {}


def _maas(stack: Stack) -> tuple[Names, Body]:
    maas = {"maas_url": "https://maas.example", "maas_token_file": Path("token")}
    stack.settings = stack.settings.model_copy(update=maas)
    with transaction(stack.engine) as conn:
        nodes.update(conn, NODE, maas={"system_id": "abc123", "identity": {}})
    return {}, {}


def _pool(stack: Stack) -> tuple[Names, Body]:
    return {"pool_id": started(stack)}, {}


def _remote_pool(stack: Stack) -> tuple[Names, Body]:
    remote_pool(stack)
    return {"pool_id": "remote-demo"}, {}


def _pool_host(stack: Stack) -> tuple[Names, Body]:
    with_host(stack)
    return {}, POOL


def _led(stack: Stack) -> tuple[Names, Body]:
    with transaction(stack.engine) as conn:
        leader.campaign(conn, leader.LOOPS, "p1", 3600)
    return {}, {}


def _recording(stack: Stack) -> tuple[Names, Body]:
    return {"session_id": recorded(stack, _active(stack))}, {"reason": "test"}


ROWS = {
    "allocations_change_power": Row(
        "selling", lambda stack: ({"allocation_id": _active(stack)}, {"action": "stop"})
    ),
    "allocations_create": on(**LAUNCH),
    "allocations_release": Row("selling", lambda stack: ({"allocation_id": _active(stack)}, {})),
    "apps_create": Row("metal", lambda stack: ({}, app_body(_machine(stack)))),
    "apps_reconcile": Row("metal", _app),
    "apps_stop": Row("metal", _app),
    "bare_metal_accept_drift": Row("metal", _drifted),
    "bare_metal_accept_firmware": Row("metal", _firmware),
    "bare_metal_record_bmc": Row(
        "metal", lambda _stack: ({"node_id": MACHINE["id"]}, {"sections": {"redfish_boot": {}}})
    ),
    "bare_metal_clean_machine": Row("metal", _unclean),
    "enrolment_issue": on("new"),
    "enrolment_renew": Row("new", _enrolled),
    "ingress_create": Row("selling", _ingress),
    "ingress_remove": Row("selling", _rule),
    "images_register": on(**IMAGE | {"name": "another"}),
    "maas_deploy": Row("new", _maas),
    "maas_diff": Row("new", _maas),
    "maas_release": Row("new", _maas),
    "maas_synchronise": Row("new", _maas),
    "maas_unbind": Row("new", _maas),
    "netbox_diff": Row("selling", _netbox),
    "netbox_synchronise": Row("selling", _netbox),
    "node_state_drain": _after(),
    "node_state_maintain": _after("drain"),
    "node_state_resume": _after("drain"),
    "node_state_retire": _after("drain", "maintain"),
    "jobs_cancel": _job({}, queued=True),
    "jobs_cancel_all": _job({"all": True}, queued=True),
    "jobs_cancel_own": _job({}, queued=True),
    "jobs_create": _job(JOB),
    "jobs_create_own": _job(JOB),
    "jobs_create_together": _job({"jobs": [JOB]}),
    "jobs_reprocess": _job({"sample": 1}, dead=True),
    "node_work_bind": on(),
    "node_work_bootstrap": on(),
    "node_work_cache_image": Row("selling", _image),
    "node_work_change_firmware": on(),
    "node_work_convert": on(to="baremetal"),
    "node_work_reboot": _after("drain"),
    "node_work_transition": on(devices=[DISK]),
    "nodes_change": on(region="eu"),
    "nodes_create": on(id="n2", address="192.0.2.8", profile="lab"),
    "nodes_schedule": on(enabled=False),
    "nodes_schedule_site": on(enabled=False),
    "console_sessions_end_sessions": Row("new", _session),
    "projects_amend_default_quota": on(gpus=8),
    "projects_amend_quota": on(names={"project_id": "demo"}, gpus=8),
    "projects_change_default_quota": on(gpus=8),
    "pools_evict": Row("new", _pool),
    "pools_issue_token": Row("new", _remote_pool),
    "pools_start": Row("new", _pool_host),
    "pools_stop": Row("new", _pool),
    "pools_stop_all": Row("new", _pool),
    "projects_create": on(name="another"),
    "projects_limit": on(names={"project_id": "demo"}, gpus=8),
    "operator_release_leader": Row("new", _led),
    "operator_set_maintenance": on("new", mode="drain"),
    "recovery_force_cleanup": _failed(runtime_verified_absent=False, reason="test"),
    "recovery_force_release": Row("selling", _lost),
    "recovery_policy_change": on(enabled=True),
    "recovery_recover": _failed(reason="test"),
    "recovery_verify_absent": _failed(),
    "slots_approve": Row("prepared", _approval),
    "slots_remove_orphan": Row("selling", _orphan),
    "slots_repair": Row("selling", _blocked),
    "slots_switch": Row("selling", lambda stack: ({"slot_id": _slot(stack)}, {})),
    "ssh_register_key": on(public_key=KEY),
    "ssh_revoke_key": on(public_key=KEY),
    "tasks_cancel": Row("selling", _task),
    "terminals_open_terminal": Row(
        "selling", lambda stack: ({"allocation_id": with_terminal(stack)}, {})
    ),
    "terminals_replay": Row("selling", _recording),
    "terminals_switch": Row(
        "selling", lambda stack: ({"allocation_id": with_terminal(stack)}, {"enabled": False})
    ),
    "terminals_switch_recording": on(enabled=True),
    "tokens_issue": on(role="project-member", name="spare", project_id="demo"),
    "tokens_issue_own": on(name="spare"),
    "tokens_revoke": Row("selling", _token),
    "tokens_revoke_own": Row("selling", _own_token),
    "topology_compare": on(),
    "topology_discover": on(),
    "topology_measure": on(),
}


@cache
def mutating() -> dict[str, tuple[str, str, dict[str, Any]]]:
    """Verb, path and description of every operation that changes something, by its id."""
    return {
        operation["operationId"]: (verb, path, operation)
        for verb, path, operation in operations()
        if verb in MUTATING
    }


def test_no_operation_is_without_a_key() -> None:
    keys = {"#/components/parameters/IdempotencyKey", "#/components/parameters/XIdempotencyKey"}
    assert set(mutating()) == set(ROWS) | KEYLESS
    bodiless = set()
    for name, (_, _, operation) in mutating().items():
        references = {part.get("$ref") for part in operation["parameters"]}
        assert name in KEYLESS or keys <= references, name
        if "requestBody" not in operation:
            bodiless.add(name)
    assert bodiless == BODILESS


def _request(stack: Stack, name: str) -> Callable[..., Any]:
    """The operation as a function of the key and of changes of its body."""
    verb, path, operation = mutating()[name]
    names, body = ROWS[name].prepare(stack)
    at = path.format(**{"node_id": NODE, "project_id": "demo", "action": "disable"} | names)
    client = stack.client("member" if "project-member" in roles(operation) else "admin")

    def ask(key: str = "one", **changes: Any) -> Any:
        sent = {} if name in BODILESS else {"json": body | changes}
        headers = {"Idempotency-Key": key} if key else {}
        return client.request(verb, f"http://test{at}", headers=headers, **sent)

    return ask


@pytest.mark.covers("I21", "CTRL-1")
@pytest.mark.parametrize("name", ROWS)
def test_one_key_is_one_effect_and_one_answer(request: pytest.FixtureRequest, name: str) -> None:
    stack: Stack = request.getfixturevalue(ROWS[name].fixture)
    ask = _request(stack, name)
    if name in KEY_REQUIRED:
        keyless = refused(stack, lambda: ask(key=""))
        assert (keyless["status"], keyless["code"]) == (400, "idempotency_key_required")
    before = kept(stack)
    first = ask()
    assert first.is_success, first.text
    done = kept(stack)
    assert {table for table in done if done[table] != before[table]} > {"idempotency_keys"}
    again = ask()
    if name in SECRET:
        problem = again.json()
        assert (again.status_code, problem["code"]) == (HTTPStatus.CONFLICT, "secret_shown_once")
    else:
        assert again.headers["Idempotency-Replayed"] == "true"
        assert (again.status_code, again.json()) == (first.status_code, first.json())
    if name not in BODILESS:
        other = refused(stack, lambda: ask(**OTHER.get(name, {"reason": "another"})))
        assert (other["status"], other["code"]) == (422, "idempotency_key_reused")
    assert kept(stack) == done


@pytest.mark.covers("I20")
@pytest.mark.parametrize("name", [name for name in ROWS if "/admin/" in mutating()[name][1]])
def test_an_act_leaves_one_audit_row_if_it_changes_something_and_none_if_not(
    request: pytest.FixtureRequest, name: str
) -> None:
    stack: Stack = request.getfixturevalue(ROWS[name].fixture)
    ask = _request(stack, name)
    for turn in range(3):
        before = kept(stack)
        answer = ask(key=f"turn-{turn}")
        after = kept(stack)
        different = {table for table in after if after[table] != before[table]}
        changed = bool(different - {"audit_log", "idempotency_keys"}) or name in AUDITED_READS
        written = after["audit_log"][len(before["audit_log"]) :]
        rows = [(row.action, row.subject_id) for row in written]
        # Each slot of a request has its own row.
        assert len(set(rows)) == len(rows), rows
        assert len({action for action, _ in rows}) == changed, (turn, different, rows)
        assert changed or turn, answer.text

"""Machines on which a tenant was root: distrusted until they are installed anew."""

from __future__ import annotations

import subprocess
import uuid
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
import yaml

from reconciler.db import schema
from reconciler.db.engine import reading, transaction
from reconciler.lifecycle import baremetal, host, launch, slices
from reconciler.model.states import TaskKind, TaskState
from reconciler.records import certificates, leasing, nodes, queue
from reconciler.runs import ssh
from reconciler.trust import ca
from reconciler.work import worker
from tests.unit.reconciler.api.refusals import refused
from tests.unit.reconciler.api.stack import ACT, KEY, Stack, discovery
from tests.unit.reconciler.benchmark import sshd

PATH = "projects/demo/allocations"
NODE = "metal"
ADMIN = f"admin/nodes/{NODE}"
CLEAN = {"absence": {"absent": True, "checks": {}}, "drift": [], "compared": True}
REPOSITORY = Path(__file__).resolve().parents[4]


def fresh(folder: Path) -> dict[str, str]:
    """Identity of a machine that was just installed."""
    key = sshd.new_key(folder / uuid.uuid4().hex)
    return {**discovery()["identity"], "machine_id": uuid.uuid4().hex, "host_key": key}


class Metal:
    """A whole machine of the site with a real SSH server; its modules answer as the test says."""

    def __init__(self, stack: Stack, folder: Path, running: ExitStack) -> None:
        self.stack, self.folder = stack, folder
        self.admin = stack.client("admin")
        self.identity = fresh(folder)
        body = {"id": NODE, "address": "127.0.0.1", "profile": "lab", "mode": "baremetal"}
        body["tenant_address"] = "203.0.113.9"
        assert self.admin.post("admin/nodes", json=body).status_code == 201
        operator = ca.open_trust(stack.settings.state_dir).operator
        login = operator.with_name("operator.pub").read_text().strip()
        self.server = running.enter_context(
            sshd.machine(folder / "server", login=login, certify=self.certify)
        )
        self.prepare()

    def certify(self, key: str) -> str:
        """Enrol the server's host key and return its certificate."""
        self.identity["host_key"] = " ".join(key.split()[:2])
        answer = self.enrol(self.identity)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["certificate"])

    def enrol(self, identity: dict[str, str], token: str = "") -> Any:
        token = token or self.token()
        body = {**identity, "token": token, "node_id": NODE, "hostname": "metal"}
        return self.stack.client().post(f"nodes/{NODE}/enrol", json=body)

    def token(self) -> str:
        answer = self.admin.post(f"{ADMIN}/enrollment-token").json()
        return str(answer["token"])

    def prepare(self) -> None:
        with transaction(self.stack.engine) as conn:
            host.bootstrapped(conn, NODE, ACT, identity=self.identity)
        self.answers()

    def answers(self, **identity: str) -> None:
        """Its discovery finds nothing wrong."""
        document = discovery()
        document["identity"] = self.identity | identity
        with transaction(self.stack.engine) as conn:
            host.record_discovery(conn, NODE, document, ACT)

    def launch(self) -> Any:
        body = {"username": "tenant", "ssh_keys": [KEY], "hostname": "metal-1"}
        headers = {"Idempotency-Key": uuid.uuid4().hex}
        return self.stack.client("member").post(PATH, json=body, headers=headers)

    def begin(self) -> str:
        """Start the provision, as a worker does; returns the allocation id."""
        answer = self.launch()
        assert answer.status_code == 201, answer.text
        with transaction(self.stack.engine) as conn:
            (self.task,) = leasing.lease(conn, "test", kinds=[TaskKind.BAREMETAL_PROVISION])
            slices.provision_started(conn, self.task.allocation_id or "", ACT)
            baremetal.entered(conn, NODE)
        return str(answer.json()["id"])

    def tenant(self) -> str:
        """Let a tenant in, who is root from now on."""
        key = self.begin()
        with transaction(self.stack.engine) as conn:
            before = {"accounts": {"root": "1"}}
            baremetal.provision_succeeded(conn, key, ACT, baseline=before, task_id=self.task.id)
            queue.finish(conn, self.task.id, self.task.lease_token, TaskState.SUCCEEDED, ACT)
        return key

    def release(self, key: str) -> None:
        """End the tenancy."""
        with transaction(self.stack.engine) as conn:
            launch.release(conn, key, ACT)
        self.clean_up(key)

    def clean_up(self, key: str) -> None:
        """Every module of the tenant's system answers "all clean"."""
        with transaction(self.stack.engine) as conn:
            (task,) = leasing.lease(conn, "test", kinds=[TaskKind.BAREMETAL_RELEASE])
            evidence = {**CLEAN, "proofs": {}}
            fence = task.parameters["fence"]
            assert baremetal.release_succeeded(conn, key, ACT, fence=fence, evidence=evidence)
            queue.finish(conn, task.id, task.lease_token, TaskState.SUCCEEDED, ACT)

    def reach(self) -> subprocess.CompletedProcess[str]:
        """Connect as a run does."""
        access = worker._access(self.stack.engine, self.stack.settings, 60)
        words = ["ssh", *ssh.options(access, NODE), "-p", str(self.server.port), "127.0.0.1", "id"]
        return subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)

    def required(self) -> bool:
        return bool(self.admin.get(ADMIN).json()["reinstall_required"])

    def reason(self) -> str:
        """Why the machine is not given away; "" when it would be."""
        with reading(self.stack.engine) as conn:
            return baremetal._refusal(conn, nodes.get(conn, NODE), ())


@pytest.fixture
def metal(new: Stack, tmp_path: Path) -> Iterator[Metal]:
    if sshd.SSHD is None:
        pytest.skip("no sshd here: install openssh-server")
    with ExitStack() as running:
        yield Metal(new, tmp_path, running)


@pytest.mark.covers("CTRL-15")
def test_a_machine_that_answers_all_clean_is_not_sold_again(metal: Metal) -> None:
    assert not metal.required()
    metal.release(metal.tenant())
    metal.answers()
    assert metal.required() and metal.reason() == "reinstall_required"
    answer = refused(metal.stack, metal.launch)
    assert (answer["status"], answer["code"]) == (409, "no_capacity")
    problem = refused(
        metal.stack, lambda: metal.admin.post(f"{ADMIN}/conversion", json={"to": "slice"})
    )
    assert (problem["status"], problem["code"]) == (409, "reinstall_required")
    assert f"gpuaas nodes userdata {NODE}" in problem["remedy"]


@pytest.mark.covers("CTRL-15", "HOST-13")
def test_the_host_key_that_the_tenant_could_copy_is_refused(metal: Metal) -> None:
    """Also with another certificate of the same authority, and for a run that was queued before."""
    assert metal.reach().returncode == 0, metal.reach().stderr
    metal.release(metal.tenant())
    cut = metal.reach()
    assert cut.returncode != 0 and "revoked" in cut.stderr.lower(), cut.stderr
    trust = ca.open_trust(metal.stack.settings.state_dir)
    again = ca.certify_host(trust, metal.server.key, NODE)
    (metal.server.folder / "host_key-cert.pub").write_text(f"{again}\n")
    assert metal.reach().returncode != 0
    with reading(metal.stack.engine) as conn, pytest.raises(Exception, match="reinstall_required"):
        certificates.require_valid(conn, NODE)
    back = metal.enrol(metal.identity)
    assert (back.status_code, back.json()["code"]) == (409, "host_key_not_accepted")


@pytest.mark.covers("CTRL-15", "HOST-13")
def test_only_another_installation_with_another_key_ends_it(metal: Metal) -> None:
    key = metal.tenant()
    # Root sets another machine id, and later the first id again.
    mine = uuid.uuid4().hex
    metal.answers(machine_id=mine)
    metal.answers()
    metal.release(key)
    token = metal.token()
    for machine_id in (metal.identity["machine_id"], mine):
        same = fresh(metal.folder) | {"machine_id": machine_id}
        answer = metal.enrol(same, token)
        assert (answer.status_code, answer.json()["code"]) == (409, "reinstall_required")
        assert metal.required()
    metal.identity = fresh(metal.folder)
    # The refusals have not used the token up.
    assert metal.enrol(metal.identity, token).status_code == 200
    assert not metal.required()
    assert metal.reason() == "node_bootstrapping"
    metal.prepare()
    assert metal.reason() == ""
    log = metal.admin.get("admin/audit", params={"action": "node.reinstalled"}).json()["items"]
    assert [row["actor"] for row in log] == [f"node:{NODE}"]
    key = metal.tenant()
    assert metal.required()
    metal.release(key)
    assert metal.reason() == "reinstall_required"


@pytest.mark.covers("CTRL-15")
def test_an_enrolment_under_a_tenant_lifts_nothing(metal: Metal) -> None:
    """The host may have lost its certificate, or the tenant may have installed it anew."""
    key = metal.tenant()
    assert metal.enrol(metal.identity).status_code == 200
    assert metal.required()
    other = fresh(metal.folder)
    assert metal.enrol(other).status_code == 200
    assert metal.required()
    metal.release(key)
    again = fresh(metal.folder) | {"machine_id": other["machine_id"]}
    assert metal.enrol(again).json()["code"] == "reinstall_required"


@pytest.mark.covers("CTRL-15", "HOST-13")
def test_the_tenants_installation_is_not_believed_as_another_node_either(metal: Metal) -> None:
    """The operator retires the node, registers the machine again and makes a new host key."""
    metal.release(metal.tenant())
    for step in ("drain", "maintain", "retire"):
        answer = metal.admin.post(f"{ADMIN}/{step}", json={"reason": "a new name"})
        assert answer.status_code == 200, answer.text
    body = {"id": "renamed", "address": "127.0.0.1", "profile": "lab", "mode": "baremetal"}
    assert metal.admin.post("admin/nodes", json=body).status_code == 201
    token = str(metal.admin.post("admin/nodes/renamed/enrollment-token").json()["token"])

    def enrol(identity: dict[str, str]) -> Any:
        body = {**identity, "token": token, "node_id": "renamed", "hostname": "metal"}
        return metal.stack.client().post("nodes/renamed/enrol", json=body)

    refused = enrol(fresh(metal.folder) | {"machine_id": metal.identity["machine_id"]})
    assert (refused.status_code, refused.json()["code"]) == (409, "reinstall_required")
    assert enrol(fresh(metal.folder)).status_code == 200


@pytest.mark.covers("CTRL-15")
def test_a_tenant_takes_no_machine_id_of_another_node_and_few_of_none(metal: Metal) -> None:
    """A tenant with root reports any id; an id that counts as its own is refused elsewhere."""
    metal.release(metal.tenant())
    body = {"id": "other", "address": "192.0.2.9", "profile": "lab", "mode": "baremetal"}
    assert metal.admin.post("admin/nodes", json=body).status_code == 201
    taken = uuid.uuid4().hex
    with transaction(metal.stack.engine) as conn:
        nodes.update(conn, "other", machine_id=taken)
    for machine_id in (taken, *(uuid.uuid4().hex for _ in range(40))):
        metal.answers(machine_id=machine_id)
    with reading(metal.stack.engine) as conn:
        ids = nodes.get(conn, NODE).tenant_machine_ids
    assert metal.identity["machine_id"] in ids and taken not in ids and len(ids) == 16
    # The installation that reported them is new neither under the last id nor under the other
    # node's.
    last = metal.identity["machine_id"]
    for machine_id in (uuid.uuid4().hex, taken):
        metal.answers(machine_id=machine_id)
        again = fresh(metal.folder) | {"machine_id": machine_id}
        assert metal.enrol(again).json()["code"] == "reinstall_required"
    assert last in ids and metal.reason() == "reinstall_required"


@pytest.mark.covers("CTRL-15")
def test_a_machine_installed_anew_before_its_clean_up_keeps_its_key(metal: Metal) -> None:
    key = metal.tenant()
    with transaction(metal.stack.engine) as conn:
        launch.release(conn, key, ACT)
    metal.identity = fresh(metal.folder)
    assert metal.enrol(metal.identity).status_code == 200
    assert not metal.required()
    metal.clean_up(key)
    with reading(metal.stack.engine) as conn:
        assert not certificates.cut_off(conn, NODE)
        assert queue.every(conn, kind=TaskKind.SLICE_TOPOLOGY_DISCOVER)


TAKE = "Take the machine under the fence of the claim"


@pytest.mark.covers("CTRL-15")
@pytest.mark.parametrize(
    ("step", "attempt", "untouched", "required"),
    [
        (TAKE, 1, True, False),
        ("Look whether the account can be made", 1, True, False),
        (TAKE, 1, False, True),
        # An earlier attempt may have let the tenant in, who then says that nothing was touched.
        (TAKE, 2, True, True),
        ("Let the tenant in", 1, True, True),
        ("Report the result", 1, True, True),
        ("", 1, True, True),
    ],
)
def test_a_provision_that_failed_before_its_tenant_needs_no_new_installation(
    metal: Metal, step: str, attempt: int, untouched: bool, required: bool
) -> None:
    """Otherwise a launch with a name that the host refuses would take a machine off sale."""
    key = metal.begin()
    error = {"code": "account_taken", "found": "daemon"}
    with transaction(metal.stack.engine) as conn:
        conn.execute(sa.update(schema.tasks).values(attempt=attempt))
        baremetal.provision_failed(conn, key, ACT, step=step, error=error, untouched=untouched)
    assert metal.required() == required


def test_the_steps_before_the_tenant_are_those_of_the_playbook() -> None:
    play = yaml.safe_load((REPOSITORY / "playbooks/provision_baremetal.yml").read_text())[0]
    block = next(task["block"] for task in play["tasks"] if "block" in task)
    names = [task["name"] for task in block]
    before = names[: names.index("Say on the host that the machine is the tenant's")]
    assert names.index("Let the tenant in") > len(before)
    steps = {"deadline", "start the run", "wait for its run"}
    assert set(before) | steps == baremetal.BEFORE_THE_TENANT

"""A member with a valid token tries everything against a member of another project."""

from __future__ import annotations

import asyncio
import itertools
import re
import threading
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import sqlalchemy as sa
from fastapi import FastAPI

from reconciler.api import admission, security
from reconciler.api.app import create_app
from reconciler.api.health import create_operator_app
from reconciler.db.engine import reading, transaction
from reconciler.db.schema import jobs as jobs_table
from reconciler.db.schema import settings
from reconciler.lifecycle import (
    apps,
    ingress,
    placement,
    quota,
    recovery_policy,
    slices,
    ssh_access,
)
from reconciler.lifecycle import launch as launching
from reconciler.model import client_limits, cloud_config
from reconciler.model.act import Act
from reconciler.model.errors import Problem
from reconciler.model.jobs import Outcome
from reconciler.model.states import Role, TaskKind, TaskState
from reconciler.pools import jobs, pools
from reconciler.records import leasing, projects, queue, tokens
from reconciler.work.handler import open_work
from reconciler.work.kinds import HANDLERS
from reconciler.work.loops import play_recovery_cases, recover_blocked
from tests.unit.reconciler import wipes
from tests.unit.reconciler.api.conformity import operations, roles
from tests.unit.reconciler.api.refusals import kept, refused
from tests.unit.reconciler.api.stack import ACT, KEY, NODE, Stack, listening
from tests.unit.reconciler.api.test_baremetal import BODY as MACHINE
from tests.unit.reconciler.api.test_baremetal import launch as launch_machine
from tests.unit.reconciler.api.test_baremetal import metal
from tests.unit.reconciler.api.test_ingress import ADDRESS, OTHER, body, with_addresses
from tests.unit.reconciler.api.test_jobs import bury, enqueue, play, with_model
from tests.unit.reconciler.api.test_launches import BODY, activate, launch
from tests.unit.reconciler.api.test_security import app_instance
from tests.unit.reconciler.api.test_terminals import recorded
from tests.unit.reconciler.pools.test_leases import clock_ahead
from tests.unit.reconciler.service.service import until

__all__ = ["metal"]
pytestmark = pytest.mark.covers("CTRL-10", "CTRL-11", "P4")

# The attacker's token is of the project `other`, the victim's of `demo`.
ATTACKER, VICTIM = "stranger", "member"
OWN_KEY = KEY.replace("ILw6MHUf", "ILw6MHUg")
NUMBERS = itertools.count()


def attack(stack: Stack, verb: str, path: str, *, key: str = "", **options: Any) -> Any:
    headers = {"Idempotency-Key": key or f"attack-{next(NUMBERS)}"}
    return stack.client(ATTACKER).request(verb, path, headers=headers, **options)


def grab(stack: Stack, **changes: Any) -> Any:
    """A launch of the attacker."""
    wish = {**BODY, "ssh_keys": [OWN_KEY], **changes}
    return attack(stack, "POST", "projects/other/allocations", json=wish)


def rate(monkeypatch: pytest.MonkeyPatch, **rates: float) -> SimpleNamespace:
    """Rates of requests under a clock that stands still, whose `now` a test moves."""
    clock = SimpleNamespace(now=1000.0, monotonic=lambda: clock.now)
    monkeypatch.setattr(client_limits, "time", clock)
    for name, value in rates.items():
        monkeypatch.setattr(security, name, value)
    return clock


def limit(stack: Stack, project: str, **limits: int) -> None:
    answer = stack.client("admin").put(f"admin/projects/{project}/quota", json=limits)
    assert answer.status_code == 200, answer.text


@pytest.fixture
def objects(selling: Stack) -> dict[str, str]:
    """Objects of the victim."""
    with_addresses(selling)
    instance = app_instance(selling)
    mine = launch(selling).json()["id"]
    activate(selling, mine)
    with_model(selling)
    return {
        "allocation_id": mine,
        "app_instance_id": instance,
        "rule_id": selling.ingress_rule(mine),
        "job_id": enqueue(selling),
    }


BODIES: dict[str, dict[str, Any]] = {
    "allocations_create": BODY,
    "allocations_change_power": {"action": "stop"},
    "ingress_create": body(public_address=OTHER),
    "ssh_register_key": {"public_key": OWN_KEY},
    "ssh_revoke_key": {"public_key": KEY},
    "terminals_switch": {"enabled": True},
}


def test_no_operation_reaches_the_objects_of_another_project(
    selling: Stack, objects: dict[str, str]
) -> None:
    """From the contract, so that a new operation is tried too."""
    before, tried = kept(selling), 0
    for verb, path, operation in operations():
        if "project-member" not in roles(operation) or "{project_id}" not in path:
            continue
        sent: dict[str, Any] = {}
        if verb not in {"get", "delete"}:
            name = operation["operationId"]
            app = {
                "slug": "slurm-reference",
                "name": "mine",
                "managed_key": KEY,
                "controller_allocation_id": objects["allocation_id"],
            }
            sent = {"json": app if name == "apps_create" else BODIES.get(name, {})}
        projects = ["demo"]
        # In the attacker's own project, by the id of an object of the victim.
        if len(re.findall("{", path)) > 1 or operation["operationId"] == "apps_create":
            projects.append("other")
        for project in projects:
            names = defaultdict(lambda: objects["allocation_id"], objects, project_id=project)
            target = path.format_map(names).removeprefix("/api/v1/")
            answer = attack(selling, verb.upper(), target, **sent)
            # Without an example in BODIES, the body may be refused before its object is looked up.
            unread = 422 if project == "other" and sent == {"json": {}} else 404
            assert answer.status_code in {404, unread}, (verb, target, answer.text)
            assert project == "other" or answer.json()["code"] == "project_not_found"
            assert NODE not in answer.text and "tenant" not in answer.text
            tried += 1
    assert tried > 30
    assert kept(selling) == before


def as_a_whole(stack: Stack, names: dict[str, str]) -> dict[str, Any]:
    """The attacker's view of its project and its own objects, by every GET operation."""
    documents = {}
    for verb, path, operation in operations():
        whole = "{project_id}" in path and set(re.findall("{(.*?)}", path)) <= set(names)
        # Whether a model is served follows from heartbeats: it has a test of its own.
        whole = whole and not path.endswith("/jobs/models")
        if verb == "get" and whole and "project-member" in roles(operation):
            answer = stack.client(ATTACKER).get("http://test" + path.format(**names))
            assert answer.status_code == 200, (path, answer.text)
            document = answer.json()
            # The bounds of the period move with the clock.
            for moment in ("to", "since"):
                document.pop(moment, None)
            # A machine's time goes on; the number of machines does not.
            for row in (*document.get("items", ()), *document.get("totals", ())):
                for amount in ("counted_seconds", "gpu_seconds"):
                    row.pop(amount, None)
            documents[path] = document
    return documents


def with_app(stack: Stack, project: str, allocation_id: str) -> str:
    activate(stack, allocation_id)
    with transaction(stack.engine) as conn:
        wish = {"slug": "slurm-reference", "name": "mine", "managed_key": "k"}
        app = apps.NewApp(project_id=project, controller_id=allocation_id, **wish)
        return str(apps.create(conn, app, ACT).id)


def test_no_list_or_sum_has_what_is_another_projects(
    selling: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quota, "OPERATIONS_PER_HOUR", 1)
    with_model(selling)
    theirs = grab(selling).json()["id"]
    app = with_app(selling, "other", theirs)
    names = {"project_id": "other", "allocation_id": theirs, "app_instance_id": app}
    before = as_a_whole(selling, names)
    assert len(before) > 15
    mine = launch(selling).json()["id"]
    recorded(selling, mine)
    selling.ingress_rule(mine)
    # Nor does the attacker's operation count as the victim's.
    with_app(selling, "demo", mine)
    with transaction(selling.engine) as conn:
        pool = pools.NewPool("a", ["m"], project_id="demo", target="remote")
        pools.start(conn, pool, ACT, most=1)
    enqueue(selling)
    play(selling, Outcome({}))
    bury(selling)
    for path, sent in (
        ("ssh-keys", {"public_key": OWN_KEY}),
        ("jobs", {"model": "m", "input": {}}),
        (f"allocations/{mine}/power", {"action": "stop"}),
    ):
        answer = selling.client(VICTIM).post(f"projects/demo/{path}", json=sent)
        assert answer.is_success, answer.text
    with transaction(selling.engine) as conn:
        # A chart shows jobs that were open for a while.
        conn.execute(sa.update(jobs_table).values(enqueued_at=jobs_table.c.enqueued_at - 600))
    now = as_a_whole(selling, names)
    assert {path: now[path] for path in before if now[path] != before[path]} == {}


def test_no_act_on_all_jobs_reaches_those_of_another_project(
    selling: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Acts that name no job: they cancel, take back, or make room for others."""
    with_model(selling)
    enqueue(selling)
    play(selling, Outcome({}))
    for _ in range(2):
        bury(selling)
    sample = selling.client(VICTIM).post("projects/demo/jobs/dlq/reprocess", json={"sample": 1})
    assert sample.is_success, sample.text
    enqueue(selling)
    before = kept(selling)[jobs_table.name]
    # One of two dead letters is pending again; the victim's next request for all must wait for it.
    statuses = ["dead_letter", "done", "pending", "pending"]
    assert sorted(job.status for job in before) == statuses
    for path, wish, nothing in (
        ("cancel", {"all": True}, {"canceled": 0}),
        ("cancel", {"all": True, "dead_letters": True}, {"canceled": 0}),
        ("dlq/reprocess", {"all": True}, {"ids": []}),
        ("dlq/reprocess", {"all": True, "force": True}, {"ids": []}),
    ):
        answer = attack(selling, "POST", f"projects/other/jobs/{path}", json=wish)
        assert answer.json() == nothing, (path, wish)
    # At its limit, a project gives up its own results and no others.
    monkeypatch.setitem(jobs.LIMITS, "jobs_kept", 1)
    with clock_ahead(selling.engine, 2 * jobs.READABLE_S):
        for status in (201, 429):
            wish = {"model": "m", "input": {}}
            answer = attack(selling, "POST", "projects/other/jobs", json=wish)
            assert answer.status_code == status, answer.text
    after = kept(selling)[jobs_table.name]
    assert [job for job in after if job.project_id == "demo"] == before


def test_the_key_of_a_request_is_its_senders(selling: Stack) -> None:
    """The same idempotency key neither shows the victim's answer nor stands in its way."""
    mine = launch(selling, "same").json()
    theirs = attack(
        selling, "POST", "projects/other/allocations", key="same", json={**BODY, "hostname": "x"}
    )
    assert theirs.status_code == 201 and theirs.json()["id"] != mine["id"]
    assert "Idempotency-Replayed" not in theirs.headers
    again = launch(selling, "same")
    assert (again.json()["id"], again.headers["Idempotency-Replayed"]) == (mine["id"], "true")
    first = attack(selling, "POST", "projects/other/ssh-keys", key="k", json={"public_key": KEY})
    headers = {"Idempotency-Key": "k"}
    answer = selling.client(VICTIM).post(
        "projects/demo/ssh-keys", json={"public_key": KEY}, headers=headers
    )
    assert (first.status_code, answer.status_code) == (201, 201)
    assert "Idempotency-Replayed" not in answer.headers
    # Every caller has the same address for its own jobs and tokens.
    with_model(selling)
    for path, wish in (("jobs", {"model": "m", "input": {}}), ("tokens", {"name": "same"})):
        both = [
            selling.client(who).post(path, json=wish, headers=headers) for who in (VICTIM, ATTACKER)
        ]
        assert [answer.status_code for answer in both] == [201, 201], path
        assert [answer.json()["project_id"] for answer in both] == ["demo", "other"]


def test_a_name_belongs_to_nobody(selling: Stack) -> None:
    mine = launch(selling).json()
    theirs = grab(selling, hostname=mine["hostname"], username=mine["username"])
    assert theirs.status_code == 201, theirs.text
    assert mine["id"] not in theirs.text


def test_cancelled_launches_leave_the_free_slot_and_the_quota_alone(selling: Stack) -> None:
    limit(selling, "demo", gpus=1, launches_per_hour=1)
    for _ in range(12):
        theirs = grab(selling, gpu_count=2)
        assert theirs.status_code == 201, theirs.text
        path = f"projects/other/allocations/{theirs.json()['id']}/release"
        assert attack(selling, "POST", path).json()["state"] == "released"
    slots = selling.client("admin").get(f"admin/nodes/{NODE}/resource-slots").json()["items"]
    assert [(slot["status"], slot["health_state"]) for slot in slots] == [
        ("available", "healthy"), ("available", "healthy"),
    ]  # fmt: skip
    assert launch(selling).status_code == 201


def test_the_rate_of_one_project_is_not_that_of_another(selling: Stack) -> None:
    limit(selling, "other", launches_per_hour=2, gpus=1)
    for _ in range(2):
        made = grab(selling).json()["id"]
        attack(selling, "POST", f"projects/other/allocations/{made}/release")
    answer = refused(selling, lambda: grab(selling))
    assert (answer["status"], answer["code"]) == (429, "rate_exceeded")
    assert "demo" not in str(answer)
    # Until the first of the two is an hour old.
    assert 3000 < int(grab(selling).headers["Retry-After"]) <= 3601
    assert launch(selling).status_code == 201


def test_a_member_who_floods_the_service_stops_nobody_else(
    selling: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = rate(monkeypatch, PER_S=0.5, BURST=5)
    client, path = selling.client(ATTACKER), "projects/other/quota"
    assert [client.get(path).status_code for _ in range(5)] == [200] * 5
    answer = refused(selling, lambda: client.get(path))
    assert (answer["status"], answer["code"]) == (429, "rate_exceeded")
    assert client.get("projects/none/quota").headers["Retry-After"] == "2"
    assert selling.client(VICTIM).get("projects/demo/quota").status_code == 200
    admin = selling.client("admin")
    assert {admin.get("projects/demo/quota").status_code for _ in range(9)} == {200}
    clock.now += 2
    assert [client.get(path).status_code for _ in range(2)] == [200, 429]


@pytest.mark.parametrize("chosen", [True, False])
def test_a_persons_name_is_not_taken_for_a_token(selling: Stack, *, chosen: bool) -> None:
    """Names of guests in Azure AD have the character that comes before a token's id elsewhere."""
    with reading(selling.engine) as conn:
        victim = tokens.authenticate(conn, selling.secrets[VICTIM])
    assert victim is not None
    name = f"mallory#{victim.id}" if chosen else "guest_example.com#EXT#@tenant.onmicrosoft.com"
    person = security.Caller("p1", f"oidc:{name}", Role.PROJECT_MEMBER, frozenset(), False, "p1")
    act = Act(person.actor, role=person.role, owner=person.owner)
    with transaction(selling.engine) as conn:
        fields = {"username": "u", "hostname": "h", "image": "ubuntu", "ssh_keys": [OWN_KEY]}
        mine = launching.allocate(
            conn, launching.Launch(project_id="demo", gpu_count=1, **fields), act
        ).id
    activate(selling, mine)
    with reading(selling.engine) as conn:
        assert ssh_access.authorise(conn, mine, OWN_KEY.rsplit(" ", 1)[0]).owner == "p1"


@pytest.fixture
def over(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Until it is set, every document of cloud-config is being read."""
    over = threading.Event()

    def slow(_text: str) -> dict[str, Any]:
        assert over.wait(60)
        return {}

    monkeypatch.setattr(cloud_config, "parse", slow)
    return over


def test_requests_of_a_member_that_take_long_stop_nobody_else(
    selling: Stack, over: threading.Event
) -> None:
    """A process has forty threads for requests; a document of cloud-config takes long to read."""
    app = create_app(selling.settings, selling.engine)
    theirs, victim = ({"Authorization": f"Bearer {selling.secrets[w]}"} for w in (ATTACKER, VICTIM))
    wish = {**BODY, "ssh_keys": [OWN_KEY], "gpu_count": 9}

    def post(number: int) -> int:
        keyed = {**theirs, "Idempotency-Key": f"slow-{number}"}
        path = "/api/v1/projects/other/allocations"
        return httpx.post(f"{url}{path}", json=wish, headers=keyed, timeout=60).status_code

    with listening(app) as url, ThreadPoolExecutor(50) as pool:
        answers = [pool.submit(post, number) for number in range(50)]
        until(lambda: app.state.places._waiting)
        path = "/api/v1/projects/demo/allocations"
        try:
            for _ in range(3):
                assert httpx.get(f"{url}{path}", headers=victim, timeout=30).status_code == 200
        finally:
            over.set()
        assert {answer.result() for answer in answers} == {409}
    assert app.state.places._taken == app.state.places._waiting == {}


def test_a_token_that_is_revoked_while_a_request_waits_opens_nothing(
    selling: Stack, over: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thief may have sent a thousand requests, which wait for each other."""
    monkeypatch.setattr(security, "PLACES", 1)
    app = create_app(selling.settings, selling.engine)
    theirs = {"Authorization": f"Bearer {selling.secrets[ATTACKER]}"}

    def post(path: str, wish: dict[str, Any]) -> int:
        headers = {**theirs, "Idempotency-Key": path}
        at = f"{url}/api/v1/projects/other/{path}"
        return httpx.post(at, json=wish, headers=headers, timeout=60).status_code

    with listening(app) as url, ThreadPoolExecutor(2) as pool:
        pool.submit(post, "allocations", {**BODY, "ssh_keys": [OWN_KEY], "gpu_count": 9})
        until(lambda: app.state.places._taken)
        waiting = pool.submit(post, "ssh-keys", {"public_key": OWN_KEY})
        until(lambda: app.state.places._waiting)
        try:
            with transaction(selling.engine) as conn:
                token = tokens.authenticate(conn, selling.secrets[ATTACKER])
                assert token is not None
                tokens.revoke(conn, token.id, ACT)
        finally:
            over.set()
        assert waiting.result() == 401
    assert kept(selling)["ssh_keys"] == []
    assert app.state.places._taken == app.state.places._waiting == {}


def test_a_request_that_is_canceled_gives_its_place_to_the_next() -> None:
    async def play() -> None:
        places = security.Places()
        leave, _ = await places.take("a", 1)
        first, second, third = (asyncio.create_task(places.take("a", 1)) for _ in range(3))
        await asyncio.sleep(0)
        first.cancel()
        await asyncio.sleep(0)
        leave()
        # It has its turn, and is canceled before it knows.
        second.cancel()
        (await third)[0]()
        assert places._taken == places._waiting == {}
        (await places.take("a", 1))[0]()

    asyncio.run(play())


def test_documents_that_take_long_to_read_are_counted(
    selling: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = rate(monkeypatch, READING_PER_S=0.5, READING_BURST=2.0)
    spent = iter((0.0, 3.0, 10.0, 10.1, 20.0, 20.1))
    monkeypatch.setattr(security, "time", SimpleNamespace(thread_time=lambda: next(spent)))
    wish: dict[str, Any] = {"gpu_count": 9, "user_data": "#cloud-config\ntimezone: UTC\n"}
    assert grab(selling, **wish).json()["code"] == "no_capacity"
    answer = refused(selling, lambda: grab(selling, **wish))
    assert (answer["status"], answer["code"]) == (429, "rate_exceeded")
    # Others, admins, and launches without a document are not asked.
    assert launch(selling, user_data=wish["user_data"]).status_code == 201
    assert grab(selling, gpu_count=9).json()["code"] == "no_capacity"
    body = {**BODY, **wish}
    admin = selling.client("admin")
    for number in range(2):
        keyed = {"Idempotency-Key": f"admin-{number}"}
        answer_of = admin.post("projects/demo/allocations", json=body, headers=keyed)
        assert answer_of.json()["code"] == "no_capacity"
    clock.now += answer["retry_after_s"]
    assert grab(selling, **wish).json()["code"] == "no_capacity"


def test_a_document_waits_for_another_one_a_moment_only(
    selling: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each that waits takes a thread."""
    rates = security.Rates()
    monkeypatch.setattr(security, "_TURN_S", 0.01)
    with rates.reading("a"), pytest.raises(Problem, match="rate_exceeded"), rates.reading("b"):
        raise AssertionError
    with rates.reading("b"):
        pass


def test_large_bodies_are_counted_by_their_bytes(
    selling: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = rate(monkeypatch)
    large = {"jobs": [{"model": "m", "input": {"text": "x" * (1 << 19)}}]}
    path = "projects/other/jobs/batch"
    codes = [attack(selling, "POST", path, json=large).status_code for _ in range(33)]
    assert codes[0] != 429 and codes[-1] == 429
    answer = selling.client(VICTIM).post("projects/demo/jobs/batch", json=large)
    assert answer.status_code != 429
    admin = selling.client("admin")
    assert {admin.post(path, json=large).status_code for _ in range(33)}.isdisjoint({429})
    clock.now += 1
    assert attack(selling, "POST", path, json=large).status_code == codes[0]


class Sender:
    """A sender of a body of stated size, as the application sees it."""

    def __init__(self, app: FastAPI, secret: str, size: int) -> None:
        self._app = app
        self._secret, self._size = secret, size
        self.read = False
        self.messages: list[Any] = []

    async def _receive(self) -> Any:
        self.read = True
        return {"type": "http.request", "body": b" " * self._size, "more_body": False}

    async def _send(self, message: Any) -> None:
        self.messages.append(message)

    def post(self, path: str) -> int:
        """The status of the answer."""
        headers = {"content-length": f"{self._size}", "content-type": "application/json"}
        headers |= {"authorization": f"Bearer {self._secret}"} if self._secret else {}
        scope = {
            "type": "http", "method": "POST", "path": path, "query_string": b"",
            "http_version": "1.1", "scheme": "http", "client": ("t", 1),
            "headers": [(key.encode(), value.encode()) for key, value in headers.items()],
        }  # fmt: skip
        asyncio.run(self._app(scope, self._receive, self._send))
        return int(self.messages[0]["status"])


def test_a_large_body_of_a_stranger_is_not_read(selling: Stack) -> None:
    """Reading is the work of the loop that serves everybody."""
    app = create_app(selling.settings, selling.engine)
    size = security.UNKNOWN_LIMIT + 1
    paths = {
        re.sub(r"\{[^}]*\}", "x", path)
        for path, verbs in app.openapi()["paths"].items()
        if "requestBody" in verbs.get("post", {})
    }
    assert len(paths) > 30
    for path in sorted(paths):
        stranger = Sender(app, "", size)
        assert (stranger.post(path), stranger.read) == (401, False), path
    sender = Sender(app, selling.secrets[VICTIM], size)
    assert sender.post("/api/v1/projects/demo/allocations") == 422
    # The operators' own application has no strangers, and the same limit.
    operators = create_operator_app(selling.settings, selling.engine)
    for size in (admission.BODY_LIMIT, admission.BODY_LIMIT + 1):
        local = Sender(operators, "", size)
        assert (local.post("/control/maintenance") == 413) is (size > admission.BODY_LIMIT)


def test_a_database_that_is_away_is_named_to_senders_of_large_bodies(
    selling: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(*_: Any) -> None:
        raise sa.exc.OperationalError("SELECT", {}, OSError("away"))

    monkeypatch.setattr(admission, "authenticate", away)
    app = create_app(selling.settings, selling.engine)
    sender = Sender(app, selling.secrets[VICTIM], security.UNKNOWN_LIMIT + 1)
    assert sender.post("/api/v1/projects/demo/allocations") == 503


def test_a_member_who_changes_things_without_end_does_not_fill_the_records(
    selling: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each change leaves rows in the audit log, which keeps them for ever."""
    clock = rate(monkeypatch, ACTS_PER_S=0.5, ACTS_BURST=4)
    path = "projects/{}/terminal-recording"

    def switch(number: int) -> Any:
        wish = {"enabled": number % 2 == 0}
        return attack(selling, "PUT", path.format("other"), json=wish)

    # A refused request leaves no rows and is not counted.
    for _ in range(9):
        assert attack(selling, "PUT", path.format("other"), json={}).status_code == 422
    assert [switch(number).status_code for number in range(5)] == [200] * 4 + [429]
    before = kept(selling)
    answer = refused(selling, lambda: switch(5))
    assert (answer["code"], answer["retry_after_s"]) == ("rate_exceeded", 2)
    assert kept(selling) == before
    # Other members are not limited, and jobs have their own limits.
    permitted = selling.client(VICTIM).put(path.format("demo"), json={"enabled": True})
    assert permitted.status_code == 200
    with_model(selling)
    job = {"model": "m", "input": {}}
    assert attack(selling, "POST", "projects/other/jobs", json=job).status_code == 201
    clock.now += 2
    assert [switch(number).status_code for number in range(2)] == [200, 429]


def test_keys_and_rules_are_added_at_the_pace_of_people(
    selling: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quota, "KEYS_PER_HOUR", 2)
    monkeypatch.setattr(quota, "RULES_PER_HOUR", 1)
    keys = "projects/other/ssh-keys"
    names = [KEY.replace("ILw6MHUf", f"ILw6MHU{letter}") for letter in "ghi"]
    for name in names[:2]:
        assert attack(selling, "POST", keys, json={"public_key": name}).status_code == 201
    answer = refused(selling, lambda: attack(selling, "POST", keys, json={"public_key": names[2]}))
    assert (answer["code"], answer["used"]) == ("rate_exceeded", 2)
    # Neither a known key nor a revocation, which may be urgent, nor another project waits.
    assert attack(selling, "POST", keys, json={"public_key": names[0]}).status_code == 201
    answer = attack(selling, "POST", f"{keys}/revoke", json={"public_key": names[0]})
    assert answer.status_code == 200
    permitted = selling.client(VICTIM).post("projects/demo/ssh-keys", json={"public_key": names[2]})
    assert permitted.status_code == 201
    # Invented keys leave rows, too; a machine's key is known, and a damaged key may be known.
    damaged = {"public_key": "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5"}
    assert attack(selling, "POST", f"{keys}/revoke", json=damaged).status_code == 429
    answer = attack(selling, "POST", f"{keys}/revoke", json={"public_key": names[2]})
    assert answer.status_code == 429
    grab(selling, ssh_keys=[names[2]])
    answer = attack(selling, "POST", f"{keys}/revoke", json={"public_key": names[2]})
    assert answer.status_code == 200
    with_addresses(selling)
    theirs = grab(selling).json()["id"]
    activate(selling, theirs)
    path = f"projects/other/allocations/{theirs}/ingress"
    assert attack(selling, "POST", path, json=body()).status_code == 201
    more = refused(selling, lambda: attack(selling, "POST", path, json=body(public_port=9)))
    assert more["code"] == "rate_exceeded" and int(more["retry_after_s"]) > 3000


@pytest.mark.parametrize(
    "wish",
    [{"gpu_count": 1}, {"gpu_count": 2}, {"user_data": "#cloud-config\nruncmd: [poweroff]\n"}],
    ids=["one", "two", "user-data"],
)
def test_launches_that_fail_by_their_tenant_take_no_slot_off_sale(
    selling: Stack, wish: dict[str, Any]
) -> None:
    """Images and user data that never answer, on a site that has set nothing: each slot is wiped
    and sold again without a person, and its project soon has to pause.
    """
    as_shipped(selling)
    for number in range(quota.SHIPPED["failures_per_hour"]):
        made = grab(selling, **wish)
        assert made.status_code == 201, (number, made.text)
        fail(selling, made.json()["id"])
        recover(selling)
    answer = refused(selling, lambda: grab(selling))
    assert (answer["code"], answer["limit"]) == ("rate_exceeded", "failures_per_hour")
    for number in range(2):
        assert launch(selling, f"k{number}").status_code == 201


def test_a_release_while_a_launch_begins_changes_nothing(selling: Stack) -> None:
    """Its slots are wiped after the next release, and then anybody's."""
    theirs = grab(selling, gpu_count=2).json()["id"]
    path = f"projects/other/allocations/{theirs}/release"
    task = selling.lease()

    def release() -> None:
        answer = refused(selling, lambda: attack(selling, "POST", path))
        assert (answer["status"], answer["code"]) == (409, "allocation_not_releasable")

    release()
    with transaction(selling.engine) as conn:
        slices.provision_started(conn, theirs, ACT)
    for _ in range(5):
        release()
    with transaction(selling.engine) as conn:
        slices.provision_succeeded(conn, theirs, ACT, connection={"username": "tenant"})
        queue.finish(conn, task.id, task.lease_token, TaskState.SUCCEEDED, ACT)
    assert attack(selling, "POST", path).json()["state"] == "releasing"
    release()
    with transaction(selling.engine) as conn:
        evidence = {"proofs": wipes.proofs(conn, theirs), "absence": {"absent": True, "checks": {}}}
        assert slices.release_succeeded(conn, theirs, ACT, **evidence)
    release()
    for number in range(2):
        assert launch(selling, f"k{number}").status_code == 201


def test_launches_that_do_not_fit_are_explained_one_at_a_time(
    selling: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An explanation judges every slot of the site, and a refused launch counts nowhere."""
    explain = placement.refusal
    calls: list[Any] = []
    meanwhile: list[Any] = []

    def refusal(*given: Any, **options: Any) -> Problem | None:
        calls.append(given)
        if len(calls) == 1:
            meanwhile.append(grab(selling, gpu_count=9))
            meanwhile.append(launch(selling, gpu_count=9))
        return explain(*given, **options)

    begun: list[Any] = []
    allocate = launching.allocate

    def counted(*given: Any) -> Any:
        begun.append(given)
        return allocate(*given)

    monkeypatch.setattr(launching, "allocate", counted)
    monkeypatch.setattr(placement, "refusal", refusal)
    first = refused(selling, lambda: grab(selling, gpu_count=9))
    victims, others = (answer.json() for answer in meanwhile)
    assert {answer["code"] for answer in (first, victims, others)} == {"no_capacity"}
    assert ["explanation" in answer for answer in (first, victims, others)] == [True, False, True]
    assert len(calls) == 2
    # A launch's transaction keeps others from writing.
    assert len(begun) == 4
    assert "explanation" in grab(selling, gpu_count=9).json()


def test_whole_machines_take_no_slot(selling: Stack) -> None:
    """A request never turns a slice host without slices into a whole machine."""
    wish = {**MACHINE, "ssh_keys": [OWN_KEY]}
    for _ in range(5):
        answer = refused(
            selling, lambda: attack(selling, "POST", "projects/other/allocations", json=wish)
        )
        assert answer["code"] == "no_capacity"
    for number in range(2):
        assert launch(selling, f"k{number}").status_code == 201


def test_whole_machines_that_are_given_back_are_free_at_once(metal: Stack) -> None:
    wish = {**MACHINE, "ssh_keys": [OWN_KEY]}
    for _ in range(12):
        theirs = attack(metal, "POST", "projects/other/allocations", json=wish)
        assert theirs.status_code == 201, theirs.text
        path = f"projects/other/allocations/{theirs.json()['id']}/release"
        assert attack(metal, "POST", path).json()["state"] == "released"
    launched = launch_machine(metal)
    assert launched.status_code == 201, launched.text
    answer = refused(metal, lambda: attack(metal, "POST", "projects/other/allocations", json=wish))
    assert answer["code"] == "no_capacity" and launched.json()["id"] not in str(answer)


def test_requests_of_one_project_that_wait_are_limited_as_shipped(selling: Stack) -> None:
    """Otherwise all of them could fail at the same time, before the first failure is known."""
    as_shipped(selling)
    with transaction(selling.engine) as conn:
        project = projects.get(conn, "other")
        assert quota.limits(conn, project)["open_requests"] == 4
        quota.change(conn, "other", {"open_requests": 1}, ACT)
    assert grab(selling).status_code == 201
    answer = refused(selling, lambda: grab(selling))
    assert (answer["limit"], "launches_per_hour" in quota.SHIPPED) == ("open_requests", True)


def test_a_slot_on_which_launches_of_two_projects_failed_is_left_to_people(selling: Stack) -> None:
    """Its host may be the cause, such as a GPU that does not compute."""
    as_shipped(selling)
    fail(selling, grab(selling, gpu_count=2).json()["id"])
    recover(selling)
    theirs = launch(selling).json()["id"]
    fail(selling, theirs)
    recover(selling)
    assert blocked(selling) == [theirs]
    # A project that tried again elsewhere says nothing about the other.
    fail(selling, grab(selling).json()["id"])
    recover(selling)
    assert theirs in blocked(selling)
    # Two projects of the same person do not keep slot after slot off sale: they fail everywhere.
    fail(selling, launch(selling, "again").json()["id"])
    recover(selling)
    assert blocked(selling) == []


def as_shipped(stack: Stack) -> None:
    """The site has set neither limits nor a recovery policy."""
    with transaction(stack.engine) as conn:
        conn.execute(sa.delete(settings).where(settings.c.name == "default_quota"))


def fail(stack: Stack, allocation_id: str) -> None:
    """The guest of a launch is not reachable in time."""
    error = {"code": "readiness_failed", "found": "no SSH", "expected": "x", "remedy": "x"}
    with transaction(stack.engine) as conn:
        (task,) = leasing.lease(conn, "test", kinds=[TaskKind.SLICE_VM_PROVISION])
        assert task.allocation_id == allocation_id
        slices.provision_started(conn, allocation_id, ACT)
        slices.provision_failed(conn, allocation_id, ACT, step="ready", error=error)
        queue.finish(conn, task.id, task.lease_token, TaskState.FAILED, ACT)


def recover(stack: Stack) -> None:
    """The leader's loops, and an honest host, on which the machine runs until it is removed."""
    kinds = (TaskKind.SLICE_ABSENCE_VERIFY, TaskKind.SLICE_WIPE)
    removed = False
    for _ in range(8):
        recover_blocked(stack.engine, stack.settings)
        play_recovery_cases(stack.engine, stack.settings)
        with transaction(stack.engine) as conn:
            for task in leasing.lease(conn, "test", kinds=kinds):
                removed |= task.kind == TaskKind.SLICE_WIPE
                evidence: dict[str, Any] = {"absence": {"absent": removed, "checks": {}}}
                if removed:
                    evidence["proofs"] = wipes.proofs(conn, str(task.allocation_id))
                HANDLERS[task.kind].succeed(open_work(conn, stack.settings, task), evidence)
                queue.finish(conn, task.id, task.lease_token, TaskState.SUCCEEDED, ACT)


def blocked(stack: Stack) -> list[str]:
    """The allocations that left blocked slots."""
    with reading(stack.engine) as conn:
        return [row.allocation_id for row in recovery_policy.blocked_allocations(conn)]


def test_a_public_key_and_its_revocation_hold_in_one_project_only(selling: Stack) -> None:
    mine = launch(selling).json()["id"]
    activate(selling, mine)
    keys = "projects/other/ssh-keys"
    for key in (KEY, OWN_KEY):
        assert attack(selling, "POST", keys, json={"public_key": key}).status_code == 201
    answer = attack(selling, "POST", f"{keys}/revoke", json={"public_key": KEY})
    assert answer.json()["revoked_at"]
    with reading(selling.engine) as conn:
        assert ssh_access.authorise(conn, mine, KEY.rsplit(" ", 1)[0]).project_id == "demo"
        with pytest.raises(Problem, match="access_unknown"):
            ssh_access.authorise(conn, mine, OWN_KEY.rsplit(" ", 1)[0])


def test_ports_of_ingress_are_kept_from_others_and_named_to_none(selling: Stack) -> None:
    with_addresses(selling)
    mine, theirs = launch(selling).json()["id"], grab(selling).json()["id"]
    for key in (mine, theirs):
        activate(selling, key)
    rule = selling.ingress_rule(mine)
    path = f"projects/other/allocations/{theirs}/ingress"
    answer = refused(selling, lambda: attack(selling, "POST", path, json=body()))
    assert answer["code"] == "ingress_port_in_use"
    assert not [name for name in (rule, mine, "demo") if name in str(answer)]
    assert attack(selling, "DELETE", f"{path}/{rule}").status_code == 404
    wishes = (body(public_address=OTHER, public_port=port) for port in range(1000, 1100))
    made = [attack(selling, "POST", path, json=wish).status_code for wish in wishes]
    assert made.count(201) == ingress.MOST and made[ingress.MOST :] == [409] * (100 - ingress.MOST)
    again = body(public_port=8080)
    headers = {"Idempotency-Key": "mine"}
    client = selling.client(VICTIM)
    given = client.post(f"projects/demo/allocations/{mine}/ingress", json=again, headers=headers)
    assert (given.status_code, given.json()["public_address"]) == (201, ADDRESS)


def test_a_machine_has_one_power_action_at_a_time(selling: Stack) -> None:
    """However often it is asked for, so that it does not fill the queue of its host."""
    mine, theirs = launch(selling).json()["id"], grab(selling).json()["id"]
    for key in (mine, theirs):
        activate(selling, key)
    path = f"projects/other/allocations/{theirs}/power"
    actions = [{"action": action} for action in ("restart", "reset", "stop", "restart") * 5]
    assert {attack(selling, "POST", path, json=wish).status_code for wish in actions} == {202, 409}
    with reading(selling.engine) as conn:
        queued = [task for task in queue.every(conn) if task.kind == TaskKind.SLICE_VM_POWER]
    assert [task.allocation_id for task in queued] == [theirs]


@pytest.mark.parametrize("mark", ["\x1b", "\x9b", "\u202e", "\u2028", "\u2066"])
def test_a_reason_reads_as_it_was_written(selling: Stack, mark: str) -> None:
    """Operators read it in the audit, where such a mark shows other words."""
    path = f"projects/other/allocations/{grab(selling).json()['id']}/release"
    answer = refused(selling, lambda: attack(selling, "POST", path, json={"reason": f"a{mark}b"}))
    assert (answer["status"], answer["code"]) == (422, "request_invalid")


def test_a_registered_key_ends_with_the_token_that_registered_it(selling: Stack) -> None:
    """Otherwise a thief of the token would keep access to the machines."""
    mine = grab(selling).json()["id"]
    activate(selling, mine)
    answer = attack(selling, "POST", "projects/other/ssh-keys", json={"public_key": KEY})
    assert answer.status_code == 201
    with transaction(selling.engine) as conn:
        line = KEY.rsplit(" ", 1)[0]
        assert ssh_access.authorise(conn, mine, line).project_id == "other"
        token = tokens.authenticate(conn, selling.secrets[ATTACKER])
        assert token is not None
        tokens.revoke(conn, token.id, ACT)
        with pytest.raises(Problem, match="token_ended"):
            ssh_access.authorise(conn, mine, line)

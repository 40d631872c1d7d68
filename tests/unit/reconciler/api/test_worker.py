"""Workers without the database: the rights of a pool's token, and their limits."""

from __future__ import annotations

import json
import threading
import time
import uuid
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import sqlalchemy as sa

from reconciler.api import security
from reconciler.api import worker as worker_routes
from reconciler.api.app import create_app
from reconciler.api.security import BURST, Rates
from reconciler.db import clock
from reconciler.db.engine import transaction
from reconciler.db.schema import Job, Pool, PoolWorker
from reconciler.lifecycle import restore
from reconciler.model import client_limits
from reconciler.model.errors import Problem
from reconciler.model.jobs import LOST_LIMIT
from reconciler.pools import hints, jobs, pools, remote
from reconciler.pools.hints import DEAD
from reconciler.records.tokens import digest
from reconciler.settings import Settings
from reconciler.work.loops import tend_leases, tend_remote_workers
from tests.redis_server import RedisServer
from tests.unit.reconciler.api.conformity import Client, operations
from tests.unit.reconciler.api.refusals import kept, refused
from tests.unit.reconciler.api.stack import ACT, NODE, Stack, listening
from tests.unit.reconciler.api.test_pools import started
from tests.unit.reconciler.pools.test_leases import check_counts, clock_ahead
from tests.unit.reconciler.service.service import until

pytestmark = pytest.mark.covers("ORCH-1", "ORCH-2")

FAILURE = {"code": "function_failed", "expected": "a", "found": "b", "remedy": "c"}


def remote_pool(stack: Stack, project: str = "demo", **options: Any) -> str:
    """The token of a new remote pool, which is also that of the caller with its name."""
    options = {"models": ["m"], **options}
    wish = pools.NewPool(f"remote-{project}", project_id=project, target="remote", **options)
    with transaction(stack.engine) as conn:
        pool = pools.start(conn, wish, ACT, most=9)
        _, secret = remote.issue(conn, pool.id, ACT, 3600)
    stack.secrets[wish.name] = secret
    return secret


class Worker:
    """A worker of a project's pool, hostile as its test needs it."""

    def __init__(self, stack: Stack, project: str = "demo", model: str = "m") -> None:
        self.stack = stack
        self.client: Client = stack.client(f"remote-{project}")
        body = {"host": "gpu-1", "pid": 7, "models": [model]}
        answer = self.client.post("worker/register", json=body)
        assert answer.status_code == 200, answer.text
        self.id = answer.json()["worker_id"]

    def ask(self, act: str, **body: Any) -> Any:
        return self.client.post(f"worker/{act}", json={"worker_id": self.id, **body})

    def claim(self, limit: int = 1, token: str = "") -> list[dict[str, Any]]:
        answer = self.ask("turn", claim={"token": token or str(uuid.uuid4()), "limit": limit})
        assert answer.status_code == 200, answer.text
        held: list[dict[str, Any]] = answer.json()["jobs"]
        return held

    def finish(self, *held: dict[str, Any], **end: Any) -> int:
        ended = [{"id": job["id"], "token": job["token"], **end} for job in held]
        answer = self.ask("turn", ended=ended)
        assert answer.status_code == 200, answer.text
        return int(answer.json()["counted"])


def enqueue(stack: Stack, count: int = 1, project: str = "demo", **options: Any) -> list[str]:
    wishes = [jobs.NewJob("m", {"number": number}, **options) for number in range(count)]
    with transaction(stack.engine) as conn:
        return jobs.enqueue(conn, project, wishes, ACT)


def read(stack: Stack, id: str, project: str = "demo") -> Job:
    with transaction(stack.engine) as conn:
        return jobs.get(conn, project, id)


def change(stack: Stack, row: Any, **values: Any) -> None:
    with transaction(stack.engine) as conn:
        conn.execute(sa.update(row.TABLE).values(**values))


@pytest.fixture
def worker(new: Stack) -> Worker:
    remote_pool(new)
    return Worker(new)


def test_jobs_are_claimed_renewed_finished_and_failed_in_groups(new: Stack, worker: Worker) -> None:
    ids = enqueue(new, 4)
    first, second, third, fourth = worker.claim(9)
    assert [job["input"] for job in (first, second, third, fourth)] == [
        {"number": number} for number in range(4)
    ]
    tokens = [first["token"]]
    assert sorted(worker.ask("renew", tokens=tokens).json()["held"]) == sorted(ids)
    ended = [
        {"id": first["id"], "token": first["token"], "result": {"n": 1}},
        {"id": second["id"], "token": second["token"], "error": FAILURE},
        {"id": third["id"], "token": third["token"], "error": FAILURE, "permanent": True},
    ]
    returned = [{"id": fourth["id"], "token": fourth["token"]}]
    answer = worker.ask("turn", ended=ended, returned=returned).json()
    assert answer == {"counted": 3, "jobs": [], "serving": True}
    rows = [read(new, id) for id in ids]
    assert [row.status for row in rows] == ["done", "pending", "dead_letter", "pending"]
    assert [row.attempts for row in rows] == [1, 1, 1, 0]
    assert rows[0].result == {"n": 1} and rows[1].error["code"] == "function_failed"
    assert worker.ask("renew", tokens=tokens).json()["held"] == []


def test_a_repeated_claim_gets_the_same_jobs_and_a_lost_lease_nothing(
    new: Stack, worker: Worker
) -> None:
    enqueue(new, 3)
    token = str(uuid.uuid4())
    (held,) = worker.claim(1, token)
    change(new, Job, lease_expires_at=clock_of(new) + 10)
    assert worker.claim(1, token) == [held]
    assert read(new, held["id"]).lease_expires_at > clock_of(new) + 20
    change(new, Job, lease_expires_at=1.0)
    tend_leases(new.engine, Settings())
    assert worker.finish(held, result={}) == 0
    assert worker.ask("renew", tokens=[token]).json()["held"] == []
    row = read(new, held["id"])
    assert (row.status, row.attempts, row.lost) == ("pending", 0, 1)


def clock_of(stack: Stack) -> float:
    with transaction(stack.engine) as conn:
        return clock.read(conn)


def test_a_worker_cannot_touch_jobs_of_others(new: Stack) -> None:
    remote_pool(new, replicas=2)
    remote_pool(new, "other")
    mine, beside, stranger = Worker(new), Worker(new), Worker(new, "other")
    (id,) = enqueue(new)
    assert stranger.claim(9) == [], "of another project"
    (held,) = mine.claim()
    for thief in (beside, stranger):
        assert thief.finish(held, result={"stolen": True}) == 0
        assert thief.ask("renew", tokens=[held["token"]]).json()["held"] == []
        thief.ask("turn", returned=[{"id": id, "token": held["token"]}])
        assert thief.claim(1, held["token"]) == []
    # A caller cannot act as the worker of another pool either.
    for act, body in (("turn", {}), ("renew", {"tokens": []}), ("due", {}), ("leave", {})):
        answer = stranger.ask(act, worker_id=mine.id, **body)
        assert (answer.status_code, answer.json()["code"]) == (404, "worker_not_found")
    assert worker_of(read(new, id)) == (mine.id, "running")
    assert mine.finish(held, held, result={}) == 1, "each counts once"


def worker_of(job: Job) -> tuple[str, str]:
    return job.worker, job.status


def test_a_worker_holds_no_more_than_its_limit_and_no_job_for_ever(
    new: Stack, worker: Worker
) -> None:
    enqueue(new, remote.HELD + 5, timeout_s=10)
    held = worker.claim(remote.HELD)
    assert len(held) == remote.HELD
    assert worker.claim(remote.HELD) == []
    assert worker.finish(held[0], result={}) == 1
    assert len(worker.claim(remote.HELD)) == 1
    answer = worker.ask("turn", claim={"token": str(uuid.uuid4()), "limit": remote.HELD + 1})
    assert answer.status_code == 422
    change(new, Job, started_at=clock_of(new) - 371)
    assert worker.ask("renew", tokens=[held[0]["token"]]).json()["held"] == []


def test_a_worker_that_has_a_job_which_was_lost_has_no_other(new: Stack, worker: Worker) -> None:
    lost, *_ = enqueue(new, 4)
    held = worker.claim()
    change(new, Job, lease_expires_at=1.0)
    tend_leases(new.engine, Settings())
    assert [(job["id"], job["lost"]) for job in worker.claim(9)] == [(lost, 1)]
    assert worker.claim(9) == [], "it cannot have others to blame"
    assert worker.finish(*held, result={}) == 0
    (again,) = worker.claim(9, read(new, lost).token)
    assert worker.finish(again, result={}) == 1
    assert len(worker.claim(9)) == 3


def test_dead_letters_are_named_in_the_stream(new: Stack, worker: Worker, tmp_path: Path) -> None:
    """Those of outcomes, of workers that leave or are silent, and none that is not committed."""
    with closing(RedisServer(tmp_path)) as server:
        server.start()
        new.settings = new.settings.model_copy(update={"redis_url": server.url})
        worker.client = new.client("remote-demo")
        failed, left, silent = enqueue(new, 3)
        (held,) = worker.claim()
        assert worker.finish(held, error=FAILURE, permanent=True) == 1
        assert worker.finish(held, error=FAILURE, permanent=True) == 0
        change(new, Job, lost=LOST_LIMIT - 1)
        assert [job["id"] for job in worker.claim()] == [left]
        worker.ask("leave")
        tend_leases(new.engine, new.settings)
        worker = Worker(new)
        assert [job["id"] for job in worker.claim()] == [silent]
        change(new, PoolWorker, beat_at=1.0)
        tend_remote_workers(new.engine, new.settings)
        tend_leases(new.engine, new.settings)
        letters = [fields for _, fields in server.client.xrange(DEAD)]
        hints.of.cache_clear()
    assert letters == [
        {"job": failed, "code": "function_failed"},
        {"job": left, "code": "worker_lost"},
        {"job": silent, "code": "worker_lost"},
    ]


def test_a_pool_has_a_seat_for_each_worker(new: Stack, worker: Worker) -> None:
    body = {"host": "x", "pid": 1, "models": ["m"]}
    full = refused(new, lambda: worker.client.post("worker/register", json=body))
    assert (full["status"], full["code"]) == (409, "pool_full")
    change(new, PoolWorker, beat_at=clock_of(new) - 31)
    second = Worker(new)
    enqueue(new)
    late = worker.ask("turn", claim={"token": str(uuid.uuid4()), "limit": 1})
    assert (late.status_code, late.json()["code"]) == (409, "pool_full"), "its seat has gone"
    second.ask("leave")
    assert len(worker.claim()) == 1
    change(new, PoolWorker, beat_at=clock_of(new) - 601)
    tend_remote_workers(new.engine, Settings())
    assert worker.ask("renew", tokens=[]).json()["code"] == "worker_not_found"
    unknown = worker.client.post("worker/register", json=body | {"models": ["other"]})
    assert (unknown.status_code, unknown.json()["code"]) == (422, "model_unknown")


def test_of_two_silent_workers_one_takes_the_seat_again(new: Stack, worker: Worker) -> None:
    change(new, PoolWorker, beat_at=clock_of(new) - 31)
    second = Worker(new)
    change(new, PoolWorker, beat_at=clock_of(new) - 31)
    enqueue(new, 2)
    assert len(worker.claim()) == 1
    late = second.ask("turn", claim={"token": str(uuid.uuid4()), "limit": 1})
    assert (late.status_code, late.json()["code"]) == (409, "pool_full")
    assert second.ask("renew", tokens=[]).json()["code"] == "pool_full"


def test_a_clock_set_back_keeps_no_seat(new: Stack, worker: Worker) -> None:
    """A heartbeat of before would be from the future for as long as the clock went back."""
    body = {"host": "x", "pid": 1, "models": ["m"]}
    change(new, PoolWorker, beat_at=clock_of(new) + 3600)
    tend_remote_workers(new.engine, Settings())
    with clock_ahead(new.engine, remote.SILENT_S + 1):
        assert worker.client.post("worker/register", json=body).status_code == 200


@pytest.mark.parametrize(
    ("end", "code"),
    [
        ({"result": {"text": "x" * (1 << 16)}}, "result_invalid"),
        ({"result": {"numbers": [1e308] * 300}}, "result_invalid"),
        ({"result": {"text": "\ud800"}}, "result_invalid"),
        ({"result": {"number": float("inf")}}, "result_invalid"),
        ({"result": json.loads('{"x":' * 900 + "1" + "}" * 900)}, "result_invalid"),
        ({}, "result_invalid"),
        ({"error": FAILURE | {"found": "a\0b"}}, "function_failed"),
    ],
)
def test_an_outcome_that_cannot_be_kept_is_a_failure(
    new: Stack, worker: Worker, end: dict[str, Any], code: str
) -> None:
    (id,) = enqueue(new)
    (held,) = worker.claim()
    text = json.dumps({"worker_id": worker.id, "ended": [{**end, **keys(held)}]})
    answer = worker.client.post(
        "worker/turn", content=text, headers={"Content-Type": "application/json"}
    )
    assert answer.status_code == 200, answer.text
    row = read(new, id)
    assert (row.error["code"], row.result) == (code, None)
    assert "\0" not in row.error["found"]


def test_the_texts_of_a_failure_are_cut(new: Stack, worker: Worker) -> None:
    """They count against no limit of the project, and a job may fail again and again."""
    (id,) = enqueue(new)
    (held,) = worker.claim()
    texts = dict.fromkeys(("expected", "found", "remedy"), "\U0001f600" * 2000)
    worker.finish(held, error={**FAILURE, **texts, "detail": "\x01" * 1999 + "!"})
    row = read(new, id)
    assert len(json.dumps(row.error)) < 5_000
    assert row.error["detail"].endswith("\x01!")
    assert {len(row.error[name]) for name in texts} == {75}
    change(new, Job, not_before=None)
    (held,) = worker.claim()
    worker.finish(held, error={**FAILURE, "found": "x" * 2000, "detail": "y" * 2000})
    row = read(new, id)
    assert (len(row.error["found"]), len(row.error["detail"])) == (300, 2000)
    assert row.error["remedy"] == FAILURE["remedy"]
    check_counts(new.engine)


def keys(held: dict[str, Any]) -> dict[str, Any]:
    return {"id": held["id"], "token": held["token"]}


@pytest.mark.parametrize(
    ("act", "body"),
    [
        ("turn", {"ended": [{"id": "a", "token": "b"}] * 65}),
        ("turn", {"ended": [{"id": "a", "token": "b", "error": {**FAILURE, "code": "No code"}}]}),
        ("turn", {"ended": [{"id": "a", "token": "b", "error": {**FAILURE, "found": "x" * 2001}}]}),
        ("turn", {"ended": [{"id": "a", "token": "b", "project_id": "other"}]}),
        ("turn", {"claim": {"token": "t", "limit": 1}}),
        ("renew", {"tokens": ["a"] * 65}),
        ("due", {"wait_s": 21}),
        ("register", {"host": "x", "pid": 1, "models": []}),
        ("register", {"host": "x\n", "pid": 1, "models": ["m"]}),
    ],
)
def test_what_exceeds_its_bounds_is_refused(
    new: Stack, worker: Worker, act: str, body: dict[str, Any]
) -> None:
    who = {} if act == "register" else {"worker_id": worker.id}
    answer = refused(new, lambda: worker.client.post(f"worker/{act}", json={**who, **body}))
    assert (answer["status"], answer["code"]) == (422, "request_invalid")


def test_a_flood_of_requests_is_refused(
    new: Stack, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    app: Any = new.client().app
    app.state.rates._paid = {f"pool:{pool_of(new).id}": time.monotonic() + 1e6}
    answer = worker.ask("renew", tokens=[])
    assert (answer.status_code, answer.json()["code"]) == (429, "rate_exceeded")
    assert answer.headers["Retry-After"]
    monkeypatch.setattr(client_limits, "time", SimpleNamespace(monotonic=lambda: 1000.0))
    rates = Rates()
    # One less, because the sum of so many fractions may be a little more.
    for _ in range(2 * BURST - 1):
        rates.take("a pool of two", 2)
    with pytest.raises(Problem, match="at most 200"):
        for _ in range(2):
            rates.take("a pool of two", 2)


def test_acts_that_each_write_to_the_disk_have_a_pace_of_their_own(
    new: Stack, worker: Worker
) -> None:
    app: Any = new.client().app
    app.state.rates._paid = {f"acts of pool {pool_of(new).id}": time.monotonic() + 1e6}
    for act, body in (("renew", {"tokens": []}), ("leave", {})):
        assert worker.ask(act, **body).json()["code"] == "rate_exceeded"
    assert worker.ask("turn").status_code == 200


def test_turns_that_take_long_stop_neither_heartbeats_nor_anybody_else(
    new: Stack, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process has forty threads for requests; a repeated claim gets up to 4 MiB each time."""
    over = threading.Event()
    monkeypatch.setattr(hints, "bury", lambda *_: over.wait(60))
    app = create_app(new.settings, new.engine)
    token, member = (
        {"Authorization": f"Bearer {new.secrets[who]}"} for who in ("remote-demo", "member")
    )
    body = {"worker_id": worker.id}

    def post(act: str, **more: Any) -> int:
        address = f"{url}/api/v1/worker/{act}"
        return httpx.post(address, json=body | more, headers=token, timeout=60).status_code

    with listening(app) as url, ThreadPoolExecutor(50) as requests:
        try:
            turns = [requests.submit(post, "turn")]
            until(lambda: app.state.places._taken)
            assert post("renew", tokens=[]) == 200
            turns += [requests.submit(post, "turn") for _ in range(49)]
            until(lambda: app.state.places._waiting)
            address = f"{url}/api/v1/projects/demo/jobs"
            for _ in range(3):
                assert httpx.get(address, headers=member, timeout=30).status_code == 200
            assert post("due") == 200, "it waits without a thread"
        finally:
            over.set()
        assert {turn.result() for turn in turns} == {200}
    assert app.state.places._taken == app.state.places._waiting == {}


def pool_of(stack: Stack) -> Pool:
    with transaction(stack.engine) as conn:
        return pools.get(conn, "remote-demo")


def test_a_wait_ends_when_a_job_is_due(new: Stack) -> None:
    """Soon, however rarely the service looks later in a wait."""
    new.settings = new.settings.model_copy(update={"poll_s": 60.0})
    remote_pool(new)
    worker = Worker(new)
    began = time.monotonic()
    assert worker.ask("due").json() == {"due": False, "serving": True}
    timer = threading.Timer(0.3, enqueue, (new,))
    timer.start()
    assert worker.ask("due", wait_s=20).json()["due"] is True
    timer.join()
    assert 0.2 < time.monotonic() - began < 15
    worker.claim()
    # With the poll of a site.
    new.settings = new.settings.model_copy(update={"poll_s": 0.5})
    new.client()
    began = time.monotonic()
    assert worker.ask("due", wait_s=1).json()["due"] is False
    assert time.monotonic() - began > 0.9


def test_a_job_that_comes_to_the_same_process_ends_a_wait_at_once(
    new: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each job lets one request look, and no request of another project or model, even if the pool
    has both and the request came first.
    """
    new.settings = new.settings.model_copy(update={"poll_s": 60.0})
    monkeypatch.setattr(worker_routes, "_FIRST_S", 60.0)
    remote_pool(new, replicas=3, models=["m", "n"])
    remote_pool(new, "other")
    waiting = [Worker(new), Worker(new), Worker(new, "other"), Worker(new, model="n")]
    answers: dict[int, bool] = {}

    def wait(number: int) -> None:
        answers[number] = waiting[number].ask("due", wait_s=20).json()["due"]

    looked: list[worker_routes.WaitingRequest] = []
    pause = worker_routes.WaitingRequest.pause

    async def long_pause(request: worker_routes.WaitingRequest, _seconds: float) -> None:
        """Only a job ends it."""
        looked.append(request)
        await pause(request, 600)

    monkeypatch.setattr(worker_routes.WaitingRequest, "pause", long_pause)
    threads = [threading.Thread(target=wait, args=(number,), daemon=True) for number in range(4)]
    for number, thread in enumerate(reversed(threads), 1):
        thread.start()
        until(lambda number=number: len(looked) == number)
    member, job = new.client("member"), {"model": "m", "input": {}}
    assert member.post("projects/demo/jobs", json=job).status_code == 201
    until(lambda: {0, 1} & set(answers))
    (first,) = {0, 1} & set(answers)
    assert len(waiting[first].claim()) == 1
    body = {"jobs": [job, job]}
    assert member.post("projects/demo/jobs/batch", json=body).status_code == 201
    until(lambda: {0, 1} <= set(answers))
    assert set(answers) == {0, 1}, "nothing came for the others"
    assert new.client("stranger").post("projects/other/jobs", json=job).status_code == 201
    of_n = member.post("projects/demo/jobs", json={**job, "model": "n"})
    assert of_n.status_code == 201
    until(lambda: answers == dict.fromkeys(range(4), True))
    for thread in threads:
        thread.join()


def test_nothing_is_due_during_maintenance(new: Stack, worker: Worker) -> None:
    enqueue(new)
    admin = new.client("admin", base="/")
    assert admin.post("control/maintenance", json={"mode": "drain"}).status_code == 200
    assert worker.ask("due").json()["due"] is False and worker.claim() == []


def test_the_token_opens_its_pool_only_and_for_no_longer_than_that(new: Stack) -> None:
    secret = remote_pool(new)
    worker = Worker(new)
    assert pool_of(new).token_hash == digest(secret)
    assert secret not in json.dumps(kept(new), default=str), "only its hash is kept"
    calls = [("turn", {}), ("renew", {"tokens": []}), ("due", {}), ("leave", {})]
    for who in ("", "admin", "member", "node"):
        for act, body in calls:
            sent = {"worker_id": worker.id, **body}
            answer = new.client(who).post(f"worker/{act}", json=sent)
            assert (answer.status_code, answer.json()["code"]) == (401, "unauthenticated"), who

    def opened() -> bool:
        return bool(worker.ask("renew", tokens=[]).status_code == 200)

    assert opened()
    change(new, Pool, token_expires_at=clock_of(new) - 1)
    assert not opened()
    change(new, Pool, token_expires_at=clock_of(new) + 60)
    assert opened()
    admin = new.client("admin", base="/")
    issued = admin.post("pools/remote-demo/token", json={"ttl_s": 60})
    assert issued.status_code == 201 and not opened(), "replaced"
    new.secrets["remote-demo"] = issued.json()["token"]
    worker.client = new.client("remote-demo")
    assert opened()
    shown = admin.get("pools/remote-demo")
    assert issued.json()["token_expires_at"] == shown.json()["token_expires_at"]
    assert "hash" not in shown.text
    with transaction(new.engine) as conn:
        restore.doubt(conn, ACT)
    assert not opened(), "it may have been replaced since the backup"
    new.secrets["remote-demo"] = admin.post("pools/remote-demo/token", json={}).json()["token"]
    worker.client = new.client("remote-demo")
    (id,) = enqueue(new)
    assert worker.claim()
    draining = admin.post("pools/remote-demo/stop", json={}).json()
    assert draining["state"] == "draining" and opened(), "what runs may end"
    tend_remote_workers(new.engine, Settings())
    assert worker.ask("turn", claim={"token": str(uuid.uuid4()), "limit": 1}).json() == {
        "counted": 0,
        "jobs": [],
        "serving": False,
    }
    assert admin.post("pools/remote-demo/evict", json={}).json()["state"] == "stopping"
    assert not opened(), "at once"
    tend_remote_workers(new.engine, Settings())
    tend_leases(new.engine, Settings())
    ended = admin.get(f"pools/{draining['id']}").json()
    assert (ended["state"], ended["workers"]) == ("evicted", [])
    assert (read(new, id).status, read(new, id).lost) == ("pending", 1)


def test_a_token_that_is_replaced_while_a_request_waits_opens_nothing(
    new: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pool's requests wait for each other, and any number of them may have come before."""
    remote_pool(new)
    worker = Worker(new)
    (id,) = enqueue(new)
    pool = pool_of(new).id

    async def replaced(*given: Any) -> bool:
        waited = await security.take_place(*given)
        with transaction(new.engine) as conn:
            remote.issue(conn, pool, ACT, 3600)
        return waited

    monkeypatch.setattr(worker_routes, "take_place", replaced)
    claim = {"token": str(uuid.uuid4()), "limit": 1}
    answer = worker.ask("turn", claim=claim)
    assert (answer.status_code, answer.json()["code"]) == (401, "unauthenticated")
    assert read(new, id).status == "pending"


def test_no_operation_but_those_of_workers_takes_the_token(new: Stack) -> None:
    remote_pool(new)
    holder, before = new.client("remote-demo"), kept(new)
    names = defaultdict(lambda: "x", node_id=NODE, project_id="demo", action="disable")
    tried = 0
    for verb, path, operation in operations():
        if "security" in operation:
            at = path.format_map(names)
            answer = holder.request(verb, f"http://test{at}", json={})
            assert (answer.status_code, answer.json()["code"]) == (401, "unauthenticated"), at
            tried += 1
    assert tried > 100 and kept(new) == before


@pytest.mark.parametrize(
    "changes",
    [
        {"project_id": None},
        {"host": "control"},
        {"devices": ["GPU-0"]},
        {"kill_on_oom": True},
        {"memory_mib": 512},
        {"target": "elsewhere"},
    ],
)
def test_a_remote_pool_is_refused_with_what_it_does_not_have(
    new: Stack, changes: dict[str, Any]
) -> None:
    body = {"name": "r", "models": ["m"], "project_id": "demo", "target": "remote"}
    admin = new.client("admin", base="/")
    problem = refused(new, lambda: admin.post("pools", json=body | changes))
    assert (problem["status"], problem["code"]) == (422, "request_invalid")
    pool = admin.post("pools", json=body).json()
    assert (pool["state"], pool["host_id"]) == ("running", "remote")
    assert admin.get("pools/hosts").json()["hosts"] == [], "it takes no other pool"


def test_no_memory_is_shown_where_none_is_known(new: Stack, worker: Worker) -> None:
    text = new.client("admin", base="/").get("metrics").text
    assert 'gpu_orchestrator_worker_pools{state="running"} 1.0\n' in text
    assert 'pool="remote-demo"' not in text


def test_a_pool_on_a_host_has_no_token(new: Stack) -> None:
    id = started(new)
    admin = new.client("admin", base="/")
    problem = refused(new, lambda: admin.post(f"pools/{id}/token", json={}))
    assert (problem["status"], problem["code"]) == (409, "pool_without_token")

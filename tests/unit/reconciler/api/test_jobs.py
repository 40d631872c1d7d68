"""Jobs through the API: every wrong request is refused by name, and a project sees its own only."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from reconciler.db import clock, leader
from reconciler.db.engine import transaction
from reconciler.db.schema import control as modes
from reconciler.db.schema import idempotency_keys
from reconciler.db.schema import jobs as table
from reconciler.model.jobs import Outcome
from reconciler.pools import hints, jobs, leases, pools, remote
from tests.redis_server import RedisServer
from tests.unit.reconciler.api.refusals import kept, refused
from tests.unit.reconciler.api.stack import ACT, Stack
from tests.unit.reconciler.pools.test_leases import clock_ahead

pytestmark = pytest.mark.covers("ORCH-2")

PATH = "projects/demo/jobs"
BODY = {"model": "m", "input": {"x": [1, 2]}}
ERROR = {"code": "function_failed", "expected": "a", "found": "b", "remedy": "c"}


def with_model(stack: Stack) -> None:
    with transaction(stack.engine) as conn:
        leases.register(conn, host="canary-host", pid=1, models=["m"])


def enqueue(stack: Stack, **changes: Any) -> str:
    answer = stack.client("member").post(PATH, json=BODY | changes)
    assert answer.status_code == 201, answer.text
    return str(answer.json()["id"])


def play(stack: Stack, outcome: Outcome) -> None:
    """End every job that is due, as a worker does."""
    with transaction(stack.engine) as conn:
        worker = leases.register(conn, host="canary-host", pid=1, models=["m"])
        held = leases.claim(conn, worker, limit=100)
        leases.finish(conn, [(job, outcome) for job in held])


def bury(stack: Stack, **detail: str) -> str:
    id = enqueue(stack)
    play(stack, Outcome(error=ERROR | detail, permanent=True))
    return id


@pytest.fixture
def site(new: Stack) -> Stack:
    with_model(new)
    return new


def test_a_job_is_queued_followed_and_answered(site: Stack) -> None:
    member = site.client("member")
    id = enqueue(site, priority=0)
    assert member.get(f"{PATH}/{id}").json()["status"] == "pending"
    play(site, Outcome({"sum": 3}))
    job = member.get(f"{PATH}/{id}").json()
    assert (job["status"], job["result"], job["input"]) == ("done", {"sum": 3}, BODY["input"])
    assert (job["attempts"], job["failure"], job["priority"]) == (1, None, 0)
    ended = refused(site, lambda: member.post(f"{PATH}/{id}/cancel"))
    assert (ended["status"], ended["code"]) == (409, "job_ended")


def test_a_token_of_one_project_need_not_name_it(site: Stack) -> None:
    member, admin = site.client("member"), site.client("admin")
    job = member.post("jobs", json=BODY).json()
    assert (job["project_id"], job["status"]) == ("demo", "pending")
    play(site, Outcome({"sum": 3}))
    path = f"jobs/{job['id']}"
    assert member.get(path).json() == member.get(f"{PATH}/{job['id']}").json()
    assert member.get(path).json()["result"] == {"sum": 3}
    assert [
        each["id"] for each in member.get("jobs", params={"status": "done"}).json()["items"]
    ] == [job["id"]]
    waiting = member.post("jobs", json=BODY).json()["id"]
    assert member.post(f"jobs/{waiting}/cancel").json()["status"] == "canceled"
    for ask in (
        lambda: admin.post("jobs", json=BODY),
        lambda: admin.get("jobs"),
        lambda: admin.get(path),
        lambda: admin.post(f"{path}/cancel"),
    ):
        unnamed = refused(site, ask)
        assert (unnamed["status"], unnamed["code"]) == (422, "project_required")
    stranger = refused(site, lambda: site.client("stranger").get(path))
    assert (stranger["status"], stranger["code"]) == (404, "job_not_found")


def test_no_repetition_keeps_a_copy_of_an_input(site: Stack) -> None:
    """A member may repeat a request with new keys, each of whose answers is remembered for days."""
    member, large = site.client("member"), BODY | {"input": {"x": "y" * 60_000}}
    id = member.post(PATH, json=large, headers={"Idempotency-Key": "a"}).json()["id"]
    for number in range(5):
        key = {"Idempotency-Key": f"b{number}"}
        assert member.post(f"{PATH}/{id}/cancel", headers=key).json()["status"] == "canceled"
    with transaction(site.engine) as conn:
        bodies = list(conn.execute(sa.select(idempotency_keys.c.body)).scalars())
    assert len(bodies) == 6
    assert max(len(json.dumps(body)) for body in bodies) < 2_000
    assert member.get(f"{PATH}/{id}").json()["input"] == large["input"]


def test_the_keys_of_jobs_are_as_many_as_the_jobs(
    site: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A member may queue and cancel jobs without an end, each with a key."""
    monkeypatch.setitem(jobs.LIMITS, "jobs_kept", 3)
    member = site.client("member")

    def send(number: int) -> Any:
        batch = (f"{PATH}/batch", {"jobs": [BODY]}) if number % 2 else (PATH, BODY)
        return member.post(batch[0], json=batch[1], headers={"Idempotency-Key": f"{number}"})

    for number in range(9):
        with clock_ahead(site.engine, number * 2 * jobs.READABLE_S):
            answer = send(number)
            assert answer.status_code == 201, answer.text
            assert send(number).json() == answer.json()
            assert member.post(f"{PATH}/cancel", json={"all": True}).json() == {"canceled": 1}
    with transaction(site.engine) as conn:
        bodies = conn.execute(sa.select(idempotency_keys.c.body)).scalars().all()
        named = {body["ids"][0] if "ids" in body else body["id"] for body in bodies}
        assert named == set(conn.execute(sa.select(table.c.id)).scalars())
    assert len(named) <= 3


def test_several_are_queued_together_or_not_at_all(site: Stack) -> None:
    member = site.client("member")
    ids = member.post(f"{PATH}/batch", json={"jobs": [BODY] * 3}).json()["ids"]
    listed = member.get(PATH).json()["items"]
    assert {job["id"] for job in listed} == set(ids)
    wrong = {"jobs": [BODY, BODY | {"model": "none"}]}
    document = refused(site, lambda: member.post(f"{PATH}/batch", json=wrong))
    assert (document["status"], document["code"]) == (422, "model_unknown")
    canceled = member.post(f"{PATH}/{ids[0]}/cancel").json()
    assert canceled["status"] == "canceled"
    only = member.get(PATH, params={"status": "canceled"}).json()["items"]
    assert [job["id"] for job in only] == ids[:1]


@pytest.mark.parametrize(
    ("changes", "status", "code"),
    [
        ({"model": "none"}, 422, "model_unknown"),
        ({"model": "../m"}, 422, "request_invalid"),
        ({"input": [1]}, 422, "request_invalid"),
        ({"input": {"x": "y" * jobs.INPUT_BYTES}}, 413, "input_too_large"),
        # By its size, before all of its values are looked at.
        ({"input": {"x": "\0", "y": "y" * jobs.INPUT_BYTES}}, 413, "input_too_large"),
        ({"input": {"x": "\0"}}, 422, "input_invalid"),
        ({"priority": 10}, 422, "request_invalid"),
        ({"priority": True}, 422, "request_invalid"),
        ({"delay_s": 10**9}, 422, "request_invalid"),
        ({"max_attempts": 0}, 422, "request_invalid"),
        ({"timeout_s": 0}, 422, "request_invalid"),
        ({"owner": "me"}, 422, "request_invalid"),
    ],
)
def test_a_wrong_job_is_refused(
    site: Stack, changes: dict[str, Any], status: int, code: str
) -> None:
    document = refused(site, lambda: site.client("member").post(PATH, json=BODY | changes))
    assert (document["status"], document["code"]) == (status, code)


def test_a_job_for_a_pool_of_another_project_is_refused(new: Stack) -> None:
    """Its model is unknown there, and named by its own project's member only."""
    with transaction(new.engine) as conn:
        wish = pools.NewPool("far", ["m"], project_id="other", target="remote")
        pool = pools.start(conn, wish, ACT, most=9)
        remote.register(conn, pool, host="canary-host", pid=3, models=["m"])
    member = new.client("member")
    for path, body in ((PATH, BODY), (f"{PATH}/batch", {"jobs": [BODY]}), ("jobs", BODY)):
        document = refused(new, lambda path=path, body=body: member.post(path, json=body))
        assert (document["status"], document["code"]) == (422, "model_unknown")
        assert "far" not in str(document) and "canary" not in str(document)
    assert new.client("admin").post("projects/other/jobs", json=BODY).status_code == 201


@pytest.mark.parametrize(
    ("text", "codes"),
    [
        ('{"x": [NaN]}', {"input_invalid"}),
        *(
            ('{"x":' * depth + "1" + "}" * depth, {"input_invalid", "request_invalid"})
            for depth in (101, 300, 900)
        ),
    ],
)
def test_an_input_that_no_database_stores_is_refused(
    site: Stack, text: str, codes: set[str]
) -> None:
    member, content = site.client("member"), f'{{"model": "m", "input": {text}}}'
    for key in ({}, {"Idempotency-Key": "a"}):
        headers = {"Content-Type": "application/json", **key}
        document = refused(site, lambda h=headers: member.post(PATH, content=content, headers=h))
        assert document["status"] == 422
        assert document["code"] in codes


def test_a_full_project_is_told_when_to_come_again(
    site: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(jobs.LIMITS, "jobs_open", 1)
    enqueue(site)
    document = refused(site, lambda: site.client("member").post(PATH, json=BODY))
    assert (document["status"], document["code"]) == (429, "job_limit")
    assert site.client("member").post(PATH, json=BODY).headers["Retry-After"] == "60"


@pytest.mark.covers("ORCH-5")
def test_maintenance_refuses_jobs_until_it_ends(site: Stack) -> None:
    admin, member = site.client("admin", base="/"), site.client("member")
    queued = enqueue(site)
    wrong = refused(site, lambda: admin.post("control/maintenance", json={"mode": "drained"}))
    assert wrong["code"] == "request_invalid"
    began = admin.post("control/maintenance", json={"mode": "drain", "reason": "upgrade"}).json()
    assert (began["mode"], began["running"], began["reason"]) == ("drain", 0, "upgrade")
    for path, body in (
        (PATH, BODY),
        (f"{PATH}/batch", {"jobs": [BODY]}),
        (f"{PATH}/dlq/reprocess", {"all": True}),
    ):
        before = kept(site)
        answer = member.post(path, json=body)
        assert (answer.status_code, answer.json()["code"]) == (503, "maintenance")
        assert answer.headers["Retry-After"] == "30"
        assert kept(site) == before
    assert member.get(f"{PATH}/{queued}").json()["status"] == "pending"
    assert 'gpu_orchestrator_mode{mode="drain"} 1.0' in admin.get("metrics").text
    ended = admin.post("control/maintenance", json={"mode": "normal"}).json()
    assert ended == admin.get("control/maintenance").json()
    assert (ended["mode"], ended["deadline_at"]) == ("normal", None)
    enqueue(site)
    audit = site.client("admin").get("admin/audit", params={"subject_id": "jobs"}).json()["items"]
    assert [row["action"] for row in audit] == ["maintenance.ended", "maintenance.began"]


def test_jobs_of_another_project_do_not_exist(site: Stack) -> None:
    id = enqueue(site)
    stranger = site.client("stranger")
    for ask in (
        lambda: stranger.get(f"projects/other/jobs/{id}"),
        lambda: stranger.post(f"projects/other/jobs/{id}/cancel"),
    ):
        document = refused(site, ask)
        assert (document["status"], document["code"]) == (404, "job_not_found")
    assert stranger.get("projects/other/jobs").json()["items"] == []


def test_dead_letters_come_back_by_a_sample_first(site: Stack) -> None:
    member = site.client("member")
    dead = {bury(site) for _ in range(3)}
    again = f"{PATH}/dlq/reprocess"
    (sample,) = member.post(again, json={"sample": 1}).json()["ids"]
    assert sample in dead
    document = refused(site, lambda: member.post(again, json={"all": True}))
    assert (document["status"], document["code"]) == (409, "sample_unfinished")
    for body in ({}, {"sample": 1, "all": True}, {"sample": 0}):
        assert member.post(again, json=body).status_code == 422
    play(site, Outcome({}))
    assert set(member.post(again, json={"all": True}).json()["ids"]) == dead - {sample}


def test_a_member_sees_which_models_it_may_call(site: Stack) -> None:
    """Of other projects' models and of machines nothing is shown."""
    with transaction(site.engine) as conn:
        gone = leases.register(conn, host="canary-host", pid=2, models=["gone", "m"])
        leases.sign_off(conn, gone.id)
        for name, project in (("mine", "demo"), ("canary", "other")):
            wish = pools.NewPool(name, [name], project_id=project, target="remote")
            pool = pools.start(conn, wish, ACT, most=9)
            remote.register(conn, pool, host="canary-host", pid=3, models=[name])
            if name == "mine":
                pools.stop(conn, pool.id, ACT)
    enqueue(site, model="gone")
    enqueue(site, model="gone", delay_s=60)
    site.client("admin").post("projects/other/jobs", json=BODY)
    answer = site.client("member").get(f"{PATH}/models")
    assert answer.json()["models"] == [
        {"name": "gone", "serving": False, "due": 1},
        {"name": "m", "serving": True, "due": 0},
        {"name": "mine", "serving": False, "due": 0},
    ]
    assert site.client("stranger").get(f"{PATH}/models").status_code in (403, 404)


def test_a_member_cancels_all_jobs_and_gives_up_dead_letters(site: Stack) -> None:
    member, stranger = site.client("member"), site.client("stranger")
    dead, job = bury(site), enqueue(site)
    path = f"{PATH}/cancel"
    for body in ({}, {"model": "m", "all": True}, {"all": "yes"}):
        assert refused(site, lambda body=body: member.post(path, json=body))["status"] == 422
    assert stranger.post(path, json={"all": True}).status_code in (403, 404)
    assert [member.post(path, json={"model": model}).json() for model in ("n", "m", "m")] == [
        {"canceled": 0},
        {"canceled": 1},
        {"canceled": 0},
    ]
    assert member.get(f"{PATH}/{job}").json()["status"] == "canceled"
    assert member.post(path, json={"all": True, "dead_letters": True}).json() == {"canceled": 1}
    assert member.get(f"{PATH}/{dead}").json()["status"] == "canceled"


def test_operators_see_the_queue_of_every_project(site: Stack) -> None:
    bury(site)
    enqueue(site)
    site.client("admin").post("projects/other/jobs", json=BODY)
    queue = site.client("admin").get("admin/jobs/queue").json()
    assert queue["open"][-1] == 2
    number = {"pending": 1, "running": 0, "done": 0, "dead_letter": 0, "canceled": 0}
    assert queue["projects"] == {"demo": {**number, "dead_letter": 1}, "other": number}
    assert site.client("member").get("admin/jobs/queue").status_code == 403


def test_only_operators_read_the_detail_of_a_failure(site: Stack) -> None:
    id = bury(site, detail="File /srv/canary-path")
    for path in (f"{PATH}/{id}", PATH):
        mine, theirs = (site.client(who).get(path).text for who in ("member", "admin"))
        assert "function_failed" in mine
        assert "canary" in theirs and "canary" not in mine


def test_jobs_are_counted_and_announced(site: Stack, tmp_path: Path) -> None:
    server = RedisServer(tmp_path)
    site.settings = site.settings.model_copy(update={"redis_url": server.url})
    enqueue(site)  # Redis is down; the job is enqueued all the same.
    server.start()
    hints.of.cache_clear()
    ids = [enqueue(site)]
    ids += site.client("member").post(f"{PATH}/batch", json={"jobs": [BODY] * 2}).json()["ids"]
    announced = [fields["job"] for _, fields in server.client.xrange(hints.STREAM)]
    assert announced == ids
    enqueue(site, delay_s=60)
    text = site.client("admin", base="/").get("metrics").text
    server.close()
    for line in (
        "gpu_orchestrator_pending_jobs 5.0",
        "gpu_orchestrator_delayed_jobs 1.0",
        "gpu_orchestrator_running_jobs 0.0",
        "gpu_orchestrator_dlq_length 0.0",
        "gpu_orchestrator_stream_length 4.0",
    ):
        assert line in text, line


@pytest.mark.covers("ORCH-6")
def test_what_workers_and_the_leader_did_is_in_a_scrape(site: Stack) -> None:
    prefix = "gpu_orchestrator_"

    def scraped(name: str) -> float:
        text = site.client("admin", base="/").get("metrics").text
        (line,) = [line for line in text.splitlines() if line.startswith(f"{prefix}{name} ")]
        return float(line.split()[1])

    totals = ("job_retries_total", "reclaimed_total", "reclaimer_errors_total")
    assert [scraped(name) for name in (*totals, "leader")] == [0, 0, 0, 0]
    for _ in range(2):
        enqueue(site)
    play(site, Outcome(error=ERROR))
    for _ in range(3):
        enqueue(site)
    with transaction(site.engine) as conn:
        worker = leases.register(conn, host="canary-host", pid=1, models=["m"])
        held = leases.claim(conn, worker, limit=9)
        conn.execute(sa.update(table).where(table.c.worker == worker.id).values(lease_expires_at=1))
        leases.tend(conn, errors=4)
        conn.execute(sa.update(modes).values(since=clock.now() - 500))
        leader.campaign(conn, leader.LOOPS, "p1", 3600)
    assert len(held) == 3
    assert [scraped(name) for name in (*totals, "leader")] == [2, 3, 4, 1]
    assert 500 <= scraped("mode_seconds") < 900
    with transaction(site.engine) as conn:
        leader.release(conn, leader.LOOPS, ACT)
    assert scraped("leader") == 0

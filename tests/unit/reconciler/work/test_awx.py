"""A task whose run AWX carries out: real store, stand-in AWX, the worker as it is."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from pydantic import ValidationError

from reconciler.db import clock
from reconciler.db import schema as tables
from reconciler.db.engine import transaction
from reconciler.db.schema import Task
from reconciler.model.errors import Problem
from reconciler.records import allocations, leasing, nodes, queue, slots, tokens
from reconciler.runs import collect, launch, lock
from reconciler.runs import process as run
from reconciler.runs.awx import job, request
from reconciler.runs.awx.job import Pace
from reconciler.runs.paths import RunPaths, write_json
from reconciler.settings import Settings
from reconciler.work import worker
from tests.standin.awx import REAPED_AT_START, REAPED_BY_PEER
from tests.standin.controller import TOKEN, Controller, standing
from tests.unit.reconciler.conftest import ADMIN, Site
from tests.unit.reconciler.work.conftest import READINESS

pytestmark = pytest.mark.covers("CTRL-9")

EVIDENCE = {
    "plan": {},
    "image": {"digest": f"sha256:{'a' * 64}"},
    "domain": {"state": "running"},
    "readiness": READINESS,
    "disk_written": True,
    "leftovers": True,
}
RESULT = {
    "schema": 1,
    "playbook": "provision_slice",
    "ok": True,
    "step": "",
    "error": {},
    "evidence": EVIDENCE,
}


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Controller]:
    with standing(tmp_path_factory.mktemp("awx")) as controller:
        yield controller


BEGUN = [
    {
        "event": "playbook_on_task_start",
        "counter": 1,
        "event_data": {"task": "One", "task_action": "ansible.builtin.command", "task_uuid": "1"},
    }
]


@pytest.fixture
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Follow the job in this process, with short pauses."""
    pace = Pace(every=0.01, saving=0.2)
    monkeypatch.setattr(job, "Pace", lambda: pace)
    monkeypatch.setattr(launch, "_spawn", lambda paths, _: run._carry_out(paths, lambda: False))


class Shop:
    """A site with an allocated slice; the worker's next task is brought to its end."""

    def __init__(self, site: Site, awx: Controller, state_dir: Path) -> None:
        self.site = site
        self.settings = Settings(
            state_dir=state_dir,
            poll_s=0.05,
            launcher="awx",
            awx_url=awx.url,
            awx_token_file=awx.token_file,
            awx_ca_file=awx.ca_file,
        )
        with transaction(site.engine) as conn:
            nodes.change(conn, "n1", ADMIN, profile="lab")
            self.allocation = site.allocate(conn)

    def attend(self) -> Task:
        with transaction(self.site.engine) as conn:
            (task,) = leasing.lease(conn, "worker")
        worker.attend(self.site.engine, self.settings, task, threading.Event())
        with transaction(self.site.engine) as conn:
            return queue.get(conn, task.id)

    def states(self) -> tuple[str, list[str]]:
        with transaction(self.site.engine) as conn:
            state = allocations.get(conn, self.allocation).state
            return state, sorted(self.site.statuses(conn))


@pytest.fixture
def shop(sold: Site, process: Controller, tmp_path: Path) -> Iterator[Shop]:
    yield Shop(sold, process, tmp_path)
    for run_dir in (tmp_path / "runs").glob("*-1"):
        assert lock.end_processes(run_dir) == []


def test_a_slice_is_provisioned_by_a_job_of_awx(shop: Shop, process: Controller) -> None:
    process.begin(hosts=["n1"], steps=0, artifacts={"slice_result": RESULT})
    task = shop.attend()
    output = collect.output(Path(task.run_directory))
    assert task.state == "succeeded", (task.error, output)
    assert shop.states() == ("active", ["active", "available"])
    (body,) = process.record()["bodies"]
    assert body["limit"] == "n1"
    assert body["extra_vars"]["slice_run"]["id"] == task.run_id


@pytest.mark.covers("HOST-13")
def test_a_job_is_told_which_keys_its_host_gave_up(shop: Shop, process: Controller) -> None:
    table = tables.node_certificates
    old, new = (f"ssh-ed25519 AAAAC3NzaC1lZDI1NTE5{mark * 48}" for mark in "xy")
    with transaction(shop.site.engine) as conn:
        for key in (f"{old}== root@h", new):
            conn.execute(sa.update(table).values(revoked_at=clock.now()))
            tokens.record_certificate(
                conn,
                "n1",
                ADMIN,
                serial=key,
                public_key=key,
                certificate="as signed",
                principals=["n1"],
                valid_until=clock.read(conn) + 86_400,
            )
    process.begin(hosts=["n1"], steps=0, artifacts={"slice_result": RESULT})
    assert shop.attend().state == "succeeded"
    (body,) = process.record()["bodies"]
    arguments = body["extra_vars"]["ansible_ssh_args"]
    assert f'@revoked * {old}"' in arguments and new not in arguments


def test_an_awx_that_is_away_is_waited_for(shop: Shop, process: Controller) -> None:
    process.begin(hosts=["n1"], drop={"GET /job_templates/": 1})
    task = shop.attend()
    assert task.state == "waiting"
    assert task.state_reason.startswith("awx_silent: ")
    with transaction(shop.site.engine) as conn:
        assert nodes.get(conn, "n1").state == "ready"
        assert leasing.wait_reasons(conn, [task])[task.id]["code"] == "awx_silent"
    assert TOKEN not in str(task)
    assert shop.states()[1] == ["available", "provisioning"]
    process.begin(hosts=["n1"], steps=0, artifacts={"slice_result": RESULT})
    with transaction(shop.site.engine) as conn:
        queue.resume(conn, "n1")
    assert shop.attend().state == "succeeded"


def test_a_job_in_the_queue_of_awx_keeps_its_task_and_its_claims(
    shop: Shop, process: Controller, monkeypatch: pytest.MonkeyPatch
) -> None:
    process.begin(hosts=["n1"], queued=True)
    engine, passes = shop.site.engine, list[float]()
    threads = list[threading.Thread]()

    def spawn(paths: RunPaths, descriptor: int) -> None:
        held = os.dup(descriptor)
        write_json(paths.process, {})

        def follow() -> None:
            with contextlib.closing(os.fdopen(held)):
                run._carry_out(paths, lambda: False)

        threads.append(threading.Thread(target=follow))
        threads[0].start()

    class Passes(threading.Event):
        """Lets most of the deadline pass once the job is in the queue, then cancels the task."""

        def wait(self, timeout: float | None = None) -> bool:
            with transaction(engine) as conn:
                task = queue.get(conn, leased.id)
                left_s = (task.deadline_at or 0.0) - clock.read(conn)
                held = allocations.get(conn, shop.allocation).deadline_at or 0.0
            assert held > (task.deadline_at or 0.0)
            if not collect.queued_limit_s(Path(task.run_directory)):
                return super().wait(timeout)
            passes.append(left_s)
            table = tables.tasks
            with transaction(engine) as conn:
                if len(passes) == 1:
                    conn.execute(sa.update(table).values(deadline_at=clock.now() + 60))
                elif len(passes) == 2:
                    queue.expire(conn, task.id, task.deadline_at or 0.0, ADMIN, {"code": "x"})
            return super().wait(timeout)

    with transaction(engine) as conn:
        (leased,) = leasing.lease(conn, "worker")
    monkeypatch.setattr(launch, "_spawn", spawn)
    monkeypatch.setattr(job, "Pace", partial(Pace, every=0.01, saving=0.2))
    worker.attend(engine, shop.settings, leased, Passes())
    threads[0].join(30)
    assert passes[1] > passes[0] - 20
    # Nothing is added after the task was given up.
    assert passes[2] <= queue.GRACE_S
    with transaction(engine) as conn:
        task = queue.get(conn, leased.id)
    assert (task.state, shop.states()[1]) == ("canceled", ["available", "available"])


def test_what_awx_refuses_frees_the_slot(shop: Shop, process: Controller) -> None:
    process.begin(hosts=["n1"], without=["gpuaas.slice.provision_slice"])
    assert shop.attend().error["code"] == "awx_template_missing"
    assert shop.states() == ("failed", ["available", "available"])


@pytest.mark.covers("I13")
def test_a_run_that_is_refused_to_its_first_worker_is_begun_by_the_second(
    shop: Shop, process: Controller, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second attached while the first held the folder, and knows that nothing has begun."""
    process.begin(hosts=["n1"], without=["gpuaas.slice.provision_slice"])
    engine, prepare = shop.site.engine, request.prepare
    holds, attached = threading.Event(), threading.Event()

    def slowly(*arguments: Any) -> Any:
        holds.set()
        assert attached.wait(60)
        return prepare(*arguments)

    class Second(threading.Event):
        """Waits, between its looks at the run, until the first worker has given up."""

        def wait(self, timeout: float | None = None) -> bool:
            if not attached.is_set():
                monkeypatch.setattr(launch, "prepare_awx", prepare)
                attached.set()
                with pytest.raises(Problem, match="stale_lease"):
                    first.result(60)
                process.begin(hosts=["n1"], steps=0, artifacts={"slice_result": RESULT})
            return super().wait(timeout)

    monkeypatch.setattr(launch, "prepare_awx", slowly)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(shop.attend)
        assert holds.wait(60)
        with transaction(engine) as conn:
            queue.abandon(conn, "worker")
            (task,) = leasing.lease(conn, "second")
        worker.attend(engine, shop.settings, task, Second())
    with transaction(engine) as conn:
        task = queue.get(conn, task.id)
    assert task.state == "succeeded", task.error
    assert shop.states() == ("active", ["active", "available"])


@pytest.mark.usefixtures("_impatient")
@pytest.mark.parametrize(
    ("faults", "reason"),
    [
        ({"ends": "error", "explanation": "lost its node"}, "lost its node"),
        ({"lost": REAPED_BY_PEER, "events": BEGUN}, REAPED_BY_PEER),
        ({"lost": REAPED_AT_START}, REAPED_AT_START),
    ],
)
def test_what_awx_lost_blocks_the_slot_and_fences_it_off(
    shop: Shop, process: Controller, faults: dict[str, Any], reason: str
) -> None:
    process.begin(hosts=["n1"], steps=0, **faults)
    task = shop.attend()
    assert (task.state, task.error["code"]) == ("lost", "run_lost")
    assert reason in task.error["found"]
    assert shop.states() == ("failed", ["available", "cleanup_blocked"])
    with transaction(shop.site.engine) as conn:
        ((slot_id, fence),) = task.fences.items()
        assert slots.get(conn, slot_id).fence == fence + 1


@pytest.mark.parametrize(
    "faults",
    [
        {"ends": "error", "traceback": "x\nConnectionRefusedError: receptor", "unit": None},
        {"ends": "failed", "events": [{"event": "verbose", "counter": 1, "stdout": "receptor"}]},
    ],
)
def test_what_awx_could_not_begin_frees_the_slot(
    shop: Shop, process: Controller, faults: dict[str, Any]
) -> None:
    process.begin(hosts=["n1"], steps=0, **faults)
    task = shop.attend()
    assert (task.state, task.error["code"]) == ("failed", "run_not_started")
    assert "receptor" in task.error["found"]
    assert shop.states() == ("failed", ["available", "available"])


@pytest.mark.parametrize(
    "more", [{}, {"awx_url": "https://awx"}, {"awx_url": "http://awx", "awx_token_file": "t"}]
)
def test_settings_that_could_not_reach_awx_are_refused(more: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        Settings(launcher="awx", **more)

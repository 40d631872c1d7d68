"""Workers as processes: they answer, survive their functions, drain, and may be killed."""

from __future__ import annotations

import mmap
import os
import re
import signal
from importlib.metadata import requires
from pathlib import Path

import pytest

from reconciler.db.engine import transaction
from reconciler.pools import drills, jobs, leases
from tests.unit.reconciler.conftest import ADMIN
from tests.unit.reconciler.pools.conftest import FUNCTIONS, Workers, suspend
from tests.unit.reconciler.service.service import alive, until

pytestmark = pytest.mark.covers("ORCH-2")


def test_a_worker_answers_and_hides_the_service_from_its_functions(workers: Workers) -> None:
    workers.start("--model", f"seen={FUNCTIONS}:environment")
    workers.served("m", "seen")
    ids = workers.submit(40)
    with transaction(workers.queue.engine) as conn:
        (seen_id,) = jobs.enqueue(conn, "p1", [jobs.NewJob("seen", {})], ADMIN)
    for number, id in enumerate(ids):
        assert workers.wait(id, "done").result == {"twice": number * 2}
    assert sorted(workers.ran()) == list(range(40))
    names = workers.wait(seen_id, "done").result["names"]
    assert "PATH" in names and not [name for name in names if name.startswith("GPUAAS")]


def test_a_call_that_fails_costs_its_own_job_only(workers: Workers) -> None:
    expected = {
        "refuse": ("dead_letter", "input_refused"),
        "raise": ("pending", "function_failed"),
        "exit": ("pending", "runner_ended"),
        "kill": ("pending", "memory_exceeded"),
        "eat": ("pending", "memory_exceeded"),
        "hang": ("pending", "timed_out"),
        "huge": ("dead_letter", "result_invalid"),
        "nan": ("dead_letter", "result_invalid"),
        "list": ("dead_letter", "result_invalid"),
    }
    ids = []
    for number, how in enumerate(expected):
        call = {"file": str(workers.note), "number": number, "how": how}
        ids += workers.queue.submit([call], timeout_s=1 if how == "hang" else 60)
    workers.start("--memory", "256", function="misbehave")
    for id, (status, code) in zip(ids, expected.values(), strict=True):
        until(lambda id=id: workers.queue.read(id).attempts)
        job = workers.queue.read(id)
        assert (job.status, job.error["code"], job.lost) == (status, code, 0), job
        assert all(job.error[name] for name in ("expected", "found", "remedy"))
    assert "secret of the operators" in workers.queue.read(ids[1]).error["detail"]


def test_the_worker_of_a_drill_gives_jobs_of_others_neither_memory_nor_files(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(mmap, "mmap", lambda *_: pytest.fail("it takes memory"))
    assert drills.wait({"seconds": 0, "mib": 1 << 16}) == {"seconds": 0}
    for name in ("passwd", "broken"):
        (tmp_path / name).touch()
    assert drills.fail({"broken": str(tmp_path / "passwd")}) == {}
    with pytest.raises(RuntimeError):
        drills.fail({"broken": str(tmp_path / "broken")})


def test_told_to_end_it_finishes_its_job_and_gives_the_others_back(workers: Workers) -> None:
    workers.submit(60)
    worker = workers.start()
    # Claims have grown. The last is not the last to end: a job that came back is overtaken.
    until(lambda: not workers.queue.open())
    slow = workers.submit(8, until=str(workers.go))
    until(lambda: len(workers.ran()) > 60)
    os.kill(worker, signal.SIGTERM)

    def states() -> list[tuple[str, int]]:
        jobs = [workers.queue.read(id) for id in slow]
        return sorted((job.status, job.lost) for job in jobs)

    until(lambda: states() == [*[("pending", 0)] * 7, ("running", 0)])
    workers.go.touch()
    workers.ended(worker)
    assert len(workers.ran()) == 61, "it began nothing more"
    assert states() == [("done", 0), *[("pending", 0)] * 7]


def test_a_drain_is_bounded_and_the_job_goes_back(workers: Workers) -> None:
    (id,) = workers.submit(1, seconds=600)
    worker = workers.start("--drain", "0.2")
    until(workers.ran)
    os.kill(worker, signal.SIGTERM)
    workers.ended(worker)
    job = workers.queue.read(id)
    assert (job.status, job.attempts, job.lost) == ("pending", 0, 0)


def test_a_killed_worker_leaves_no_process_and_its_job_to_the_next(workers: Workers) -> None:
    (id,) = workers.submit(1, seconds=600)
    worker = workers.start()
    until(workers.ran)
    (runner,) = children(worker)
    workers.kill(worker)
    until(lambda: not alive(runner))
    workers.queue.change(id, lease_expires_at=1.0, input={"file": str(workers.note), "number": 7})
    workers.start()
    job = workers.wait(id, "done")
    assert (job.result, job.lost) == ({"twice": 14}, 1)


def test_a_worker_that_slept_over_its_lease_cannot_finish(workers: Workers) -> None:
    (id,) = workers.submit(1, until=str(workers.go))
    sleeper = workers.start()
    until(workers.ran)
    suspend(workers.queue.engine, sleeper)
    workers.queue.change(id, lease_expires_at=1.0)
    workers.queue.tend()
    (held,) = workers.queue.claim()
    workers.go.touch()
    os.kill(sleeper, signal.SIGCONT)
    until(lambda: "do not count" in workers.log.read_text())
    assert workers.queue.read(id).token == held.token
    with transaction(workers.queue.engine) as conn:
        leases.give_back(conn, [held])
    assert workers.wait(id, "done").attempts == 1
    assert workers.ran() == [0, 0]


def test_a_model_that_cannot_be_loaded_ends_the_worker(workers: Workers) -> None:
    workers.ended(workers.start(function="missing"))
    assert "model_unusable" in workers.log.read_text()


def test_without_options_the_shipped_model_is_served(workers: Workers) -> None:
    workers.start(function="")
    workers.served("digits")
    call = jobs.NewJob("digits", {"segments": [[0, 1, 1, 0, 0, 0, 0]]})
    with transaction(workers.queue.engine) as conn:
        (id,) = jobs.enqueue(conn, "p1", [call], ADMIN)
    assert workers.wait(id, "done").result["digit"] == [1]


def children(pid: int) -> list[int]:
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(word) for word in text.split()]


def test_jobs_behind_a_slow_one_go_to_another_worker(workers: Workers) -> None:
    first = workers.start()
    workers.submit(60)
    until(lambda: not workers.queue.open())  # Claims have grown.
    slow = workers.submit(1, seconds=600)[0]
    until(lambda: workers.queue.read(slow).status == "running")
    behind = workers.submit(5)
    workers.start()
    jobs = [workers.wait(id, "done") for id in behind]
    assert {(job.attempts, job.lost) for job in jobs} == {(1, 0)}
    assert workers.queue.read(slow).status == "running" and alive(first)


def test_the_function_of_the_documentation_runs_in_a_worker(
    workers: Workers, tmp_path: Path
) -> None:
    page = (Path(__file__).resolve().parents[4] / "docs" / "pools.md").read_text()
    code = page.split("```python\n")[1].split("```")[0]
    assert len(code.split("\n")) <= 10
    command = re.search(r"^gpuaas jobs worker --model double=((\w+):\w+)$", page, re.MULTILINE)
    (tmp_path / f"{command[2]}.py").write_text(code)
    workers.environment["PYTHONPATH"] = str(tmp_path)
    workers.start("--model", f"m={command[1]}", function="")
    good, bad = workers.queue.submit([{"number": 21}, {"number": "21"}])
    assert workers.wait(good, "done").result == {"twice": 42}
    assert workers.wait(bad, "dead_letter").error["expected"] == "an integer `number`"
    needed = requires("gpuaas-slice") or []
    assert [each for each in needed if each.startswith("onnxruntime") and "worker" in each]

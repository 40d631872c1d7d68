"""The runner of a worker: jobs wait in its socket, come back from there, and end in groups."""

from __future__ import annotations

import ctypes
import hashlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from reconciler.db.engine import transaction
from reconciler.model.errors import Problem
from reconciler.model.jobs import Call, Outcome
from reconciler.pools import child, leases, remote, worker
from reconciler.pools import runner as child_process
from reconciler.pools.api_queue import ApiQueue
from reconciler.pools.child import Runner
from reconciler.pools.queue import Away, DatabaseQueue, Ended, Turn
from reconciler.pools.worker import Worker
from reconciler.runs import lock
from tests.silent_proxy import SilentProxy
from tests.unit.reconciler.conftest import PostgresDatabase
from tests.unit.reconciler.pools.conftest import FUNCTIONS
from tests.unit.reconciler.pools.test_leases import Queue, commits
from tests.unit.reconciler.service.service import until

pytestmark = pytest.mark.covers("ORCH-2")


@pytest.fixture
def runner() -> Iterator[Runner]:
    runner = Runner({"m": f"{FUNCTIONS}:double"}, 512)
    yield runner
    runner.stop()


def test_the_next_process_loads_the_same_file_or_none(tmp_path: Path) -> None:
    file = tmp_path / "model.py"
    file.write_text("def run(call):\n    return call\n")
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    runner = Runner(child.parse([f"m=model:run@sha256:{digest}"]), 256, tmp_path)
    runner.start()
    assert runner.digests == {"m": digest}
    file.write_text("def run(call):\n    return {}\n")
    with pytest.raises(Problem, match="model_changed") as refused:
        runner.start()
    assert refused.value.expected == f"model.py, SHA-256 {digest}"
    # A file that changes while it is loaded has no digest.
    file.write_text("from pathlib import Path\nPath(__file__).write_text('')\nrun = dict\n")
    with pytest.raises(Problem, match="model_changed"):
        Runner({"m": "model:run"}, 256, tmp_path).start()
    for word in ("m=model:run@sha256:12", "m=none.onnx@sha256:" + digest):
        with pytest.raises(Problem, match="model_unusable"):
            child.parse([word])


def calls(count: int, file: Path) -> list[dict[str, object]]:
    return [{"file": str(file), "number": number} for number in range(count)]


def test_jobs_that_come_back_have_not_begun(queue: Queue, runner: Runner, tmp_path: Path) -> None:
    file, go = tmp_path / "ran", tmp_path / "go"
    # Job 38 waits for a file, so job 39 has not begun, however slow this side is.
    waits = {"file": str(file), "number": 38, "until": str(go)}
    ids = set(queue.submit([*calls(38, file), waits, {"file": str(file), "number": 39}]))
    held = sorted(queue.claim(40), key=lambda job: job.input["number"])
    runner.start()
    for turn in range(1, 21):
        go.unlink(missing_ok=True)
        runner.send(held)
        # The process takes jobs from the socket at the same time as this side does.
        ended = runner.outcomes(30, turn)
        back = runner.recall()
        go.touch()
        assert held[-1] in back
        while len(runner):
            ended += runner.outcomes(30, len(runner))
        assert {job.id for job, _ in ended} | {job.id for job in back} == ids
        assert len(ended) + len(back) == len(ids)
        for job, outcome in ended:
            assert outcome.result == {"twice": job.input["number"] * 2}
        assert len(file.read_text().split()) == len(ended)
        file.unlink()


def test_jobs_behind_one_that_ends_the_process_run_in_the_next(
    queue: Queue, tmp_path: Path
) -> None:
    runner = Runner({"m": f"{FUNCTIONS}:misbehave"}, 512)
    ways = [{"file": str(tmp_path / "ran"), "number": n, "how": how}
            for n, how in enumerate(("list", "exit", "list"))]  # fmt: skip
    queue.submit(ways)
    runner.send(queue.claim(3))
    ended = [pair for _ in range(3) for pair in runner.outcomes(30, 1)]
    runner.stop()
    codes = [outcome.error["code"] for _, outcome in ended if outcome.error]
    assert codes == ["result_invalid", "runner_ended", "result_invalid"]
    assert (tmp_path / "ran").read_text().split() == ["0", "1", "2"]


@pytest.mark.parametrize("then", ["hang", "exit"])
def test_a_program_that_a_function_has_started_ends_with_its_call(
    queue: Queue, tmp_path: Path, then: str
) -> None:
    """It would go on for ever, with its memory and that of its GPU, after each such call."""
    runner = Runner({"m": f"{FUNCTIONS}:misbehave"}, 512)
    call = {"file": str(tmp_path / "ran"), "number": 0, "how": "start", "then": then}
    queue.submit([call], timeout_s=5)
    runner.send(queue.claim(1))
    ((_, outcome),) = runner.outcomes(60, 1)
    pid = int((tmp_path / "ran").read_text().split()[-1])
    assert (outcome.error or {})["code"] == {"hang": "timed_out", "exit": "runner_ended"}[then]
    until(lambda: has_ended(pid))
    runner.stop()


def test_a_call_that_has_left_its_group_ends_in_time(queue: Queue, tmp_path: Path) -> None:
    """The worker would wait for its end, and its heartbeat keep the jobs from others."""
    runner = Runner({"m": f"{FUNCTIONS}:misbehave"}, 512)
    queue.submit([{"file": str(tmp_path / "ran"), "number": 0, "how": "move"}], timeout_s=1)
    runner.send(queue.claim(1))
    began = time.monotonic()
    ((_, outcome),) = runner.outcomes(60, 1)
    assert (outcome.error or {})["code"] == "timed_out"
    assert time.monotonic() - began < 15
    runner.stop()


def has_ended(pid: int) -> bool:
    try:
        return lock.stat(pid)[0] in "ZX"
    except OSError:
        return True


def test_a_call_that_costs_the_gpu_costs_no_other_call(queue: Queue, tmp_path: Path) -> None:
    """After some errors CUDA refuses all further work of a process."""
    runner = Runner({"m": f"{FUNCTIONS}:misbehave"}, 512)
    ways = [{"file": str(tmp_path / "ran"), "number": n, "how": how}
            for n, how in enumerate(("lose", "list", "raise", "list"))]  # fmt: skip
    queue.submit(ways)
    runner.send(queue.claim(4))
    runner._load_s = 60.0  # Its project lets others go first for longer than this test takes.
    ended = runner.outcomes(30, 4)
    assert (len(ended), runner._process) == (1, None), "recorded before the next process has loaded"
    for _ in range(3):
        ended += runner.outcomes(30, 1)
    assert runner._process.poll() is None, "not ended by a call that fails otherwise"
    runner.stop()
    codes = [outcome.error["code"] for _, outcome in ended if outcome.error]
    assert codes == ["function_failed", "result_invalid", "function_failed", "result_invalid"]
    assert (tmp_path / "ran").read_text().split() == ["0", "1", "2", "3"]
    assert runner.behind() == {"p1"}, "its project lets others go first"


class Cuda:
    """The driver's library with one GPU; names of functions with their answers."""

    def __init__(self, **answers: int) -> None:
        self._answers = answers
        self.called: list[str] = []

    def __getattr__(self, name: str) -> Callable[..., int]:
        def call(*given: Any) -> int:
            self.called.append(name)
            if name == "cuDeviceGetCount":
                given[0]._obj.value = 1
            if name == "cuDevicePrimaryCtxGetState":
                given[2]._obj.value = self._answers.get("active", 1)
            return self._answers.get(name, 0)

        return call


@pytest.mark.parametrize(
    ("answers", "lost"),
    [
        ({}, False),
        ({"cuCtxSynchronize": 710}, True),
        ({"cuDevicePrimaryCtxRetain": 719}, True),
        ({"cuDevicePrimaryCtxGetState": 999}, True),
        # No function uses a GPU: not initialized, or without a context.
        ({"cuDeviceGetCount": 3}, False),
        ({"active": 0, "cuCtxSynchronize": 201}, False),
    ],
)
def test_the_driver_says_whether_a_gpu_is_lost(
    monkeypatch: pytest.MonkeyPatch, answers: dict[str, int], lost: bool
) -> None:
    assert not child_process._gpu_is_lost(), "no process loads the library for this"
    cuda = Cuda(**answers)
    monkeypatch.setattr(ctypes, "CDLL", lambda *_: cuda)
    assert child_process._gpu_is_lost() is lost
    popped, released = "cuCtxPopCurrent_v2", "cuDevicePrimaryCtxRelease_v2"
    assert cuda.called.count(popped) == cuda.called.count(released), "the context is as it was"


def test_a_process_that_ended_between_jobs_costs_none(
    queue: Queue, runner: Runner, tmp_path: Path
) -> None:
    queue.submit(calls(1, tmp_path / "ran"))
    runner.start()
    runner._process.kill()
    os.waitid(os.P_PID, runner._process.pid, os.WEXITED | os.WNOWAIT)
    runner.send(queue.claim(1))
    assert [outcome.result for _, outcome in runner.outcomes(30, 1)] == [{"twice": 0}]


def test_outcomes_and_claims_share_transactions(
    queue: Queue, runner: Runner, tmp_path: Path
) -> None:
    ids = queue.submit(calls(400, tmp_path / "ran"))
    stopping = threading.Event()
    claims = []

    def executed(conn: sa.Connection, _cursor: object, statement: str, *_: object) -> None:
        if "started_at" in statement and "RETURNING" in statement:
            claims.append(statement)
        if not statement.startswith("SELECT") and queue_is_done():
            stopping.set()

    def queue_is_done() -> bool:
        return len((tmp_path / "ran").read_text().split()) == len(ids)

    (tmp_path / "ran").touch()
    sa.event.listen(queue.engine, "after_cursor_execute", executed)
    Worker(DatabaseQueue(queue.engine, ["m"]), runner, stopping).run()
    assert {queue.read(id).status for id in ids} == {"done"}
    assert len(claims) < len(ids) / 4


@pytest.mark.parametrize(("last", "lost"), [(0, False), (30, False), (30, True)])
def test_jobs_go_back_when_the_models_do_not_load_again(
    queue: Queue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, last: int, *, lost: bool
) -> None:
    """last: number of the job that ends the process. Its outcome is recorded first.

    lost: as it ends, the leases of those behind it are lost.
    """
    file = tmp_path / "replaced.py"
    file.write_text(
        "import os\nfrom pathlib import Path\ndef run(call):\n"
        f"    if call['number'] == {last}:\n        Path(__file__).write_text('')\n"
        "        os._exit(3)\n    return {}\n"
    )
    ids = queue.submit(calls(60, tmp_path / "ran"))
    runner = Runner({"m": "replaced:run"}, 512, tmp_path)
    worker = Worker(DatabaseQueue(queue.engine, ["m"]), runner, threading.Event())
    broken = runner._broken

    def lose(*, late: bool) -> tuple[Call, Outcome]:
        ended = broken(late=late)
        worker._lost = {key for key in worker._held if key[0] != ended[0].id}
        return ended

    if lost:
        monkeypatch.setattr(runner, "_broken", lose)
    with pytest.raises(Problem, match="model_changed"):
        worker.run()
    after = [queue.read(id) for id in ids]
    assert [job.status for job in after[: last + 1]] == ["done"] * last + ["pending"]
    assert lost or {job.status for job in after} <= {"done", "pending"}
    assert [job.attempts for job in after[last:]] == [1] + [0] * (59 - last)
    assert {job.lost for job in after} == {0}


def test_an_outcome_is_recorded_although_the_queue_did_not_answer_before(
    queue: Queue, runner: Runner, tmp_path: Path
) -> None:
    """As at a restart of the database. The job would stay with its worker, and without an end."""
    stopping = threading.Event()

    class Restarting(DatabaseQueue):
        looks = 0

        def is_idle(self) -> bool:
            self.looks += 1
            if self.looks % 2 == 0:
                raise Away("restarts")
            return super().is_idle()

    ids = queue.submit(calls(2, tmp_path / "ran"))

    def watch() -> None:
        try:
            until(lambda: not queue.open(), 20)
        finally:
            stopping.set()

    watcher = threading.Thread(target=watch)
    watcher.start()
    Worker(Restarting(queue.engine, ["m"]), runner, stopping).run()
    watcher.join()
    assert [queue.read(id).status for id in ids] == ["done", "done"]


def test_a_worker_that_is_to_end_records_its_outcome_although_the_queue_restarts(
    queue: Queue, runner: Runner, tmp_path: Path
) -> None:
    """As an upgrade of the machine ends both. A call of an hour would begin again."""
    note, go, stopping = tmp_path / "ran", tmp_path / "go", threading.Event()

    class Restarting(DatabaseQueue):
        refusals = 2

        def turn(self, ended: Ended, *given: Any) -> Turn:
            if ended and self.refusals:
                self.refusals -= 1
                raise Away("restarts")
            return super().turn(ended, *given)

    (id,) = queue.submit([{"file": str(note), "number": 1, "until": str(go)}])

    def watch() -> None:
        try:
            until(note.exists)
        finally:
            stopping.set()
            go.touch()

    watcher = threading.Thread(target=watch)
    watcher.start()
    Worker(Restarting(queue.engine, ["m"]), runner, stopping, drain_s=600).run()
    watcher.join()
    assert queue.read(id).status == "done"


def test_calls_that_cost_the_process_leave_others_as_much_time(
    queue: Queue, runner: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each would have the models loaded again, and let its project have the next turn as well."""
    file = tmp_path / "ran"
    file.touch()
    queue.submit([{"file": str(file), "number": 1, "seconds": 600}] * 3, "p1", timeout_s=1)
    # For longer than a busy machine loads the models.
    queue.submit([{"file": str(file), "number": 2, "seconds": 0.05}] * 2_000, "p2")
    stopping = threading.Event()
    blamed: list[float] = []
    blame = runner._blame

    def note(job: Call) -> None:
        blamed.append(time.monotonic())
        blame(job)

    monkeypatch.setattr(runner, "_blame", note)

    def ran() -> str:
        return "".join(file.read_text().split())

    def watch() -> None:
        until(lambda: ran().count("1") == 2)
        stopping.set()

    watcher = threading.Thread(target=watch)
    watcher.start()
    Worker(DatabaseQueue(queue.engine, ["m"]), runner, stopping, drain_s=0).run()
    watcher.join()
    assert "2" in ran().split("1")[1]
    first, second, *_ = blamed
    assert second - first > 1, "as long as the call"
    assert "p1" in runner._behind
    assert queue.open() > 3, "others always waited"


def test_a_project_whose_jobs_are_canceled_as_they_run_lets_others_go_first(
    queue: Queue, runner: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "ran"
    queue.submit([{"file": str(file), "number": 1, "seconds": 600}])
    with transaction(queue.engine) as conn:
        held = leases.claim(conn, queue.worker, limit=1)
    runner.start()
    runner.send(held)
    until(file.exists)
    assert runner.behind() == set()
    runner._load_s = 60.0
    runner.drop()
    assert runner.behind() == {"p1"}
    later = time.monotonic() + 600
    with monkeypatch.context() as patch:
        patch.setattr(time, "monotonic", lambda: later)
        assert runner.behind() == set()


def test_a_worker_that_hangs_ends_so_that_its_jobs_go_to_others(
    monkeypatch: pytest.MonkeyPatch, queue: Queue, runner: Runner
) -> None:
    stopping, ended = threading.Event(), threading.Event()
    monkeypatch.setattr(worker, "_STUCK_S", 0.3)
    monkeypatch.setattr(os, "_exit", lambda _code: ended.set())

    class Hanging(DatabaseQueue):
        beat_s = 0.05

        def renew(self, _tokens: Sequence[str]) -> set[str]:
            return set()

        def turn(self, *_: object) -> Turn:
            ended.clear()
            assert ended.wait(60), "its heart goes on"
            stopping.set()
            return Turn(0, [])

    queue.add()
    Worker(Hanging(queue.engine, ["m"]), runner, stopping).run()
    assert ended.is_set()


@pytest.mark.postgres
def test_a_worker_ends_whose_database_never_answers(
    monkeypatch: pytest.MonkeyPatch,
    postgres_database: PostgresDatabase,
    runner: Runner,
    tmp_path: Path,
) -> None:
    """Its heartbeat waits as well, so only a thread that needs no database can detect it."""
    queue = Queue(postgres_database.restore())
    queue.submit([{"file": str(tmp_path / "ran"), "number": 1, "seconds": 600}])
    ended: list[int] = []
    monkeypatch.setattr(worker, "_STUCK_S", 1.5)
    monkeypatch.setattr(os, "_exit", ended.append)
    stopping = threading.Event()
    proxy = SilentProxy(queue.engine.url)

    def watch() -> None:
        try:
            until((tmp_path / "ran").exists)
            proxy.fall_silent()
            until(lambda: ended, 30)
        finally:
            stopping.set()
            proxy.close()

    watcher = threading.Thread(target=watch)
    watcher.start()
    database = DatabaseQueue(proxy.engine, ["m"])
    database.beat_s = 0.05
    Worker(database, runner, stopping, drain_s=0).run()
    watcher.join()
    assert set(ended) == {1}


def test_a_call_that_goes_on_soon_has_its_claim_on_the_disk(
    queue: Queue, runner: Runner, tmp_path: Path
) -> None:
    """Should it take the machine down, it must not come back as if it had never begun. A heartbeat
    that fails for any reason is repeated.
    """
    note, go, stopping = tmp_path / "ran", tmp_path / "go", threading.Event()
    durable: list[bool] = []

    class Beating(DatabaseQueue):
        beats, beat_s = 0, 600

        def renew(self, tokens: Sequence[str]) -> set[str]:
            self.beats += 1
            if self.beats == 1:
                raise RuntimeError("of no known kind")
            with commits(queue.engine) as levels:
                held = super().renew(tokens)
            durable.append(all(levels) and bool(held))
            return held

    beating = Beating(queue.engine, ["m"])
    (id,) = queue.submit([{"file": str(note), "number": 1, "until": str(go)}])

    def watch() -> None:
        try:
            until(lambda: durable)
            assert queue.read(id).status == "running"
        finally:
            go.touch()
            stopping.set()

    watcher = threading.Thread(target=watch)
    watcher.start()
    Worker(beating, runner, stopping).run()
    watcher.join()
    assert durable == [True] and queue.read(id).status == "done"


def test_a_heartbeat_that_fails_is_logged_once_for_each_reason(
    monkeypatch: pytest.MonkeyPatch, queue: Queue, runner: Runner, caplog: pytest.LogCaptureFixture
) -> None:
    stopping = threading.Event()
    monkeypatch.setattr(worker, "_AGAIN_S", 0.01)

    class Failing(DatabaseQueue):
        beats, beat_s = 0, 0.01

        def renew(self, tokens: Sequence[str]) -> set[str]:
            self.beats += 1
            if self.beats == 9:
                stopping.set()
            if self.beats == 5:
                return super().renew(tokens)
            raise RuntimeError("of another kind" if self.beats > 6 else "of no known kind")

    Worker(Failing(queue.engine, ["m"], poll_s=0.01), runner, stopping).run()
    lines = [record for record in caplog.records if record.message.startswith("could not renew")]
    assert [str(record.args[0]) for record in lines[:3] if record.args] == [  # type: ignore[index]
        *("of no known kind", "of no known kind", "of another kind")
    ]
    assert len(lines) == 3 and all(record.exc_info for record in lines)


def test_a_worker_ends_whose_heartbeat_hangs(
    monkeypatch: pytest.MonkeyPatch, queue: Queue, runner: Runner
) -> None:
    """Its jobs go to others meanwhile, and it would go on with them."""
    ended, stopping = threading.Event(), threading.Event()
    monkeypatch.setattr(worker, "_STUCK_S", 0.5)
    monkeypatch.setattr(os, "_exit", lambda _code: ended.set())

    class Hanging(DatabaseQueue):
        beat_s = 0.05

        def renew(self, _tokens: Sequence[str]) -> set[str]:
            ended.clear()  # The models may have taken as long to load.
            try:
                assert ended.wait(30)
            finally:
                stopping.set()
            return set()

    Worker(Hanging(queue.engine, ["m"], poll_s=0.01), runner, stopping).run()
    assert ended.is_set()


@pytest.mark.parametrize(("lag_s", "most", "held"), [(0.01, 256, 256), (0.01, 5, 5), (0.2, 256, 1)])
def test_a_worker_holds_what_ends_in_a_tenth_of_a_second(
    monkeypatch: pytest.MonkeyPatch, queue: Queue, lag_s: float, most: int, held: int
) -> None:
    stopping = threading.Event()
    limits: list[int] = []

    class Endless(DatabaseQueue):
        def turn(self, ended: Ended, _returned: object, limit: int, *_: object) -> Turn:
            assert not (limit and 0 < len(ended) <= self.apart), "the claim has to go first"
            if not limit:
                return Turn(len(ended), [])
            limits.append(limit)
            if len(limits) > 20:
                stopping.set()
            calls = [Call(f"{len(limits)}-{number}", "t", "m", {}, 9) for number in range(limit)]
            return Turn(0, calls)

    class Steady(Runner):
        """Ends all that it has. lag_s: as long after it came."""

        def start(self) -> None:
            self.lag_s = lag_s

        def lives(self) -> bool:
            return True

        def _push(self) -> None:
            pass

        def outcomes(self, seconds: float, enough: int) -> list[tuple[Call, Outcome]]:
            return [(call, Outcome({})) for call in self.drop()]

    monkeypatch.setattr(Endless, "most", most)
    monkeypatch.setattr(Endless, "is_idle", lambda _: False)
    Worker(Endless(queue.engine, ["m"]), Steady({}, 256), stopping).run()
    assert max(limits) == held == limits[20]
    assert len(limits) == 21, "and nothing after the end"
    assert (DatabaseQueue.most, ApiQueue.most) == (256, remote.HELD)

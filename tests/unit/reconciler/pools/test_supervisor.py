"""Pools as processes: they run jobs, drain, are killed with proof, adopted, and keep to memory."""

from __future__ import annotations

import hashlib
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from tempfile import mkdtemp
from types import SimpleNamespace
from typing import Any

import pytest
import sqlalchemy as sa

from reconciler.api.pools import PoolHost
from reconciler.db import clock
from reconciler.db.engine import reading, retrying, transaction
from reconciler.db.migrations import program_version
from reconciler.db.schema import Job, Pool, PoolWorker, device_leases, pool_hosts, pool_workers
from reconciler.db.schema import pools as table
from reconciler.pools import jobs, memory, pools, processes, supervisor, watch, workers
from reconciler.pools.supervisor import Supervisor
from reconciler.runs import lock
from reconciler.settings import Settings
from tests.silent_proxy import SilentProxy
from tests.unit.reconciler.conftest import ADMIN, PostgresDatabase
from tests.unit.reconciler.pools.conftest import suspend
from tests.unit.reconciler.pools.test_leases import Queue, clock_ahead
from tests.unit.reconciler.service.service import until

RECORDED = Path(__file__).resolve().parents[3] / "data" / "h200"

pytestmark = pytest.mark.covers("ORCH-1", "ORCH-3")

MODEL = """
import mmap, os, time
from pathlib import Path

def run(call):
    if "note" in call:
        Path(call["note"]).touch()
    if "mib" in call:
        shared = mmap.mmap(-1, call["mib"] << 20)  # RLIMIT_DATA does not count it.
        for _ in range(call["mib"]):
            shared.write(bytes(1 << 20))
    time.sleep(call.get("seconds", 0))
    return {"devices": os.environ["CUDA_VISIBLE_DEVICES"]}
"""


class Control:
    """A machine of the service, its supervisor, and the queue of jobs."""

    def __init__(self, engine: sa.Engine, folder: Path) -> None:
        self.queue = Queue(engine)
        self.engine = engine
        url = engine.url.render_as_string(hide_password=False)
        self.settings = Settings(state_dir=folder, database_url=url, poll_s=0.05)
        models = processes.models_folder(self.settings)
        models.mkdir()
        (models / "m.py").write_text(MODEL)
        self.note = folder / "note"
        self.supervisor = Supervisor(self.settings, engine)

    def start(self, **values: Any) -> Pool:
        self.supervisor.tend()
        values = {"models": ["m"], "memory_mib": 512, "grace_s": 1, **values}
        wish = pools.NewPool("a", **values)
        return retrying(self.engine, lambda conn: pools.start(conn, wish, ADMIN, most=9))

    def running(self, **values: Any) -> Pool:
        return self.until(self.start(**values), "running")

    def read(self, pool: Pool) -> Pool:
        with reading(self.engine) as conn:
            return pools.get(conn, pool.id)

    def until(self, pool: Pool, *states: str) -> Pool:
        def reached() -> bool:
            self.supervisor.tend()
            return self.read(pool).state in states

        until(reached)
        return self.read(pool)

    def workers(self, pool: Pool, *, ended: bool = False) -> list[PoolWorker]:
        query = sa.select(pool_workers).where(pool_workers.c.pool_id == pool.id)
        query = query.where(pool_workers.c.ended_at.is_not(None) if ended else sa.true())
        with reading(self.engine) as conn:
            return [PoolWorker(**row) for row in conn.execute(query).mappings()]

    def submit(self, **call: Any) -> str:
        with transaction(self.engine) as conn:
            new = [jobs.NewJob("m", {"note": str(self.note), **call}, max_attempts=1)]
            return jobs.enqueue(conn, "p1", new, ADMIN)[0]

    def begun(self, **call: Any) -> str:
        """A job that a worker runs."""
        self.note.unlink(missing_ok=True)
        id = self.submit(**call)
        until(self.note.exists)
        return id

    def ended(self, id: str) -> Job:
        until(lambda: self.queue.read(id).status in ("done", "dead_letter"))
        return self.queue.read(id)

    def left(self) -> dict[str, Any]:
        return processes.scan(self.supervisor.host_id)


@pytest.fixture
def control(
    engine: sa.Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Control]:
    gpu = {"id": "GPU-0", "memory_bytes": 1, "memory_used_bytes": 0}
    monkeypatch.setattr(memory, "gpus", lambda: [gpu])
    control = Control(engine, tmp_path)
    yield control
    for left in control.left().values():
        processes.send(left, signal.SIGKILL)
    for child in control.supervisor._children.values():
        child.wait(timeout=60)
    with reading(engine) as conn:
        groups = conn.execute(sa.select(pool_workers.c.cgroup)).scalars().all()
    for group in filter(None, groups):
        until(lambda group=group: not memory.members(group))
        memory.remove(group)


def test_a_pool_runs_jobs_and_finishes_what_it_holds(control: Control) -> None:
    # A name of the standard library, of which workers and their children import it.
    (processes.models_folder(control.settings) / "random.py").write_text("raise SystemExit")
    pool = control.running(models=["m"], devices=["GPU-0"])
    assert control.ended(control.submit()).result == {"devices": "GPU-0"}
    held = control.begun(seconds=1)
    with transaction(control.engine) as conn:
        pools.stop(conn, "a", ADMIN)
        before = clock.read(conn)
    late = control.submit()
    pool = control.until(pool, "stopped")
    assert control.queue.read(held).status == "done"
    assert control.queue.read(late).status == "pending"
    assert control.left() == {}
    (worker,) = control.workers(pool, ended=True)
    assert (worker.ending, worker.models) == ("exit status 0", ["m"])
    with reading(control.engine) as conn:
        until_ = conn.execute(sa.select(device_leases.c.until)).scalar_one()
    assert pool.ended_at is not None and before < until_ <= pool.ended_at


def test_a_worker_that_does_not_listen_is_killed(control: Control) -> None:
    pool = control.running(devices=["GPU-0"], grace_s=2)
    held = control.begun(seconds=600)
    (worker,) = control.workers(pool)
    assert len(control.left()[worker.id]) == 2, "the worker and its child"
    suspend(control.engine, worker.pid)
    with transaction(control.engine) as conn:
        pools.evict(conn, "a", ADMIN)
    control.supervisor.tend()
    assert worker.id in control.left(), "it has a time of grace"
    pool = control.until(pool, "evicted")
    assert pool.ended_at is not None and pool.ended_at - pool.created_at > 2
    assert control.left() == {}
    with reading(control.engine) as conn:
        assert pools.leases(conn) == []
    control.queue.tend()
    job = control.queue.read(held)
    assert (job.status, job.lost) == ("pending", 1)


def test_the_next_supervisor_adopts_what_lives(control: Control) -> None:
    pool = control.running(replicas=2)
    held = control.begun(seconds=600)
    holder = control.queue.read(held).worker
    worker, other = sorted(control.workers(pool), key=lambda worker: worker.id != holder)
    suspend(control.engine, worker.pid)
    with transaction(control.engine) as conn:
        hung = sa.update(pool_workers).where(pool_workers.c.id == worker.id)
        conn.execute(hung.values(beat_at=1.0))
    first, control.supervisor = control.supervisor, Supervisor(control.settings, control.engine)
    control.supervisor.tend()
    assert worker.id in control.left(), "whoever was out of touch itself judges nobody"
    control.supervisor._beats[worker.id] = 1.0, time.monotonic() - supervisor.SILENT_S - 1
    control.supervisor.tend()
    # A process that exits has no environment any more before it leaves its group.
    until(lambda: control.supervisor.tend() or control.workers(pool, ended=True))
    assert [worker.id for worker in control.workers(pool, ended=True)] == [worker.id]
    control.queue.tend()
    assert control.queue.read(held).status in ("pending", "running")
    assert control.queue.read(held).lost == 1

    def replaced() -> bool:
        control.supervisor.tend()
        living = [worker for worker in control.workers(pool) if worker.ended_at is None]
        return len(living) == 2 and all(worker.models for worker in living)

    until(replaced)
    kept = [worker for worker in control.workers(pool) if worker.id == other.id]
    assert [worker.pid for worker in kept] == [other.pid]
    with transaction(control.engine) as conn:
        pools.evict(conn, "a", ADMIN)
    control.until(pool, "evicted")
    assert control.left() == {}
    for child in first._children.values():
        child.wait(timeout=60)


@pytest.mark.covers("ORCH-5")
def test_workers_of_another_version_are_replaced_one_by_one(control: Control) -> None:
    """As after an upgrade of the service, which leaves them running."""
    # None is killed, however long a busy machine takes to end it: that would cost its jobs.
    pool = control.running(replicas=2, grace_s=600)
    former = {worker.id: worker for worker in control.workers(pool)}
    assert {worker.version for worker in former.values()} == {program_version()}
    with transaction(control.engine) as conn:
        older = zip(former, ("", "0.0.9+0050"), strict=True)
        for id, version in older:
            update = sa.update(pool_workers).where(pool_workers.c.id == id)
            conn.execute(update.values(version=version))
    first, control.supervisor = control.supervisor, Supervisor(control.settings, control.engine)
    # Workers that this service has started itself stay, whatever their version.
    first.tend()
    assert {worker.id for worker in control.workers(pool)} == former.keys()
    sent: list[str] = []

    def replaced() -> bool:
        sent.append(control.submit(seconds=0.05))
        control.supervisor.tend()
        living = [worker for worker in control.workers(pool) if worker.ended_at is None]
        loaded = [worker for worker in living if worker.models]
        assert loaded, "the jobs go on"
        return len(loaded) == 2 and not former.keys() & {worker.id for worker in living}

    until(replaced)
    ended = [control.ended(id) for id in sent]
    assert {(job.status, job.attempts, job.lost) for job in ended} == {("done", 1, 0)}
    gone = control.workers(pool)
    assert {worker.ending for worker in gone if worker.id in former} == {workers.REPLACED}
    assert {worker.version for worker in gone if worker.id not in former} == {program_version()}
    with reading(control.engine) as conn:
        ends = workers.recent_ends(conn, pool)
        assert (ends, workers.pause(conn, pool, ends)) == (0, 0)
    # Heartbeats go on meanwhile.
    kept = {(worker.id, worker.ending, worker.ended_at) for worker in control.workers(pool)}
    control.supervisor.tend()
    assert {(each.id, each.ending, each.ended_at) for each in control.workers(pool)} == kept
    for child in first._children.values():
        child.wait(timeout=60)


@pytest.mark.postgres
def test_a_supervisor_whose_database_never_answers_ends_its_process(
    postgres_database: PostgresDatabase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or it would keep the lock of the machine for ever."""
    ended: list[int] = []
    looks: list[float] = []

    def later() -> float:
        looks.append(time.monotonic() + 3600)
        return looks[-1]

    monkeypatch.setattr(supervisor, "EVERY_S", 600.0)
    monkeypatch.setattr(os, "_exit", ended.append)
    monkeypatch.setattr(memory, "gpus", list)
    proxy = SilentProxy(postgres_database.restore().url)
    first, it = (Supervisor(Settings(state_dir=tmp_path), proxy.engine) for _ in range(2))
    first.start()
    with closing(proxy):
        with postgres_database.engine.connect() as conn:
            hosts = sa.select(sa.func.count()).select_from(pool_hosts)
            until(lambda: conn.execute(hosts).scalar_one())
        until(lambda: first._moved == math.inf)
        monkeypatch.setattr(watch, "time", SimpleNamespace(monotonic=later))
        until(lambda: len(looks) > 1)
        assert not ended, "a pause between two passes is no hang"
        first.stop()
        proxy.fall_silent()
        it.start()
        until(lambda: ended)
    it.stop()
    with it.lock() as held:
        assert held is not None
    assert set(ended) == {1}


@pytest.mark.parametrize("hours", [1, -1])
def test_a_jump_of_the_database_s_clock_ends_no_worker(control: Control, hours: int) -> None:
    pool = control.running()
    (worker,) = control.workers(pool)
    with transaction(control.engine) as conn:
        earlier = {**vars(worker), "id": "earlier", "ended_at": clock.read(conn)}
        conn.execute(sa.insert(pool_workers), [earlier])
        assert workers.recent_ends(conn, pool) == 1
    with clock_ahead(control.engine, hours * 3600):
        control.supervisor.tend()
        with reading(control.engine) as conn:
            assert workers.recent_ends(conn, pool) == 0
        control.supervisor.tend()
        living = [each.id for each in control.workers(pool) if each.ended_at is None]
        assert living == [worker.id] and worker.id in control.left()
        with transaction(control.engine) as conn:
            pools.evict(conn, "a", ADMIN)
        suspend(control.engine, worker.pid)
        control.supervisor.tend()
        assert worker.id in control.left(), "its grace begins with its signal"
    # Ended as at the present time.
    control.until(pool, "evicted")


HIDING = """
import ctypes, sys, threading, time
from pathlib import Path

def wait(name):
    for _ in range(6_000):
        if Path(sys.argv[1], name).exists():
            return
        time.sleep(0.02)

threading.Thread(target=wait, args=("end",)).start()
wait("hide")
ctypes.CDLL(None).syscall(60, 0)
"""


def test_a_process_that_ends_without_its_mark_keeps_its_gpu(
    control: Control, tmp_path: Path
) -> None:
    """Its first thread is gone, and so are its entries in /proc, as while a driver frees a GPU."""
    pool = control.running(devices=["GPU-0"], grace_s=600)
    (worker,) = control.workers(pool)
    mark = {processes.MARK: f"{control.supervisor.host_id}/{worker.id}"}
    command = [sys.executable, "-c", HIDING, str(tmp_path)]
    with subprocess.Popen(command, env=mark) as process:
        control.supervisor.tend()
        assert [len(each) for each in control.left().values()] == [3], "with the worker's child"
        os.kill(worker.pid, signal.SIGKILL)
        (tmp_path / "hide").touch()
        until(lambda: not control.left())
        with transaction(control.engine) as conn:
            pools.evict(conn, "a", ADMIN)
        for _ in range(5):
            control.supervisor.tend()
        assert control.read(pool).state == "stopping"
        (tmp_path / "end").touch()
        control.until(pool, "evicted")
        assert process.poll() is not None, "its last thread has ended"


RENAMED = """
import ctypes, sys, time
from pathlib import Path

while not Path(sys.argv[1], "hide").exists():
    time.sleep(0.02)
# As setproctitle does it, which vLLM calls: it writes over the environment.
libc = ctypes.CDLL(None)
first = ctypes.c_void_p.in_dll(libc, "environ").value
text = ctypes.cast(first, ctypes.POINTER(ctypes.c_char_p))
start = ctypes.cast(text, ctypes.POINTER(ctypes.c_void_p))[0]
ctypes.memset(start, 0, len(text[0]))
Path(sys.argv[1], "hidden").touch()
time.sleep(600)
"""


def test_a_process_that_has_lost_its_mark_is_killed(control: Control, tmp_path: Path) -> None:
    pool = control.running(devices=["GPU-0"])
    (worker,) = control.workers(pool)
    mark = {processes.MARK: f"{control.supervisor.host_id}/{worker.id}"}
    command = [sys.executable, "-c", RENAMED, str(tmp_path)]
    with subprocess.Popen(command, env=mark) as process:
        until(lambda: len(control.left()[worker.id]) == 3)
        control.supervisor.tend()
        (tmp_path / "hide").touch()
        until((tmp_path / "hidden").exists)
        assert len(control.left()[worker.id]) == 2
        with transaction(control.engine) as conn:
            pools.evict(conn, "a", ADMIN)
        control.until(pool, "evicted")
        assert process.wait(timeout=60) == -signal.SIGKILL


def test_the_process_of_another_is_neither_adopted_nor_killed(control: Control) -> None:
    """After a restart of the machine, or once process ids have come round."""
    pool = control.start()
    with subprocess.Popen(["sleep", "600"]) as other:
        with transaction(control.engine) as conn:
            conn.execute(sa.update(table).values(state="stopping", state_since=1.0))
            for number, boot in enumerate((lock.boot_id(), "earlier")):
                worker = {"id": f"w{number}", "host": "control", "boot_id": boot, "models": ["m"]}
                times = dict.fromkeys(("started_at", "beat_at"), clock.now())
                values = {"pool_id": pool.id, "pid": other.pid, "start_ticks": 1, "cgroup": ""}
                rest = {"memory_bytes": 0, "oom_kills": 0, "ending": "", "ended_with": ""}
                conn.execute(sa.insert(pool_workers).values(**worker, **values, **times, **rest))
        assert control.until(pool, "stopped").failure == {}
        assert other.poll() is None
        other.kill()


def test_a_pool_whose_workers_always_end_is_given_up(
    control: Control, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "ENDS_LIMIT", 1)
    (processes.models_folder(control.settings) / "m.py").write_text("raise ImportError\n")
    pool = control.until(control.start(), "failed")
    assert pool.failure["code"] == "workers_ended"
    assert all(pool.failure.values())
    assert [worker.ending for worker in control.workers(pool)] == ["exit status 1"]


def test_a_worker_is_replaced_after_the_pause(
    control: Control, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses = [1.0, 0.0]
    monkeypatch.setattr(workers, "pause", lambda *_: pauses.pop(0))
    pool = control.start()
    control.supervisor.tend()
    assert control.read(pool).state == "starting"
    control.supervisor.tend()
    assert control.workers(pool) == []
    control.supervisor.tend()
    assert len(control.workers(pool)) == 1


def test_a_worker_that_hangs_as_it_loads_is_replaced(
    control: Control, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its pool would stay `running` without it."""
    models = processes.models_folder(control.settings)
    hang = 'while Path("hang").exists():\n    time.sleep(0.01)\n'
    (models / "m.py").write_text(MODEL + hang)
    pool = control.running()
    (models / "hang").touch()
    (first,) = control.workers(pool)
    os.kill(first.pid, signal.SIGKILL)

    def loading() -> list[PoolWorker]:
        control.supervisor.tend()
        ids = {first.id, *(worker.id for worker in control.workers(pool, ended=True))}
        return [each for each in control.workers(pool) if each.pid and each.id not in ids]

    (second,) = until(loading)
    with monkeypatch.context() as patch:
        patch.setattr(supervisor, "LOADING_S", 0.5)
        until(lambda: second.id not in {worker.id for worker in loading()})
        (models / "hang").unlink()
    until(lambda: [worker for worker in loading() if worker.models])
    assert control.read(pool).state == "running"


def test_a_pool_runs_the_files_that_it_began_with(
    control: Control, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(supervisor, "ENDS_LIMIT", 2)
    pool = control.running()
    digest = hashlib.sha256(MODEL.encode()).hexdigest()
    assert pool.digests == {"m": digest}
    file = processes.models_folder(control.settings) / "m.py"
    file.write_text(f"{MODEL}\n")
    changed = hashlib.sha256(file.read_bytes()).hexdigest()
    (worker,) = control.workers(pool)
    os.kill(worker.pid, signal.SIGKILL)
    assert control.until(pool, "failed").failure["code"] == "workers_ended"
    log = capfd.readouterr().err
    assert "model_changed" in log and digest in log and changed in log
    # The shipped model is the release's: after an upgrade its file may be another.
    served = control.until(control.start(models=["m", "digits"]), "running")
    assert served.digests == {"m": changed}


def test_a_process_without_a_record_is_killed(control: Control) -> None:
    """As after a restored backup."""
    mark = {processes.MARK: f"{control.supervisor.host_id}/gone"}
    foreign = {processes.MARK: "another-site/gone"}
    with (
        subprocess.Popen(["sleep", "600"], env=mark) as stray,
        subprocess.Popen(["sleep", "600"], env=foreign) as other,
    ):
        control.supervisor.tend()
        assert stray.wait(timeout=60) == -signal.SIGKILL
        assert other.poll() is None
        other.kill()


def test_a_pool_whose_workers_are_not_recorded_ends_after_them(control: Control) -> None:
    """As after a restored backup: any of them may be this pool's."""
    pool = control.running(devices=["GPU-0"])
    (worker,) = control.workers(pool)
    with transaction(control.engine) as conn:
        pools.evict(conn, pool.id, ADMIN)
        conn.execute(sa.delete(pool_workers))
    control.supervisor.tend()
    assert control.read(pool).state == "stopping", "its processes were there"
    control.until(pool, "evicted")
    assert control.left() == {}
    memory.remove(worker.cgroup)


def test_a_host_that_comes_back_kills_what_was_given_up(control: Control) -> None:
    """Before that, its GPUs are not offered."""
    pool = control.running(devices=["GPU-0"])
    with transaction(control.engine) as conn:
        conn.execute(sa.update(pool_hosts).values(seen_at=1.0))
        pools.evict_lost(conn, pool.id, ADMIN.because("its power is cut"))

    def offered() -> list[str]:
        control.supervisor.tend()
        with reading(control.engine) as conn:
            devices = conn.execute(sa.select(pool_hosts.c.devices)).scalars()
            return [device["id"] for each in devices for device in each]

    control.supervisor._due["report"] = 0.0
    assert offered() == []
    until(lambda: offered() == ["GPU-0"])
    assert control.left() == {}


def test_only_files_that_a_pool_can_name_are_models(control: Control) -> None:
    """A name that is no UTF-8 made the lists of hosts fail, on every page that has them."""
    folder = os.fsencode(processes.models_folder(control.settings))
    for name in (b"mod\xe8le", b"my model", b"x=y", b"a" * 65, b"good"):
        Path(os.fsdecode(folder + b"/" + name + b".onnx")).touch()
    control.supervisor.tend()
    with reading(control.engine) as conn:
        (host,) = pools.hosts(conn)
    assert host.models == ["digits", "drill", "good", "m"]
    assert b"good" in PoolHost.of(host).model_dump_json().encode()


@pytest.mark.covers("ORCH-8")
def test_the_kernel_counts_what_it_kills(control: Control) -> None:
    """A drill: the counter of the kernel's memory controller, not ours."""
    group = memory.own_group()
    if group is None or memory.parent_group(group) is None:
        pytest.skip("the memory controller is not writable here")
    pool = control.running(memory_mib=256)
    (worker,) = control.workers(pool)
    job = control.ended(control.submit(mib=400))
    assert job.error["code"] == "memory_exceeded"
    assert memory.of_group(worker.cgroup).oom_kills == 1
    control.supervisor.tend()
    (worker,) = control.workers(pool)
    assert (worker.oom_kills, control.read(pool).state) == (1, "running")
    assert 0 < worker.memory_bytes < 256 << 20
    with transaction(control.engine) as conn:
        conn.execute(sa.update(table).values(kill_on_oom=True))
    control.ended(control.submit(mib=400))
    assert memory.of_group(worker.cgroup).oom_kills == 2
    pool = control.until(pool, "evicted")
    assert pool.failure["code"] == "memory_exceeded"
    assert not Path(worker.cgroup).exists()


@pytest.mark.covers("ORCH-8")
def test_without_the_controller_samples_keep_the_limit(control: Control) -> None:
    control.supervisor._parent = None
    pool = control.running(memory_mib=256)
    id = control.submit(mib=400, seconds=600)
    begin = time.monotonic()

    def killed() -> bool:
        control.supervisor.tend()
        return control.queue.read(id).status == "dead_letter"

    until(killed)
    assert time.monotonic() - begin < 60
    assert control.queue.read(id).error["code"] == "memory_exceeded"
    control.supervisor.tend()
    (worker,) = control.workers(pool)
    assert (worker.cgroup, worker.oom_kills) == ("", 1)


def test_gpus_are_those_that_nvidia_smi_can_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """With the recorded answers about an H200 whose pools began, worked, and held 100 GiB."""
    text = (RECORDED / "pools-nvidia-smi.txt").read_text().splitlines()
    query = text[0].removeprefix("$ nvidia-smi ")
    answers = [line for line in text if line.startswith("GPU-")]
    uuid = answers[0].partition(",")[0]
    # A scrape divides by the memory.
    dead = f"{uuid}-2, [N/A], [Unknown Error]\n{uuid}-3, 0, 0"
    program = tmp_path / "nvidia-smi"
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    def gpus(script: str) -> list[dict[str, Any]]:
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
        return memory.gpus()

    def read(answer: str) -> list[dict[str, Any]]:
        return gpus(f'[ "$*" = "{query}" ] || exit 2\necho "{answer}"\necho "{dead}"')

    lists = [read(answer) for answer in answers]
    assert {each["id"] for (each,) in lists} == {uuid}
    assert {each["memory_bytes"] >> 20 for (each,) in lists} == {143_771}
    assert [each["memory_used_bytes"] >> 20 for (each,) in lists] == [0, 879, 621, 0, 103_019]
    assert gpus("echo 'No devices were found'; exit 6") == []
    assert gpus("echo 'No devices were found'") == []
    monkeypatch.setattr(memory, "_SMI_S", 0.2)
    assert gpus("exec sleep 60") == []
    until(lambda: len(read(answers[0])) == 1)
    note = tmp_path / "note"
    with monkeypatch.context() as patch:
        # As a driver does that hangs.
        patch.setattr(subprocess.Popen, "kill", lambda _: None)
        hangs = f"echo >> {note}; exec sleep 60"
        assert [gpus(hangs), gpus(hangs)] == [[], []]
    started = until(lambda: note.exists() and note.read_text())
    assert started == "\n", "no other is started while the first hangs"
    memory._smi[0].kill()
    memory._smi[0].wait()


def test_a_worker_with_a_group_of_threads_is_read_and_killed() -> None:
    """Any code in a worker can make such a group."""
    with ExitStack() as stack:
        try:
            unified = memory._mounts(Path("/proc/self"))["cgroup2"][1]
            above = Path(mkdtemp(prefix="gpuaas-test-", dir=unified))
        except (KeyError, OSError):
            pytest.skip("no version 2 of control groups that this process may change")
        group, inner = above / "worker", above / "worker/threads"
        for path in (above, group, inner):
            path.mkdir(exist_ok=True)
            stack.callback(path.rmdir)
        sleeper = stack.enter_context(subprocess.Popen(["sleep", "60"]))
        stack.callback(sleeper.kill)
        (group / "cgroup.procs").write_text(str(sleeper.pid))
        (inner / "cgroup.type").write_text("threaded")
        assert memory.members(str(group)) == [sleeper.pid]
        (inner / "cgroup.threads").write_text(str(sleeper.pid))
        with pytest.raises(OSError, match="not supported"):
            (inner / "cgroup.procs").read_text()
        assert memory.members(str(group)) == [sleeper.pid]
        memory.kill(str(group))
        assert sleeper.wait(60) == -signal.SIGKILL
        assert memory.members(str(group)) == []


def test_a_worker_that_cannot_be_read_is_not_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock, "_PROC", tmp_path)
    process, group = processes.Process(12, 1), tmp_path / "group"
    assert not processes.is_left(process)
    assert memory.members("") == memory.members(str(group)) == []
    (tmp_path / "12").mkdir()
    (tmp_path / "12/stat").symlink_to("stat")
    group.symlink_to("group")
    with pytest.raises(OSError, match="symbolic links"):
        processes.is_left(process)
    with pytest.raises(OSError, match="symbolic links"):
        memory.members(str(group))

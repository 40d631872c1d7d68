"""Worker processes as sites run them, on a database of the test's own."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from reconciler.db.engine import reading, transaction
from reconciler.db.schema import PoolWorker
from tests.unit.reconciler.pools.test_leases import Queue, check_counts
from tests.unit.reconciler.service.service import alive, forge, until


def pieces(jobs: int, kills: int, *, number: int) -> list[Any]:
    """Parameters `jobs`, `kills` and `first` of a short test, and of the pieces of a long one. Each
    piece goes on with the kills of the piece before, and takes minutes.
    """
    long = range(0, kills, kills // number)
    return [
        pytest.param(300, 8, 0, id="short"),
        *(
            pytest.param(
                jobs // number, long.step, first, marks=pytest.mark.long, id=f"from-{first}"
            )
            for first in long
        ),
    ]


def suspend(engine: sa.Engine, pid: int) -> None:
    """Stop a process, while it holds no write lock of SQLite: the lock would stay held."""
    with transaction(engine):
        os.kill(pid, signal.SIGSTOP)


FUNCTIONS = "tests.unit.reconciler.pools.functions"


class Workers:
    """Processes of `gpuaas jobs worker`, and the queue that they serve."""

    def __init__(self, queue: Queue, folder: Path) -> None:
        self.queue = queue
        self.log = folder / "workers.log"
        self.note = folder / "ran"
        # Calls that name it as `until` end once it exists.
        self.go = folder / "go"
        self.pids: list[int] = []
        self.environment = {
            "GPUAAS_STATE_DIR": str(folder),
            "GPUAAS_DATABASE_URL": queue.engine.url.render_as_string(hide_password=False),
            "GPUAAS_POLL_S": "0.02",
        }

    def start(self, *words: str, function: str = "double") -> int:
        """The id of a new worker of the model "m"."""
        models = ["--model", f"m={FUNCTIONS}:{function}"] if function else []
        command = ["jobs", "worker", *models, *words]
        self.pids.append(forge().start(command, self.environment, self.log))
        return self.pids[-1]

    def kill(self, pid: int) -> None:
        """As the kernel's memory killer does it."""
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        self.ended(pid)

    def ended(self, pid: int) -> None:
        """Wait for the end of a worker."""
        until(lambda: not alive(pid))

    def close(self) -> None:
        for pid in self.pids:
            self.kill(pid)

    def ran(self) -> list[int]:
        """The numbers of the calls that functions noted, in their order."""
        return [int(line) for line in self.note.read_text().split()] if self.note.exists() else []

    def submit(self, count: int = 1, project: str = "p1", **call: object) -> list[str]:
        calls = [{"file": str(self.note), **call, "number": number} for number in range(count)]
        return self.queue.submit(calls, project)

    def served(self, *models: str) -> None:
        """Wait until a worker serves these models."""
        query = sa.select(PoolWorker.TABLE.c.models)

        def ready() -> bool:
            with reading(self.queue.engine) as conn:
                return sorted(models) in conn.execute(query).scalars().all()

        until(ready)

    def wait(self, id: str, *statuses: str) -> Any:
        """The job, once it has any of these statuses."""
        until(lambda: self.queue.read(id).status in statuses)
        return self.queue.read(id)


@pytest.fixture
def queue(engine: sa.Engine) -> Iterator[Queue]:
    queue = Queue(engine)
    yield queue
    check_counts(engine)


@pytest.fixture
def workers(queue: Queue, tmp_path: Path) -> Iterator[Workers]:
    workers = Workers(queue, tmp_path)
    yield workers
    workers.close()

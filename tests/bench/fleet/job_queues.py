"""A client and a worker of each queue of jobs; run as a script by the Python that has the queue.

`job_queues.py NAME work|send|offer …`. A job appends how long ago it was sent to a file, as eight
bytes: the file says how many jobs ran, and how long each took from its sender to its end.
"""

from __future__ import annotations

import asyncio
import os
import struct
import sys
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

# As in the packages' own tests; also the size of our groups.
CONCURRENCY = 32
# Jobs per call of a client, as a request of the API takes them.
TOGETHER = 100
TICK_S = 0.005
RECORD = struct.Struct("d")
NOTE = "BENCH_NOTE"
URL = "BENCH_REDIS"
Send = Callable[[list[float]], Coroutine[Any, Any, Any]]
_files: list[int] = []


def note(at: float) -> None:
    """Do the work of a job."""
    if not _files:
        _files.append(os.open(os.environ[NOTE], os.O_WRONLY | os.O_APPEND | os.O_CREAT))
    os.write(_files[0], RECORD.pack(time.monotonic() - at))


def run(call: dict[str, Any]) -> dict[str, Any]:
    """The function that our worker serves, with the path of the file, for it has no environment."""
    os.environ.setdefault(NOTE, call["note"])
    note(call["at"])
    return {}


def taskiq(url: str) -> Any:
    from taskiq.api import run_receiver_task
    from taskiq_redis import RedisAsyncResultBackend, RedisStreamBroker

    broker = RedisStreamBroker(url).with_result_backend(RedisAsyncResultBackend(url))

    @broker.task(task_name="job")
    async def job(at: float) -> None:
        note(at)

    async def work() -> None:
        await run_receiver_task(broker, run_startup=True)

    async def send(moments: list[float]) -> None:
        await asyncio.gather(*(job.kiq(at) for at in moments))

    return work, broker.startup, send


def saq(url: str) -> Any:
    from saq import Queue, Worker

    queue = Queue.from_url(url)

    async def job(_context: Any, *, at: float) -> None:
        note(at)

    async def work() -> None:
        await Worker(queue, functions=[("job", job)], concurrency=CONCURRENCY).start()

    async def send(moments: list[float]) -> None:
        await asyncio.gather(*(queue.enqueue("job", at=at) for at in moments))

    return work, queue.connect, send


def streaq(url: str) -> Any:
    from streaq import Worker

    worker: Any = Worker(redis_url=url, concurrency=CONCURRENCY)

    @worker.task(name="job")
    async def job(at: float) -> None:
        note(at)

    async def send(moments: list[float]) -> None:
        await worker.enqueue_many([job.enqueue(at) for at in moments])

    return worker.run_async, worker.__aenter__, send


def arq(url: str) -> Any:
    from arq import create_pool, func
    from arq.connections import RedisSettings
    from arq.worker import Worker

    settings = RedisSettings.from_dsn(url)
    pool: list[Any] = []

    async def job(_context: Any, at: float) -> None:
        note(at)

    async def work() -> None:
        functions = [func(job, name="job")]
        worker = Worker(functions, redis_settings=settings, max_jobs=CONCURRENCY)
        await worker.async_run()

    async def connect() -> None:
        pool.append(await create_pool(settings))

    async def send(moments: list[float]) -> None:
        await asyncio.gather(*(pool[0].enqueue_job("job", at) for at in moments))

    return work, connect, send


def ours(url: str) -> Any:
    from reconciler.db.engine import open_engine, retrying
    from reconciler.model.act import Act
    from reconciler.pools import hints, jobs
    from reconciler.settings import Settings

    engine = open_engine(Settings().database)
    streams = hints.of(url)
    act = Act("bench", "jobs of the benchmark")
    file = os.environ[NOTE]

    async def connect() -> None:
        pass

    async def send(moments: list[float]) -> None:
        new = [jobs.NewJob("m", {"at": at, "note": file}) for at in moments]
        ids = retrying(engine, lambda conn: jobs.enqueue(conn, "bench", new, act))
        if streams is not None:
            streams.announce(ids)

    return None, connect, send


async def fill(send: Send, count: int) -> None:
    """Send jobs as fast as the client can."""
    for begin in range(0, count, TOGETHER):
        size = min(TOGETHER, count - begin)
        await send([time.monotonic()] * size)


async def offer(send: Send, rate: float, seconds: float) -> None:
    """Send jobs at a rate, without waiting for them. A late tick sends all due jobs, dated then."""
    began = time.monotonic()
    sent = 0
    while sent < rate * seconds:
        due = min(int((time.monotonic() - began) * rate) + 1, int(rate * seconds))
        if due > sent:
            await send([began + number / rate for number in range(sent, due)])
            sent = due
        await asyncio.sleep(max(0.0, began + sent / rate + TICK_S - time.monotonic()))


async def main(name: str, act: str, *numbers: str) -> None:
    work, connect, send = globals()[name](os.environ.get(URL, ""))
    if act == "work":
        await work()
        return
    await connect()
    await (fill if act == "send" else offer)(send, *map(int, numbers))
    os._exit(0)  # Some clients do not end by themselves.


if __name__ == "__main__":
    # Not this folder, whose names are those of packages.
    sys.path[0] = str(Path(__file__).resolve().parents[3])
    try:
        import uvloop
    except ImportError:
        asyncio.run(main(*sys.argv[1:]))
    else:
        uvloop.run(main(*sys.argv[1:]))

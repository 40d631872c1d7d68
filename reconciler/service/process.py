"""A process of the service: its parts, started together and stopped in order."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from sqlalchemy import Engine

from reconciler.service.heartbeat import Heartbeat
from reconciler.settings import Settings
from reconciler.work.loops import Loops
from reconciler.work.worker import Worker

API, WORKER, LOOPS = "api", "worker", "loops"
# Roles that a site needs besides the API, on any machine: they carry out and end all work.
NEEDED = (WORKER, LOOPS)


@contextmanager
def running(settings: Settings, engine: Engine, *, api: bool, work: bool) -> Iterator[Heartbeat]:
    """Run all parts except the API's server until the block ends.

    work: run tasks and, while this process is the leader, the loops. A process without it only
    reports that it is alive. The parts stop in reverse order: the loops first, then the heartbeat,
    which resigns, then the worker.
    """
    worker = Worker(settings, engine) if work and settings.workers else None

    def roles() -> list[str]:
        # A worker whose thread has died has no role, even if the process lives on.
        working = worker is not None and worker.looking()
        states = ((API, api), (WORKER, working), (LOOPS, work))
        return [role for role, active in states if active]

    heartbeat = Heartbeat(engine, roles, candidate=work, lease_s=settings.leader_lease_s)
    with ExitStack() as parts:
        if worker is not None:
            worker.start()
            parts.callback(worker.stop)
        heartbeat.start()
        parts.callback(heartbeat.stop)
        if work:
            loops = Loops(settings, engine, heartbeat.lease)
            loops.start()
            parts.callback(loops.stop)
        yield heartbeat

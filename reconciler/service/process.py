"""One process of the service: its parts, started together and ended in order."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from sqlalchemy import Engine

from reconciler.service.loops import Loops
from reconciler.service.pulse import Pulse
from reconciler.settings import Settings
from reconciler.work.worker import Worker

API, WORKER, LOOPS = "api", "worker", "loops"
# What a site needs beside its API, wherever it runs: without these nothing is done or ended.
NEEDED = (WORKER, LOOPS)


@contextmanager
def running(settings: Settings, engine: Engine, *, api: bool, work: bool) -> Iterator[Pulse]:
    """The parts but for the API's own server run until the block ends.

    work: tasks and, while this process leads, the single loops. A process of an API alone only says
    that it lives. The order matters: what is stopped last hears that all the rest has stopped.
    """
    worker = Worker(settings, engine) if work and settings.workers else None

    def roles() -> list[str]:
        # A worker whose thread has died is none, whatever else goes on in this process.
        working = worker is not None and worker.looking()
        said = ((API, api), (WORKER, working), (LOOPS, work))
        return [role for role, there in said if there]

    pulse = Pulse(engine, roles, candidate=work, lease_s=settings.leader_lease_s)
    with ExitStack() as parts:
        if worker is not None:
            worker.start()
            parts.callback(worker.stop)
        pulse.start()
        parts.callback(pulse.stop)
        if work:
            loops = Loops(settings, engine, pulse.lease)
            loops.start()
            parts.callback(loops.stop)
        yield pulse

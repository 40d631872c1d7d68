"""The process of `gpuaas worker`. It loads no web framework: many of these may run."""

from __future__ import annotations

import logging
import signal
import threading

from reconciler import logs
from reconciler.cli.database import opened
from reconciler.model.errors import Problem
from reconciler.service import process
from reconciler.service.authorities import adopt
from reconciler.settings import Settings

log = logging.getLogger("gpuaas")


def work() -> None:
    """Run tasks, and the single loops while this process leads, until SIGINT or SIGTERM."""
    settings = Settings()
    logs.configure(settings)
    if not settings.workers:
        raise Problem(
            "workers_missing",
            400,
            expected="GPUAAS_WORKERS of at least 1 for a worker",
            found="0",
            remedy="set it, or run `gpuaas serve --api-only` here",
        )
    engine, revision = opened(settings)
    adopt(settings, engine)
    over = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: over.set())
    try:
        with process.running(settings, engine, api=False, work=True):
            log.info("database at %s, %d tasks at a time", revision, settings.workers)
            over.wait()
    finally:
        engine.dispose()

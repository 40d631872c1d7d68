"""The process of `gpuaas serve`."""

from __future__ import annotations

import logging
import signal
from types import FrameType

import uvicorn
from fastapi import FastAPI
from sqlalchemy import Engine

from reconciler.api.app import create_app
from reconciler.api.operator import create_operator_app
from reconciler.cli.database import opened
from reconciler.service import addresses, logs, process
from reconciler.service.authorities import adopt
from reconciler.service.listener import operators
from reconciler.settings import Settings

log = logging.getLogger("gpuaas")

# How long open requests may take after the signal to stop.
GRACE_S = 10


def serve(*, api_only: bool) -> None:
    """Serve until SIGINT or SIGTERM."""
    settings = Settings()
    logs.configure(settings)
    engine, revision = opened(settings)
    adopt(settings, engine)
    host, port = addresses.api(settings)
    app = create_app(settings, engine)
    # A process that serves a site answers for the site: see /readyz.
    app.state.needed = process.NEEDED
    server = uvicorn.Server(
        uvicorn.Config(
            app,
            host=host,
            port=port,
            access_log=False,
            log_config=None,
            server_header=False,
            timeout_graceful_shutdown=GRACE_S,
        )
    )
    # uvicorn stops at a signal and then raises it again: without a handler of ours the process
    # would end there, and the leases of its tasks would have to run out.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _stop)
    try:
        with (
            operators(settings, _for_operators(settings, engine)),
            process.running(settings, engine, api=True, work=not api_only),
        ):
            log.info("database at %s, API on %s", revision, settings.api_url)
            server.run()
    finally:
        engine.dispose()


def _stop(_number: int, _frame: FrameType | None) -> None:
    raise SystemExit(0)


def _for_operators(settings: Settings, engine: Engine) -> FastAPI:
    app = create_operator_app(settings, engine)
    app.state.needed = process.NEEDED
    return app

"""The process of `gpuaas serve`."""

from __future__ import annotations

import logging
import signal
import socket
from types import FrameType

import uvicorn
from fastapi import FastAPI
from sqlalchemy import Engine

from reconciler import logs
from reconciler.api.app import create_app
from reconciler.api.health import create_operator_app
from reconciler.cli.database import opened
from reconciler.service import addresses, listener, process
from reconciler.service.authorities import adopt
from reconciler.settings import Settings

log = logging.getLogger("gpuaas")

# How long open requests may take after the signal to stop.
GRACE_S = 10


def serve(*, api_only: bool) -> None:
    """Serve until SIGINT or SIGTERM."""
    settings = Settings()
    logs.configure(settings)
    with listener.api(settings) as taken:
        _serve(settings, taken, api_only=api_only)


def _serve(settings: Settings, taken: list[socket.socket], *, api_only: bool) -> None:
    engine, revision = opened(settings)
    adopt(settings, engine)
    app = create_app(settings, engine)
    # A process that serves a site answers for the site: see /readyz.
    app.state.needed = process.NEEDED
    server = uvicorn.Server(
        uvicorn.Config(
            app,
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
            listener.operators(settings, _for_operators(settings, engine)),
            process.running(settings, engine, api=True, work=not api_only),
        ):
            log.info("database at %s, API on %s", revision, _where(settings, taken))
            server.run(taken)
    finally:
        engine.dispose()


def _where(settings: Settings, taken: list[socket.socket]) -> str:
    """Where it listens, and the URL under which others find it where that is another."""
    own = [f"http://{addresses.host_port(one.getsockname()[:2])}" for one in taken]
    listens = " and ".join(own)
    elsewhere = settings.public_url and settings.public_url.rstrip("/") not in own
    return f"{listens}, for others at {settings.public_url}" if elsewhere else listens


def _stop(_number: int, _frame: FrameType | None) -> None:
    raise SystemExit(0)


def _for_operators(settings: Settings, engine: Engine) -> FastAPI:
    app = create_operator_app(settings, engine)
    app.state.needed = process.NEEDED
    return app

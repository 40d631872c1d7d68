"""The web server of `gpuaas serve`: API, operators' listener, workers and loops in a process."""

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
from reconciler.cli.service import open_migrated
from reconciler.service import listeners, process
from reconciler.settings import Settings

log = logging.getLogger("gpuaas")

# Time that open requests have after the signal to stop.
GRACE_S = 10


def serve(*, api_only: bool) -> None:
    """Serve until SIGINT or SIGTERM."""
    settings = Settings()
    logs.configure(settings)
    with listeners.api_sockets(settings) as sockets:
        _serve(settings, sockets, api_only=api_only)


def _serve(settings: Settings, sockets: list[socket.socket], *, api_only: bool) -> None:
    engine, revision = open_migrated(settings)
    process.adopt(settings, engine)
    app = create_app(settings, engine)
    # /readyz of this process answers for the whole site.
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
    # uvicorn stops at a signal and then raises it again. Without this handler the process would end
    # there, and its tasks would wait until their leases expire.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _stop)
    try:
        with (
            listeners.serve_operators(settings, _for_operators(settings, engine)),
            process.running(settings, engine, api=True, work=not api_only),
        ):
            log.info("database at %s, API on %s", revision, _listening(settings, sockets))
            server.run(sockets)
    finally:
        engine.dispose()


def _listening(settings: Settings, sockets: list[socket.socket]) -> str:
    """The addresses that it listens on, and the public URL if it differs."""
    urls = [f"http://{listeners.host_port(item.getsockname()[:2])}" for item in sockets]
    text = " and ".join(urls)
    if settings.public_url and settings.public_url.rstrip("/") not in urls:
        return f"{text}, for others at {settings.public_url}"
    return text


def _stop(_number: int, _frame: FrameType | None) -> None:
    raise SystemExit(0)


def _for_operators(settings: Settings, engine: Engine) -> FastAPI:
    app = create_operator_app(settings, engine)
    app.state.needed = process.NEEDED
    return app

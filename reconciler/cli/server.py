"""The process of `gpuaas serve`."""

from __future__ import annotations

import logging
import signal
from types import FrameType

import uvicorn

from reconciler.api.app import create_app
from reconciler.cli.database import opened
from reconciler.domain.errors import Problem
from reconciler.service import logs, process
from reconciler.service.authorities import adopt
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
    host, port = _listen(settings.listen)
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
        with process.running(settings, engine, api=True, work=not api_only):
            log.info("database at %s, API on %s", revision, settings.api_url)
            server.run()
    finally:
        engine.dispose()


def _stop(_number: int, _frame: FrameType | None) -> None:
    raise SystemExit(0)


def _listen(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit():
        raise Problem(
            "listen_invalid",
            400,
            expected="GPUAAS_LISTEN as host:port",
            found=text,
            remedy="for example 127.0.0.1:8080",
        )
    return host.strip("[]"), int(port)

"""The operators' listener beside the API's own: another socket, served by a thread of its own."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager

import uvicorn
from fastapi import FastAPI

from reconciler.domain.errors import Problem
from reconciler.service import addresses
from reconciler.service.addresses import Address
from reconciler.settings import Settings

log = logging.getLogger("gpuaas")

# What is asked there is short; nothing waits for somebody who holds a connection open.
GRACE_S = 2


@contextmanager
def operators(settings: Settings, app: FastAPI) -> Iterator[str]:
    """Serve the application on loopback until the block ends; its address, "" when it is off."""
    address = addresses.operators(settings)
    if address is None:
        yield ""
        return
    with closing(_bound(address)) as taken:
        config = uvicorn.Config(
            app,
            access_log=False,
            log_config=None,
            server_header=False,
            timeout_graceful_shutdown=GRACE_S,
            # Nothing stands before this listener that could speak for somebody else.
            proxy_headers=False,
        )
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, args=([taken],), name="operators", daemon=True)
        thread.start()
        told = addresses.told(taken.getsockname()[:2])
        log.info("operators' listener on %s, without tokens", told)
        try:
            yield told
        finally:
            server.should_exit = True
            thread.join(10)


def _bound(address: Address) -> socket.socket:
    """The socket, taken before anything else starts: a service without it would look well."""
    family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
    try:
        return socket.create_server(address, family=family)
    except OSError as failure:
        raise Problem(
            "operator_listen_unavailable",
            503,
            expected=f"GPUAAS_OPERATOR_LISTEN={addresses.told(address)}, free for us",
            found=failure.strerror or str(failure),
            remedy="choose another port, or end what listens there",
        ) from failure

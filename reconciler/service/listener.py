"""Sockets of the API, and the operators' listener with its server thread."""

from __future__ import annotations

import errno
import logging
import socket
import threading
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, closing, contextmanager
from typing import Any

import uvicorn
from fastapi import FastAPI

from reconciler.model.errors import Problem
from reconciler.service import addresses
from reconciler.service.addresses import Address
from reconciler.settings import Settings

log = logging.getLogger("gpuaas")

# Requests to the operators' listener are short, so a stop does not wait for open connections.
GRACE_S = 2
# No interface has the address, or the kernel does not support its family.
_ABSENT = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)


@contextmanager
def operators(settings: Settings, app: FastAPI) -> Iterator[str]:
    """Serve the application on loopback until the block ends. Yields its address, "" if off."""
    address = addresses.operators(settings)
    if address is None:
        yield ""
        return
    with closing(_listening(address, "GPUAAS_OPERATOR_LISTEN")) as listening:
        config = uvicorn.Config(
            app,
            access_log=False,
            log_config=None,
            server_header=False,
            timeout_graceful_shutdown=GRACE_S,
            # No proxy stands before this listener, so it must not believe a proxy's headers.
            proxy_headers=False,
        )
        server = uvicorn.Server(config)
        sockets = [listening]
        thread = threading.Thread(target=server.run, args=(sockets,), name="operators", daemon=True)
        thread.start()
        text = addresses.host_port(listening.getsockname()[:2])
        log.info("operators' listener on %s, without tokens", text)
        try:
            yield text
        finally:
            server.should_exit = True
            thread.join(10)


@contextmanager
def api(settings: Settings) -> Iterator[list[socket.socket]]:
    """The API's sockets, for each address of its name, until the block ends.

    They are opened before anything else starts. A second service on this machine would otherwise
    become the leader and run tasks before it notices that the port is in use.
    """
    host, port = addresses.api(settings)
    try:
        infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as failure:
        raise _unavailable((host, port), "GPUAAS_LISTEN", failure) from failure
    resolved = dict.fromkeys(info[4][:2] for info in infos)
    with ExitStack() as stack:
        yield [stack.enter_context(closing(listening)) for listening in _each(resolved)]


def _each(resolved: Iterable[tuple[Any, ...]]) -> Iterator[socket.socket]:
    """A socket for each address that this machine has: IPv6, for example, may be disabled."""
    absent: list[tuple[Address, OSError]] = []
    bound = False
    for name, number in resolved:
        address = (str(name), int(number))
        try:
            listening = _bound(address)
        except OSError as failure:
            if failure.errno not in _ABSENT:
                raise _unavailable(address, "GPUAAS_LISTEN", failure) from failure
            absent.append((address, failure))
            continue
        bound = True
        yield listening
    for address, why in absent:
        if not bound:
            raise _unavailable(address, "GPUAAS_LISTEN", why) from why
        log.warning("not listening on %s: %s", addresses.host_port(address), why.strerror)


def _listening(address: Address, setting: str) -> socket.socket:
    try:
        return _bound(address)
    except OSError as failure:
        raise _unavailable(address, setting, failure) from failure


def _bound(address: Address) -> socket.socket:
    family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
    listening = socket.create_server(address, family=family)
    # Inherited by connections. asyncio sets it on sockets that it creates only, and without it the
    # body of an answer waits for the client's acknowledgement of the head: 40 ms.
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listening


def _unavailable(address: Address, setting: str, failure: OSError) -> Problem:
    operators_listener = setting == "GPUAAS_OPERATOR_LISTEN"
    return Problem(
        "operator_listen_unavailable" if operators_listener else "listen_unavailable",
        503,
        expected=f"{setting}={addresses.host_port(address)}, not in use",
        found=failure.strerror or str(failure),
        remedy="choose another port, or stop the program that listens there",
    )

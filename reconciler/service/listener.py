"""The sockets of the API, and of the operators' listener: that is served by a thread of its own."""

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

# What is asked there is short; nothing waits for somebody who holds a connection open.
GRACE_S = 2
# No interface has the address, or the kernel not its family.
_ABSENT = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)


@contextmanager
def operators(settings: Settings, app: FastAPI) -> Iterator[str]:
    """Serve the application on loopback until the block ends; its address, "" when it is off."""
    address = addresses.operators(settings)
    if address is None:
        yield ""
        return
    with closing(_taken(address, "GPUAAS_OPERATOR_LISTEN")) as taken:
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


@contextmanager
def api(settings: Settings) -> Iterator[list[socket.socket]]:
    """The API's sockets, one for each address of its name, until the block ends.

    Taken before anything else starts: a second service on this machine would otherwise lead, and
    work, until it found the first one's port in use.
    """
    host, port = addresses.api(settings)
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as failure:
        raise _unavailable((host, port), "GPUAAS_LISTEN", failure) from failure
    places = dict.fromkeys(place[4][:2] for place in found)
    with ExitStack() as taken:
        yield [taken.enter_context(closing(one)) for one in _each(places)]


def _each(places: Iterable[tuple[Any, ...]]) -> Iterator[socket.socket]:
    """A socket for each that this machine has: a name may have one of a family that is off here."""
    absent: list[tuple[Address, OSError]] = []
    found = False
    for name, number in places:
        address = (str(name), int(number))
        try:
            one = _bound(address)
        except OSError as failure:
            if failure.errno not in _ABSENT:
                raise _unavailable(address, "GPUAAS_LISTEN", failure) from failure
            absent.append((address, failure))
            continue
        found = True
        yield one
    for address, why in absent:
        if not found:
            raise _unavailable(address, "GPUAAS_LISTEN", why) from why
        log.warning("not listening on %s: %s", addresses.told(address), why.strerror)


def _taken(address: Address, setting: str) -> socket.socket:
    """The socket, taken before anything else starts: a service without it would look well."""
    try:
        return _bound(address)
    except OSError as failure:
        raise _unavailable(address, setting, failure) from failure


def _bound(address: Address) -> socket.socket:
    family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
    taken = socket.create_server(address, family=family)
    # Connections inherit it. asyncio does it for sockets of its own making only, and without it
    # each answer's body waits for the client to acknowledge the head: 40 ms.
    taken.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return taken


def _unavailable(address: Address, setting: str, failure: OSError) -> Problem:
    operators_own = setting == "GPUAAS_OPERATOR_LISTEN"
    return Problem(
        "operator_listen_unavailable" if operators_own else "listen_unavailable",
        503,
        expected=f"{setting}={addresses.told(address)}, free for us",
        found=failure.strerror or str(failure),
        remedy="choose another port, or end what listens there",
    )

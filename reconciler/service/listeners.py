"""Listen addresses and sockets of the API, and the operators' listener with its server thread."""

from __future__ import annotations

import errno
import logging
import socket
import threading
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, closing, contextmanager
from ipaddress import ip_address
from typing import TYPE_CHECKING, Any

from reconciler.model.errors import Problem
from reconciler.settings import Settings

if TYPE_CHECKING:
    from fastapi import FastAPI

log = logging.getLogger("gpuaas")

Address = tuple[str, int]
# Requests to the operators' listener are short, so a stop does not wait for open connections.
GRACE_S = 2
# No interface has the address, or the kernel does not support its family.
_ABSENT = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)


def api_address(settings: Settings) -> Address:
    """Host and port of the API."""
    address = _split(settings.listen)
    if address is None:
        raise Problem(
            "listen_invalid",
            400,
            expected="GPUAAS_LISTEN as host:port",
            found=settings.listen,
            remedy="for example 127.0.0.1:8080",
        )
    return address


def operator_address(settings: Settings) -> Address | None:
    """Loopback address and port of the operators' listener; None when it is off.

    Only an IP address is accepted: this listener asks for no token, and a name could resolve to
    another interface.
    """
    text = settings.operator_listen
    if not text:
        return None
    address = _split(text)
    try:
        if address is not None and ip_address(address[0]).is_loopback:
            return address
    except ValueError:
        pass
    raise Problem(
        "operator_listen_invalid",
        400,
        expected="GPUAAS_OPERATOR_LISTEN as a loopback address and a port, because this listener"
        " asks for no token",
        found=text,
        remedy="127.0.0.1:8008 or [::1]:8008; other machines use GPUAAS_LISTEN with a token",
    )


def is_local(address: Address | None) -> bool:
    """Whether no other machine can connect to it. The name `localhost` counts as local."""
    if address is None:
        return True
    try:
        return ip_address(address[0].strip("[]")).is_loopback
    except ValueError:
        return address[0] == "localhost"


def host_port(address: Address) -> str:
    """The address as a setting has it, with brackets around an IPv6 address."""
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


@contextmanager
def serve_operators(settings: Settings, app: FastAPI) -> Iterator[str]:
    """Serve the application on loopback until the block ends. Yields its address, "" if off."""
    address = operator_address(settings)
    if address is None:
        yield ""
        return
    # Commands read addresses without loading a web server.
    import uvicorn  # noqa: PLC0415

    from reconciler.service import connections  # noqa: PLC0415

    with closing(_listening(address, "GPUAAS_OPERATOR_LISTEN")) as listening:
        config = uvicorn.Config(
            app,
            http=connections.limited(),
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
        text = host_port(listening.getsockname()[:2])
        log.info("operators' listener on %s, without tokens", text)
        try:
            yield text
        finally:
            server.should_exit = True
            thread.join(10)


@contextmanager
def api_sockets(settings: Settings) -> Iterator[list[socket.socket]]:
    """The API's sockets, for each address of its name, until the block ends.

    They are opened before anything else starts. A second service on this machine would otherwise
    become the leader and run tasks before it notices that the port is in use.
    """
    host, port = api_address(settings)
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
        log.warning("not listening on %s: %s", host_port(address), why.strerror)


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
        expected=f"{setting}={host_port(address)}, not in use",
        found=failure.strerror or str(failure),
        remedy="choose another port, or stop the program that listens there",
    )


def _split(text: str) -> Address | None:
    host, _, port = text.rpartition(":")
    if not host or not (port.isascii() and port.isdigit()) or int(port) > 65_535:
        return None
    return host.strip("[]"), int(port)

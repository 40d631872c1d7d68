"""TCP probe: a connection of parity's guest through guard, connection tracking and NAT.

A service of the probe's own answers, so no host needs the internet for it. It is in a network
namespace behind a link of its own. It has routes to the host's own addresses only, so it answers
translated packets and no other machine. Link and namespace end with this process, however it ends.

The answer to a first packet proves little. A kernel that sees only one direction of a connection
takes what follows for invalid, and the guard then drops it. So several packets go each way.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
from collections.abc import Iterator

from ansible_collections.gpuaas.slice.plugins.module_utils.core import _command
from ansible_collections.gpuaas.slice.plugins.module_utils.core._errors import Refusal
from ansible_collections.gpuaas.slice.plugins.module_utils.network import _baseline_files, _flows
from ansible_collections.gpuaas.slice.plugins.module_utils.parity import _namespace

LINK = "gsparity-out"
SERVICE = _baseline_files.PROBE_SERVICE
# The host's end of the link. Guests reach no link-local address, so that their guards stay the same
# while the host has this one.
_HOST = "169.254.103.115"
# Each end knows the other's, because a site may have its hosts answer ARP from some networks only.
# udev leaves a hardware address alone that was chosen at the creation of the link.
_HOST_MAC, _SERVICE_MAC = "02:67:73:70:72:64", "02:67:73:70:72:65"

# Messages of each side, each of several packets.
MESSAGES, _BYTES = 4, 4000
_WAIT_S = 3.0
_SUBJECT = f"a guest's TCP through NAT to {SERVICE}"


def problem(client: socket.socket) -> str:
    """What is wrong with a connection of this socket of a guest to the service, "" if nothing is.

    The guest's guard and the host's firewall let it reach the service (`_guards.probe_targets`).
    """
    try:
        with _service() as server:
            return _exchange(client, server)
    except (Refusal, OSError) as broken:
        return f"the probe's own service cannot be made: {broken}"


def _exchange(client: socket.socket, server: socket.socket) -> str:
    for handle in (client, server):
        handle.settimeout(_WAIT_S)
    try:
        client.connect(server.getsockname())
    except OSError as error:
        return f"{_SUBJECT} is not answered: {error}"
    done = 0
    try:
        with server.accept()[0] as accepted:
            accepted.settimeout(_WAIT_S)
            for sender, receiver in ((client, accepted), (accepted, client)) * MESSAGES:
                message = os.urandom(_BYTES)
                sender.sendall(message)
                if _receive(receiver) != message:
                    raise OSError("other data arrives than was sent")
                done += 1
    except OSError as error:
        return f"{_SUBJECT} begins, and stops after {done} of {2 * MESSAGES} messages: {error}"
    return ""


def _receive(handle: socket.socket) -> bytes:
    message = b""
    while len(message) < _BYTES and (part := handle.recv(_BYTES - len(message))):
        message += part
    return message


@contextlib.contextmanager
def _service() -> Iterator[socket.socket]:
    """A listening socket behind the link."""
    with _namespace.anonymous() as place:
        try:
            _connect(place)
            with _namespace.inside(place):
                server = socket.create_server((SERVICE, 0), backlog=1)
            with server:
                yield server
        finally:
            _remove()


def _connect(place: int) -> None:
    """Make the link to a namespace, with addresses and routes. place: its descriptor."""
    addresses = [ipaddress.IPv4Address(address) for address in _flows.local_addresses()]
    # The link of a run that was killed goes with its namespace, but not at once.
    if any(name == LINK for _index, name in socket.if_nameindex()):
        _remove()
    _command.run(
        ["ip", "-batch", "-"],
        stdin=f"link add {LINK} address {_HOST_MAC} type veth"
        f" peer name {LINK} address {_SERVICE_MAC} netns /proc/{os.getpid()}/fd/{place}\n"
        f"address add {_HOST} peer {SERVICE} dev {LINK}\n"
        f"link set {LINK} up\n"
        f"neighbour add {SERVICE} lladdr {_SERVICE_MAC} dev {LINK}\n",
    )
    # A site's own rule of NAT may give guests any address of the host.
    routes = "".join(
        f"route replace {address} via {_HOST} dev {LINK}\n"
        for address in addresses
        if not (address.is_loopback or address.is_link_local)
    )
    # A program belongs to the namespace of the thread that starts it.
    with _namespace.inside(place):
        _command.run(
            ["ip", "-batch", "-"],
            stdin=f"address add {SERVICE} peer {_HOST} dev {LINK}\n"
            f"link set {LINK} up\n"
            f"neighbour add {_HOST} lladdr {_HOST_MAC} dev {LINK}\n"
            f"{routes}",
        )


def _remove() -> None:
    _command.run(["ip", "link", "delete", LINK], ok=(0, 1))

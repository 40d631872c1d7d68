"""Two ends of a forwarded connection, each an SSH channel or a TCP connection."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import asyncssh
from asyncssh.constants import MSG_IGNORE

Connection = asyncssh.SSHServerConnection | asyncssh.SSHClientConnection


class Held(Protocol):
    """A sender that waits while there is a reason to."""

    def hold(self, why: str) -> None: ...
    def release(self, why: str) -> None: ...


class End(asyncssh.SSHTCPSession[bytes], asyncio.Protocol):
    """End of a pipe. Received data go to its peer, at the pace at which the peer takes them."""

    peer: End

    def __init__(self) -> None:
        self.received = 0
        self.lost = False
        self._channel: Any = None
        self._early: list[bytes] = []
        self._eof = False
        self._holds: set[str] = set()

    def connection_made(self, transport: Any) -> None:
        self._channel = transport
        for data in self._early:
            transport.write(data)
        self._early.clear()
        if self._eof:
            transport.write_eof()
        # Later, because asyncssh makes a new channel read after this call, whatever is set here.
        asyncio.get_running_loop().call_soon(self._pace)
        self.peer.release("opening")

    def data_received(self, data: bytes, _datatype: object = None) -> None:
        self.received += len(data)
        self.peer.write(data)

    def write(self, data: bytes) -> None:
        """Send, or keep until this end is connected: a server may speak first."""
        if self._channel is None:
            self._early.append(data)
        elif not self._channel.is_closing():
            self._channel.write(data)

    def eof_received(self) -> bool:
        """Pass the end of this direction on; the other direction stays open. A TCP connection is
        closed when both directions have ended, because it would keep its peer open.
        """
        self.peer.write_eof()
        if self._eof:
            self.close()
            self.peer.close()
        return True

    def write_eof(self) -> None:
        self._eof = True
        if self._channel is not None and not self._channel.is_closing():
            self._channel.write_eof()

    def connection_lost(self, _exc: Exception | None) -> None:
        self.lost = True
        if not self.peer.lost:
            self.peer.close()

    def close(self) -> None:
        if self._channel is not None:
            self._channel.close()

    def abort(self) -> None:
        """Close, and drop what its other side has not taken yet."""
        if self._channel is not None:
            self._channel.abort()

    def pause_writing(self) -> None:
        self.peer.hold("window")

    def resume_writing(self) -> None:
        self.peer.release("window")

    def hold(self, why: str) -> None:
        """Do not read until the reason is released."""
        self._holds.add(why)
        self._pace()

    def release(self, why: str) -> None:
        if why in self._holds:
            self._holds.discard(why)
            self._pace()

    def _pace(self) -> None:
        if self._channel is None or self.lost:
            return
        if self._holds:
            self._channel.pause_reading()
        else:
            self._channel.resume_reading()


def pair() -> tuple[End, End]:
    """Two ends that are connected to each other."""
    near, far = End(), End()
    near.peer, far.peer = far, near
    return near, far


def lean(connection: Connection) -> None:
    """Send no packet without content before each packet of data.

    asyncssh puts one there, for ciphers that chain the blocks of packets. It costs as much as the
    data itself: its own encryption, system call and packet of TCP.
    """
    send = connection.send_packet

    def send_packet(kind: int, *parts: bytes, **options: Any) -> None:
        if kind != MSG_IGNORE:
            send(kind, *parts, **options)

    connection.send_packet = send_packet  # type: ignore[assignment, method-assign]


def unread(connection: Connection | None) -> int:
    """Bytes that wait for the connection's peer to read; 0 without a connection.

    Channels wait for their reader. Answers to requests do not: the library sends each of them, and
    a peer that asks without end and reads nothing is never found dead.
    """
    sender = connection and connection._transport
    return sender.get_write_buffer_size() if sender else 0


def heed(
    connection: Connection,
    ends: Callable[[], Iterable[Held]],
    why: str,
) -> None:
    """Hold these ends while the connection's own TCP peer does not read.

    asyncssh looks at the windows of channels only. A peer that grants a large window and then reads
    nothing would fill this process's memory.
    """

    def pause() -> None:
        for end in ends():
            end.hold(why)

    def resume() -> None:
        for end in ends():
            end.release(why)

    connection.pause_writing = pause  # type: ignore[method-assign]
    connection.resume_writing = resume  # type: ignore[method-assign]

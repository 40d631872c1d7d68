"""A shell or command in a machine: its bytes, its size, and its recording.

What it prints is read at the pace of its reader, and what is typed is taken at the pace of the
machine. So neither side can fill this process's memory.
"""

from __future__ import annotations

import asyncio
import codecs
import hashlib
import json
import logging
import time
from dataclasses import dataclass

import asyncssh
from sqlalchemy import Connection

from reconciler.gateway.machine import Machine
from reconciler.gateway.sessions import LARGEST, Session
from reconciler.lifecycle.ssh_access import Grant
from reconciler.model.errors import Problem
from reconciler.records import terminals

log = logging.getLogger("gpuaas.gateway")

# Limits in bytes: of output that waits for its reader, and of a single piece of it.
WINDOW, PIECE = 256 << 10, 32 << 10


@dataclass(frozen=True)
class Wish:
    """What a client asks for. kind: the type of its terminal; "" without a terminal."""

    columns: int
    rows: int
    kind: str = "xterm-256color"
    command: str | None = None

    @property
    def size(self) -> tuple[int, int]:
        """Columns and rows; usable defaults replace unusable values."""
        return (_within(self.columns, 80), _within(self.rows, 24))


def _within(count: int, usual: int) -> int:
    return count if 1 <= count <= LARGEST else usual


class Terminal:
    """A running shell or command."""

    def __init__(
        self,
        guest: asyncssh.SSHClientConnection,
        process: asyncssh.SSHClientProcess[bytes],
        recording: Recording | None,
        size: tuple[int, int],
    ) -> None:
        self.process = process
        self.recording = recording
        self.received = self.sent = 0
        self._guest = guest
        self._size = self._newest = size
        self._problem: Problem | None = None
        self._text = codecs.getincrementaldecoder("utf-8")("replace")
        self._free = asyncio.Event()
        self._free.set()
        loop = asyncio.get_running_loop()
        self._began = self._typed = loop.time()
        # asyncssh answers all requests of a machine, also if the machine does not read the answers.
        guest.pause_writing = self._pause  # type: ignore[method-assign]
        guest.resume_writing = self._resume  # type: ignore[method-assign]

    def _pause(self) -> None:
        self._free.clear()
        self._guest._transport.pause_reading()  # type: ignore[union-attr]

    def _resume(self) -> None:
        self._free.set()
        self._guest._transport.resume_reading()  # type: ignore[union-attr]
        self.resize(*self._newest)

    async def read(self, reader: asyncssh.SSHReader[bytes]) -> bytes:
        """The next piece of output; b"" at its end, or the Problem that ended it."""
        data = await reader.read(PIECE)
        if self._problem is not None:
            raise self._problem
        self.sent += len(data)
        if self.recording is not None:
            await self.recording.keep(self._text.decode(data, final=not data))
        return data

    async def write(self, data: bytes) -> None:
        """Type something, as soon as the machine takes it."""
        self._typed = asyncio.get_running_loop().time()
        self.received += len(data)
        self.process.stdin.write(data)
        await self.process.stdin.drain()
        await self._free.wait()

    def write_eof(self) -> None:
        """End the input of a command."""
        if not self.process.is_closing():
            self.process.stdin.write_eof()

    def resize(self, columns: int, rows: int) -> None:
        """Change the size; the newest size later, while the machine takes nothing."""
        size = self._newest = Wish(columns, rows).size
        if size == self._size or not self._free.is_set() or self.process.is_closing():
            return
        self._size = size
        try:
            if self.recording is not None:
                self.recording.resize(*size)
        except Problem as full:
            self.end(full)
        else:
            self.process.change_terminal_size(*size)

    def signal(self, name: str) -> None:
        """Send a signal to a machine that takes it."""
        if self._free.is_set() and not self.process.is_closing():
            self.process.send_signal(name)

    def over(self, now: float, typed_s: float, lives_s: float) -> str:
        """Why the terminal ends, although it may go on; "" if it does not."""
        if now - self._began > lives_s:
            return "time_is_over"
        return "idle" if now - self._typed > typed_s else ""

    def end(self, problem: Problem | None = None) -> None:
        """End the shell; its reader is told why."""
        self._problem = self._problem or problem
        self._guest.abort()

    async def close(self) -> None:
        """End the shell, and its recording."""
        self._guest.abort()
        if self.recording is not None:
            try:
                await self.recording.close()
            except Exception as failure:
                log.error("cannot complete a recording: %s", failure)


async def open_terminal(
    session: Session, machine: Machine, grant: Grant, wish: Wish, way: str
) -> Terminal:
    """Open a shell or command and record its session, or raise a Problem."""
    gateway = session.gateway

    def ask(conn: Connection) -> bool:
        # Again when the session is recorded; here, so that one too many does not reach the machine.
        session.require_room(conn, grant, way)
        return terminals.are_recorded(conn, grant.project_id, grant.owner, way)

    recorded = await gateway.ask(ask)
    guest = await machine.log_in()
    try:
        await session.begin(grant, way)
        # A guest answers the login, and may be silent from then on.
        async with machine.in_time():
            process: asyncssh.SSHClientProcess[bytes] = await guest.create_process(
                wish.command,
                encoding=None,
                request_pty="force" if wish.kind else False,
                term_type=wish.kind or None,
                term_size=wish.size,
                window=WINDOW,
            )
        recording = _recording(session, grant.project_id, wish) if recorded else None
    except asyncssh.ChannelOpenError:
        guest.abort()
        raise Problem(
            "terminal_refused_by_guest",
            502,
            expected="a machine that opens a shell",
            found="it accepts the certificate and opens none",
            remedy="use `gpuaas ssh`",
        ) from None
    except BaseException:
        guest.abort()
        raise
    return Terminal(guest, process, recording, wish.size)


def _recording(session: Session, project_id: str, wish: Wish) -> Recording:
    """The session's recording, with another terminal."""
    if session.recording is None:
        session.recording = Recording(session, project_id, wish.size)
    else:
        session.recording.join(wish)
    return session.recording


class Recording:
    """Output of a session's terminals as asciicast 2, and input only where it is echoed.

    A client may open several in a connection, at once or one after the other. They share a
    recording: one of each would be neither readable nor what the digest says.
    A terminal ends at the limit of size, so that nothing is shown without being recorded.
    """

    LIMIT = 8 << 20
    PART, PART_S = 64 << 10, 5.0
    NOTICE = "The project {} records what this terminal shows. Operators can replay it.\r\n"

    def __init__(self, session: Session, project_id: str, size: tuple[int, int]) -> None:
        self._session = session
        self._project_id = project_id
        self._began = self._written = time.monotonic()
        self._lines: list[str] = []
        self._waiting = self._whole = 0
        self._writing: asyncio.Task[None] | None = None
        self._checksum = hashlib.sha256()
        self._terminals = 1
        header = {"version": 2, "width": size[0], "height": size[1], "timestamp": int(time.time())}
        self._add(header)

    @property
    def notice(self) -> bytes:
        """The announcement, which is shown before anything else."""
        return self.NOTICE.format(self._project_id).encode()

    def join(self, wish: Wish) -> None:
        """Record another terminal, too."""
        self._require_room()
        # A command without a terminal has no size. Another terminal keeps its own.
        if wish.kind:
            self.resize(*wish.size)
        if not self._terminals:
            # It is not complete any more.
            self._flush("")
        self._terminals += 1

    async def keep(self, text: str) -> None:
        """Keep a piece of output."""
        if text:
            self._add([self._elapsed(), "o", text])
        if self._writing is not None:
            await asyncio.shield(self._writing)
        self._require_room()

    def resize(self, columns: int, rows: int) -> None:
        """Keep a change of size."""
        self._require_room()
        self._add([self._elapsed(), "r", f"{columns}x{rows}"])

    def _require_room(self) -> None:
        if self._whole > self.LIMIT:
            raise Problem(
                "recording_full",
                expected=f"at most {self.LIMIT >> 20} MiB of a recording",
                found="more",
                remedy="open a terminal in another connection, or copy much data with scp",
            )

    async def close(self) -> None:
        """Write the rest of a terminal, and after the last the digest of all."""
        self._terminals -= 1
        await self._flush(None if self._terminals else self._checksum.hexdigest())

    def _elapsed(self) -> float:
        return round(time.monotonic() - self._began, 3)

    def _add(self, entry: object) -> None:
        line = json.dumps(entry) + "\n"
        self._checksum.update(line.encode())
        self._lines.append(line)
        self._waiting += len(line)
        self._whole += len(line)
        if self._waiting > self.PART or time.monotonic() - self._written > self.PART_S:
            self._flush()

    def _flush(self, digest: str | None = None) -> asyncio.Task[None]:
        part, self._lines, self._waiting = "".join(self._lines), [], 0
        self._written = time.monotonic()
        # A part is written although its reader was cut, and before the next.
        self._writing = asyncio.create_task(self._write(part, digest, self._writing))
        return self._writing

    async def _write(
        self, part: str, digest: str | None, before: asyncio.Task[None] | None
    ) -> None:
        if before is not None:
            await before
        session, project = self._session.session, self._project_id
        if part:
            await self._session.gateway.write(
                lambda conn: terminals.append(conn, session, project, part)
            )
        if digest is not None:
            await self._session.gateway.write(lambda conn: terminals.finish(conn, session, digest))

"""An SSH client's shell or command, which runs in the machine and not on the gateway."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import asyncssh

from reconciler.gateway.machine import Machine
from reconciler.gateway.sessions import Limits, Session, keep
from reconciler.gateway.terminal import PIECE, Terminal, Wish, open_terminal
from reconciler.lifecycle.ssh_access import Grant
from reconciler.records.ssh_sessions import Traffic


class Shell(asyncssh.SSHServerProcess[bytes]):
    """The channel of a client. Size and signals pass through at once. over: nothing runs in it any
    more. gone: the client has closed the channel.
    """

    def __init__(self, run: Callable[[Shell], Awaitable[None]]) -> None:
        super().__init__(lambda _process: run(self), None, 0, False)
        self.over = self.gone = self._started = False
        self._began = asyncio.get_running_loop().time()
        self._terminal: Terminal | None = None
        self._holds: set[str] = set()
        self._free = asyncio.Event()
        self._free.set()

    def connection_made(self, chan: Any) -> None:
        # asyncssh keeps each variable that a client sends, without a limit; the gateway uses none.
        chan._process_env_request = lambda _packet: False
        super().connection_made(chan)

    def session_started(self) -> None:
        self._started = True
        super().session_started()

    async def run(self, session: Session, machine: Machine, grant: Grant) -> None:
        """Run the shell to its end, or raise a Problem."""
        columns, rows, _, _ = self.term_size
        wish = Wish(columns, rows, self.term_type or "", self.command)
        terminal = await open_terminal(session, machine, grant, wish, "terminal")
        # A gateway that stops waits for it, because its recording must be complete.
        await keep(self._play(terminal, wish))

    async def _play(self, terminal: Terminal, wish: Wish) -> None:
        if self.is_closing():
            keep(terminal.close())
            return
        if terminal.recording:
            (self.stdout if wish.kind else self.stderr).write(terminal.recording.notice)
        self._terminal = terminal
        typing = asyncio.create_task(self._type(terminal))
        try:
            await asyncio.gather(
                self._show(terminal, terminal.process.stdout, self.stdout),
                self._show(terminal, terminal.process.stderr, self.stderr),
            )
            await terminal.process.wait_closed()
            if self.is_closing():
                return
            if killed := terminal.process.exit_signal:
                self.exit_with_signal(*killed)
            else:
                status = terminal.process.exit_status
                self.exit(255 if status is None else status)
        finally:
            typing.cancel()
            keep(terminal.close())

    async def _show(
        self,
        terminal: Terminal,
        reader: asyncssh.SSHReader[bytes],
        writer: asyncssh.SSHWriter[bytes],
    ) -> None:
        while data := await terminal.read(reader):
            await self._free.wait()
            writer.write(data)
            await writer.drain()

    async def _type(self, terminal: Terminal) -> None:
        with suppress(OSError, asyncssh.Error):
            while data := await self.stdin.read(PIECE):
                await terminal.write(data)
            terminal.write_eof()

    def subsystem_requested(self, *_name: str) -> bool:
        return False

    def break_received(self, *_msec: int) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self.gone = True
        # Its client has asked for nothing, or for a subsystem.
        self.over = self.over or not self._started
        self._free.set()
        self._stop()
        super().connection_lost(exc)

    def _stop(self) -> None:
        if self._terminal is not None:
            self._terminal.end()

    def end(self, reason: str) -> None:
        """End the shell while its connection goes on."""
        self.refuse(reason)
        self._stop()

    def refuse(self, words: str) -> None:
        """End the channel with a reason."""
        if not self.is_closing():
            self.stderr.write(f"gpuaas: {words}.\r\n".encode())
            self.exit(255)

    def hold(self, why: str) -> None:
        """Print nothing until the reason is released."""
        self._holds.add(why)
        self._free.clear()

    def release(self, why: str) -> None:
        self._holds.discard(why)
        if not self._holds:
            self._free.set()

    def ends(self, now: float, limits: Limits) -> str:
        """Why the shell ends, although it may go on; "" if it does not."""
        if self._terminal is None:
            return "time_is_over" if now - self._began > limits.terminal_s else ""
        return self._terminal.over(now, limits.typed_s, limits.terminal_s)

    def traffic(self) -> Traffic:
        """Bytes from and to the client."""
        return (self._terminal.received, self._terminal.sent) if self._terminal else (0, 0)

    def terminal_size_changed(self, width: int, height: int, *_pixels: int) -> None:
        if self._terminal is not None:
            self._terminal.resize(width, height)

    def signal_received(self, signal: str) -> None:
        if self._terminal is not None:
            self._terminal.signal(signal)

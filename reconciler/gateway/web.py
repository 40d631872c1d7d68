"""Terminal in the browser: a WebSocket of the console's own origin, opened with a ticket.

Text frames are JSON. The client's first has the event `open` with ticket, columns and rows, later
ones `resize` with columns and rows. The server's are `session_ready`, and `closed` with a code and
words. Binary frames are bytes of the terminal.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from importlib import import_module
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from fastapi import FastAPI
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from sqlalchemy import Connection
from starlette.requests import HTTPConnection
from starlette.websockets import WebSocket, WebSocketDisconnect

from reconciler.api.security import SESSION, Caller, authenticate, credential
from reconciler.db import journal
from reconciler.db.schema import TerminalTicket
from reconciler.gateway.sessions import LARGEST, Claim, Limits, Session, Sessions, keep, too_many
from reconciler.lifecycle import ssh_access
from reconciler.lifecycle.ssh_access import Grant
from reconciler.model.act import Act
from reconciler.model.errors import Problem
from reconciler.model.states import Role
from reconciler.records import ssh_sessions, terminals, tokens
from reconciler.trust.ca import open_trust

if TYPE_CHECKING:
    from reconciler.gateway.terminal import Terminal

log = logging.getLogger("gpuaas.gateway")

PATH, PROTOCOL = "/terminal", "gpuaas.terminal.v1"
# Longest frame of a client. The page sends a pasted text in pieces.
FRAME = 64 << 10
_OPEN_S = 10.0
# Frames that wait until the machine takes them.
_HEARD = 16
_CLOSE_S = 2.0
# Code with which the server closes its sockets when it ends.
_RESTART = 1012
# Codes of the WebSocket and words for each end; another refusal has the words of its Problem.
_REFUSED = 4000
ENDS: dict[str, tuple[int, str]] = {
    "shell_ended": (1000, "The shell has ended."),
    "allocation_not_active": (4001, "The machine was released."),
    "session_ended": (4002, "You have logged out, or your session has ended."),
    "token_ended": (4003, "Your token has ended."),
    "membership_ended": (4004, "You are no longer a member of the project."),
    "terminal_off": (4014, "The machine has no terminal, or not any more."),
    "idle": (4005, "Nothing was typed for half an hour."),
    "time_is_over": (4006, "A terminal lives for twelve hours. Open another."),
    "frame_refused": (4007, "The page sent something that no terminal takes."),
    "too_many_connections": (4008, "Too many terminals are open. Close one."),
    "ticket_refused": (4009, "The ticket was used, has expired, or is not yours. Open another."),
    "terminal_refused_by_guest": (
        4010,
        "The machine does not accept the gateway's certificates any more: its certificate authority"
        " for terminals was removed. Use `gpuaas ssh`.",
    ),
    "recording_full": (4011, "The recording is full. Open another terminal."),
    "authorisation_unavailable": (4012, "The service cannot tell whether you may go on."),
    "gateway_stopped": (_RESTART, "The service restarts. Open another terminal."),
    "machine_closed": (4013, "The machine has closed the connection."),
}

Identify = Callable[[HTTPConnection], Callable[[], Caller | None] | None]


class _Frame(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    event: str
    ticket: str = Field("", max_length=100)
    columns: int = Field(ge=1, le=LARGEST)
    rows: int = Field(ge=1, le=LARGEST)


class _End(Exception):
    """The end of a session, by its code."""


def mount(app: FastAPI, identify: Identify, limits: Limits | None = None) -> FastAPI:
    """Add the WebSocket to the API's application. identify: the console's session of a request."""
    hall: list[Sessions] = []

    async def endpoint(socket: WebSocket) -> None:
        if identity := identify(socket):
            socket.scope[SESSION] = identity
        if not _of_this_site(socket) or PROTOCOL not in socket.scope["subprotocols"]:
            await socket.close()
            return
        caller = await asyncio.to_thread(authenticate, socket)
        if caller is None or caller.role == Role.NODE or not _paced(socket, caller):
            await socket.close()
            return
        if not hall:
            settings, engine = app.state.settings, app.state.engine
            name = settings.gateway[0]
            hall.append(Sessions(engine, open_trust(settings.state_dir), name, limits or Limits()))
        await Browser(hall[0], socket, caller).serve()

    app.state.terminals = hall
    app.add_api_websocket_route(PATH, endpoint)
    return app


def _paced(socket: WebSocket, caller: Caller) -> bool:
    """Whether the caller may make another request now."""
    try:
        socket.app.state.rates.take(caller.owner)
    except Problem:
        return False
    return True


def _of_this_site(socket: WebSocket) -> bool:
    """Whether a page of this site opened the socket, or a program without a browser's cookies.

    Browsers send cookies with every WebSocket, whatever page opens it.
    """
    origin = socket.headers.get("Origin")
    if origin is None:
        return SESSION not in socket.scope
    try:
        parts = urlsplit(origin)
    except ValueError:
        return False
    secure = socket.url.scheme == "wss"
    return parts.netloc == socket.headers.get("Host") and parts.scheme == (
        "https" if secure else "http"
    )


class Browser(Session):
    """A terminal of a browser, or of a program with a token."""

    def __init__(self, gateway: Sessions, socket: WebSocket, caller: Caller) -> None:
        super().__init__(gateway)
        self._socket = socket
        self._caller = caller
        self._holder = credential(socket)
        self._terminal: Terminal | None = None
        self._work: asyncio.Task[None] | None = None
        self.address = socket.client.host if socket.client else ""
        self.person = caller.actor

    async def serve(self) -> None:
        """Serve the socket to its end."""
        await self._socket.accept(PROTOCOL)
        self.gateway.clients.add(self)
        self.gateway.ensure_watch()
        # A silent socket holds a place too. Owners count, because all may come from one proxy.
        browsers = [each for each in self.gateway.clients if isinstance(each, Browser)]
        alike = [each for each in browsers if each.owner == self.owner]
        if len(alike) > self.gateway.limits.terminals:
            self.gateway.clients.discard(self)
            problem = too_many(f"at most {self.gateway.limits.terminals}", f"{len(alike)}")
            self._why = problem.code
            await self.gateway.refuse(problem, self, "-")
            await self._goodbye("")
            return
        self._work = asyncio.create_task(self._serve())
        words = ""
        try:
            await self._work
        except asyncio.CancelledError:
            # Either `cut` has canceled the work, or the end of the process has canceled this task.
            ends = self._why == "closed"
            if ends:
                self._why = "gateway_stopped"
            if ends or not self._work.cancelled():
                raise
        except WebSocketDisconnect:
            pass
        except _End as end:
            self._why = str(end)
        except Problem as problem:
            self._why, words = problem.code, f"{problem.found}. {problem.remedy}"
            await self.gateway.refuse(problem, self, self.grant_id or "-")
        except Exception as failure:
            self._why = "machine_closed" if self._terminal else "internal_error"
            log.error("terminal of %s: %s: %s", self._caller.actor, type(failure).__name__, failure)
        finally:
            self._work.cancel()
            await asyncio.shield(keep(self._complete()))
        if self._why != "closed":
            await self._goodbye(words)

    async def _complete(self) -> None:
        # The rest of a recording is written now, because the process may end after this.
        if self._terminal:
            await self._terminal.close()
        await self.finish()

    async def _goodbye(self, words: str) -> None:
        code, usual = ENDS.get(self._why, (_REFUSED, "The terminal cannot be opened now."))
        document = {"event": "closed", "code": self._why, "reason": words or usual}
        if self._why in ENDS:
            document["reason"] = usual
        with suppress(Exception):
            async with asyncio.timeout(_CLOSE_S):
                await self._socket.send_json(document)
                await self._socket.close(code, self._why)

    async def _serve(self) -> None:
        try:
            async with asyncio.timeout(_OPEN_S):
                frame = _frame(await self._socket.receive(), "open")
        except TimeoutError:
            raise _End("frame_refused") from None
        if not isinstance(frame, _Frame):
            raise _End("frame_refused")
        ticket = await self.gateway.write(
            lambda conn: terminals.take(conn, frame.ticket, self._holder)
        )
        if ticket is None:
            raise Problem(
                "ticket_refused",
                403,
                expected="an unused ticket of this session, and room for it",
                found="ticket refused",
                remedy=ENDS["ticket_refused"][1],
            )
        grant = await self._let_in(ticket)
        heard: asyncio.Queue[_Frame | bytes] = asyncio.Queue(_HEARD)
        # Frames are read also while the machine is silent or takes no input: the page may go.
        await _until_failure(self._hear(heard), self._run(grant, frame, heard))

    async def _run(self, grant: Grant, frame: _Frame, heard: asyncio.Queue[_Frame | bytes]) -> None:
        # The library of SSH takes 6 MiB of each service, and many services open no terminal.
        await asyncio.to_thread(import_module, "reconciler.gateway.terminal")
        from reconciler.gateway.machine import Machine  # noqa: PLC0415
        from reconciler.gateway.terminal import Wish, open_terminal  # noqa: PLC0415

        limits = self.gateway.limits
        machine = self.machine = Machine(self.gateway.trust, grant, limits.machine_s)
        wish = Wish(frame.columns, frame.rows)
        try:
            self._terminal = await open_terminal(self, machine, grant, wish, "web")
            await self.gateway.write(lambda conn: _audit(conn, self.session, grant))
            recording = self._terminal.recording
            await self._socket.send_json(
                {
                    "event": "session_ready",
                    "session_id": self.session,
                    "recorded": recording is not None,
                }
            )
            if recording:
                await self._socket.send_bytes(recording.notice)
            await _until_failure(self._type(self._terminal, heard), self._show(self._terminal))
        finally:
            machine.close()

    async def _let_in(self, ticket: TerminalTicket) -> Grant:
        names = (ticket.project_id, ticket.allocation_id, ticket.actor, self.owner)
        grant = await self.gateway.ask(lambda conn: ssh_access.authorise_member(conn, *names))
        self.grant = grant
        # Checked anew, because rights may have changed since the socket was opened.
        if why := await self.gateway.ask(lambda conn: self.reason(conn, self.claim)):
            raise _End(why)
        ssh_access.require_terminal(grant)
        self.gateway.require_room(self)
        self.since = asyncio.get_running_loop().time()
        return grant

    async def _show(self, terminal: Terminal) -> None:
        while data := await terminal.read(terminal.process.stdout):
            try:
                await self._socket.send_bytes(data)
            except WebSocketDisconnect:
                # `_hear` gets the frame with the reason.
                await asyncio.sleep(_CLOSE_S)
                raise
        if terminal.process.exit_status is None:
            with suppress(TimeoutError):
                async with asyncio.timeout(_CLOSE_S):
                    await terminal.process.wait_closed()
        raise _End("machine_closed" if terminal.process.exit_status is None else "shell_ended")

    async def _hear(self, heard: asyncio.Queue[_Frame | bytes]) -> None:
        while True:
            await heard.put(_frame(await self._socket.receive(), "resize"))

    async def _type(self, terminal: Terminal, heard: asyncio.Queue[_Frame | bytes]) -> None:
        # A shell that has ended takes no input; `_show` ends with its output.
        import asyncssh  # noqa: PLC0415  # `_run` has loaded it

        with suppress(OSError, asyncssh.Error):
            while True:
                frame = await heard.get()
                if isinstance(frame, bytes):
                    await terminal.write(frame)
                else:
                    terminal.resize(frame.columns, frame.rows)

    @property
    def owner(self) -> str:
        return self._caller.owner

    @property
    def claim(self) -> Claim:
        return ("web", self.grant_id, self._holder)

    def reason(self, conn: Connection, _claim: Claim) -> str:
        caller, grant = self._caller, self.grant
        if grant is None:
            return ""
        project = grant.project_id
        if caller.stored and not tokens.owner(conn, caller.token_id, project):
            return "token_ended"
        # The provider may delay its answer, and one task watches all sessions here.
        now = authenticate(self._socket, patient=False)
        if now is None or now.actor != caller.actor:
            return "session_ended"
        if now.role != Role.PLATFORM_ADMIN and project not in now.projects:
            return "membership_ended"
        try:
            names = (project, grant.allocation_id, caller.actor, self.owner)
            ssh_access.require_terminal(ssh_access.authorise_member(conn, *names))
        except Problem as problem:
            return problem.code
        return ""

    def idle(self, now: float) -> str:
        limits = self.gateway.limits
        if self._terminal is None:
            return "time_is_over" if now - self.since > limits.terminal_s else ""
        return self._terminal.over(now, limits.typed_s, limits.terminal_s)

    def cut(self, reason: str) -> None:
        self._why = reason
        if self._work is not None:
            self._work.cancel()

    def traffic(self) -> ssh_sessions.Traffic:
        terminal = self._terminal
        return (terminal.received, terminal.sent) if terminal else (0, 0)


async def _until_failure(*works: Coroutine[Any, Any, None]) -> None:
    """Run coroutines at once until the first of them fails."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


def _frame(message: Mapping[str, Any], event: str) -> _Frame | bytes:
    """A frame of the client: an event, or bytes."""
    if message["type"] == "websocket.disconnect":
        # A client that closes with this code gives a reason, if only an empty one.
        if message.get("code") == _RESTART and message.get("reason") is None:
            raise _End("gateway_stopped")
        raise WebSocketDisconnect(message.get("code", 1006))
    data, text = message.get("bytes"), message.get("text")
    if len(data or text or "") > FRAME:
        raise _End("frame_refused")
    if data is not None:
        return bytes(data)
    try:
        frame = _Frame.model_validate(json.loads(text or ""))
    except (ValueError, ValidationError, RecursionError):
        raise _End("frame_refused") from None
    if frame.event != event:
        raise _End("frame_refused")
    return frame


def _audit(conn: Connection, session_id: str, grant: Grant) -> None:
    act = Act(grant.actor, "opened in the browser")
    detail = {
        "capacity_shape": "gpu_slice",
        "target_host": grant.address,
        "target_port": 22,
        "session_id": session_id,
    }
    journal.audit(
        *(conn, act, "terminal.open", "allocation", grant.allocation_id),
        detail=detail,
        project_id=grant.project_id,
    )

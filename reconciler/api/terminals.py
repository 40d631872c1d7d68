"""Terminals: tickets for terminals in the browser, and recordings."""

from __future__ import annotations

from typing import Annotated, Self

from fastapi import APIRouter
from fastapi.responses import JSONResponse
from pydantic import Field
from sqlalchemy import Connection

from reconciler.api.models import Answer, Id, Moment, Reasoned, Switch
from reconciler.api.security import Admin, Context, Member, credential
from reconciler.lifecycle import guest_terminal, ssh_access
from reconciler.model.act import Act
from reconciler.model.errors import Problem
from reconciler.profiles import hardware_profile
from reconciler.records import projects, terminals
from reconciler.settings import Settings
from reconciler.trust.ca import Trust, gateway_ca

router = APIRouter(prefix="/projects/{project_id}", tags=["terminals"])
admin_router = APIRouter(prefix="/admin/ssh-sessions", tags=["terminals"])


class Ticket(Answer):
    """Permission to open a terminal once, for the session or token that asked for it."""

    allocation_id: str
    expires_at: Moment
    recorded: bool = Field(description="Whether what the terminal shows is kept.")
    path: str = Field(description="Path of the WebSocket, whose first frame has the ticket.")
    ticket: str


class Setup(Answer):
    """Whether the gateway offers terminals of a slice, and what its machine must be told."""

    allocation_id: str
    enabled: bool
    script: str = Field(description="Shell script for root of the machine; it holds no secret.")


class Recording(Answer):
    """Whether the project's terminals are recorded."""

    project_id: str
    enabled: bool
    required: bool = Field(description="Whether an operator has switched it on and must end it.")
    kept_days: int = Field(description="Days after which a recording is deleted.")

    @classmethod
    def read(cls, conn: Connection, project_id: str, settings: Settings) -> Self:
        enabled = projects.get(conn, project_id).records_terminals
        required = terminals.is_required(conn, project_id)
        kept_days = settings.keep_recordings_days
        return cls(project_id=project_id, enabled=enabled, required=required, kept_days=kept_days)


class Replay(Answer):
    """What a terminal showed, in the form of asciicast 2."""

    session_id: str
    actor: str
    digest: Annotated[str, Field(description="SHA-256 of it; empty if it is not complete.")]
    cast: str


@router.post("/allocations/{allocation_id}/terminal", status_code=201, response_model=Ticket)
def open_terminal(
    project_id: Id, allocation_id: Id, context: Member, body: Reasoned | None = None
) -> JSONResponse:
    """Get a ticket for a terminal of a slice that was launched with one. It is valid for 30 seconds
    and one use.
    """
    holder = credential(context.request)

    def work(conn: Connection, act: Act) -> Ticket:
        grant = ssh_access.authorise_member(conn, project_id, allocation_id, act.actor)
        _require_gateway(context)
        _require_keys(context)
        ssh_access.require_terminal(grant)
        names = {"allocation_id": allocation_id, "project_id": project_id}
        ticket, secret = terminals.issue(conn, act, holder=holder, **names)
        recorded = projects.get(conn, project_id).records_terminals
        return Ticket.of(ticket, recorded=recorded, path="/terminal", ticket=secret)

    return context.write(work, body=body, status=201, secrets=frozenset({"ticket"}))


@router.put("/allocations/{allocation_id}/terminal", response_model=Setup, name="switch")
def switch_terminal(
    project_id: Id, allocation_id: Id, body: Switch, context: Member
) -> JSONResponse:
    """Allow terminals of a running slice, or disallow them, which ends open terminals. Only the
    tenant can write into the machine, so the answer has a script for root of the machine.
    """
    settings = context.settings

    def work(conn: Connection, act: Act) -> Setup:
        grant = ssh_access.authorise_member(conn, project_id, allocation_id, act.actor)
        _require_gateway(context)
        enabled = body.enabled
        node = guest_terminal.switch(conn, allocation_id, act, enabled=enabled)
        files = []
        if enabled:
            profile = hardware_profile(settings.profiles_dir, node.profile)
            authority = gateway_ca(Trust(settings.state_dir / "trust"))
            files = guest_terminal.files(
                *(allocation_id, grant.username, authority, profile["network"]["address"])
            )
        return Setup(
            allocation_id=allocation_id, enabled=enabled, script=guest_terminal.script(files)
        )

    return context.write(work, body=body)


@router.get("/terminal-recording", name="recording")
def show_recording(project_id: Id, context: Member) -> Recording:
    """Whether the project's terminals are recorded."""
    return context.read(lambda conn: Recording.read(conn, project_id, context.settings))


@router.put("/terminal-recording", response_model=Recording, name="switch_recording")
def switch_recording(project_id: Id, body: Switch, context: Member) -> JSONResponse:
    """Record the project's terminals, or stop recording, from the next terminal on. Each terminal
    announces its recording, which has keystrokes only where they are echoed. Only an operator
    ends what an operator has switched on.
    """

    def work(conn: Connection, act: Act) -> Recording:
        terminals.record_terminals(conn, project_id, act, enabled=body.enabled)
        return Recording.read(conn, project_id, context.settings)

    return context.write(work, body=body)


@admin_router.post("/{session_id}/replay", response_model=Replay)
def replay(session_id: Id, body: Reasoned, context: Admin) -> JSONResponse:
    """Read the recording of a terminal. A reason is required; it is kept in the audit log."""

    def work(conn: Connection, act: Act) -> Replay:
        session, cast = terminals.replay(conn, session_id, act)
        digest = session.recording_digest
        return Replay(session_id=session.id, actor=session.actor, digest=digest, cast=cast)

    return context.write(work, body=body, secrets=frozenset({"cast"}))


def _require_gateway(context: Context) -> None:
    if not context.settings.member_address:
        raise Problem(
            "gateway_missing",
            expected="an SSH gateway",
            found="none is configured",
            remedy="ask the operators to set GPUAAS_MEMBER_ADDRESS",
        )


def _require_keys(context: Context) -> None:
    key = Trust(context.settings.state_dir / "trust").gateway_authority
    if not key.exists():
        raise Problem(
            "gateway_missing",
            expected="the gateway's authority on the service's machine",
            found="its public key alone",
            remedy="use `ssh`; ask the operators to copy trust/gateway_ca* to every machine with an"
            " API",
        )

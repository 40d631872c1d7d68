"""Sessions of the console: an operator sees who is logged in, and ends one person's."""

from __future__ import annotations

from collections.abc import Sequence

from fastapi import APIRouter
from fastapi.responses import JSONResponse
from pydantic import Field
from sqlalchemy import Connection

from reconciler.api.http import PageOf, Paging
from reconciler.api.models import Answer, Moment, Reasoned, RequiredText
from reconciler.api.security import Admin, Caller, person
from reconciler.db import schema
from reconciler.lifecycle import ssh_access
from reconciler.model.act import Act, roles_of
from reconciler.records import console_sessions, tokens
from reconciler.settings import Settings

router = APIRouter(prefix="/admin/console-sessions", tags=["console sessions"])


class EndedPerson(Reasoned):
    """A person, by the name in the audit log. Bar them at the provider, or revoke their token, so
    that they cannot log in again.
    """

    actor: RequiredText


class ConsoleSession(Answer):
    """An open session."""

    id: str
    actor: str = Field(description="Empty: it opens nothing under the present settings.")
    address: str
    agent: str
    created_at: Moment
    expires_at: Moment


class Ended(Answer):
    """What was ended."""

    actor: str
    sessions: int
    ssh_keys: int = Field(description="Keys for the gateway, of a person of the provider.")
    tokens: int = Field(description="Tokens that a person of the provider has made.")


@router.get("")
def list_sessions(context: Admin, paging: Paging) -> PageOf[ConsoleSession]:
    """Open sessions, the newest first."""

    def items(conn: Connection, sessions: Sequence[schema.ConsoleSession]) -> list[ConsoleSession]:
        actors = _actors(conn, context.settings, sessions)
        return [ConsoleSession.of(each, actor=actors[each.id]) for each in sessions]

    return context.page_with(paging, console_sessions.ORDER, console_sessions.every, items)


@router.post("/end", response_model=Ended)
def end_sessions(body: EndedPerson, context: Admin) -> JSONResponse:
    """End all sessions of a person with their streams and terminals. Keys and tokens of a person of
    the provider open nothing any more.
    """

    def work(conn: Connection, act: Act) -> Ended:
        sessions = console_sessions.every(conn)
        actors = _actors(conn, context.settings, sessions)
        both = roles_of(body.actor)
        theirs = [session for session in sessions if actors[session.id] in both]
        console_sessions.end_some(conn, theirs, act)
        keys = ssh_access.end_person(conn, body.actor, act)
        own_tokens = tokens.end_person(conn, body.actor, act)
        return Ended(actor=body.actor, sessions=len(theirs), ssh_keys=keys, tokens=own_tokens)

    return context.write(work, body=body)


def _actors(
    conn: Connection, settings: Settings, sessions: Sequence[schema.ConsoleSession]
) -> dict[str, str]:
    """Whom each session stands for."""
    holders = {token.id: token for token in tokens.every(conn)}
    actors = {}
    for session in sessions:
        if session.token_id:
            caller: Caller | None = Caller.of_token(holders[session.token_id])
        else:
            caller = person(settings, session.claims)
        actors[session.id] = caller.actor if caller else ""
    return actors

"""Access through the SSH gateway: a project's keys, and its sessions."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial
from typing import Annotated, Literal, Self

from fastapi import APIRouter
from fastapi.responses import JSONResponse
from pydantic import Field
from sqlalchemy import Connection

from reconciler.api.http import PageOf, Paging
from reconciler.api.models import Answer, Filter, Id, KnownKey, Moment, PublicKey, Reasoned
from reconciler.api.security import Member
from reconciler.db import schema
from reconciler.lifecycle import quota
from reconciler.lifecycle.ssh_access import PROVIDER_S, in_force, launched_with
from reconciler.model.act import Act
from reconciler.records import ssh_keys, ssh_sessions

router = APIRouter(prefix="/projects/{project_id}", tags=["ssh"])


class GivenKey(Reasoned):
    """A public key."""

    public_key: PublicKey


class RevokedKey(Reasoned):
    """A public key that may be in the records."""

    public_key: KnownKey


class SshKey(Answer):
    """A key for the gateway. It opens nothing once the token that registered it has ended."""

    fingerprint: str
    public_key: str
    name: str
    registered_by: str
    created_at: Moment
    expires_at: Moment | None
    revoked_at: Moment | None
    valid: bool = Field(description="Whether the gateway lets it through now.")

    @classmethod
    def of_key(cls, key: schema.SshKey, valid: Collection[str]) -> Self:
        """valid: ids of keys that are in force."""
        fingerprint = ssh_keys.fingerprint(key.public_key)
        return cls.of(key, fingerprint=fingerprint, valid=key.id in valid)


class SshSession(Answer):
    """A connection through the gateway, from its first use of the machine to its end."""

    id: str
    way: Literal["jump", "terminal", "web"]
    allocation_id: str
    actor: str
    fingerprint: str
    address: str
    opened_at: Moment
    seen_at: Moment
    closed_at: Moment | None
    reason: str = Field(description="Why it ended; empty while it is open.")
    bytes_in: Annotated[int, Field(ge=0)]
    bytes_out: Annotated[int, Field(ge=0)]
    recording_digest: str = Field(description="SHA-256 of its recording; empty without one.")


@router.get("/ssh-keys")
def list_keys(project_id: Id, context: Member, paging: Paging) -> PageOf[SshKey]:
    """The keys that members have registered or revoked, the newest first."""

    def items(conn: Connection, keys: Sequence[schema.SshKey]) -> list[SshKey]:
        valid = in_force(conn, keys)
        return [SshKey.of_key(key, valid) for key in keys]

    read = partial(ssh_keys.every, project_id=project_id)
    return context.page_with(paging, ssh_keys.ORDER, read, items)


@router.post("/ssh-keys", status_code=201, response_model=SshKey)
def register_key(project_id: Id, body: GivenKey, context: Member) -> JSONResponse:
    """Register a key for the machines of the project. The gateway accepts it while the caller's
    token is valid, and the key of a user of the OpenID provider for twelve hours.
    """
    caller = context.caller
    token_id, ttl_s = (caller.token_id, None) if caller.stored else (None, PROVIDER_S)

    def work(conn: Connection, act: Act) -> SshKey:
        if ssh_keys.find(conn, project_id, body.public_key) is None:
            quota.require_rate(conn, project_id, schema.ssh_keys, quota.KEYS_PER_HOUR)
        key = ssh_keys.register(
            *(conn, project_id, body.public_key, act), token_id=token_id, ttl_s=ttl_s
        )
        return SshKey.of_key(key, in_force(conn, [key]))

    return context.write(work, body=body, reason="registered by its member", status=201)


@router.post("/ssh-keys/revoke", response_model=SshKey)
def revoke_key(project_id: Id, body: RevokedKey, context: Member) -> JSONResponse:
    """Revoke a key, registered or of a launch, for good, and cut its sessions."""

    def work(conn: Connection, act: Act) -> SshKey:
        registered = ssh_keys.find(conn, project_id, body.public_key) is not None
        if not registered and not launched_with(conn, project_id, body.public_key):
            quota.require_rate(conn, project_id, schema.ssh_keys, quota.KEYS_PER_HOUR)
        key = ssh_keys.revoke(conn, project_id, body.public_key, act)
        return SshKey.of_key(key, in_force(conn, [key]))

    return context.write(work, body=body, reason="revoked by its project")


@router.get("/ssh-sessions")
def list_sessions(
    project_id: Id, context: Member, paging: Paging, allocation_id: Filter = None
) -> PageOf[SshSession]:
    """The project's sessions through the gateway, the newest first."""
    rows = partial(ssh_sessions.every, project_id=project_id, allocation_id=allocation_id)
    return context.page(paging, ssh_sessions.ORDER, rows, SshSession.of)

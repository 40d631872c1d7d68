"""Tables of projects, tokens, certificates, idempotency keys, settings, processes and leaders."""

from __future__ import annotations

from typing import Annotated, Any

import sqlalchemy as sa

from reconciler.db.schema.base import (
    KEY,
    AllocationId,
    Default,
    NodeId,
    Number,
    ProjectId,
    Reference,
    Row,
    Text,
    partial,
    table,
)
from reconciler.model.states import Role


@table("projects", "project", sa.UniqueConstraint("name"))
class Project(Row):
    """A tenant's project. quota: its limits by name (`lifecycle.quota`). records_terminals: whether
    what its terminals show is kept.
    """

    id: str
    name: str
    quota: dict[str, Any]
    records_terminals: bool
    created_at: float


# Only hashes are stored, so that a copy of the database grants no access.
@table(
    "api_tokens",
    "token",
    sa.UniqueConstraint("hash"),
    partial("ix_api_tokens_parent_id", "parent_id", where="parent_id IS NOT NULL"),
    partial("ix_api_tokens_owner", "owner", "created_at", where="owner IS NOT NULL"),
)
class ApiToken(Row):
    """An API token; its secret is stored as a hash.

    parent_id: the token that it was made with, and with which it ends. owner: of a token that
    a person made for themselves, the id of the first token of its line, or of the person of the
    OpenID provider; null for a token of an operator.
    """

    id: str
    name: str
    hash: str
    role: Annotated[str, Role]
    project_id: ProjectId | None
    node_id: NodeId | None
    parent_id: Annotated[str, Reference("api_tokens")] | None
    owner: str | None
    issued_by: Text
    created_at: float
    expires_at: float | None
    revoked_at: float | None


@table(
    "console_sessions",
    "console_session",
    sa.UniqueConstraint("hash"),
    sa.UniqueConstraint("login"),
    sa.CheckConstraint("(token_id IS NULL) = (login IS NOT NULL)", name="console_sessions_holder"),
)
class ConsoleSession(Row):
    """A session of the web console; its cookie is stored as a hash.

    It stands for a token of this site, or for verified claims of the OpenID provider. login: hash
    of the login at the provider, which starts one session only.
    """

    id: str
    hash: str
    token_id: Annotated[str, Reference("api_tokens")] | None
    claims: dict[str, Any]
    login: str | None
    created_at: float
    expires_at: float
    address: str
    agent: str


@table("ssh_keys", "ssh_key", sa.UniqueConstraint("project_id", "public_key"))
class SshKey(Row):
    """A member's key for the gateway, or the revocation of a key of a launch.

    It opens nothing after the token with which it was registered has ended.
    """

    id: str
    project_id: ProjectId
    # Type and base64, without a comment.
    public_key: str
    name: Text
    token_id: Annotated[str, Reference("api_tokens")] | None
    registered_by: str
    owner: Text
    created_at: float
    expires_at: float | None
    revoked_at: float | None


@table(
    "ssh_sessions",
    "ssh_session",
    sa.Index("ix_ssh_sessions_project_id", "project_id", "opened_at"),
    partial("ix_ssh_sessions_open", "seen_at", where="closed_at IS NULL"),
)
class SshSession(Row):
    """A connection through the gateway to the machine of an allocation."""

    id: str
    # jump, terminal (by SSH) or web.
    way: Annotated[str, Default("jump")]
    allocation_id: AllocationId
    project_id: ProjectId
    # Holder of the key or member, and by which their sessions are counted; the key's fingerprint,
    # and the address it came from.
    actor: str
    owner: Text
    fingerprint: str
    address: Text
    opened_at: float
    # When its gateway last reported it. A gateway that ends without a word closes nothing.
    seen_at: float
    closed_at: float | None
    reason: Text
    bytes_in: Number
    bytes_out: Number
    # SHA-256 of the whole recording; empty without a recording.
    recording_digest: Text


@table("terminal_tickets", "terminal_ticket")
class TerminalTicket(Row):
    """Permission to open a terminal once, stored as a hash; the row ends with its use.

    holder: digest of the token or session that asked for it.
    """

    hash: Annotated[str, KEY]
    holder: str
    actor: str
    owner: Text
    allocation_id: AllocationId
    project_id: ProjectId
    expires_at: float


@table(
    "terminal_recordings",
    "terminal_recording",
    sa.Index("ix_terminal_recordings_session_id", "session_id"),
)
class TerminalRecording(Row):
    """A part of a terminal's recording: lines of asciicast."""

    id: int
    session_id: Annotated[str, Reference("ssh_sessions")]
    project_id: ProjectId
    at: float
    size: Number
    lines: str


@table("enrolment_tokens", "enrolment_token", sa.UniqueConstraint("hash"))
class EnrolmentToken(Row):
    """A single-use token for the enrolment of a host; its secret is stored as a hash.

    A ticket, which fetches a token later, has `ticket` with `system_id` and `addresses` from which
    it is accepted.
    """

    id: str
    hash: str
    node_id: NodeId
    created_at: float
    expires_at: float | None
    used_at: float | None
    used_by: dict[str, Any]
    ticket: dict[str, Any] | None


@table("node_certificates", "certificate", sa.Index("ix_node_certificates_node_id", "node_id"))
class NodeCertificate(Row):
    """A certificate of a host's SSH key."""

    id: str
    node_id: NodeId
    serial: Text
    public_key: str
    certificate: str
    principals: list[Any]
    valid_until: float | None
    revoked_at: float | None
    created_at: float


@table(
    "idempotency_keys",
    "idempotency_key",
    partial("ix_idempotency_keys_job", "job_id", where="job_id IS NOT NULL"),
)
class IdempotencyKey(Row):
    """The key of a request with its answer, or with the request that works on it.

    job_id: the last job that the request has queued. The key goes with it, so that the limit of a
    project's jobs bounds its keys.
    """

    scope: Annotated[str, KEY]
    key: Annotated[str, KEY]
    fingerprint: str
    holder: str
    expires_at: float | None
    completed_at: float | None
    status: Number
    body: dict[str, Any]
    job_id: str | None
    created_at: float


@table("settings", "setting")
class Setting(Row):
    """A setting of the site."""

    name: Annotated[str, KEY]
    value: dict[str, Any]
    changed_at: float


@table("leaders", "leader")
class Leader(Row):
    """The current or last leader."""

    name: Annotated[str, KEY]
    # Grows with every change of the leader; writes under an older epoch are refused.
    epoch: Number
    holder: Text
    acquired_at: float | None
    expires_at: float | None


@table("service_processes", "process")
class ServiceProcess(Row):
    """A process of the service."""

    id: str
    roles: list[Any]
    host: Text
    pid: Number
    version: Text
    started_at: float
    seen_at: float


projects = Project.TABLE
api_tokens = ApiToken.TABLE
console_sessions = ConsoleSession.TABLE
ssh_keys = SshKey.TABLE
ssh_sessions = SshSession.TABLE
terminal_tickets = TerminalTicket.TABLE
terminal_recordings = TerminalRecording.TABLE
enrolment_tokens = EnrolmentToken.TABLE
node_certificates = NodeCertificate.TABLE
idempotency_keys = IdempotencyKey.TABLE
settings = Setting.TABLE
leaders = Leader.TABLE
service_processes = ServiceProcess.TABLE

"""Tables of projects, tokens, certificates, idempotency keys, settings, processes and leaders."""

from __future__ import annotations

from typing import Annotated, Any

import sqlalchemy as sa

from reconciler.db.schema.base import KEY, NodeId, Number, ProjectId, Row, Text, table
from reconciler.model.states import Role


@table("projects", "project", sa.UniqueConstraint("name"))
class Project(Row):
    """A tenant's project."""

    id: str
    name: str
    created_at: float


# Only hashes are stored, so that a copy of the database grants no access.
@table("api_tokens", "token", sa.UniqueConstraint("hash"))
class ApiToken(Row):
    """An API token; its secret is stored as a hash."""

    id: str
    name: str
    hash: str
    role: Annotated[str, Role]
    project_id: ProjectId | None
    node_id: NodeId | None
    created_at: float
    expires_at: float | None
    revoked_at: float | None


@table("enrolment_tokens", "enrolment_token", sa.UniqueConstraint("hash"))
class EnrolmentToken(Row):
    """A single-use token for the enrolment of a host; its secret is stored as a hash."""

    id: str
    hash: str
    node_id: NodeId
    created_at: float
    expires_at: float | None
    used_at: float | None
    used_by: dict[str, Any]


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


@table("idempotency_keys", "idempotency_key")
class IdempotencyKey(Row):
    """The key of a request with its answer, or with the request that works on it."""

    scope: Annotated[str, KEY]
    key: Annotated[str, KEY]
    fingerprint: str
    holder: str
    expires_at: float | None
    completed_at: float | None
    status: Number
    body: dict[str, Any]
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
enrolment_tokens = EnrolmentToken.TABLE
node_certificates = NodeCertificate.TABLE
idempotency_keys = IdempotencyKey.TABLE
settings = Setting.TABLE
leaders = Leader.TABLE
service_processes = ServiceProcess.TABLE

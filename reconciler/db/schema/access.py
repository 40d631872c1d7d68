"""Tables of projects, tokens, certificates, idempotency keys and site settings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from reconciler.db.schema.base import (
    Row,
    document,
    key,
    metadata,
    moment,
    number,
    one_of,
    reference,
    row_of,
    stamp,
    text,
)
from reconciler.model.states import Role

projects = sa.Table(
    "projects",
    metadata,
    key(),
    text("name", None),
    stamp(),
    sa.UniqueConstraint("name"),
)

# Only hashes are stored, so that a copy of the database grants no access.
api_tokens = sa.Table(
    "api_tokens",
    metadata,
    key(),
    text("name", None),
    text("hash", None),
    text("role", None),
    reference("project_id", "projects", required=False),
    reference("node_id", "nodes", required=False),
    stamp(),
    moment("expires_at"),
    moment("revoked_at"),
    sa.UniqueConstraint("hash"),
    one_of("role", Role),
)

enrolment_tokens = sa.Table(
    "enrolment_tokens",
    metadata,
    key(),
    text("hash", None),
    reference("node_id", "nodes"),
    stamp(),
    moment("expires_at"),
    moment("used_at"),
    document("used_by"),
    sa.UniqueConstraint("hash"),
)

node_certificates = sa.Table(
    "node_certificates",
    metadata,
    key(),
    reference("node_id", "nodes"),
    text("serial"),
    text("public_key", None),
    text("certificate", None),
    document("principals", list),
    moment("valid_until"),
    moment("revoked_at"),
    stamp(),
    sa.Index("ix_node_certificates_node_id", "node_id"),
)

idempotency_keys = sa.Table(
    "idempotency_keys",
    metadata,
    sa.Column("scope", sa.Text, primary_key=True),
    sa.Column("key", sa.Text, primary_key=True),
    text("fingerprint", None),
    text("holder", None),
    moment("expires_at"),
    moment("completed_at"),
    number("status"),
    document("body"),
    stamp(),
)

settings = sa.Table(
    "settings",
    metadata,
    sa.Column("name", sa.Text, primary_key=True),
    document("value"),
    stamp("changed_at"),
)


@row_of(projects, "project")
@dataclass(frozen=True, kw_only=True)
class Project(Row):
    """A tenant's project."""

    id: str
    name: str
    created_at: float


@row_of(api_tokens, "token")
@dataclass(frozen=True, kw_only=True)
class ApiToken(Row):
    """An API token; its secret is stored as a hash."""

    id: str
    name: str
    hash: str
    role: str
    project_id: str | None
    node_id: str | None
    created_at: float
    expires_at: float | None
    revoked_at: float | None


@row_of(enrolment_tokens, "enrolment_token")
@dataclass(frozen=True, kw_only=True)
class EnrolmentToken(Row):
    """A single-use token for the enrolment of a host; its secret is stored as a hash."""

    id: str
    hash: str
    node_id: str
    created_at: float
    expires_at: float | None
    used_at: float | None
    used_by: dict[str, Any]


@row_of(node_certificates, "certificate")
@dataclass(frozen=True, kw_only=True)
class NodeCertificate(Row):
    """A certificate of a host's SSH key."""

    id: str
    node_id: str
    serial: str
    public_key: str
    certificate: str
    principals: list[Any]
    valid_until: float | None
    revoked_at: float | None
    created_at: float

"""Tables of applications on allocations: instances, members, and operations on members."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from reconciler.db.schema.base import (
    Row,
    document,
    key,
    lifecycle,
    metadata,
    moment,
    one_of,
    reference,
    row_of,
    stamp,
    text,
    unique,
)
from reconciler.model.states import (
    AppStatus,
    MemberRole,
    MemberStatus,
    OperationKind,
    OperationStatus,
)

instances = sa.Table(
    "app_instances",
    metadata,
    key(),
    reference("project_id", "projects"),
    text("slug", None),
    text("name", None),
    # The public key. The private key stays with the application's controller and is never stored
    # here.
    text("managed_key", None),
    *lifecycle("status"),
    text("requested_by"),
    text("correlation_id"),
    stamp(),
    moment("ended_at"),
    one_of("status", AppStatus),
    sa.Index("ix_app_instances_project_id", "project_id"),
    unique("uq_app_instances_name", "project_id", "name", where="status <> 'stopped'"),
)

members = sa.Table(
    "app_members",
    metadata,
    key(),
    reference("instance_id", "app_instances"),
    reference("allocation_id", "allocations"),
    text("role", None),
    *lifecycle("status"),
    # Report of the application's controller about the member.
    document("detail"),
    # Expiry of the managed key on the host; null: no key was installed.
    moment("key_expires_at"),
    stamp(),
    # Time since which the allocation is free for another application.
    moment("left_at"),
    one_of("role", MemberRole),
    one_of("status", MemberStatus),
    sa.Index("ix_app_members_instance_id", "instance_id"),
    unique("uq_app_members_controller", "instance_id", where="role = 'controller'"),
    unique("uq_app_members_allocation", "allocation_id", where="left_at IS NULL"),
)

operations = sa.Table(
    "app_member_operations",
    metadata,
    key(),
    reference("instance_id", "app_instances"),
    reference("member_id", "app_members"),
    text("kind", None),
    *lifecycle("status"),
    # {} unless the operation failed: code, expected, found, remedy.
    document("failure"),
    reference("task_id", "tasks", required=False),
    text("requested_by"),
    text("correlation_id"),
    stamp(),
    moment("finished_at"),
    one_of("kind", OperationKind),
    one_of("status", OperationStatus),
    sa.Index("ix_app_member_operations_instance_id", "instance_id"),
    unique(
        "uq_app_member_operations_open",
        "member_id",
        where="status IN ('accepted', 'running')",
    ),
)


@row_of(instances, "app_instance")
@dataclass(frozen=True, kw_only=True)
class AppInstance(Row):
    """An application on the allocations of a project."""

    id: str
    project_id: str
    slug: str
    name: str
    managed_key: str
    status: str
    status_reason: str
    status_since: float
    deadline_at: float | None
    generation: int
    requested_by: str
    correlation_id: str
    created_at: float
    ended_at: float | None


@row_of(members, "app_member")
@dataclass(frozen=True, kw_only=True)
class AppMember(Row):
    """An allocation that takes part in an application."""

    id: str
    instance_id: str
    allocation_id: str
    role: str
    status: str
    status_reason: str
    status_since: float
    deadline_at: float | None
    generation: int
    detail: dict[str, Any]
    key_expires_at: float | None
    created_at: float
    left_at: float | None


@row_of(operations, "app_operation")
@dataclass(frozen=True, kw_only=True)
class AppOperation(Row):
    """An operation on a member of an application."""

    id: str
    instance_id: str
    member_id: str
    kind: str
    status: str
    status_reason: str
    status_since: float
    deadline_at: float | None
    generation: int
    failure: dict[str, Any]
    task_id: str | None
    requested_by: str
    correlation_id: str
    created_at: float
    finished_at: float | None

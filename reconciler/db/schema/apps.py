"""Tables of applications on allocations: instances, members, and operations on members."""

from __future__ import annotations

from typing import Annotated, Any

import sqlalchemy as sa

from reconciler.db.schema.base import (
    AllocationId,
    ProjectId,
    Reference,
    StatusRow,
    TaskId,
    Text,
    table,
    unique,
)
from reconciler.model.states import (
    AppStatus,
    MemberRole,
    MemberStatus,
    OperationKind,
    OperationStatus,
)


@table(
    "app_instances",
    "app_instance",
    sa.Index("ix_app_instances_project_id", "project_id"),
    unique("uq_app_instances_name", "project_id", "name", where="status <> 'stopped'"),
)
class AppInstance(StatusRow):
    """An application on the allocations of a project."""

    project_id: ProjectId
    slug: str
    name: str
    # The public key. The private key stays with the application's controller and is never stored
    # here.
    managed_key: str
    status: Annotated[str, AppStatus]
    requested_by: Text
    correlation_id: Text
    created_at: float
    ended_at: float | None


@table(
    "app_members",
    "app_member",
    sa.Index("ix_app_members_instance_id", "instance_id"),
    unique("uq_app_members_controller", "instance_id", where="role = 'controller'"),
    unique("uq_app_members_allocation", "allocation_id", where="left_at IS NULL"),
)
class AppMember(StatusRow):
    """An allocation that takes part in an application."""

    instance_id: Annotated[str, Reference("app_instances")]
    allocation_id: AllocationId
    role: Annotated[str, MemberRole]
    status: Annotated[str, MemberStatus]
    # Report of the application's controller about the member.
    detail: dict[str, Any]
    # Expiry of the managed key on the host; null: no key was installed.
    key_expires_at: float | None
    created_at: float
    # Time since which the allocation is free for another application.
    left_at: float | None


@table(
    "app_member_operations",
    "app_operation",
    sa.Index("ix_app_member_operations_instance_id", "instance_id"),
    unique("uq_app_member_operations_open", "member_id", where="status IN ('accepted', 'running')"),
)
class AppOperation(StatusRow):
    """An operation on a member of an application."""

    instance_id: Annotated[str, Reference("app_instances")]
    member_id: Annotated[str, Reference("app_members")]
    kind: Annotated[str, OperationKind]
    status: Annotated[str, OperationStatus]
    # {} unless the operation failed: code, expected, found, remedy.
    failure: dict[str, Any]
    task_id: TaskId | None
    requested_by: Text
    correlation_id: Text
    created_at: float
    finished_at: float | None


app_instances = AppInstance.TABLE
app_members = AppMember.TABLE
app_operations = AppOperation.TABLE

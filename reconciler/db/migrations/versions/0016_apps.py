"""Tables of applications on allocations: instances, members, operations."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from reconciler.db.migrations.columns import (
    documents,
    moments,
    numbers,
    one_of,
    optional,
    points,
    stamps,
    texts,
    unique,
)

revision = "0016"
down_revision = "0015"


def upgrade() -> None:
    """Tables in the order in which they refer to each other."""
    _instances()
    _members()
    _operations()


def _lifecycle() -> list[sa.Column[object]]:
    return [
        *texts("status", "status_reason"),
        *stamps("status_since"),
        *moments("deadline_at"),
        *numbers("generation"),
    ]


def _instances() -> None:
    op.create_table(
        "app_instances",
        *texts("id", "project_id", "slug", "name", "managed_key"),
        *_lifecycle(),
        *texts("requested_by", "correlation_id"),
        *stamps("created_at"),
        *moments("ended_at"),
        one_of("ck_app_instances_status", "status", "deploying running failed stopped"),
        points("fk_app_instances_project_id", "project_id", "projects"),
        sa.PrimaryKeyConstraint("id", name="pk_app_instances"),
    )
    op.create_index("ix_app_instances_project_id", "app_instances", ["project_id"])
    unique("uq_app_instances_name", "app_instances", "project_id name", "status <> 'stopped'")


def _members() -> None:
    op.create_table(
        "app_members",
        *texts("id", "instance_id", "allocation_id", "role"),
        *_lifecycle(),
        *documents("detail"),
        *moments("key_expires_at"),
        *stamps("created_at"),
        *moments("left_at"),
        one_of("ck_app_members_role", "role", "controller worker"),
        one_of("ck_app_members_status", "status", "reconciling ready failed"),
        points("fk_app_members_instance_id", "instance_id", "app_instances"),
        points("fk_app_members_allocation_id", "allocation_id", "allocations"),
        sa.PrimaryKeyConstraint("id", name="pk_app_members"),
    )
    op.create_index("ix_app_members_instance_id", "app_members", ["instance_id"])
    unique("uq_app_members_controller", "app_members", "instance_id", "role = 'controller'")
    unique("uq_app_members_allocation", "app_members", "allocation_id", "left_at IS NULL")


def _operations() -> None:
    kinds = "member_add bootstrap_ssh_reconcile bootstrap_ssh_remove"
    states = "accepted running succeeded failed"
    op.create_table(
        "app_member_operations",
        *texts("id", "instance_id", "member_id", "kind"),
        *_lifecycle(),
        *documents("failure"),
        *optional("task_id"),
        *texts("requested_by", "correlation_id"),
        *stamps("created_at"),
        *moments("finished_at"),
        one_of("ck_app_member_operations_kind", "kind", kinds),
        one_of("ck_app_member_operations_status", "status", states),
        points("fk_app_member_operations_instance_id", "instance_id", "app_instances"),
        points("fk_app_member_operations_member_id", "member_id", "app_members"),
        points("fk_app_member_operations_task_id", "task_id", "tasks"),
        sa.PrimaryKeyConstraint("id", name="pk_app_member_operations"),
    )
    op.create_index(
        "ix_app_member_operations_instance_id", "app_member_operations", ["instance_id"]
    )
    unique(
        "uq_app_member_operations_open",
        "app_member_operations",
        "member_id",
        "status IN ('accepted', 'running')",
    )

"""What follows for applications from what happened to their allocations, keys and tasks.

The leader looks every so often; nobody who ends an allocation or a task need know of applications.
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

from reconciler.domain.act import Act
from reconciler.domain.states import (
    AllocationState,
    AppStatus,
    CapacityShape,
    OperationKind,
    OperationStatus,
    TaskState,
)
from reconciler.store import appwork, clock, rows
from reconciler.store.appwork import KEY_S, OPEN
from reconciler.store.leasing import DUE
from reconciler.store.tables import (
    allocations,
    app_instances,
    app_members,
    app_operations,
    tasks,
)

# With a third left a new end is written.
RENEW_S = KEY_S / 3
# What failed by itself is tried again this much later.
RETRY_S = 1_800.0


def remove_keys(conn: sa.Connection, act: Act, *, instance_id: str | None = None) -> int:
    """Queue the removal of keys that stopped instances may have left; how many were queued.

    Not of those that have ended by themselves, nor where something is still under way.
    """
    done_already = _exists(
        app_operations.c.kind == OperationKind.BOOTSTRAP_SSH_REMOVE,
        app_operations.c.status == OperationStatus.SUCCEEDED,
    )
    query = _of_active().where(
        app_instances.c.status == AppStatus.STOPPED,
        app_instances.c.ended_at > clock.now() - KEY_S,
        _exists(app_operations.c.task_id.is_not(None)),
        ~done_already,
        ~_exists(app_operations.c.status.in_(OPEN)),
        ~_tried_lately(app_operations.c.kind == OperationKind.BOOTSTRAP_SSH_REMOVE),
    )
    query = rows.where(query, app_members, instance_id=instance_id)
    return _ask_each(conn, query, OperationKind.BOOTSTRAP_SSH_REMOVE, act)


def renew_keys(conn: sa.Connection, act: Act) -> int:
    """Queue a new end for keys that are wanted and end soon; how many were queued."""
    query = _of_active().where(
        app_instances.c.status.in_((AppStatus.DEPLOYING, AppStatus.RUNNING)),
        app_members.c.left_at.is_(None),
        app_members.c.key_expires_at < clock.now() + RENEW_S,
        ~_exists(app_operations.c.status.in_(OPEN)),
        ~_tried_lately(),
    )
    return _ask_each(conn, query, OperationKind.BOOTSTRAP_SSH_RECONCILE, act)


def let_go(conn: sa.Connection, act: Act) -> int:
    """Members whose allocation has ended leave; how many."""
    query = (
        sa.select(app_members.c.id)
        .join(allocations, allocations.c.id == app_members.c.allocation_id)
        .where(app_members.c.left_at.is_(None), allocations.c.state != AllocationState.ACTIVE)
        .order_by(app_members.c.instance_id, app_members.c.id)
    )
    found = list(conn.execute(query).scalars())
    for member_id in found:
        instance, member = appwork.member_held(conn, member_id)
        if member["left_at"] is None:
            appwork.left(conn, instance, member, act)
    return len(found)


def close(conn: sa.Connection, act: Act) -> int:
    """End operations whose task has ended without a word to them; how many.

    Tasks are also ended by those who end what they are about, such as a node.
    """
    query = (
        sa.select(app_operations.c.id, tasks.c.state)
        .join(tasks, tasks.c.id == app_operations.c.task_id)
        .where(
            app_operations.c.status.in_(OPEN),
            tasks.c.state.not_in((*DUE, TaskState.RUNNING)),
        )
        .order_by(app_operations.c.instance_id, app_operations.c.id)
    )
    found = conn.execute(query).all()
    for operation_id, state in found:
        error = {
            "code": f"task_{state}",
            "expected": "a task that ends with a result",
            "found": f"a task that is {state}",
            "remedy": "reconcile again",
        }
        appwork.failed(conn, operation_id, act, error)
    return len(found)


def _ask_each(conn: sa.Connection, query: sa.Select[Any], kind: OperationKind, act: Act) -> int:
    found = list(conn.execute(query.order_by(app_members.c.instance_id, app_members.c.id)))
    for member_id, allocation_id in found:
        instance, member = appwork.member_held(conn, member_id)
        allocation = rows.get(conn, allocations, allocation_id, "allocation")
        appwork.ask(conn, instance, member, allocation, kind, act)
    return len(found)


def _of_active() -> sa.Select[Any]:
    """Members on whole machines that their tenant still has."""
    return (
        sa.select(app_members.c.id, app_members.c.allocation_id)
        .join(app_instances, app_instances.c.id == app_members.c.instance_id)
        .join(allocations, allocations.c.id == app_members.c.allocation_id)
        .where(
            allocations.c.state == AllocationState.ACTIVE,
            allocations.c.capacity_shape == CapacityShape.BAREMETAL,
        )
    )


def _exists(*conditions: sa.ColumnElement[bool]) -> sa.Exists:
    return sa.exists().where(app_operations.c.member_id == app_members.c.id, *conditions)


def _tried_lately(*conditions: sa.ColumnElement[bool]) -> sa.Exists:
    return _exists(app_operations.c.created_at > clock.now() - RETRY_S, *conditions)

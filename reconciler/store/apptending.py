"""What follows for applications from what happened to their allocations, keys and tasks.

The leader looks every so often; nobody who ends an allocation or a task need know of applications.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
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
from reconciler.store.appwork import ENDED, KEY_S, OPEN
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


@dataclass(frozen=True)
class Look:
    """Which rows something follows for, and what, one by one: of each in a transaction of its own,
    so that one which cannot be looked after keeps no other waiting.
    """

    id: sa.Column[str]
    query: Callable[[], sa.Select[Any]]
    follow: Callable[[sa.Connection, str, Act], None]

    def due(self, conn: sa.Connection, *which: sa.ColumnElement[bool]) -> list[str]:
        """The ids of those rows, in the order in which they are locked."""
        query = self.query().where(*which).order_by(self.id.table.c.instance_id, self.id)
        return list(conn.execute(query).scalars())

    def __call__(self, conn: sa.Connection, act: Act, *which: sa.ColumnElement[bool]) -> int:
        """Do what follows for those of them that are due still; how many."""
        found = self.due(conn, *which)
        for id in found:
            self.follow(conn, id, act)
        return len(found)


def _keys_to_remove() -> sa.Select[Any]:
    """Those that instances which have ended may have left.

    Not of those that have ended by themselves, nor where something is still under way.
    """
    done_already = _exists(
        app_operations.c.kind == OperationKind.BOOTSTRAP_SSH_REMOVE,
        app_operations.c.status == OperationStatus.SUCCEEDED,
    )
    return _of_active().where(
        app_instances.c.status.in_(ENDED),
        # Before that, all that is under way about a member is withdrawn.
        app_members.c.left_at.is_not(None),
        app_instances.c.ended_at > clock.now() - KEY_S,
        _exists(app_operations.c.task_id.is_not(None)),
        ~done_already,
        ~_exists(app_operations.c.status.in_(OPEN)),
        ~_tried_lately(app_operations.c.kind == OperationKind.BOOTSTRAP_SSH_REMOVE),
    )


def _keys_to_renew() -> sa.Select[Any]:
    """Those that are wanted and end soon."""
    return _of_active().where(
        app_instances.c.status.in_((AppStatus.DEPLOYING, AppStatus.RUNNING)),
        app_members.c.left_at.is_(None),
        app_members.c.key_expires_at < clock.now() + RENEW_S,
        ~_exists(app_operations.c.status.in_(OPEN)),
        ~_tried_lately(),
    )


def _members_to_leave() -> sa.Select[Any]:
    """Those whose allocation has ended, and those whose instance failed without them."""
    over = sa.or_(
        allocations.c.state != AllocationState.ACTIVE, app_instances.c.status == AppStatus.FAILED
    )
    return _members().where(app_members.c.left_at.is_(None), over)


def _leave(conn: sa.Connection, member_id: str, act: Act) -> None:
    instance, member = appwork.member_held(conn, member_id)
    if member["left_at"] is not None:
        return
    allocation = rows.get(conn, allocations, member["allocation_id"], "allocation")
    if allocation["state"] != AllocationState.ACTIVE:
        appwork.left(conn, instance, member, act)
    else:
        appwork.leave(conn, member)
        appwork.withdraw(conn, member, act)


def _operations_to_close() -> sa.Select[Any]:
    """Those whose task has ended without a word to them.

    Tasks are also ended by those who end what they are about, such as a node.
    """
    return (
        sa.select(app_operations.c.id)
        .join(tasks, tasks.c.id == app_operations.c.task_id)
        .where(
            app_operations.c.status.in_(OPEN),
            tasks.c.state.not_in((*DUE, TaskState.RUNNING)),
        )
    )


def _close(conn: sa.Connection, operation_id: str, act: Act) -> None:
    operation = rows.get(conn, app_operations, operation_id, "app_operation")
    state = rows.get(conn, tasks, operation["task_id"], "task")["state"]
    error = {
        "code": f"task_{state}",
        "expected": "a task that ends with a result",
        "found": f"a task that is {state}",
        "remedy": "reconcile again",
    }
    appwork.failed(conn, operation_id, act, error)


def _ask(kind: OperationKind, conn: sa.Connection, member_id: str, act: Act) -> None:
    instance, member = appwork.member_held(conn, member_id)
    allocation = rows.get(conn, allocations, member["allocation_id"], "allocation")
    appwork.ask(conn, instance, member, allocation, kind, act)


def _members() -> sa.Select[Any]:
    return (
        sa.select(app_members.c.id)
        .join(app_instances, app_instances.c.id == app_members.c.instance_id)
        .join(allocations, allocations.c.id == app_members.c.allocation_id)
    )


def _of_active() -> sa.Select[Any]:
    """Members on whole machines that their tenant still has."""
    return _members().where(
        allocations.c.state == AllocationState.ACTIVE,
        allocations.c.capacity_shape == CapacityShape.BAREMETAL,
    )


def _exists(*conditions: sa.ColumnElement[bool]) -> sa.Exists:
    return sa.exists().where(app_operations.c.member_id == app_members.c.id, *conditions)


def _tried_lately(*conditions: sa.ColumnElement[bool]) -> sa.Exists:
    return _exists(app_operations.c.created_at > clock.now() - RETRY_S, *conditions)


let_go = Look(app_members.c.id, _members_to_leave, _leave)
close = Look(app_operations.c.id, _operations_to_close, _close)
renew_keys = Look(
    app_members.c.id, _keys_to_renew, partial(_ask, OperationKind.BOOTSTRAP_SSH_RECONCILE)
)
remove_keys = Look(
    app_members.c.id, _keys_to_remove, partial(_ask, OperationKind.BOOTSTRAP_SSH_REMOVE)
)

"""Operations on application members: add, renew and remove the managed key on a member's host.

Lock order: after the allocation (`db.locks`) the instance, its members, their operations, then
tasks.

The line of a key on the host contains its expiry time. A key that cannot be removed, because its
host does not answer, is therefore valid for a limited time only. A key still in use is renewed
before it expires.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import sqlalchemy as sa

from reconciler.db import clock, journal, rows
from reconciler.db.journal import advance
from reconciler.db.rows import Order, Page, part
from reconciler.db.schema import (
    Allocation,
    AppInstance,
    AppMember,
    AppOperation,
    Task,
    allocations,
    app_instances,
    app_members,
    app_operations,
    tasks,
)
from reconciler.lifecycle import baremetal
from reconciler.model.act import Act
from reconciler.model.states import (
    ENDED_TASKS,
    AllocationState,
    AppStatus,
    CapacityShape,
    MemberRole,
    MemberStatus,
    OperationKind,
    OperationStatus,
    TaskKind,
)
from reconciler.records import queue

# Lifetime of a key on its host. If it is too short, a host that is away for a night locks its
# application out. If it is too long, a key that could not be removed opens the host for that time.
KEY_S = 86_400
OPERATIONS = Order(app_operations, ("created_at", "id"))
OPEN = (OperationStatus.ACCEPTED, OperationStatus.RUNNING)
# Status of instances that need no key.
ENDED = (AppStatus.FAILED, AppStatus.STOPPED)
_GUEST = {
    "code": "guest_unreachable_by_design",
    "expected": "a member whose accounts the reconciler can change",
    "found": "a slice: the reconciler has no identity inside a tenant's machine",
    "remedy": "put the key into the guest yourself, or use a whole machine",
}


def request(
    conn: sa.Connection,
    instance: AppInstance,
    member: AppMember,
    allocation: Allocation,
    kind: OperationKind,
    act: Act,
) -> AppOperation:
    """Create the operation and its task, or return the member's open operation.

    For a slice the operation fails at once with `guest_unreachable_by_design`.
    """
    same = rows.first(conn, _open_of(member.id), AppOperation)
    if same is not None:
        return same
    id, whole = rows.ordered_id(), allocation.capacity_shape == CapacityShape.BAREMETAL
    task = _enqueue(conn, instance, allocation, kind, id, act) if whole else None
    operation = journal.create(
        conn,
        AppOperation,
        act,
        id=id,
        instance_id=instance.id,
        member_id=member.id,
        kind=kind.value,
        status=OperationStatus.ACCEPTED,
        task_id=task.id if task else None,
        requested_by=act.actor,
        correlation_id=act.correlation_id,
    )
    if not whole:
        _fail(conn, operation, act, _GUEST)
        operation = rows.get(conn, AppOperation, id)
    return operation


def every(conn: sa.Connection, instance_id: str, page: Page | None = None) -> list[AppOperation]:
    """All operations on the instance's members, in order."""
    query = sa.select(app_operations).where(app_operations.c.instance_id == instance_id)
    return rows.every(conn, part(query, OPERATIONS, page), AppOperation)


def began(conn: sa.Connection, operation_id: str, act: Act) -> str:
    """Record the start of the run. Returns a reason, and changes nothing, if it is obsolete."""
    operation, member, instance = held(conn, operation_id)
    allocation = rows.get(conn, Allocation, member.allocation_id)
    removes = operation.kind == OperationKind.BOOTSTRAP_SSH_REMOVE
    if operation.status not in OPEN:
        return f"operation {operation.status}"
    if allocation.state != AllocationState.ACTIVE:
        return f"allocation {allocation.state}: its account goes with all its keys"
    if not removes and instance.status in ENDED:
        return f"its app instance {instance.status}"
    if operation.status == OperationStatus.ACCEPTED:
        advance(conn, AppOperation, operation_id, "begin", act, held=operation)
    return ""


def succeeded(
    conn: sa.Connection, operation_id: str, act: Act, *, expires_at: float | None
) -> bool:
    """Record success. expires_at: expiry of the key now on the host, None without a key."""
    operation, member, _ = held(conn, operation_id)
    if operation.status != OperationStatus.RUNNING:
        return False
    over = {"finished_at": clock.now()}
    advance(conn, AppOperation, operation_id, "succeed", act, columns=over, held=operation)
    _set(conn, member, key_expires_at=expires_at)
    return True


def failed(conn: sa.Connection, operation_id: str, act: Act, error: Mapping[str, Any]) -> bool:
    """Record failure. A ready member with a key stays a member until the key expires."""
    operation, _, _ = held(conn, operation_id)
    if operation.status not in OPEN:
        return False
    _fail(conn, operation, act, error)
    return True


def leave(conn: sa.Connection, member: AppMember, act: Act) -> None:
    """Mark the member as left, so that its allocation is free for another application.

    Operations that have not started end. A running operation ends by itself.
    """
    _set(conn, member, left_at=clock.now())
    for operation in rows.every(conn, _open_of(member.id), AppOperation):
        if operation.status != OperationStatus.ACCEPTED:
            continue
        error = {
            "code": "canceled",
            "expected": "an app instance that wants it",
            "found": "one that has ended",
            "remedy": "nothing to do: no run was started",
        }
        _fail(conn, operation, act, error)
        if operation.task_id:
            queue.cancel(conn, operation.task_id, act)


def left(conn: sa.Connection, instance: AppInstance, member: AppMember, act: Act) -> None:
    """Fail a member whose allocation has ended. Without its controller the instance fails too.

    The key is gone with the account.
    """
    act = act.because("allocation_ended", {"allocation_id": member.allocation_id})
    if member.status != MemberStatus.FAILED:
        advance(conn, AppMember, member.id, "fail", act)
    _set(conn, member, left_at=clock.now(), key_expires_at=None)
    living = instance.status in (AppStatus.DEPLOYING, AppStatus.RUNNING)
    if living and member.role == MemberRole.CONTROLLER:
        ended = {"ended_at": clock.now()}
        advance(conn, AppInstance, instance.id, "fail", act, columns=ended)


def held(conn: sa.Connection, operation_id: str) -> tuple[AppOperation, AppMember, AppInstance]:
    """Operation, member and instance, locked in the common lock order."""
    operation = rows.get(conn, AppOperation, operation_id)
    instance, member = member_held(conn, operation.member_id)
    operation = rows.get(conn, AppOperation, operation_id, lock=True)
    return operation, member, instance


def member_held(conn: sa.Connection, member_id: str) -> tuple[AppInstance, AppMember]:
    member = rows.get(conn, AppMember, member_id)
    key = member.instance_id
    instance = rows.get(conn, AppInstance, key, lock=True)
    return instance, rows.get(conn, AppMember, member_id, lock=True)


def _enqueue(
    conn: sa.Connection,
    instance: AppInstance,
    allocation: Allocation,
    kind: OperationKind,
    operation_id: str,
    act: Act,
) -> Task:
    removes = kind == OperationKind.BOOTSTRAP_SSH_REMOVE
    parameters = {
        "operation_id": operation_id,
        "allocation": {key: getattr(allocation, key) for key in ("id", "username")},
        "fence": baremetal.claim_of(conn, allocation.id).fence,
        "managed_key": {
            "instance_id": instance.id,
            "public_key": instance.managed_key,
            "expires_at": int(clock.read(conn)) + KEY_S,
            "state": "absent" if removes else "present",
        },
    }
    item = queue.Enqueue(
        kind=TaskKind.ALLOCATION_RECONCILE_MANAGED_AUTHORIZED_KEY,
        node_id=allocation.node_id,
        # One task at a time per allocation, and none during its release.
        allocation_id=allocation.id,
        parameters=parameters,
        deadline_s=600,
    )
    return queue.add(conn, item, act)


def _fail(conn: sa.Connection, operation: AppOperation, act: Act, error: Mapping[str, Any]) -> None:
    names = ("code", "expected", "found", "remedy")
    failure = {name: str(error.get(name, "")) for name in names}
    failure_act = act.because(failure["code"])
    columns = {"failure": failure, "finished_at": clock.now()}
    advance(conn, AppOperation, operation.id, "fail", failure_act, columns=columns)
    member = rows.get(conn, AppMember, operation.member_id, lock=True)
    present = operation.kind != OperationKind.BOOTSTRAP_SSH_REMOVE
    if present and member.status == MemberStatus.RECONCILING and member.left_at is None:
        advance(conn, AppMember, member.id, "fail", failure_act, held=member)


def _open_of(member_id: str) -> sa.Select[Any]:
    query = sa.select(app_operations).where(
        app_operations.c.member_id == member_id, app_operations.c.status.in_(OPEN)
    )
    return query.order_by(app_operations.c.id)


def _set(conn: sa.Connection, member: AppMember, **values: Any) -> None:
    conn.execute(sa.update(app_members).where(app_members.c.id == member.id).values(values))


# A key is renewed when a third of its lifetime is left.
RENEW_S = KEY_S / 3
# Delay before a failed operation is tried again.
RETRY_S = 1_800.0


@dataclass(frozen=True)
class FollowUp:
    """A periodic follow-up: a query for due rows and the function to call for each.

    Each row can have a transaction of its own, so that a failing row does not delay the others.
    """

    id: sa.Column[str]
    query: Callable[[], sa.Select[Any]]
    follow: Callable[[sa.Connection, str, Act], None]

    def due(self, conn: sa.Connection, *which: sa.ColumnElement[bool]) -> list[str]:
        """The ids of the due rows, in lock order."""
        query = self.query().where(*which).order_by(self.id.table.c.instance_id, self.id)
        return list(conn.execute(query).scalars())

    def __call__(self, conn: sa.Connection, act: Act, *which: sa.ColumnElement[bool]) -> int:
        """Follow up on every row that is due, and return their number."""
        ids = self.due(conn, *which)
        for id in ids:
            self.follow(conn, id, act)
        return len(ids)


def _keys_to_remove() -> sa.Select[Any]:
    """Members on whose hosts an ended instance may have left a key.

    Keys that have expired by themselves, and members with an open operation, are excluded.
    """
    done_already = _exists(
        app_operations.c.kind == OperationKind.BOOTSTRAP_SSH_REMOVE,
        app_operations.c.status == OperationStatus.SUCCEEDED,
    )
    return _of_active().where(
        app_instances.c.status.in_(ENDED),
        # Until a member has left, its open operations still have to be withdrawn.
        app_members.c.left_at.is_not(None),
        app_instances.c.ended_at > clock.now() - KEY_S,
        _exists(app_operations.c.task_id.is_not(None)),
        ~done_already,
        ~_exists(app_operations.c.status.in_(OPEN)),
        ~_tried_lately(app_operations.c.kind == OperationKind.BOOTSTRAP_SSH_REMOVE),
    )


def _keys_to_renew() -> sa.Select[Any]:
    """Members whose key is still needed and expires soon."""
    return _of_active().where(
        app_instances.c.status.in_((AppStatus.DEPLOYING, AppStatus.RUNNING)),
        app_members.c.left_at.is_(None),
        app_members.c.key_expires_at < clock.now() + RENEW_S,
        ~_exists(app_operations.c.status.in_(OPEN)),
        ~_tried_lately(),
    )


def _members_to_leave() -> sa.Select[Any]:
    """Members whose allocation has ended or whose instance has failed."""
    over = sa.or_(
        allocations.c.state != AllocationState.ACTIVE, app_instances.c.status == AppStatus.FAILED
    )
    return _members().where(app_members.c.left_at.is_(None), over)


def _leave(conn: sa.Connection, member_id: str, act: Act) -> None:
    instance, member = member_held(conn, member_id)
    if member.left_at is not None:
        return
    allocation = rows.get(conn, Allocation, member.allocation_id)
    if allocation.state != AllocationState.ACTIVE:
        left(conn, instance, member, act)
    else:
        leave(conn, member, act)


def _operations_to_close() -> sa.Select[Any]:
    """Open operations whose task has ended without an outcome for the operation.

    A task can also be canceled with its subject, for example when a node is retired.
    """
    return (
        sa.select(app_operations.c.id)
        .join(tasks, tasks.c.id == app_operations.c.task_id)
        .where(app_operations.c.status.in_(OPEN), tasks.c.state.in_(ENDED_TASKS))
    )


def _close(conn: sa.Connection, operation_id: str, act: Act) -> None:
    operation = rows.get(conn, AppOperation, operation_id)
    state = rows.get(conn, Task, str(operation.task_id)).state
    error = {
        "code": f"task_{state}",
        "expected": "a task that ends with a result",
        "found": f"a task that is {state}",
        "remedy": "ask for the keys again (`gpuaas apps reconcile-ssh INSTANCE`)",
    }
    failed(conn, operation_id, act, error)


def _request_work(kind: OperationKind, conn: sa.Connection, member_id: str, act: Act) -> None:
    instance, member = member_held(conn, member_id)
    allocation = rows.get(conn, Allocation, member.allocation_id)
    request(conn, instance, member, allocation, kind, act)


def _members() -> sa.Select[Any]:
    return (
        sa.select(app_members.c.id)
        .join(app_instances, app_instances.c.id == app_members.c.instance_id)
        .join(allocations, allocations.c.id == app_members.c.allocation_id)
    )


def _of_active() -> sa.Select[Any]:
    """Members on active whole-machine allocations."""
    return _members().where(
        allocations.c.state == AllocationState.ACTIVE,
        allocations.c.capacity_shape == CapacityShape.BAREMETAL,
    )


def _exists(*conditions: sa.ColumnElement[bool]) -> sa.Exists:
    return sa.exists().where(app_operations.c.member_id == app_members.c.id, *conditions)


def _tried_lately(*conditions: sa.ColumnElement[bool]) -> sa.Exists:
    return _exists(app_operations.c.created_at > clock.now() - RETRY_S, *conditions)


LET_GO = FollowUp(app_members.c.id, _members_to_leave, _leave)
CLOSE = FollowUp(app_operations.c.id, _operations_to_close, _close)
RENEW_KEYS = FollowUp(
    app_members.c.id, _keys_to_renew, partial(_request_work, OperationKind.BOOTSTRAP_SSH_RECONCILE)
)
REMOVE_KEYS = FollowUp(
    app_members.c.id, _keys_to_remove, partial(_request_work, OperationKind.BOOTSTRAP_SSH_REMOVE)
)

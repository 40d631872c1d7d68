"""Work on the members of applications: the managed key on a member's host, and off it again.

Locks are taken in one order: behind the allocation (`store.order`) the instance, its members, their
operations, and then tasks.

A key has an end of its own, written into its line on the host. So one that cannot be taken away,
because its host does not answer, is good for a limited time only; one that is wanted is put there
again before it ends.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import sqlalchemy as sa

from reconciler.domain.act import Act
from reconciler.domain.states import (
    AllocationState,
    AppStatus,
    CapacityShape,
    MemberRole,
    MemberStatus,
    OperationKind,
    OperationStatus,
    TaskKind,
)
from reconciler.store import baremetal, clock, lifecycle, rows, tasks
from reconciler.store.lifecycle import advance
from reconciler.store.paging import Order, Page, part
from reconciler.store.rows import Record
from reconciler.store.tables import (
    allocations,
    app_instances,
    app_members,
    app_operations,
)

# How long a key is good for on its host. Too low, and a host that is away for a night locks its
# application out; too high, and a key that could not be taken away opens the host for that long.
KEY_S = 86_400
OPERATIONS = Order(app_operations, ("created_at", "id"))
OPEN = (OperationStatus.ACCEPTED, OperationStatus.RUNNING)
# Instances that want no key any more.
ENDED = (AppStatus.FAILED, AppStatus.STOPPED)
_GUEST = {
    "code": "guest_unreachable_by_design",
    "expected": "a member whose accounts the reconciler can change",
    "found": "a slice: the reconciler has no identity inside a tenant's machine",
    "remedy": "put the key into the guest yourself, or use a whole machine",
}


def ask(
    conn: sa.Connection,
    instance: Record,
    member: Record,
    allocation: Record,
    kind: OperationKind,
    act: Act,
) -> Record:
    """The operation, with its task; one that is under way already is not asked for twice.

    Fails at once, by name, for a member that nobody can do this for.
    """
    same = rows.first(conn, _open_of(member["id"]))
    if same is not None:
        return same
    id, whole = rows.ordered_id(), allocation["capacity_shape"] == CapacityShape.BAREMETAL
    task = _enqueue(conn, instance, allocation, kind, id, act) if whole else None
    operation = rows.add(
        conn,
        app_operations,
        {
            "id": id,
            "instance_id": instance["id"],
            "member_id": member["id"],
            "kind": kind.value,
            "status": OperationStatus.ACCEPTED.value,
            "deadline_at": lifecycle.limit("app_operation", OperationStatus.ACCEPTED),
            "task_id": task["id"] if task else None,
            "requested_by": act.actor,
            "correlation_id": act.correlation_id,
        },
    )
    lifecycle.begin(conn, "app_operation", operation, act)
    if not whole:
        _fail(conn, operation, act, _GUEST)
        operation = rows.get(conn, app_operations, id, "app_operation")
    return operation


def every(conn: sa.Connection, instance_id: str, page: Page | None = None) -> list[Record]:
    """What was ever done with the instance's members, in order."""
    query = sa.select(app_operations).where(app_operations.c.instance_id == instance_id)
    return rows.every(conn, part(query, OPERATIONS, page))


def begun(conn: sa.Connection, operation_id: str, act: Act) -> str:
    """Its run starts now; answers why nobody wants that any more, and then changes nothing."""
    operation, member, instance = held(conn, operation_id)
    allocation = rows.get(conn, allocations, member["allocation_id"], "allocation")
    removes = operation["kind"] == OperationKind.BOOTSTRAP_SSH_REMOVE
    if operation["status"] not in OPEN:
        return f"operation {operation['status']}"
    if allocation["state"] != AllocationState.ACTIVE:
        return f"allocation {allocation['state']}: its account goes with all its keys"
    if not removes and instance["status"] in ENDED:
        return f"its app instance {instance['status']}"
    if operation["status"] == OperationStatus.ACCEPTED:
        advance(conn, "app_operation", operation_id, "begin", act, held=operation)
    return ""


def done(conn: sa.Connection, operation_id: str, act: Act, *, expires_at: float | None) -> bool:
    """The host says so; expires_at: of the key that it has now, None when it has none."""
    operation, member, _ = held(conn, operation_id)
    if operation["status"] != OperationStatus.RUNNING:
        return False
    over = {"finished_at": clock.now()}
    advance(conn, "app_operation", operation_id, "succeed", act, columns=over, held=operation)
    _set(conn, member, key_expires_at=expires_at)
    return True


def failed(conn: sa.Connection, operation_id: str, act: Act, error: Mapping[str, Any]) -> bool:
    """It was not done. A member that has a key already keeps its place until that one ends."""
    operation, _, _ = held(conn, operation_id)
    if operation["status"] not in OPEN:
        return False
    _fail(conn, operation, act, error)
    return True


def leave(conn: sa.Connection, member: Record) -> None:
    """From now on the allocation is free for another application."""
    _set(conn, member, left_at=clock.now())


def left(conn: sa.Connection, instance: Record, member: Record, act: Act) -> None:
    """Its allocation has ended: it cannot come back, and no instance lives without its controller.

    Its key is gone with the account that had it.
    """
    own = act.because("allocation_ended", {"allocation_id": member["allocation_id"]})
    if member["status"] != MemberStatus.FAILED:
        advance(conn, "app_member", member["id"], "fail", own)
    _set(conn, member, left_at=clock.now(), key_expires_at=None)
    living = instance["status"] in (AppStatus.DEPLOYING, AppStatus.RUNNING)
    if living and member["role"] == MemberRole.CONTROLLER:
        ended = {"ended_at": clock.now()}
        advance(conn, "app_instance", instance["id"], "fail", own, columns=ended)


def withdraw(conn: sa.Connection, member: Record, act: Act) -> None:
    """End what nobody has begun; what runs is left to end by itself."""
    for operation in rows.every(conn, _open_of(member["id"])):
        if operation["status"] != OperationStatus.ACCEPTED:
            continue
        error = {
            "code": "canceled",
            "expected": "an app instance that wants it",
            "found": "one that has ended",
            "remedy": "nothing to do: no run was started",
        }
        _fail(conn, operation, act, error)
        if operation["task_id"]:
            tasks.cancel(conn, operation["task_id"], act)


def held(conn: sa.Connection, operation_id: str) -> tuple[Record, Record, Record]:
    """Operation, member and instance, locked in the order in which everybody does it."""
    operation = rows.get(conn, app_operations, operation_id, "app_operation")
    instance, member = member_held(conn, operation["member_id"])
    operation = rows.get(conn, app_operations, operation_id, "app_operation", lock=True)
    return operation, member, instance


def member_held(conn: sa.Connection, member_id: str) -> tuple[Record, Record]:
    member = rows.get(conn, app_members, member_id, "app_member")
    key = member["instance_id"]
    instance = rows.get(conn, app_instances, key, "app_instance", lock=True)
    return instance, rows.get(conn, app_members, member_id, "app_member", lock=True)


def _enqueue(
    conn: sa.Connection,
    instance: Record,
    allocation: Record,
    kind: OperationKind,
    operation_id: str,
    act: Act,
) -> Record:
    removes = kind == OperationKind.BOOTSTRAP_SSH_REMOVE
    parameters = {
        "operation_id": operation_id,
        "allocation": {key: allocation[key] for key in ("id", "username")},
        "fence": baremetal.claim_of(conn, allocation["id"])["fence"],
        "managed_key": {
            "instance_id": instance["id"],
            "public_key": instance["managed_key"],
            "expires_at": int(clock.read(conn)) + KEY_S,
            "state": "absent" if removes else "present",
        },
    }
    item = tasks.Enqueue(
        kind=TaskKind.ALLOCATION_RECONCILE_MANAGED_AUTHORIZED_KEY,
        node_id=allocation["node_id"],
        # One at a time on an allocation, and none beside its release.
        subject_kind="allocation",
        subject_id=allocation["id"],
        allocation_id=allocation["id"],
        parameters=parameters,
        deadline_s=600,
    )
    return tasks.add(conn, item, act)


def _fail(conn: sa.Connection, operation: Record, act: Act, error: Mapping[str, Any]) -> None:
    names = ("code", "expected", "found", "remedy")
    failure = {name: str(error.get(name, "")) for name in names}
    own = act.because(failure["code"])
    columns = {"failure": failure, "finished_at": clock.now()}
    advance(conn, "app_operation", operation["id"], "fail", own, columns=columns)
    member = rows.get(conn, app_members, operation["member_id"], "app_member", lock=True)
    present = operation["kind"] != OperationKind.BOOTSTRAP_SSH_REMOVE
    if present and member["status"] == MemberStatus.RECONCILING and member["left_at"] is None:
        advance(conn, "app_member", member["id"], "fail", own, held=member)


def _open_of(member_id: str) -> sa.Select[Any]:
    query = sa.select(app_operations).where(
        app_operations.c.member_id == member_id, app_operations.c.status.in_(OPEN)
    )
    return query.order_by(app_operations.c.id)


def _set(conn: sa.Connection, member: Record, **values: Any) -> None:
    conn.execute(sa.update(app_members).where(app_members.c.id == member["id"]).values(values))

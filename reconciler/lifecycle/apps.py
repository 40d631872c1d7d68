"""Application instances on a project's allocations: create, read, reconcile and stop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from reconciler.db import clock, journal, rows
from reconciler.db.journal import advance
from reconciler.db.rows import Order, Page, Record, part
from reconciler.db.schema import (
    Allocation,
    AppInstance,
    AppMember,
    AppOperation,
    allocations,
    app_instances,
    app_members,
    nodes,
)
from reconciler.lifecycle import app_operations, quota
from reconciler.model.act import Act
from reconciler.model.errors import Problem
from reconciler.model.states import (
    LIVE_ALLOCATIONS,
    AllocationState,
    AppStatus,
    MemberRole,
    MemberStatus,
    OperationKind,
)
from reconciler.records import projects

INSTANCES = Order(app_instances, ("created_at", "id"), descending=True)
MEMBERS = Order(app_members, ("created_at", "id"))
MACHINES = Order(allocations, ("created_at", "id"), descending=True)


@dataclass(frozen=True, kw_only=True)
class NewApp:
    """A request whose form the API has checked. managed_key: type and base64, nothing else."""

    project_id: str
    slug: str
    name: str
    managed_key: str
    controller_id: str
    worker_ids: Sequence[str] = ()


def create(conn: sa.Connection, wish: NewApp, act: Act) -> AppInstance:
    """Create an instance on existing allocations, and queue the preparation of each member."""
    projects.get(conn, wish.project_id)
    _require_new_name(conn, wish)
    quota.require_operations(conn, wish.project_id)
    ids = [wish.controller_id, *wish.worker_ids]
    if len(set(ids)) < len(ids):
        raise Problem(
            "app_member_repeated",
            422,
            expected="each allocation once, as controller or as worker",
            found=", ".join(sorted({key for key in ids if ids.count(key) > 1})),
            remedy="name every allocation once",
        )
    # Lock in a fixed order, so that two requests for the same allocations do not deadlock.
    held = {key: _usable(conn, wish.project_id, key) for key in sorted(ids)}
    instance = journal.create(
        conn,
        AppInstance,
        act,
        project_id=wish.project_id,
        slug=wish.slug,
        name=wish.name,
        managed_key=wish.managed_key,
        status=AppStatus.DEPLOYING,
        status_reason=act.reason,
        requested_by=act.actor,
        correlation_id=act.correlation_id,
    )
    detail = {"slug": wish.slug, "allocations": ids}
    journal.audit_of(conn, act, "app_instance.created", instance, detail)
    for key in ids:
        role = MemberRole.CONTROLLER if key == wish.controller_id else MemberRole.WORKER
        member = journal.create(
            conn,
            AppMember,
            act,
            id=rows.ordered_id(),
            instance_id=instance.id,
            allocation_id=key,
            role=role.value,
            status=MemberStatus.RECONCILING,
        )
        app_operations.request(conn, instance, member, held[key], OperationKind.MEMBER_ADD, act)
    return instance


def get(conn: sa.Connection, project_id: str, id: str, *, lock: bool = False) -> AppInstance:
    """The project's instance with this id. An instance of another project is not found."""
    return rows.of_project(conn, AppInstance, project_id, id, lock=lock)


def every(conn: sa.Connection, project_id: str, page: Page | None = None) -> list[AppInstance]:
    """The project's instances, newest first."""
    query = sa.select(app_instances).where(app_instances.c.project_id == project_id)
    return rows.every(conn, part(query, INSTANCES, page), AppInstance)


def members(conn: sa.Connection, instance_id: str, page: Page | None = None) -> list[Record]:
    """The members, controller first, with columns of the allocation and the node's address."""
    query = (
        sa.select(
            app_members,
            allocations.c.state.label("allocation_state"),
            allocations.c.capacity_shape,
            allocations.c.hostname,
            allocations.c.connection,
            nodes.c.address.label("transport_address"),
            (app_members.c.key_expires_at > clock.now()).label("key_good"),
        )
        .join(allocations, allocations.c.id == app_members.c.allocation_id)
        .join(nodes, nodes.c.id == allocations.c.node_id, isouter=True)
        .where(app_members.c.instance_id == instance_id)
    )
    return rows.every(conn, part(query, MEMBERS, page))


def machines(conn: sa.Connection, project_id: str, page: Page | None = None) -> list[Record]:
    """The project's machines that have not ended, newest first. app: the application on each."""
    query = (
        sa.select(
            *(allocations.c.id, allocations.c.hostname, allocations.c.state),
            *(allocations.c.created_at, app_instances.c.name.label("app")),
        )
        .join(app_members, _member_of(allocations.c.id), isouter=True)
        .join(app_instances, app_instances.c.id == app_members.c.instance_id, isouter=True)
        .where(
            allocations.c.project_id == project_id,
            allocations.c.state.in_(rows.literals(LIVE_ALLOCATIONS)),
        )
    )
    return rows.every(conn, part(query, MACHINES, page))


def refusal(id: str, state: str, app: str | None) -> Problem | None:
    """Why no application can use an allocation. app: the name of the one that does."""
    if state != AllocationState.ACTIVE:
        coming = state in (AllocationState.REQUESTED, AllocationState.PROVISIONING)
        return Problem(
            "allocation_not_active",
            expected=f"allocation {id} active",
            found=str(state),
            remedy="wait until it is active, or name another one" if coming else "name another one",
        )
    if app is not None:
        return Problem(
            "allocation_in_app",
            expected=f"allocation {id} in no application",
            found=f"a member of the application {app}",
            remedy="stop that application first, or name another allocation",
        )
    return None


def reconcile(conn: sa.Connection, project_id: str, id: str, act: Act) -> list[AppOperation]:
    """Put the managed key on every member again. Returns the operations."""
    instance = _living(conn, project_id, id)
    quota.require_operations(conn, project_id)
    journal.audit_of(conn, act, "app_instance.bootstrap_ssh_reconcile", instance)
    made = []
    for member in _present(conn, id):
        allocation = rows.get(conn, Allocation, member.allocation_id)
        if allocation.state != AllocationState.ACTIVE:
            app_operations.left(conn, instance, member, act)
            if member.role == MemberRole.CONTROLLER:
                break  # The instance has failed too and needs no keys.
            continue
        if member.status == MemberStatus.FAILED:
            advance(conn, AppMember, member.id, "reconcile", act)
        kind = OperationKind.BOOTSTRAP_SSH_RECONCILE
        made.append(app_operations.request(conn, instance, member, allocation, kind, act))
    return made


def stop(conn: sa.Connection, project_id: str, id: str, act: Act) -> AppInstance:
    """Stop an instance and remove its keys. Its allocations stay, free for other instances."""
    instance = get(conn, project_id, id, lock=True)
    now = {"ended_at": clock.now()}
    stopped = advance(conn, AppInstance, id, "stop", act, columns=now, held=instance)
    journal.audit_of(conn, act, "app_instance.stopped", instance)
    for member in _present(conn, id):
        app_operations.leave(conn, member, act)
    app_operations.REMOVE_KEYS(conn, act, app_members.c.instance_id == id)
    return stopped


def reported(
    conn: sa.Connection, member_id: str, detail: Mapping[str, Any], act: Act, *, ready: bool
) -> AppMember:
    """Store the controller's report on a member. When all members are ready, the app runs."""
    instance, member = app_operations.member_held(conn, member_id)
    columns = {"detail": dict(detail)}
    if not ready or member.status != MemberStatus.RECONCILING:
        update = sa.update(app_members).where(app_members.c.id == member_id)
        conn.execute(update.values(columns))
    else:
        advance(conn, AppMember, member_id, "prepare", act, columns=columns, held=member)
        all_ready = all(other.status == MemberStatus.READY for other in _present(conn, instance.id))
        if all_ready and instance.status == AppStatus.DEPLOYING:
            ready_act = act.because("every member is ready")
            advance(conn, AppInstance, instance.id, "run", ready_act, held=instance)
    return rows.get(conn, AppMember, member_id)


def waits_for(instance: AppInstance, present: Sequence[Record]) -> dict[str, str] | None:
    """Why a deploying instance does not run yet, by code. None in every other status."""
    if instance.status != AppStatus.DEPLOYING:
        return None
    for member in present:
        if member["status"] == MemberStatus.FAILED:
            why = f"{member['role']}: {member['status_reason']}"
            return {"code": "member_failed", "detail": why}
    for member in present:
        if not member["key_good"]:
            which = f"{member['role']} {member['allocation_id']}"
            return {"code": "bootstrap_ssh_pending", "detail": which}
    absent = f"no {instance.slug}-controller has registered"
    return {"code": "controller_absent", "detail": absent}


def _require_new_name(conn: sa.Connection, wish: NewApp) -> None:
    same = sa.select(app_instances).where(
        app_instances.c.project_id == wish.project_id,
        app_instances.c.name == wish.name,
        app_instances.c.status != AppStatus.STOPPED,
    )
    if rows.first(conn, same, AppInstance) is not None:
        raise Problem(
            "app_instance_exists",
            expected="a name that no instance of the project has",
            found=f"{wish.name!r}, the name of an instance that is not stopped",
            remedy="stop that instance, or use another name",
        )


def _usable(conn: sa.Connection, project_id: str, id: str) -> Allocation:
    """Lock and return the allocation. Raises a Problem when no application can use it."""
    allocation = rows.of_project(conn, Allocation, project_id, id, lock=True)
    query = sa.select(app_instances.c.name).join(app_members).where(_member_of(id))
    if problem := refusal(id, allocation.state, conn.scalar(query)):
        raise problem
    return allocation


def _member_of(id: str | sa.Column[str]) -> sa.ColumnElement[bool]:
    """Whether a row is of the allocation's membership that has not ended."""
    return sa.and_(app_members.c.allocation_id == id, app_members.c.left_at.is_(None))


def _present(conn: sa.Connection, instance_id: str) -> list[AppMember]:
    """The members that have not left, locked until the transaction ends."""
    query = sa.select(app_members).where(
        app_members.c.instance_id == instance_id, app_members.c.left_at.is_(None)
    )
    locked = part(query, MEMBERS, None).with_for_update(key_share=True)
    return rows.every(conn, locked, AppMember)


def _living(conn: sa.Connection, project_id: str, id: str) -> AppInstance:
    instance = get(conn, project_id, id, lock=True)
    if instance.status in app_operations.ENDED:
        raise Problem(
            "app_instance_ended",
            expected=f"app instance {id} deploying or running",
            found=str(instance.status),
            remedy="create another instance on active allocations",
        )
    return instance

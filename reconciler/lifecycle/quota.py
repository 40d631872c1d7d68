"""Quota of a project: the capacity that it may hold, and the rate of its launches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import sqlalchemy as sa

from reconciler.db import clock, journal, rows, settings
from reconciler.db.schema import (
    Allocation,
    Project,
    allocations,
    app_instances,
    app_operations,
    projects,
    tasks,
)
from reconciler.model.act import Act
from reconciler.model.errors import Problem
from reconciler.model.states import LIVE_ALLOCATIONS, AllocationState, CapacityShape, TaskKind
from reconciler.records.queue import OPEN

HOUR_S = 3_600
# Limits per hour.
HOURLY = ("launches_per_hour", "failures_per_hour")
Changes = Mapping[str, int | None]
# Rows that all members of a project together can add in an hour. People need a few.
KEYS_PER_HOUR, RULES_PER_HOUR = 60, 120
# The same of operations of its applications. Each request has one for every machine.
OPERATIONS_PER_HOUR = 1_000
_DEFAULTS = "default_quota"
# Limits of a site that has set none. They bound the slots that one project can keep off sale with
# launches that fail. How much a project may hold is for the site to say.
SHIPPED = {"open_requests": 4, "launches_per_hour": 20, "failures_per_hour": 3}
# Whether a launch of the project failed in the last hour.
_HAS_FAILED = sa.exists().where(
    allocations.c.project_id == projects.c.id,
    allocations.c.state == rows.literal(AllocationState.FAILED),
    allocations.c.created_at > clock.now() - HOUR_S,
)
_OPEN = (AllocationState.REQUESTED, AllocationState.PROVISIONING)
# Code of a launch that its tenant made fail: the image, keys or cloud-config of the tenant keep a
# guest from being reachable in time.
_TENANTS_OWN = "readiness_failed"
# Codes of a wipe that needs a person, because a tenant with root locked or reserved the disk.
_LEFT_BY_TENANT = ("disk_locked", "disk_reserved")


def change(conn: sa.Connection, id: str, limits: Mapping[str, int], act: Act) -> Project:
    """Replace the limits of a project. A limit that is left out is the site's."""
    before = rows.get(conn, Project, id, lock=True)
    if before.quota == limits:
        return before
    conn.execute(sa.update(projects).where(projects.c.id == id).values(quota=dict(limits)))
    detail = {"from": before.quota, "to": dict(limits)}
    journal.audit(conn, act, "admin.project.quota", "project", id, detail=detail, project_id=id)
    return rows.get(conn, Project, id)


def amend(conn: sa.Connection, id: str, changes: Changes, act: Act) -> Project:
    """Change some limits of a project; None removes a limit, so that the site's holds."""
    before = rows.get(conn, Project, id, lock=True)
    return change(conn, id, _amended(before.quota, changes), act)


def defaults(conn: sa.Connection) -> dict[str, int]:
    """The site's limits, which hold where a project has none."""
    return dict(settings.read(conn, _DEFAULTS, SHIPPED))


def change_defaults(conn: sa.Connection, limits: Changes, act: Act) -> None:
    """Replace the site's limits. A limit that is left out is as shipped; None is no limit."""
    settings.write(conn, _DEFAULTS, _amended(SHIPPED, limits), act)


def amend_defaults(conn: sa.Connection, changes: Changes, act: Act) -> None:
    """Change some of the site's limits; None removes a limit."""
    before = settings.read(conn, _DEFAULTS, SHIPPED, lock=True)
    if (after := _amended(before, changes)) != before:
        settings.write(conn, _DEFAULTS, after, act)


def _amended(limits: Mapping[str, int], changes: Changes) -> dict[str, int]:
    return {name: limit for name, limit in {**limits, **changes}.items() if limit is not None}


def limits(conn: sa.Connection, project: Project) -> dict[str, int]:
    """The limits that hold for a project."""
    return defaults(conn) | project.quota


def used(conn: sa.Connection, project_id: str) -> dict[str, int]:
    """Present use of each limit."""
    now = clock.read(conn)
    return _count(conn, _rows(conn, project_id, now), now)


def admit_action(conn: sa.Connection, project_id: str) -> None:
    """Problem `quota_exceeded` when a power action would pass the limit of open requests, because
    each keeps a worker until its guest answers. The caller has locked the project.
    """
    name = "open_requests"
    allowed = limits(conn, rows.get(conn, Project, project_id)).get(name)
    use = used(conn, project_id)[name]
    if allowed is not None and use + 1 > allowed:
        raise exceeded(name, use, 1, allowed, 0)


def admit(conn: sa.Connection, project_id: str, gpus: int) -> list[Allocation]:
    """Problem `quota_exceeded` or `rate_exceeded` when a launch would pass a limit of its project.

    Returns what the project holds and what it launched in the last hour; nothing for a project
    without limits none of whose launches failed in this time. Launches of a project of which
    something is returned wait for each other until their transactions end. Call this before a node
    or a slot is locked.
    """
    # In one statement, because a site without limits need not lock the project.
    query = sa.select(projects.c.quota, settings.column(_DEFAULTS), _HAS_FAILED).where(
        projects.c.id == project_id
    )
    if (row := conn.execute(query).one_or_none()) and row == ({}, {}, False):
        return []
    project = rows.get(conn, Project, project_id, lock=True)
    now = clock.read(conn)
    records = _rows(conn, project_id, now)
    use = _count(conn, records, now)
    for name, allowed in sorted(limits(conn, project).items()):
        if name not in use:  # A limit of jobs.
            continue
        count = gpus if name == "gpus" else 1
        if use[name] + count > allowed:
            raise exceeded(name, use[name], count, allowed, _wait_s(records, name, allowed, now))
    return records


def require_rate(conn: sa.Connection, project_id: str, table: sa.Table, allowed: int) -> None:
    """Problem `rate_exceeded` when a project has added as many rows within the hour."""
    _require_rate(conn, table, table.c.project_id == project_id, allowed)


def require_operations(conn: sa.Connection, project_id: str) -> None:
    """Problem `rate_exceeded` when the project's applications have had as many operations within
    the hour as they may.
    """
    mine = sa.select(app_instances.c.id).where(app_instances.c.project_id == project_id)
    theirs = app_operations.c.instance_id.in_(mine)
    _require_rate(conn, app_operations, theirs, OPERATIONS_PER_HOUR)


def _require_rate(
    conn: sa.Connection, table: sa.Table, which: sa.ColumnElement[bool], allowed: int
) -> None:
    now, at = clock.read(conn), table.c.created_at
    query = sa.select(at).where(which, at > now - HOUR_S)
    first = conn.execute(query.order_by(at.desc()).offset(allowed - 1).limit(1)).scalar()
    if first is not None:
        wait_s = max(1, int(first + HOUR_S - now) + 1)
        raise exceeded(f"{table.name} an hour", allowed, 1, allowed, wait_s)


def _rows(conn: sa.Connection, project_id: str, now: float) -> list[Allocation]:
    """Allocations that hold capacity, and those of the last hour, the oldest first."""
    of_project = allocations.c.project_id == project_id
    holds = allocations.c.state.in_(rows.literals(LIVE_ALLOCATIONS))
    # An index for each alternative, and a time as a value, because no index serves the clock: a
    # project may have had very many.
    query = sa.select(allocations).where(
        sa.or_(
            sa.and_(of_project, holds),
            sa.and_(of_project, allocations.c.created_at > now - HOUR_S),
        )
    )
    return rows.every(conn, query.order_by(allocations.c.created_at), Allocation)


def _count(conn: sa.Connection, records: list[Allocation], now: float) -> dict[str, int]:
    holding = [row for row in records if row.state in LIVE_ALLOCATIONS and not _stranded(row)]
    return {
        "gpus": sum(row.gpu_count for row in holding),
        "machines": len(holding),
        "open_requests": sum(row.state in _OPEN for row in records) + _actions(conn, records),
        **{name: len(_in_hour(records, name, now)) for name in HOURLY},
    }


def _stranded(row: Allocation) -> bool:
    """Whether the release of a slice waits for an operator, which is no use of its tenant unless
    that caused it: else machine after machine could be kept from others. The tenant of a whole
    machine is root, who can make any release fail.
    """
    failed = row.state == AllocationState.RELEASING and bool(row.error)
    whole = row.capacity_shape == CapacityShape.BAREMETAL
    return failed and not whole and row.error.get("code") not in _LEFT_BY_TENANT


def _actions(conn: sa.Connection, records: list[Allocation]) -> int:
    """Power actions under way that people have asked for; a host's boot asks for starts too."""
    ids = [row.id for row in records if row.power_action]
    if not ids:
        return 0
    query = sa.select(sa.func.count()).where(
        tasks.c.allocation_id.in_(ids),
        tasks.c.kind == TaskKind.SLICE_VM_POWER,
        tasks.c.state.in_(OPEN),
        ~tasks.c.requested_by.startswith("task:"),
    )
    return int(conn.execute(query).scalar_one())


def _in_hour(records: list[Allocation], name: str, now: float) -> list[Allocation]:
    recent = [row for row in records if row.created_at > now - HOUR_S]
    if name == HOURLY[0]:
        return recent
    return [row for row in recent if by_tenant(row)]


def by_tenant(allocation: Allocation) -> bool:
    """Whether a launch failed by its tenant's own doing."""
    failed = allocation.state == AllocationState.FAILED
    return failed and allocation.error.get("code") == _TENANTS_OWN


def _wait_s(records: list[Allocation], name: str, allowed: int, now: float) -> int:
    """Seconds until the hour holds few enough; 0 for a limit that time does not lift."""
    if name not in HOURLY or not allowed:
        return 0
    recent = _in_hour(records, name, now)
    return max(1, int(recent[-allowed].created_at + HOUR_S - now) + 1)


def exceeded(name: str, use: int, count: int, allowed: int, wait_s: int) -> Problem:
    detail: dict[str, Any] = {"limit": name, "used": use, "allowed": allowed}
    # A limit of 0 is lifted by people, not by time.
    rate = bool(wait_s)
    if rate:
        detail["retry_after_s"] = wait_s
    return Problem(
        "rate_exceeded" if rate else "quota_exceeded",
        429 if rate else 409,
        expected=f"at most {allowed} {name} of this project",
        found=str(use) if rate else f"{use}, and {count} more asked for",
        remedy=f"ask again after {wait_s} s"
        if wait_s
        else "wait until those have ended, or ask the operators for more"
        if name == "open_requests"
        else "release what is not needed, or ask the operators for more",
        detail=detail,
    )

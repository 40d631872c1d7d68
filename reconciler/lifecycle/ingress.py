"""Public ingress of slices: request, apply, expire and remove rules on their hosts.

A rule keeps its public port until the host is known not to forward any more: its own answer, the
proof that nothing of the allocation is left, or the retirement of a host that is gone. Lock order:
after allocation, node and slots (`db.locks`) the rules, then tasks.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import sqlalchemy as sa

from reconciler.db import clock, journal, rows
from reconciler.db.journal import advance
from reconciler.db.rows import Order, Page, part
from reconciler.db.schema import (
    Allocation,
    IngressRule,
    Task,
    allocations,
    ingress_rules,
    nodes,
    tasks,
)
from reconciler.lifecycle import quota
from reconciler.model.act import Act
from reconciler.model.errors import Problem, not_found
from reconciler.model.states import (
    ANSWERING_NODES,
    ENDED_ALLOCATIONS,
    LIVE_INGRESS,
    AllocationState,
    CapacityShape,
    IngressState,
    TaskKind,
)
from reconciler.records import queue

ORDER = Order(ingress_rules, ("created_at", "id"), descending=True)
# Longest life of a rule. A forgotten rule is an open door.
LONGEST_S = 90 * 86_400
# Live rules of an allocation.
MOST = 16
# Delay before a removal that failed is tried again.
RETRY_S = 60.0
# Fields of a rule as its host gets them.
_ON_HOST = ("id", "protocol", "public_address", "public_port", "guest_port", "sources")
_CURRENT = (IngressState.REQUESTED, IngressState.APPLIED)


@dataclass(frozen=True, kw_only=True)
class NewRule:
    """A request whose form the API has checked. sources: separate networks, sorted."""

    protocol: str
    public_address: str
    public_port: int
    guest_port: int
    sources: Sequence[str]
    expires_at: float


def request(
    conn: sa.Connection,
    project_id: str,
    allocation_id: str,
    wish: NewRule,
    act: Act,
    *,
    site: Collection[str],
) -> IngressRule:
    """Record a rule and queue its task. site: the addresses that the site keeps for ingress."""
    allocation = rows.of_project(conn, Allocation, project_id, allocation_id, lock=True)
    _require_slice(allocation)
    _require_address(conn, wish, site)
    _require_time(conn, wish)
    _require_free(conn, allocation_id, wish)
    quota.require_rate(conn, project_id, ingress_rules, quota.RULES_PER_HOUR)
    rule = journal.create(
        conn,
        IngressRule,
        act,
        allocation_id=allocation_id,
        project_id=project_id,
        **{**asdict(wish), "sources": list(wish.sources)},
        reason=act.reason,
        state=IngressState.REQUESTED,
        state_reason=act.why,
        requested_by=act.actor,
        correlation_id=act.correlation_id,
    )
    _audit(conn, rule, act)
    return _queue(conn, rule, allocation, act)


def get(conn: sa.Connection, project_id: str, allocation_id: str, id: str) -> IngressRule:
    """The rule of the project's allocation; a rule of another allocation is not found."""
    rows.of_project(conn, Allocation, project_id, allocation_id)
    rule = rows.get(conn, IngressRule, id)
    if rule.allocation_id != allocation_id:
        raise not_found("ingress_rule", id)
    return rule


def every(
    conn: sa.Connection, project_id: str, allocation_id: str, page: Page
) -> list[IngressRule]:
    """All rules of the project's allocation, the newest first."""
    rows.of_project(conn, Allocation, project_id, allocation_id)
    query = sa.select(ingress_rules).where(ingress_rules.c.allocation_id == allocation_id)
    return rows.every(conn, part(query, ORDER, page), IngressRule)


def remove(conn: sa.Connection, id: str, act: Act) -> IngressRule:
    """End a rule. If its task never began, it ends at once. An ended rule stays as it is."""
    rule = rows.get(conn, IngressRule, id)
    allocation = rows.get(conn, Allocation, rule.allocation_id, lock=True)
    rule = rows.get(conn, IngressRule, id, lock=True)
    if rule.state not in _CURRENT:
        return rule
    task = rows.get(conn, Task, rule.task_id, lock=True) if rule.task_id else None
    if rule.state == IngressState.REQUESTED and task and queue.never_ran(task):
        if task.state in queue.OPEN:
            queue.cancel(conn, task.id, act)
        return _end(conn, rule, "withdraw", act)
    rule = _advance(conn, rule, "remove", act)
    # The release of an allocation removes its rules itself.
    active = allocation.state == AllocationState.ACTIVE
    return _queue(conn, rule, allocation, act) if active else rule


def end_all(conn: sa.Connection, allocation_id: str, act: Act) -> None:
    """Begin the removal of all rules of an allocation that ends. Its release does the work."""
    for rule in _locked(conn, ingress_rules.c.allocation_id == allocation_id):
        if rule.state in _CURRENT:
            _advance(conn, rule, "remove", act)


def proven_absent(
    conn: sa.Connection, allocation_id: str, absence: Mapping[str, Any], act: Act
) -> None:
    """End the rules of an allocation of which the host has nothing left.

    A report without these checks is that of an older host, and proves nothing about rules.
    """
    checks = absence.get("checks") or {}
    looked = [checks.get(name) or {} for name in ("ingress", "ingress_file")]
    if all(check.get("absent") is True for check in looked):
        _end_all(conn, ingress_rules.c.allocation_id == allocation_id, act)


def given_up(conn: sa.Connection, node_id: str, act: Act) -> None:
    """End the rules on a host that an operator retires because it never comes back."""
    on_node = sa.select(allocations.c.id).where(allocations.c.node_id == node_id)
    _end_all(conn, ingress_rules.c.allocation_id.in_(on_node), act)


def began(conn: sa.Connection, rule_id: str, *, present: bool) -> str:
    """Why a task is obsolete before its run; "" if it is not."""
    rule = rows.get(conn, IngressRule, rule_id)
    allocation = rows.get(conn, Allocation, rule.allocation_id)
    if rule.state != (IngressState.REQUESTED if present else IngressState.REMOVING):
        return f"rule {rule.state}"
    active = allocation.state == AllocationState.ACTIVE
    if not active and (present or allocation.state not in ENDED_ALLOCATIONS):
        return f"allocation {allocation.state}: its end removes the rule"
    if present and rule.expires_at <= clock.read(conn):
        return "an expired rule"
    return ""


def reported(
    conn: sa.Connection, rule_id: str, act: Act, *, present: bool, in_force: Collection[str]
) -> None:
    """Record the host's answer to a task that succeeded. A late answer decides nothing."""
    rule = rows.get(conn, IngressRule, rule_id, lock=True)
    if present and rule.state == IngressState.REQUESTED and rule_id in in_force:
        _advance(conn, rule, "apply", act)
    elif not present and rule.state == IngressState.REMOVING and rule_id not in in_force:
        _end(conn, rule, "finish", act)


def failed(
    conn: sa.Connection, rule_id: str, act: Act, error: Mapping[str, str], *, forwards: bool
) -> None:
    """Record that a task failed. forwards: whether its host may forward; True if unknown.

    A removal that failed is tried again.
    """
    rule = rows.get(conn, IngressRule, rule_id, lock=True)
    if rule.state != IngressState.REQUESTED:
        return
    columns = {"failure": dict(error)}
    act = act.because(error["code"])
    if forwards:
        _advance(conn, rule, "remove", act, columns)
    else:
        _end(conn, rule, "fail", act, columns)


def due(conn: sa.Connection) -> list[str]:
    """Rules to follow up: expired rules, and rules that outlived their allocation or task."""
    active = allocations.c.state == AllocationState.ACTIVE
    # The release of an allocation removes its rules, unless it was forced to an end.
    removable = sa.and_(
        allocations.c.state.in_((AllocationState.ACTIVE, *ENDED_ALLOCATIONS)),
        nodes.c.state.in_(ANSWERING_NODES),
    )
    idle = sa.or_(tasks.c.id.is_(None), tasks.c.state.not_in(queue.OPEN))
    rested = sa.func.coalesce(tasks.c.finished_at, 0.0) < clock.now() - RETRY_S
    current = ingress_rules.c.state.in_(_CURRENT)
    query = (
        sa.select(ingress_rules.c.id)
        .join(allocations, allocations.c.id == ingress_rules.c.allocation_id)
        .join(nodes, nodes.c.id == allocations.c.node_id)
        .join(tasks, tasks.c.id == ingress_rules.c.task_id, isouter=True)
        .where(
            sa.or_(
                sa.and_(current, sa.or_(~active, ingress_rules.c.expires_at <= clock.now())),
                sa.and_(ingress_rules.c.state == IngressState.REQUESTED, idle),
                sa.and_(ingress_rules.c.state == IngressState.REMOVING, removable, idle, rested),
            )
        )
    )
    return list(conn.execute(query.order_by(ingress_rules.c.id)).scalars())


def follow_up(conn: sa.Connection, rule_id: str, act: Act) -> None:
    """End a rule that has expired or was left behind, or try its removal again."""
    rule = rows.get(conn, IngressRule, rule_id)
    if rule.state in _CURRENT:
        over = rule.expires_at <= clock.read(conn)
        remove(conn, rule_id, act.because("expired" if over else "its allocation or task ended"))
        return
    allocation = rows.get(conn, Allocation, rule.allocation_id, lock=True)
    rule = rows.get(conn, IngressRule, rule_id, lock=True)
    if rule.state == IngressState.REMOVING and allocation.state != AllocationState.RELEASING:
        _queue(conn, rule, allocation, act)


def expected(
    conn: sa.Connection, allocation_ids: Collection[str], since: float
) -> dict[str, tuple[tuple[str, ...], tuple[str, ...]]]:
    """By allocation, the rules that its host must have, and those that it may have.

    since: when the host was looked at. Rules that changed after it may be there or not.
    """
    query = sa.select(ingress_rules).where(
        ingress_rules.c.allocation_id.in_(allocation_ids),
        sa.or_(ingress_rules.c.state.in_(LIVE_INGRESS), ingress_rules.c.ended_at >= since),
    )
    rules = rows.every(conn, query.order_by(ingress_rules.c.id), IngressRule)
    # The host ends a rule at its expiry by itself.
    until = clock.read(conn) + RETRY_S
    by_allocation: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {}
    for rule in rules:
        must, may = by_allocation.get(rule.allocation_id, ((), ()))
        settled = rule.state == IngressState.APPLIED and rule.state_since < since
        in_time = rule.expires_at > until
        must = (*must, rule.id) if settled and in_time else must
        by_allocation[rule.allocation_id] = (must, (*may, rule.id))
    return by_allocation


def on_host(rule: IngressRule) -> dict[str, Any]:
    """The rule in the form of the run contract."""
    fields = {name: getattr(rule, name) for name in _ON_HOST}
    return {**fields, "expires_at": int(rule.expires_at)}


def _require_slice(allocation: Allocation) -> None:
    if allocation.capacity_shape != CapacityShape.GPU_SLICE:
        raise Problem(
            "ingress_needs_slice",
            expected="an allocation of a slice",
            found=f"shape {allocation.capacity_shape}",
            remedy="open the port on the machine itself: its tenant is root there",
        )
    if allocation.state != AllocationState.ACTIVE:
        raise Problem(
            "allocation_not_active",
            expected=f"allocation {allocation.id} active",
            found=str(allocation.state),
            remedy="wait until it is active, or name another one",
        )


def _require_address(conn: sa.Connection, wish: NewRule, site: Collection[str]) -> None:
    if not site:
        raise Problem(
            "ingress_off",
            expected="a site with addresses for public ingress",
            found="none",
            remedy="have an operator name them in GPUAAS_INGRESS_ADDRESSES",
        )
    if wish.public_address not in site:
        raise Problem(
            "ingress_address_unknown",
            422,
            expected=f"public_address one of {', '.join(sorted(site))}",
            found=wish.public_address,
            remedy="name an address that the site keeps for public ingress",
        )
    query = sa.select(nodes.c.id).where(nodes.c.address == wish.public_address)
    if rows.first(conn, query) is not None:
        raise Problem(
            "ingress_address_reserved",
            422,
            expected="a public_address by which no host is managed",
            found=f"{wish.public_address}, the management address of a host",
            remedy="name another address; an operator takes it out of GPUAAS_INGRESS_ADDRESSES",
        )


def _require_time(conn: sa.Connection, wish: NewRule) -> None:
    left_s = wish.expires_at - clock.read(conn)
    if not 0 < left_s <= LONGEST_S:
        raise Problem(
            "ingress_expiry_invalid",
            422,
            expected=f"expires_at in the future, at most {LONGEST_S // 86_400} days ahead",
            found=f"an end {left_s:.0f} seconds from now",
            remedy="choose an end in that time; a rule can be requested again",
        )


def _require_free(conn: sa.Connection, allocation_id: str, wish: NewRule) -> None:
    live = sa.select(ingress_rules.c.id).where(ingress_rules.c.state.in_(LIVE_INGRESS))
    same = live.where(
        ingress_rules.c.public_address == wish.public_address,
        ingress_rules.c.protocol == wish.protocol,
        ingress_rules.c.public_port == wish.public_port,
    )
    if rows.first(conn, same) is not None:
        raise Problem(
            "ingress_port_in_use",
            expected=f"{wish.public_address}:{wish.public_port} free",
            found="another rule, which is not removed",
            remedy="choose another public port, or wait until that rule is removed",
        )
    of_allocation = live.where(ingress_rules.c.allocation_id == allocation_id)
    if len(rows.every(conn, of_allocation)) >= MOST:
        raise Problem(
            "ingress_limit",
            expected=f"fewer than {MOST} rules of the allocation",
            found=str(MOST),
            remedy="remove a rule first",
        )


def _queue(conn: sa.Connection, rule: IngressRule, allocation: Allocation, act: Act) -> IngressRule:
    """Queue the task that brings the host to the rule's state."""
    present = rule.state == IngressState.REQUESTED
    item = queue.Enqueue(
        kind=TaskKind.SLICE_INGRESS_APPLY,
        node_id=allocation.node_id,
        # Its subject too: one task at a time for each allocation, and none during its release.
        allocation_id=allocation.id,
        parameters={"rule_id": rule.id, "state": "present" if present else "absent"},
        deadline_s=600,
    )
    task = queue.enqueue(conn, item, act)
    conn.execute(
        sa.update(ingress_rules).where(ingress_rules.c.id == rule.id).values(task_id=task.id)
    )
    return rows.get(conn, IngressRule, rule.id)


def _locked(conn: sa.Connection, which: sa.ColumnElement[bool]) -> list[IngressRule]:
    query = sa.select(ingress_rules).where(which, ingress_rules.c.state.in_(LIVE_INGRESS))
    return rows.every(conn, query.order_by(ingress_rules.c.id).with_for_update(), IngressRule)


def _end_all(conn: sa.Connection, which: sa.ColumnElement[bool], act: Act) -> None:
    for held in _locked(conn, which):
        rule = _advance(conn, held, "remove", act) if held.state in _CURRENT else held
        _end(conn, rule, "finish", act)


def _end(
    conn: sa.Connection,
    rule: IngressRule,
    event: str,
    act: Act,
    columns: Mapping[str, Any] | None = None,
) -> IngressRule:
    return _advance(conn, rule, event, act, {**(columns or {}), "ended_at": clock.now()})


def _advance(
    conn: sa.Connection,
    rule: IngressRule,
    event: str,
    act: Act,
    columns: Mapping[str, Any] | None = None,
) -> IngressRule:
    after = advance(conn, IngressRule, rule.id, event, act, columns=columns, held=rule)
    _audit(conn, after, act)
    return after


def _audit(conn: sa.Connection, rule: IngressRule, act: Act) -> None:
    detail = {"allocation_id": rule.allocation_id, **on_host(rule)}
    journal.audit_of(conn, act, f"ingress.{rule.state}", rule, detail)

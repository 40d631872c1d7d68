"""Journal: the function that changes lifecycle state, with history, outbox event and audit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, Generic, TypeVar

import sqlalchemy as sa
from sqlalchemy.sql.dml import ReturningUpdate

from reconciler.db import clock, rows
from reconciler.db.rows import Order, Page, part
from reconciler.db.schema import (
    Allocation,
    AppInstance,
    AppMember,
    AppOperation,
    AuditEntry,
    Claim,
    IngressRule,
    Node,
    Pool,
    RecoveryCase,
    Row,
    Slot,
    StateChange,
    Task,
    audit_log,
    history,
    outbox,
)
from reconciler.model import commands, transitions
from reconciler.model.act import Act
from reconciler.model.errors import Problem

R = TypeVar("R", bound=Row)


@dataclass(frozen=True)
class Entity(Generic[R]):
    """Table and columns that store the state of an entity. name: as the transition table has it."""

    name: str
    kind: type[R]
    state: str = "state"
    deadline: str = "deadline_at"

    @property
    def table(self) -> sa.Table:
        return self.kind.TABLE

    @property
    def computed(self) -> tuple[str, ...]:
        """Columns that the database computes from others."""
        return tuple(column.name for column in self.table.columns if column.computed is not None)


NODE_MODE = Entity("node_mode", Node, "mode", "mode_deadline_at")
# In the order in which deadlines are applied: a slot's before that of its allocation.
ENTITIES: dict[str, Entity[Any]] = {
    "node": Entity("node", Node),
    NODE_MODE.name: NODE_MODE,
    "slot": Entity("slot", Slot, "status"),
    "allocation": Entity("allocation", Allocation),
    "claim": Entity("claim", Claim),
    "task": Entity("task", Task),
    "app_instance": Entity("app_instance", AppInstance, "status"),
    "app_member": Entity("app_member", AppMember, "status"),
    "app_operation": Entity("app_operation", AppOperation, "status"),
    "recovery_case": Entity("recovery_case", RecoveryCase),
    "ingress_rule": Entity("ingress_rule", IngressRule),
    "pool": Entity("pool", Pool),
}


@dataclass(frozen=True)
class Overdue:
    """An entity past the deadline of its state. event: the event to apply, "" for a warning."""

    entity: str
    id: str
    state: str
    deadline_at: float
    event: str


def advance(
    conn: sa.Connection,
    of: type[R] | Entity[R],
    key: str,
    event: str,
    act: Act,
    *,
    expect_generation: int | None = None,
    columns: Mapping[str, Any] | None = None,
    held: R | None = None,
) -> R:
    """Apply an event, conditional on id, state and generation, and write history and outbox row.

    columns: set by the same update, so that they cannot disagree with the state. held: the whole
    row, if the caller's transaction has read and locked it already.
    """
    where: Entity[R] = of if isinstance(of, Entity) else ENTITIES[of.ENTITY]
    entity = where.name
    before = held or rows.get(conn, where.kind, key, lock=True)
    source = str(getattr(before, where.state))
    target = transitions.target(entity, source, event)
    if expect_generation is not None and expect_generation != before.generation:
        raise _outpaced(entity, key, expect_generation, before.generation)
    if target is None:
        raise _refused(entity, before, source, event)
    values = {
        where.state: str(target),
        f"{where.state}_reason": act.why,
        f"{where.state}_since": _NOW,
        where.deadline: limit(entity, target),
        "generation": before.generation + 1,
        **(columns or {}),
    }
    made = {name: value for name, value in values.items() if isinstance(value, sa.ClauseElement)}
    plain = {name: value for name, value in values.items() if name not in made}
    update = _update(entity, tuple(plain), tuple(made.items()))
    only = {"is_id": key, "is_state": source, "is_generation": before.generation}
    changed = conn.execute(update, plain | only).mappings().first()
    if changed is None:
        raise _outpaced(entity, key, before.generation, None)
    # The row was locked before, so its other columns are unchanged.
    after = where.kind(**{**vars(before), **plain, **changed})
    _write_change(conn, entity, after, act, change=(source, event, target))
    return after


def create(conn: sa.Connection, kind: type[R], act: Act, /, **values: Any) -> R:
    """Insert a row in its first state and write history and outbox row. The id is random unless it
    is given, the deadline is that of the state.
    """
    where = ENTITIES[kind.ENTITY]
    state = str(values[where.state])
    first = {"id": rows.new_id(), where.deadline: limit(where.name, state)}
    record = rows.add(conn, kind, {**first, **values, where.state: state})
    _write_change(conn, where.name, record, act, change=("", "create", state))
    return record


def remark(conn: sa.Connection, entity: str, record: Row, act: Act, event: str) -> None:
    """Write history and outbox row for a change of a row that leaves its state unchanged."""
    state = str(getattr(record, ENTITIES[entity].state))
    _write_change(conn, entity, record, act, change=(state, event, state))


@cache
def limit(entity: str, state: str) -> Any:
    """Deadline of a row that enters this state now: an SQL expression or None."""
    deadline = transitions.DEADLINES.get((entity, state))
    return clock.now() + deadline.seconds if deadline else None


def overdue(conn: sa.Connection) -> list[Overdue]:
    """Every entity past its deadline, by the database's clock."""
    late = []
    for entity, where in ENTITIES.items():
        state, deadline = where.table.c[where.state], where.table.c[where.deadline]
        query = sa.select(where.table.c.id, state, deadline).where(deadline < clock.now())
        for key, value, at in conn.execute(query.order_by(deadline)):
            rule = transitions.DEADLINES.get((entity, value))
            late.append(Overdue(entity, key, value, at, rule.event if rule else ""))
    return late


_NOW = clock.now()


@lru_cache(maxsize=256)
def _update(
    entity: str, plain: tuple[str, ...], made: tuple[tuple[str, sa.ColumnElement[Any]], ...]
) -> ReturningUpdate[Any]:
    # Built once with named parameters, because building a statement takes longer than running it.
    where = ENTITIES[entity]
    update = sa.update(where.table).where(
        where.table.c.id == sa.bindparam("is_id"),
        where.table.c[where.state] == sa.bindparam("is_state"),
        where.table.c.generation == sa.bindparam("is_generation"),
    )
    values: dict[str, Any] = {name: sa.bindparam(name) for name in plain}
    returned = (*(name for name, _ in made), *where.computed)
    return update.values(values | dict(made)).returning(*(where.table.c[name] for name in returned))


def _write_change(
    conn: sa.Connection, entity: str, record: Row, act: Act, *, change: tuple[str, str, str]
) -> None:
    """Write history and outbox row. change: source, event and target."""
    source, event, target = change
    write_history(conn, entity, record, act, source=source, event=event, target=target)
    payload = {
        "id": record.id,
        "from": source,
        "event": event,
        "to": target,
        "generation": record.generation,
        "actor": act.actor,
        "reason": act.why,
    }
    for name in ("allocation_id", "slot_id", "kind", "subject_kind", "subject_id"):
        if value := getattr(record, name, None):
            payload[name] = value
    emit(
        conn,
        f"{entity}.{target}",
        entity,
        record.id,
        payload=payload,
        node_id=record.id if entity.startswith("node") else getattr(record, "node_id", "") or "",
        project_id=getattr(record, "project_id", "") or "",
        correlation_id=act.correlation_id,
    )


def _refused(entity: str, record: Row, source: str, event: str) -> Problem:
    fields = vars(record)
    can = " or ".join(f"`{command}`" for command in commands.commands(entity, fields, source))
    states = " or ".join(commands.sources(entity, event)) or "no state at all"
    return Problem(
        "transition_refused",
        expected=f"{entity} {record.id} in {states}, for {commands.named(entity, fields, event)}",
        found=f"{source}; what can be asked for there: {can}" if can else source,
        remedy=commands.remedy(entity, fields, source, event),
        detail={"entity": entity, "id": record.id, "state": source},
    )


def _outpaced(entity: str, key: str, expected: int, found: int | None) -> Problem:
    return Problem(
        "generation_conflict",
        expected=f"{entity} {key} at generation {expected}",
        found="a later one" if found is None else f"generation {found}",
        remedy=f"read the {entity} again and decide anew",
    )


HISTORY_ORDER = Order(history, ("id",), descending=True)


def write_history(
    conn: sa.Connection, entity: str, record: Row, act: Act, *, source: str, event: str, target: str
) -> None:
    """Write a history row with the actor, the reason and the evidence of a change."""
    key = str(record.id)
    rows.insert(
        conn,
        history,
        {
            "entity": entity,
            "entity_id": key,
            "source": source,
            "event": event,
            "target": target,
            "generation": record.generation,
            "actor": act.actor,
            "reason": act.why,
            "evidence": dict(act.evidence),
            "correlation_id": act.correlation_id,
            "node_id": key if entity.startswith("node") else getattr(record, "node_id", "") or "",
            "allocation_id": key
            if entity == "allocation"
            else getattr(record, "allocation_id", "") or act.evidence.get("allocation_id") or "",
        },
    )


# Rows of the same health that an entity may add to its history, and in how many seconds. Reports
# of hosts and states of guests decide it, and history is kept for ever.
HEALTH_ROWS = ((12, 86_400.0), (60, 30 * 86_400.0))


def write_health(
    conn: sa.Connection, entity: str, record: Row, act: Act, *, source: str, target: str
) -> None:
    """Write a history row of a health that a host's reports show, unless they change too often."""
    mine = sa.select(history.c.at).where(
        history.c.entity == entity,
        history.c.entity_id == str(record.id),
        history.c.target == target,
    )
    longest = max(most for most, _ in HEALTH_ROWS)
    times = conn.execute(mine.order_by(history.c.id.desc()).limit(longest)).scalars().all()
    now = clock.read(conn)
    left = min(most - sum(at > now - seconds for at in times) for most, seconds in HEALTH_ROWS)
    if left == 1:
        act = act.because(f"{act.reason}; the next of this kind may be left out")
    if left > 0:
        write_history(conn, entity, record, act, source=source, event="observe", target=target)


def history_of(
    conn: sa.Connection, entity: str, key: str, page: Page | None = None
) -> list[StateChange]:
    """State changes of an entity: a page with the newest first, or all with the oldest first."""
    query = sa.select(history).where(history.c.entity == entity, history.c.entity_id == key)
    order = query.order_by(history.c.id) if page is None else part(query, HISTORY_ORDER, page)
    return rows.every(conn, order, StateChange)


def emit(
    conn: sa.Connection,
    topic: str,
    subject_kind: str,
    subject_id: str,
    *,
    payload: Mapping[str, Any],
    node_id: str = "",
    project_id: str = "",
    correlation_id: str = "",
) -> None:
    """Publish an event if this transaction commits, and only then."""
    rows.insert(
        conn,
        outbox,
        {
            "topic": topic,
            "subject_kind": subject_kind,
            "subject_id": subject_id,
            "node_id": node_id,
            "project_id": project_id,
            "payload": dict(payload),
            "correlation_id": correlation_id,
        },
    )


AUDIT_ORDER = Order(audit_log, ("id",), descending=True)


def audit(
    conn: sa.Connection,
    act: Act,
    action: str,
    subject_kind: str,
    subject_id: str,
    *,
    detail: Mapping[str, Any] | None = None,
    project_id: str = "",
) -> None:
    """Write an audit row in the transaction of the audited change."""
    rows.insert(
        conn,
        audit_log,
        {
            "actor": act.actor,
            "role": act.role,
            "action": action,
            "subject_kind": subject_kind,
            "subject_id": subject_id,
            "project_id": project_id,
            "reason": act.why,
            "detail": dict(detail or {}),
            "correlation_id": act.correlation_id,
        },
    )


def audit_of(
    conn: sa.Connection, act: Act, action: str, record: Row, detail: Mapping[str, Any] | None = None
) -> None:
    """Write an audit row about a record that belongs to a project, or may."""
    project_id = getattr(record, "project_id", None) or ""
    audit(conn, act, action, record.ENTITY, record.id, detail=detail, project_id=project_id)


def audit_rows(
    conn: sa.Connection,
    *,
    action: str | None = None,
    subject_id: str | None = None,
    correlation_id: str | None = None,
    page: Page | None = None,
) -> list[AuditEntry]:
    """Audit rows, newest first."""
    query = rows.where(
        sa.select(audit_log),
        audit_log,
        action=action,
        subject_id=subject_id,
        correlation_id=correlation_id,
    )
    return rows.every(conn, part(query, AUDIT_ORDER, page), AuditEntry)

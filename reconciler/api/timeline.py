"""Timelines of nodes, allocations and requests, and the audit log."""

from __future__ import annotations

from functools import partial
from typing import Literal

from fastapi import APIRouter
from pydantic import RootModel
from sqlalchemy import Connection

from reconciler.api.http import PageOf, Paging
from reconciler.api.models import Answer, Document, Filter, Id, Moment, Record
from reconciler.api.security import Admin
from reconciler.db import journal
from reconciler.db.rows import Page
from reconciler.records import allocations, nodes, timeline

router = APIRouter(prefix="/admin", tags=["timeline"])
audit_router = APIRouter(prefix="/admin/audit", tags=["audit"])


class Change(Answer):
    """One change of state: actor, reason and evidence."""

    id: int
    at: Moment
    entity: str
    entity_id: str
    source: str
    event: str
    target: str
    generation: int
    actor: str
    reason: str
    evidence: Document
    correlation_id: str
    node_id: str
    allocation_id: str


class StateStep(Change):
    """A change of state in a timeline."""

    type: Literal["state"]


class ProgressStep(Answer):
    """The progress of a task in a timeline."""

    id: int
    task_id: str
    at: Moment
    document: Document
    type: Literal["progress"]
    kind: str


class TimelineProgress(ProgressStep):
    """The progress of a task, with its node and allocation."""

    node_id: str
    allocation_id: str | None


class AuditEntry(Answer):
    """An administrative action with actor and reason."""

    id: int
    at: Moment
    actor: str
    role: str
    action: str
    subject_kind: str
    subject_id: str
    project_id: str
    reason: str
    detail: Document
    correlation_id: str


class TimelineAct(AuditEntry):
    """An administrative action in a timeline."""

    type: Literal["audit"]


class TimelineEntry(RootModel[StateStep | TimelineProgress | TimelineAct]):
    """A change of state, the progress of a task, or an administrative action."""


@router.get("/nodes/{node_id}/timeline")
def of_node(node_id: Id, context: Admin, paging: Paging) -> PageOf[TimelineEntry]:
    """Everything that happened on the node, the newest first."""

    def rows(conn: Connection, page: Page) -> list[Record]:
        nodes.get(conn, node_id)
        return timeline.of(conn, node_id=node_id, page=page)

    return context.page(paging, timeline.ORDER, rows, TimelineEntry.model_validate)


@router.get("/allocations/{allocation_id}/timeline")
def of_allocation(allocation_id: Id, context: Admin, paging: Paging) -> PageOf[TimelineEntry]:
    """Changes of the allocation, its claims, slots and tasks, and the progress of its tasks, the
    newest first.
    """

    def rows(conn: Connection, page: Page) -> list[Record]:
        allocations.get(conn, allocation_id)
        return timeline.of(conn, allocation_id=allocation_id, page=page)

    return context.page(paging, timeline.ORDER, rows, TimelineEntry.model_validate)


@router.get("/correlations/{correlation_id}/timeline")
def of_correlation(correlation_id: Id, context: Admin, paging: Paging) -> PageOf[TimelineEntry]:
    """Everything that followed from the request with this X-Correlation-Id, the newest first:
    changes of allocations, claims, slots and tasks, progress of tasks, and the audit log. The list
    is empty for an unknown id.
    """
    rows = partial(timeline.of, correlation_id=correlation_id)
    return context.page(paging, timeline.ORDER, rows, TimelineEntry.model_validate)


@audit_router.get("")
def list_audit(
    context: Admin,
    paging: Paging,
    action: Filter = None,
    subject_id: Filter = None,
    correlation_id: Filter = None,
) -> PageOf[AuditEntry]:
    """Administrative actions with actor and reason, the newest first."""
    rows = partial(
        journal.audit_rows, action=action, subject_id=subject_id, correlation_id=correlation_id
    )
    return context.page(paging, journal.AUDIT_ORDER, rows, AuditEntry.of)

"""Every table. What a table says here, a migration must say too; a test compares them."""

from reconciler.store.tables.access import (
    api_tokens,
    enrolment_tokens,
    idempotency_keys,
    node_certificates,
    projects,
    settings,
)
from reconciler.store.tables.apps import instances as app_instances
from reconciler.store.tables.apps import members as app_members
from reconciler.store.tables.apps import operations as app_operations
from reconciler.store.tables.base import metadata
from reconciler.store.tables.billing import usage
from reconciler.store.tables.capacity import allocations, claims, images, proofs, slots
from reconciler.store.tables.evidence import absences, baselines, discoveries, parities
from reconciler.store.tables.nodes import nodes
from reconciler.store.tables.record import audit_log, history, outbox
from reconciler.store.tables.service import leaders, service_processes
from reconciler.store.tables.work import task_events, tasks

__all__ = [
    "absences",
    "allocations",
    "api_tokens",
    "app_instances",
    "app_members",
    "app_operations",
    "audit_log",
    "baselines",
    "claims",
    "discoveries",
    "enrolment_tokens",
    "history",
    "idempotency_keys",
    "images",
    "leaders",
    "metadata",
    "node_certificates",
    "nodes",
    "outbox",
    "parities",
    "projects",
    "proofs",
    "service_processes",
    "settings",
    "slots",
    "task_events",
    "tasks",
    "usage",
]

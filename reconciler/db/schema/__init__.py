"""Every table. What a table says here, a migration must say too; a test compares them."""

from reconciler.db.schema.access import (
    api_tokens,
    enrolment_tokens,
    idempotency_keys,
    node_certificates,
    projects,
    settings,
)
from reconciler.db.schema.apps import instances as app_instances
from reconciler.db.schema.apps import members as app_members
from reconciler.db.schema.apps import operations as app_operations
from reconciler.db.schema.base import metadata
from reconciler.db.schema.billing import usage
from reconciler.db.schema.capacity import allocations, claims, images, proofs, slots
from reconciler.db.schema.evidence import absences, baselines, discoveries, parities
from reconciler.db.schema.nodes import nodes
from reconciler.db.schema.record import audit_log, history, outbox
from reconciler.db.schema.recovery import recovery_cases
from reconciler.db.schema.service import leaders, service_processes
from reconciler.db.schema.work import task_events, tasks

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
    "recovery_cases",
    "service_processes",
    "settings",
    "slots",
    "task_events",
    "tasks",
    "usage",
]

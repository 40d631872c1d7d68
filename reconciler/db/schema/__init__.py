"""Every table. What a table says here, a migration must say too; a test compares them."""

from reconciler.db.schema.access import (
    ApiToken,
    EnrolmentToken,
    NodeCertificate,
    Project,
    api_tokens,
    enrolment_tokens,
    idempotency_keys,
    node_certificates,
    projects,
    settings,
)
from reconciler.db.schema.apps import AppInstance, AppMember, AppOperation
from reconciler.db.schema.apps import instances as app_instances
from reconciler.db.schema.apps import members as app_members
from reconciler.db.schema.apps import operations as app_operations
from reconciler.db.schema.base import Row, metadata
from reconciler.db.schema.billing import Usage, usage
from reconciler.db.schema.capacity import (
    Allocation,
    Claim,
    Image,
    Proof,
    Slot,
    allocations,
    claims,
    images,
    proofs,
    slots,
)
from reconciler.db.schema.evidence import (
    Absence,
    Baseline,
    Discovery,
    Parity,
    absences,
    baselines,
    discoveries,
    parities,
)
from reconciler.db.schema.nodes import Node, nodes
from reconciler.db.schema.record import (
    AuditEntry,
    OutboxEvent,
    StateChange,
    audit_log,
    history,
    outbox,
)
from reconciler.db.schema.recovery import RecoveryCase, recovery_cases
from reconciler.db.schema.service import leaders, service_processes
from reconciler.db.schema.work import Task, TaskEvent, task_events, tasks

__all__ = [
    "Absence",
    "Allocation",
    "ApiToken",
    "AppInstance",
    "AppMember",
    "AppOperation",
    "AuditEntry",
    "Baseline",
    "Claim",
    "Discovery",
    "EnrolmentToken",
    "Image",
    "Node",
    "NodeCertificate",
    "OutboxEvent",
    "Parity",
    "Project",
    "Proof",
    "RecoveryCase",
    "Row",
    "Slot",
    "StateChange",
    "Task",
    "TaskEvent",
    "Usage",
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

"""Every document that the API answers with, by the name that the contract gives it."""

from __future__ import annotations

from typing import Any

from reconciler.api import appview, shapes
from reconciler.api.codes import CODES
from reconciler.api.shapes import Schema, array, closed, nullable, page, record, ref
from reconciler.db import schema as tables
from reconciler.model import states
from reconciler.model.recovery import Move
from reconciler.model.states import Described
from reconciler.records import leasing

_TEXT: Schema = {"type": "string"}
_WHOLE: Schema = {"type": "integer"}
_FLAG: Schema = {"type": "boolean"}
_OBJECT: Schema = {"type": "object"}
_MAYBE_MOMENT: Schema = {"type": ["string", "null"], "format": "date-time"}
_MAYBE_CURSOR: Schema = {
    "type": ["string", "null"],
    "description": "The `cursor` at which the list of all goes on behind these; null at its end.",
}
_WORDS: Schema = {"type": "object", "additionalProperties": {"type": "string"}}


def _const(value: str) -> Schema:
    return {"const": value}


_ENUMS: dict[str, Schema] = {
    name: shapes.states(kind)
    for name, kind in vars(states).items()
    if isinstance(kind, type) and issubclass(kind, Described) and kind is not Described
}

_RECORDS: dict[str, Schema] = {
    "Node": record(tables.nodes, "The record of a machine."),
    "ListedNode": record(tables.nodes, certificate_valid_until=_MAYBE_MOMENT),
    "NodeDetail": record(
        tables.nodes,
        certificate_valid_until=_MAYBE_MOMENT,
        certificates=array(ref("HostCertificate")),
    ),
    "HostCertificate": record(tables.node_certificates, "A certificate of the host's SSH key."),
    "Slot": record(tables.slots, "What may be sold of a node: one bundle of its devices."),
    "ListedSlot": record(tables.slots, slot_id=_TEXT, last_proof=nullable(ref("Proof"))),
    "SlotDetail": record(
        tables.slots,
        gate=array(ref("Blocker")),
        history=array(ref("Change")),
        history_next=_MAYBE_CURSOR,
        proofs=array(ref("Proof")),
        proofs_next=_MAYBE_CURSOR,
    ),
    "Slots": closed({"items": array(ref("ListedSlot"))}),
    "Proof": record(tables.proofs, "Why a disk counts as clean."),
    "Blocker": closed({"code": _TEXT, "detail": _TEXT}, "What keeps something from being sold."),
    "Change": record(tables.history, "One change of state: who, why, on what evidence."),
    "Image": record(tables.images, "An image; its digest is that of the raw bytes."),
    "Project": record(tables.projects, "Whose allocations they are."),
    "Allocation": record(tables.allocations, "What a tenant asked for, as operators see it."),
    "AllocationDetail": record(
        tables.allocations,
        "Shape, claims, tasks, and all that happened, in order.",
        claims=array(ref("Claim")),
        task_ids=array(_TEXT),
        tasks=array(ref("Task")),
        timeline=array({"anyOf": [ref("StateStep"), ref("ProgressStep")]}),
    ),
    "Claim": record(tables.claims, "What an allocation holds, as it was when it was claimed."),
    "StateStep": record(tables.history, type=_const("state")),
    "ProgressStep": record(tables.task_events, type=_const("progress"), kind=_TEXT),
    "Task": record(tables.tasks, "One piece of work on one node."),
    "ListedTask": record(tables.tasks, waits_for=nullable(ref("WaitsFor"))),
    "TaskDetail": record(
        tables.tasks,
        waits_for=nullable(ref("WaitsFor")),
        events=array(ref("TaskEvent")),
        output=_TEXT,
    ),
    "TaskOutput": closed({"task_id": _TEXT, "here": _FLAG, "output": _TEXT}),
    "WaitsFor": {
        "type": "object",
        "description": "What keeps a task from beginning.",
        "required": ["code", "detail"],
        "properties": {
            "code": {
                "enum": [
                    "host_unreachable",
                    "host_certificate_expired",
                    *leasing.CONTROLLER_CODES,
                    "later",
                    "node_busy",
                    "exclusive_first",
                    "worker",
                ]
            },
            "detail": _TEXT,
            "task_id": _TEXT,
            "attempts": _WHOLE,
            "unreachable_since": nullable({"type": "string", "format": "date-time"}),
            "not_before": nullable({"type": "string", "format": "date-time"}),
        },
        "additionalProperties": False,
    },
    "TimelineEntry": {
        "anyOf": [ref("StateStep"), ref("TimelineProgress"), ref("TimelineAct")],
    },
    "TimelineProgress": record(
        tables.task_events,
        type=_const("progress"),
        kind=_TEXT,
        node_id=_TEXT,
        allocation_id={"type": ["string", "null"]},
    ),
    "TimelineAct": record(tables.audit_log, type=_const("audit")),
    "TaskEvent": record(tables.task_events, "How far a task was at a time."),
    "AuditEntry": record(tables.audit_log, "Who used which power, and why."),
    "Token": record(tables.api_tokens, "A token without its secret."),
    "IssuedToken": record(tables.api_tokens, token=_TEXT),
    "IssuedEnrolment": record(tables.enrolment_tokens, token=_TEXT, userdata=_TEXT),
    "Discovery": record(tables.discoveries, task=nullable(ref("Task"))),
    "Parity": record(tables.parities, task=nullable(ref("Task"))),
}

_COUNTS: Schema = {
    "type": "object",
    "description": "Slots by the code of the reason why they are not free.",
    "additionalProperties": _WHOLE,
}
_SCORE = (
    "clean", "numa_nodes", "switches", "left", "odd", "odd_near",
)  # fmt: skip
_PLACEMENT: dict[str, Schema] = {
    "PlacementJudgement": closed(
        {
            "placement": nullable(
                closed(
                    {
                        "node_id": _TEXT,
                        "slot_ids": array(_TEXT),
                        "score": closed(
                            {
                                **dict.fromkeys(_SCORE, _WHOLE),
                                "node_id": _TEXT,
                                "indexes": array(_WHOLE),
                            },
                            "Compared from the left; the lowest wins.",
                        ),
                    }
                )
            ),
            "explanation": ref("Explanation"),
        }
    ),
    "Explanation": closed(
        {
            "summary": _TEXT,
            **dict.fromkeys(("wanted", "free", "largest", "slots"), _WHOLE),
            "reasons": _COUNTS,
            "nearest": array(closed({"gpus": _WHOLE, "region": _TEXT, "pool": _TEXT})),
            "nodes": array(
                closed(
                    {
                        "node_id": _TEXT,
                        **dict.fromkeys(("slots", "free", "largest"), _WHOLE),
                        "reasons": _COUNTS,
                    }
                )
            ),
            "nodes_not_told": _WHOLE,
        },
        "Every slot is counted once: free, or under one reason; the nearest nodes are told.",
    ),
    "RecoveryPolicy": closed(
        {
            "enabled": _FLAG,
            "per_node": _WHOLE,
            "per_hour": _WHOLE,
            "remove_leftovers": _FLAG,
            "cases": array(
                closed(
                    {
                        "allocation_id": _TEXT,
                        "node_id": _TEXT,
                        "slot_ids": array(_TEXT),
                        "move": {"type": "string", "enum": [str(move) for move in Move]},
                        "why": _TEXT,
                    },
                    "Blocked slots of one allocation, and what the policy does about them next.",
                )
            ),
        }
    ),
}

_MOMENT: Schema = {"type": "string", "format": "date-time"}
_AMOUNT: Schema = {"type": "number", "minimum": 0}
_COUNTED = {"counted_seconds": _AMOUNT, "gpu_seconds": _AMOUNT}
_USED = record(tables.usage, "What one allocation had of the period.", **_COUNTED)
_HIDDEN_USE = frozenset({"node_id", "claims"})


def _usage(items: str) -> Schema:
    return closed(
        {
            "from": _MOMENT,
            "to": _MOMENT,
            "totals": array(ref("UsageTotal")),
            "items": array(ref(items)),
            "next": {"type": ["string", "null"]},
        }
    )


_USAGE: dict[str, Schema] = {
    "UsageRecord": _USED,
    "ProjectUsageRecord": closed(
        {name: kind for name, kind in _USED["properties"].items() if name not in _HIDDEN_USE}
    ),
    "UsageTotal": closed(
        {
            "project_id": _TEXT,
            "capacity_shape": ref("CapacityShape"),
            "sku": _TEXT,
            "allocations": _WHOLE,
            **_COUNTED,
        },
        "Of the whole period, whatever page is shown.",
    ),
    "Usage": _usage("UsageRecord"),
    "ProjectUsage": _usage("ProjectUsageRecord"),
}

_DOCUMENTS: dict[str, Schema] = {
    "NoReport": closed({"document": {"type": "null"}, "task": nullable(ref("Task"))}),
    "LatestDiscovery": {"anyOf": [ref("Discovery"), ref("NoReport")]},
    "LatestParity": {"anyOf": [ref("Parity"), ref("NoReport")]},
    "Scheduling": closed({"enabled": _FLAG}),
    "Revoked": closed({"id": _TEXT, "revoked": {"const": True}}),
    "Enrolment": closed(
        {
            "certificate": _TEXT,
            "user_ca": _TEXT,
            "principals": array(_TEXT),
            "preflight": nullable(closed({"script": _TEXT, "environment": _WORDS})),
        }
    ),
    "ForcedCleanup": closed(
        {
            "allocation_id": _TEXT,
            "state": ref("AllocationState"),
            "runtime_verified_absent": _FLAG,
            "slots": array(
                closed(
                    {
                        "slot_id": _TEXT,
                        "slot_index": _WHOLE,
                        "status": ref("SlotState"),
                        "task_id": {"type": ["string", "null"]},
                    }
                )
            ),
            "canceled_tasks": array(_TEXT),
        }
    ),
    "Alive": closed({"status": _const("ok")}),
    "Ready": closed({"status": _const("ok"), "schema": _TEXT}),
    "Health": closed(
        {
            "status": _const("ok"),
            "schema": _TEXT,
            "processes": {
                "type": "object",
                "additionalProperties": {"type": "integer", "minimum": 1},
                "description": "How many living processes there are of each role.",
            },
            "leader": ref("Leader"),
        }
    ),
    "Leader": closed(
        {
            "live": _FLAG,
            "holder": _TEXT,
            "epoch": _WHOLE,
            "acquired_at": {**_MOMENT, "type": ["string", "null"]},
            "expires_at": {**_MOMENT, "type": ["string", "null"]},
            "host": _TEXT,
            "pid": {"type": ["integer", "null"]},
        },
        "Who leads, or led last: of a process that has ended, host and pid are not known.",
    ),
    "ProblemCode": {
        "type": "string",
        "enum": sorted(CODES),
        "description": "What was wrong, for programs. A code keeps its meaning for ever.",
    },
    "Problem": {
        "type": "object",
        "title": "Problem",
        "description": "RFC 9457. Some codes add members of their own.",
        "required": [
            "type", "title", "status", "detail", "code", "expected", "found", "remedy",
            "correlation_id",
        ],
        "properties": {
            "type": {"type": "string", "pattern": "^urn:gpuaas:problem:[a-z0-9_]+$"},
            "title": _TEXT,
            "status": {"type": "integer", "minimum": 400, "maximum": 599},
            "detail": _TEXT,
            "instance": _TEXT,
            "code": ref("ProblemCode"),
            "expected": _TEXT,
            "found": _TEXT,
            "remedy": _TEXT,
            "correlation_id": _TEXT,
        },
    },
}  # fmt: skip

_PAGES = {
    f"{name}Page": page(name)
    for name in (
        "ListedNode", "ListedSlot", "Change", "Proof", "Image", "Project", "Allocation", "Task",
        "ListedTask", "AuditEntry", "Token", "TimelineEntry", "AppInstance", "AppMember",
        "AppOperation",
    )
}  # fmt: skip

SCHEMAS: dict[str, Any] = {
    **_RECORDS,
    **_PAGES,
    **_PLACEMENT,
    **_USAGE,
    **appview.SCHEMAS,
    **_DOCUMENTS,
    **_ENUMS,
}

"""What a project sees of its applications: names, states, and addresses that are for tenants.

Every field is named here, so that a new column of the records stays hidden.
"""

from __future__ import annotations

from typing import Any

from reconciler.api import views
from reconciler.api.shapes import Schema, array, closed, nullable, ref
from reconciler.lifecycle import apps
from reconciler.model.states import AllocationState

Record = dict[str, Any]

_TEXT: Schema = {"type": "string"}
_PORT: Schema = {"type": "integer", "minimum": 1, "maximum": 65535}
_COUNT: Schema = {"type": "integer", "minimum": 0}
_MOMENT: Schema = {"type": "string", "format": "date-time"}
_MAYBE_MOMENT: Schema = {"type": ["string", "null"], "format": "date-time"}
# What a controller may say of its member; of anything else it says nothing is shown.
_SAID = ("phase", "slurmctld_state", "slurmd_state")

SCHEMAS: dict[str, Schema] = {
    "AppInstance": closed(
        {
            "id": _TEXT,
            "project_id": _TEXT,
            "slug": _TEXT,
            "name": _TEXT,
            "managed_key": _TEXT,
            "status": ref("AppStatus"),
            "status_reason": _TEXT,
            "status_since": _MOMENT,
            "generation": _COUNT,
            "correlation_id": _TEXT,
            "created_at": _MOMENT,
            "ended_at": _MAYBE_MOMENT,
        },
        "An application on allocations of a project.",
    ),
    "AppMember": closed(
        {
            "id": _TEXT,
            "allocation_id": _TEXT,
            "role": ref("MemberRole"),
            "status": ref("MemberStatus"),
            "status_reason": _TEXT,
            "status_since": _MOMENT,
            "connection": nullable(closed({"host": _TEXT, "port": _PORT, "username": _TEXT})),
            "adapter_detail": closed(
                {
                    "host": {**_TEXT, "description": "To dial; an admin sees the transport's."},
                    "hostname": {**_TEXT, "description": "For people; it may resolve nowhere."},
                    "bootstrap_ssh": {"enum": ["absent", "ready", "expired"]},
                    "key_expires_at": _MAYBE_MOMENT,
                    **dict.fromkeys(_SAID, _TEXT),
                }
            ),
            "created_at": _MOMENT,
            "left_at": _MAYBE_MOMENT,
        },
        "An allocation that works for an application.",
    ),
    "AppOperation": closed(
        {
            "id": _TEXT,
            "member_id": _TEXT,
            "kind": ref("OperationKind"),
            "status": ref("OperationStatus"),
            "failure_code": {**_TEXT, "description": "Empty unless it failed."},
            "task_id": {"type": ["string", "null"]},
            "correlation_id": _TEXT,
            "created_at": _MOMENT,
            "finished_at": _MAYBE_MOMENT,
        },
        "One piece of work on a member.",
    ),
}
SCHEMAS["AppInstanceDetail"] = closed(
    {
        **SCHEMAS["AppInstance"]["properties"],
        "waits_for": nullable(
            closed(
                {
                    "code": {
                        "enum": ["member_failed", "bootstrap_ssh_pending", "controller_absent"]
                    },
                    "detail": _TEXT,
                },
                "What keeps it from running.",
            )
        ),
    },
)
SCHEMAS["AppOperations"] = closed({"operations": array(ref("AppOperation"))})


def instance(row: Record) -> Record:
    """One of a list, or as it was changed."""
    return _named("AppInstance", row)


def instance_detail(row: Record, members: list[Record]) -> Record:
    """With what it waits for."""
    return instance(row) | {"waits_for": apps.waits_for(row, members)}


def member(row: Record, *, admin: bool = False) -> Record:
    """Where it is reached: its tenant's address, for an admin also the transport's."""
    reachable = row["allocation_state"] == AllocationState.ACTIVE
    told = (row["connection"] or {}) if reachable else {}
    host = str(told.get("host", ""))
    connection = {
        "host": host,
        "port": int(told.get("port", 22)),
        "username": str(told.get("username", "")),
    }
    good = bool(row["key_good"])
    expired = row["key_expires_at"] is not None
    detail = {
        "host": str(row["transport_address"] or "") if admin else host,
        "hostname": row["hostname"],
        "bootstrap_ssh": "ready" if good else "expired" if expired else "absent",
        "key_expires_at": row["key_expires_at"],
        **{name: str(row["detail"].get(name, "")) for name in _SAID},
    }
    own = {"connection": connection if told else None, "adapter_detail": detail}
    return _named("AppMember", row | own)


def operation(row: Record) -> Record:
    """Only the code of its failure: the text may name addresses of the host."""
    return _named("AppOperation", row | {"failure_code": str(row["failure"].get("code", ""))})


def _named(schema: str, row: Record) -> Record:
    return views.record({name: row[name] for name in SCHEMAS[schema]["properties"]})

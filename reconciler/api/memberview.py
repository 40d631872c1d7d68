"""What a tenant sees: what there is to start from, how to reach what it has, never where it is."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict

from reconciler.api import views
from reconciler.model.states import AllocationState, CapacityShape

# What the contract does not name is not sent.
_SHOWN = ConfigDict(extra="ignore", json_schema_extra={"additionalProperties": False})


class Connection(BaseModel):
    """The tenant-facing address; empty host: no gateway is configured yet."""

    model_config = _SHOWN

    host: str = ""
    port: int = 22
    username: str = ""


class MemberAllocation(BaseModel):
    """Every field is named here, so that a new column of the record stays hidden."""

    model_config = _SHOWN

    id: str
    project_id: str
    capacity_shape: CapacityShape
    sku: str
    region: str
    gpu_count: int
    hostname: str
    username: str
    ssh_keys: list[str]
    image_id: str | None
    state: AllocationState
    state_since: str
    # Until when it may be in that state: a command that waits for it waits as long.
    deadline_at: str | None
    # Its ETag: every change raises it.
    generation: int
    connection: Connection | None
    # The dashboard of a whole machine; a slice has none.
    telemetry_url: str
    # Only the code: the text of an error may name devices of the host.
    error_code: str
    created_at: str | None
    activated_at: str | None
    ended_at: str | None


class MemberAllocations(BaseModel):
    """One page of them."""

    model_config = _SHOWN

    items: list[MemberAllocation]
    next: str | None


class MemberImage(BaseModel):
    """An image without its source: an address may hold a secret, a path is the operator's."""

    model_config = _SHOWN

    id: str
    name: str
    version: str
    digest: str
    size_bytes: int
    minimum_disk_bytes: int
    created_at: str


class MemberImages(BaseModel):
    """One page of them."""

    model_config = _SHOWN

    items: list[MemberImage]
    next: str | None


_TOLD = frozenset({*MemberAllocation.model_fields, "error", "connection"})


def tell(allocation: views.Record) -> MemberAllocation:
    """The record of an allocation as its project sees it."""
    # Not the claims and all else that a tenant does not see.
    told = {name: value for name, value in allocation.items() if name in _TOLD}
    shown: dict[str, Any] = views.record(told)
    error = shown.get("error") or {}
    reachable = shown["state"] == AllocationState.ACTIVE
    connection = (shown.get("connection") or {}) if reachable else {}
    return MemberAllocation.model_validate(
        shown
        | {
            "error_code": str(error.get("code", "")),
            "connection": connection or None,
            "telemetry_url": str(connection.get("telemetry_url", "")),
        }
    )

"""Telemetry of a slice for its project: the newest sample, and those of the last hours."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query
from sqlalchemy import Connection

from reconciler.api.models import Answer, Id, Moment
from reconciler.api.security import Member
from reconciler.db import rows
from reconciler.db.schema import Allocation
from reconciler.lifecycle import slice_telemetry
from reconciler.model.errors import Problem
from reconciler.model.slice_telemetry import GuestValues, HostValues
from reconciler.model.states import CapacityShape

router = APIRouter(prefix="/projects/{project_id}/allocations", tags=["allocations"])


class TelemetrySample(Answer):
    """Values of a slice at a time. guest is null while the guest says nothing."""

    at: Moment
    host: HostValues
    guest: GuestValues | None


class Telemetry(Answer):
    """Telemetry of a slice. latest is null while its host has not been heard for some minutes."""

    allocation_id: str
    latest: TelemetrySample | None
    samples: list[TelemetrySample]


@router.get("/{allocation_id}/telemetry")
def telemetry(
    project_id: Id,
    allocation_id: Id,
    context: Member,
    minutes: Annotated[int, Query(ge=1, le=slice_telemetry.RING)] = 60,
) -> Telemetry:
    """Samples of the last minutes, the oldest first; 24 hours are kept. Whole machines have none:
    their `telemetry_url` leads to their dashboard.
    """

    def read(conn: Connection) -> Telemetry:
        allocation = rows.of_project(conn, Allocation, project_id, allocation_id)
        if allocation.capacity_shape != CapacityShape.GPU_SLICE:
            raise Problem(
                "telemetry_of_whole_machine",
                expected="a slice",
                found="a whole machine",
                remedy="see its telemetry_url, or measure in the machine itself",
            )
        samples = slice_telemetry.samples(conn, allocation_id, minutes)
        current = slice_telemetry.samples(conn, allocation_id, slice_telemetry.CURRENT)
        return Telemetry(
            allocation_id=allocation_id,
            latest=TelemetrySample.of(current[-1]) if current else None,
            samples=[TelemetrySample.of(sample) for sample in samples],
        )

    return context.read(read)

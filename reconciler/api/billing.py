"""Usage for billing: what every allocation had of a period, as JSON by pages or as CSV at once."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query
from fastapi.responses import Response, StreamingResponse
from pydantic import AwareDatetime
from sqlalchemy import Connection

from reconciler.api import views
from reconciler.api.context import Context
from reconciler.api.models import Filter, Id
from reconciler.api.paging import Paging, Part
from reconciler.api.security import Admin, Member
from reconciler.db import clock
from reconciler.db.rows import Page
from reconciler.records import projects, usage
from reconciler.records.usage import Period

router = APIRouter(tags=["usage"])

Record = dict[str, Any]
Format = Literal["json", "csv"]
From = Annotated[
    AwareDatetime | None, Query(alias="from", description="RFC 3339; the beginning if left out.")
]
To = Annotated[
    AwareDatetime | None, Query(alias="to", description="RFC 3339; now if left out, or later.")
]
_CSV: dict[int | str, dict[str, Any]] = {
    200: {"content": {"text/csv": {"schema": {"type": "string"}}}}
}
# Rows of a CSV that are read at once. Higher costs memory for each reader that does not read; lower
# costs time, for each page passes over those before it.
_AT_ONCE = 2000
# A tenant is not told where it was.
MEMBER = (
    "allocation_id",
    "project_id",
    "capacity_shape",
    "sku",
    "region",
    "pool",
    "gpu_count",
    "started_at",
    "ended_at",
    "end_state",
    "counted_seconds",
    "gpu_seconds",
)
ADMIN = (*MEMBER[:2], "node_id", *MEMBER[2:])


@router.get("/admin/usage", responses=_CSV)
def site(
    context: Admin,
    part: Paging,
    *,
    start: From = None,
    end: To = None,
    project: Filter = None,
    format: Format = "json",
) -> Any:
    """Every allocation that was active in the period, and the sums by project, shape and SKU."""
    if project is not None:
        context.read(lambda conn: projects.get(conn, project))
    return _answer(context, part, _Asked(start, end, project), (*ADMIN, "claims"), format)


@router.get("/projects/{project_id}/usage", responses=_CSV)
def own(
    project_id: Id,
    context: Member,
    part: Paging,
    *,
    start: From = None,
    end: To = None,
    format: Format = "json",
) -> Any:
    """The same for one project, without where its allocations were."""
    return _answer(context, part, _Asked(start, end, project_id), MEMBER, format)


@dataclass(frozen=True)
class _Asked:
    start: datetime | None
    end: datetime | None
    project_id: str | None

    def period(self, conn: Connection) -> Period:
        moments = [None if at is None else at.timestamp() for at in (self.start, self.end)]
        return usage.period(conn, *moments)


def _answer(
    context: Context, part: Part, asked: _Asked, fields: tuple[str, ...], format: Format
) -> Any:
    if format == "csv":
        span = context.read(asked.period)
        columns = tuple(name for name in fields if name != "claims")
        return _table(context, span, asked.project_id, columns)
    page = part.page(usage.ORDER)

    def read(conn: Connection) -> Record:
        span = asked.period(conn)
        rows = usage.every(conn, span, project_id=asked.project_id, page=page)
        told = part.told(usage.ORDER, rows, lambda row: {name: _row(row)[name] for name in fields})
        sums = usage.totals(conn, span, project_id=asked.project_id)
        return {
            "from": clock.iso(span.start),
            "to": clock.iso(span.end),
            "totals": [_sum(row) for row in sums],
            **told,
        }

    return context.read(read)


def _table(
    context: Context, span: Period, project_id: str | None, columns: tuple[str, ...]
) -> Response:
    def read(page: Page) -> list[Record]:
        return context.read(lambda conn: usage.every(conn, span, project_id=project_id, page=page))

    def lines() -> Iterator[str]:
        yield _line(columns)
        # A transaction for each page, and none while its reader takes it: readers that do not read
        # would keep every connection, the leader's among them. Neither a record's place nor what
        # counts of it before the end of the period changes meanwhile.
        rows = read(Page(_AT_ONCE))
        while rows:
            yield "".join(_line(_values(_row(row), columns)) for row in rows)
            rows = read(Page(_AT_ONCE, usage.ORDER.keys(rows[-1])))

    headers = {"Content-Disposition": 'attachment; filename="usage.csv"'}
    return StreamingResponse(lines(), media_type="text/csv; charset=utf-8", headers=headers)


def _values(row: Record, columns: tuple[str, ...]) -> list[Any]:
    return [row[name] for name in columns]


def _line(values: Any) -> str:
    buffer = io.StringIO()
    csv.writer(buffer).writerow("" if value is None else value for value in values)
    return buffer.getvalue()


def _row(row: Record) -> Record:
    counted = row["counted_ms"]
    return views.record(row) | {
        "counted_seconds": counted / 1000,
        "gpu_seconds": counted * row["gpu_count"] / 1000,
    }


def _sum(row: Record) -> Record:
    named = {name: row[name] for name in ("project_id", "capacity_shape", "sku", "allocations")}
    return named | {
        "counted_seconds": row["counted_ms"] / 1000,
        "gpu_seconds": row["gpu_ms"] / 1000,
    }

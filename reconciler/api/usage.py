"""Usage for billing: the share of every allocation in a period, as JSON pages or as a CSV file."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from decimal import ROUND_HALF_UP, Decimal
from functools import partial
from typing import Annotated, Any, Literal, Self, TypeVar

from fastapi import APIRouter, Query
from fastapi.responses import Response, StreamingResponse
from pydantic import AwareDatetime, Field
from sqlalchemy import Connection

from reconciler.api.http import PageOf, PageRequest, Paging, encode
from reconciler.api.models import Answer, Document, Filter, Id, Moment, Record
from reconciler.api.security import Admin, Context, Member
from reconciler.db.rows import Page
from reconciler.model.states import CapacityShape
from reconciler.profiles import sku_prices
from reconciler.records import projects, usage
from reconciler.records.usage import Period

router = APIRouter(tags=["usage"])

Format = Literal["json", "csv"]
From = Annotated[
    AwareDatetime | None, Query(alias="from", description="RFC 3339; by default the first record.")
]
To = Annotated[
    AwareDatetime | None,
    Query(alias="to", description="RFC 3339; by default, and at the latest, now."),
]
_CSV: dict[int | str, dict[str, Any]] = {
    200: {"content": {"text/csv": {"schema": {"type": "string"}}}}
}
# Rows of a CSV that are read at once. A higher number costs memory for each slow reader; a lower
# number costs time, because each page skips those before it.
_AT_ONCE = 2000
Amount = Annotated[float, Field(ge=0)]
# Money is decimal text, because a float is no sum of money.
Money = Annotated[
    str | None,
    Field(description="To a hundredth; null without a price.", pattern=r"^[0-9]+\.[0-9]{2}$"),
]
_HOUR_MS = Decimal(3_600_000)
_CENT = Decimal("0.01")


@dataclass(frozen=True)
class Prices:
    """Present price of a GPU hour by shape and SKU, for allocations older than their price."""

    by_sku: Mapping[tuple[str, str], Decimal]
    currency: str

    @classmethod
    def of(cls, context: Context) -> Self:
        """The present prices of the site."""
        return cls(sku_prices(context.settings.profiles_dir), context.settings.currency)

    def charge(self, row: usage.Share | usage.Total, gpu_ms: int) -> Record:
        """The fields of `Charge` for milliseconds of a GPU. Sums are of exact amounts, and rounded
        once.
        """
        kept = row.currency is not None
        sold = row.capacity_shape, row.sku
        price = row.price if kept else str(self.by_sku.get(sold, ""))
        exact = gpu_ms * Decimal(price or 0) / _HOUR_MS
        return {
            "price": price or None,
            "currency": row.currency if kept else self.currency,
            "price_kept": kept,
            "cost": str(exact.quantize(_CENT, ROUND_HALF_UP)) if price else None,
        }


class Charge(Answer):
    """The cost of a use."""

    price: str | None = Field(description="Of a GPU hour; null without a price.")
    currency: str = Field(description="By its code of ISO 4217.")
    price_kept: bool = Field(
        description="Whether it is the price of the launch. Otherwise the launch was by a version"
        " that did not keep it, and the price is the present one, which may change."
    )
    cost: Money


class ProjectUsageRecord(Charge):
    """What one allocation used of the period. Its tenant does not see the host."""

    allocation_id: str
    project_id: str
    capacity_shape: CapacityShape
    sku: str
    region: str
    pool: str
    gpu_count: int
    started_at: Moment
    ended_at: Moment | None
    end_state: str
    counted_seconds: Amount
    gpu_seconds: Amount

    @classmethod
    def of_usage(cls, prices: Prices, row: usage.Share) -> Self:
        """The answer for a row, with its share of the period in seconds."""
        counted = row.counted_ms
        gpu_ms = counted * row.gpu_count
        return cls.of(
            row,
            counted_seconds=counted / 1000,
            gpu_seconds=gpu_ms / 1000,
            **prices.charge(row, gpu_ms),
        )


class UsageRecord(ProjectUsageRecord):
    """What one allocation used of the period, and where."""

    node_id: str
    claims: list[Document]


class UsageTotal(Charge):
    """The sum at one price over the whole period, whatever page is shown."""

    project_id: str
    capacity_shape: CapacityShape
    sku: str
    allocations: int
    counted_seconds: Amount
    gpu_seconds: Amount

    @classmethod
    def of_sum(cls, prices: Prices, row: usage.Total) -> Self:
        """The answer for a row of sums in milliseconds."""
        return cls.of(
            row,
            counted_seconds=row.counted_ms / 1000,
            gpu_seconds=row.gpu_ms / 1000,
            **prices.charge(row, row.gpu_ms),
        )


class _UsagePage(Answer):
    start: Moment = Field(serialization_alias="from")
    end: Moment = Field(serialization_alias="to")
    totals: list[UsageTotal]


class Usage(_UsagePage, PageOf[UsageRecord]):
    """The usage of the site in a period, page by page."""


class ProjectUsage(_UsagePage, PageOf[ProjectUsageRecord]):
    """The usage of one project in a period, page by page."""


# The columns of a CSV, in this order.
PROJECT_COLUMNS = (*ProjectUsageRecord.__annotations__, *Charge.model_fields)
SITE_COLUMNS = (*PROJECT_COLUMNS[:2], "node_id", *PROJECT_COLUMNS[2:])
Item = TypeVar("Item", UsageRecord, ProjectUsageRecord)


@router.get("/admin/usage", responses=_CSV, response_model=Usage)
def site(
    context: Admin,
    paging: Paging,
    *,
    start: From = None,
    end: To = None,
    project: Filter = None,
    format: Format = "json",
) -> Usage | Response:
    """Every allocation that was active in the period; sums by project, shape, SKU and price."""
    if project is not None:
        context.read(lambda conn: projects.get(conn, project))
    selection = _Selection(start, end, project)
    if format == "csv":
        return _table(context, selection, UsageRecord.of_usage, SITE_COLUMNS)
    return Usage(**_page(context, paging, selection, UsageRecord.of_usage))


@router.get("/projects/{project_id}/usage", responses=_CSV, response_model=ProjectUsage, name="own")
def project_usage(
    project_id: Id,
    context: Member,
    paging: Paging,
    *,
    start: From = None,
    end: To = None,
    format: Format = "json",
) -> ProjectUsage | Response:
    """The same for one project, without the hosts of its allocations."""
    selection = _Selection(start, end, project_id)
    if format == "csv":
        return _table(context, selection, ProjectUsageRecord.of_usage, PROJECT_COLUMNS)
    return ProjectUsage(**_page(context, paging, selection, ProjectUsageRecord.of_usage))


@dataclass(frozen=True)
class _Selection:
    start: datetime | None
    end: datetime | None
    project_id: str | None

    def period(self, conn: Connection) -> Period:
        moments = [None if at is None else at.timestamp() for at in (self.start, self.end)]
        return usage.period(conn, *moments)


def _page(
    context: Context,
    paging: PageRequest,
    selection: _Selection,
    item: Callable[[Prices, usage.Share], Item],
) -> dict[str, Any]:
    page, prices = paging.page(usage.ORDER), Prices.of(context)

    def read(conn: Connection) -> dict[str, Any]:
        period = selection.period(conn)
        rows = usage.every(conn, period, project_id=selection.project_id, page=page)
        sums = usage.totals(conn, period, project_id=selection.project_id)
        return {
            "start": period.start,
            "end": period.end,
            "totals": [UsageTotal.of_sum(prices, row) for row in sums],
            **dict(paging.answer(usage.ORDER, rows, map(partial(item, prices), rows))),
        }

    return context.read(read)


def _table(
    context: Context,
    selection: _Selection,
    item: Callable[[Prices, usage.Share], Item],
    columns: tuple[str, ...],
) -> Response:
    period, prices = context.read(selection.period), Prices.of(context)

    def read(page: Page) -> list[usage.Share]:
        return context.read(
            lambda conn: usage.every(conn, period, project_id=selection.project_id, page=page)
        )

    def lines() -> Iterator[str]:
        yield _csv([columns])
        # A transaction for each page, and none while the page is sent: slow readers would occupy
        # every connection, including the leader's. The order of records and their share of the
        # period do not change in between.
        rows = read(Page(_AT_ONCE))
        while rows:
            if not context.allowed():
                # The connection ends without the end of the body, so the file is not taken for
                # complete.
                raise ConnectionAbortedError("the token of this download is no longer valid")
            documents = [encode(item(prices, row)) for row in rows]
            yield _csv([document[name] for name in columns] for document in documents)
            rows = read(Page(_AT_ONCE, usage.ORDER.keys(rows[-1])))

    headers = {"Content-Disposition": 'attachment; filename="usage.csv"'}
    return StreamingResponse(lines(), media_type="text/csv; charset=utf-8", headers=headers)


def _csv(lines: Iterable[Iterable[Any]]) -> str:
    buffer = io.StringIO()
    csv.writer(buffer).writerows(lines)
    return buffer.getvalue()

"""NetBox: the last comparison with it, and requests for another one."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Annotated, Literal

from fastapi import APIRouter
from fastapi.responses import JSONResponse
from pydantic import Field

from reconciler.api.models import Answer, Moment, Reasoned
from reconciler.api.security import Admin, Context
from reconciler.inventory import sync

router = APIRouter(prefix="/admin/netbox", tags=["netbox"])

Counts = Annotated[dict[str, int], Field(description="Numbers by name.")]


class ReadingFailure(Answer):
    """Why the comparison did not come to its end."""

    code: str
    expected: str
    found: str
    remedy: str


class Finding(Answer):
    """A difference."""

    code: str
    subject: str
    expected: str
    found: str
    remedy: str


class NetboxFinding(Finding):
    """A difference. action: how a sync ends it, empty if a person must."""

    action: Literal["", "add_node", "write", "create", "delete"]


class Reading(Answer):
    """A comparison with a service of the site."""

    at: Moment
    request_number: int = 0
    applied: bool
    complete: bool
    error: ReadingFailure | None
    nodes: int
    machines: int
    counts: Counts
    done: Counts


class NetboxReading(Reading):
    """A comparison with NetBox. applied: differences with an action were written, and `findings`
    has the others only. request_number: of the newest request that it serves; it serves all earlier
    ones, too. counts: all findings by code; `findings` has the first 500.
    """

    devices: int
    requests: int
    findings: list[NetboxFinding]


class ReadingRequest(Answer):
    """The number of the request. A reading with this number or a higher one serves it."""

    request_number: int


@router.get("")
def show(context: Admin) -> NetboxReading:
    """The last comparison; 404 before the first."""
    return NetboxReading.of(context.read(sync.READINGS.get))


@router.post("/diff", status_code=202, response_model=ReadingRequest)
def diff(context: Admin, body: Reasoned | None = None) -> JSONResponse:
    """Compare NetBox with the records soon. The service writes if its settings say so."""
    return ask_for(context, body, partial(sync.ask, apply=False))


@router.post("/sync", status_code=202, response_model=ReadingRequest)
def synchronise(context: Admin, body: Reasoned | None = None) -> JSONResponse:
    """Compare soon, add new devices as nodes, and write slots and state into NetBox."""
    return ask_for(context, body, partial(sync.ask, apply=True))


def ask_for(context: Context, body: Reasoned | None, ask: Callable[..., int]) -> JSONResponse:
    """202 with the number of the request for a comparison."""
    return context.write(
        lambda conn, act: ReadingRequest(request_number=ask(conn, context.settings, act)),
        body=body,
        status=202,
    )

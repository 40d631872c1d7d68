"""Maintenance of the site's jobs, for operators."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from fastapi import APIRouter
from fastapi.responses import JSONResponse
from pydantic import Field
from sqlalchemy import Connection

from reconciler.api.models import Answer, Integer, Moment, Reasoned
from reconciler.api.security import Admin
from reconciler.model.act import Act
from reconciler.model.jobs import Mode
from reconciler.pools import control

router = APIRouter(prefix="/control", tags=["operator"])

_DAY_S = 86_400


class SetMaintenance(Reasoned):
    """Whether jobs are admitted and run."""

    mode: Literal["drain", "normal"]
    drain_deadline_s: Annotated[
        Integer,
        Field(ge=0, le=_DAY_S, description="Jobs that still run after this time are canceled."),
    ] = 300


class Maintenance(Answer):
    """The mode of the site. running: jobs that workers hold."""

    mode: Mode
    since: Moment
    reason: str
    changed_by: str
    deadline_at: Moment | None
    canceled_at: Moment | None
    running: int

    @classmethod
    def of_site(cls, conn: Connection) -> Self:
        return cls.of(control.read(conn), running=control.running(conn))


@router.get("/maintenance")
def maintenance(context: Admin) -> Maintenance:
    """Whether jobs are admitted and run, since when, and why not."""
    return context.read(Maintenance.of_site)


@router.post("/maintenance", response_model=Maintenance)
def set_maintenance(body: SetMaintenance, context: Admin) -> JSONResponse:
    """Drain the site of jobs, or admit them again.

    During a drain, new jobs are refused with `maintenance`, and workers take none. Jobs that run
    may end until the deadline, and are canceled then. `drained`: no job runs.
    """

    def work(conn: Connection, act: Act) -> Maintenance:
        if body.mode == "drain":
            control.drain(conn, act, body.drain_deadline_s)
        else:
            control.resume(conn, act)
        return Maintenance.of_site(conn)

    return context.write(work, body=body)

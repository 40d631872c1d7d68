"""Whether this process lives, whether the site can do its work, and its numbers."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import PlainTextResponse, Response
from sqlalchemy import Engine

from reconciler.api import metrics
from reconciler.api.security import Admin
from reconciler.db import leader, migrations
from reconciler.db.engine import reading
from reconciler.model.errors import Problem

router = APIRouter(tags=["health"])


@router.get("/healthz")
def alive() -> dict[str, str]:
    """The process answers."""
    return {"status": "ok"}


@router.get("/readyz")
def ready(request: Request) -> dict[str, str]:
    """The database answers, has this version's schema, and somebody works and leads.

    A balancer that asks here takes out all API processes when the last worker ends; to keep them,
    let it ask /healthz.
    """
    engine: Engine = request.app.state.engine
    revision = migrations.current(engine)
    if not revision:
        raise Problem(
            "schema_missing",
            503,
            expected="a migrated database",
            found="one without a schema",
            remedy="run `gpuaas migrate`",
        )
    if revision != migrations.head():
        raise Problem(
            "schema_outdated",
            503,
            expected=f"the schema of this version, {migrations.head()}",
            found=revision,
            remedy="run `gpuaas migrate` with this version, or start the version of the database",
        )
    needed = getattr(request.app.state, "needed", ())
    if needed:
        _working(engine, needed)
    return {"status": "ok", "schema": revision}


@router.get("/metrics", response_class=PlainTextResponse)
def numbers(context: Admin) -> Response:
    """This process's requests and the site's state, for Prometheus."""
    return Response(metrics.exposition(context.engine), media_type=metrics.CONTENT_TYPE)


def _working(engine: Engine, needed: tuple[str, ...]) -> None:
    with reading(engine) as conn:
        living = leader.live_roles(conn)
        leads = leader.read(conn, leader.LOOPS)
    missing = [role for role in needed if not living.get(role)]
    if missing:
        raise Problem(
            "process_missing",
            503,
            expected=f"living processes of the roles {', '.join(needed)}",
            found=f"none of the role {' and none of the role '.join(missing)}",
            remedy="start `gpuaas worker`, or `gpuaas serve` without --api-only",
        )
    if not leads or not leads["live"]:
        raise Problem(
            "leader_missing",
            503,
            expected="a process that leads",
            found="none: the last lease has run out",
            remedy="wait for the next election, then look at the log of the workers",
        )

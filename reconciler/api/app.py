"""The API application: its routers, middleware and OpenAPI document."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

from fastapi import APIRouter, FastAPI
from fastapi.routing import APIRoute
from sqlalchemy import Engine

from reconciler.api import (
    allocations,
    apps,
    document,
    health,
    images,
    launches,
    nodes,
    nodework,
    placement,
    problems,
    projects,
    recovery,
    slots,
    tasks,
    timeline,
    tokens,
    usage,
)
from reconciler.api.telemetry import Correlation
from reconciler.settings import Settings

PREFIX = "/api/v1"
# Requests are matched in this order, so the routes of tenants come first.
ROUTERS = (
    launches.router,
    apps.router,
    nodes.router,
    nodes.enrolment_router,
    nodework.state_router,
    nodework.router,
    nodework.baremetal_router,
    nodework.topology_router,
    slots.router,
    images.router,
    projects.router,
    allocations.router,
    recovery.router,
    placement.router,
    recovery.policy_router,
    usage.router,
    tasks.router,
    timeline.router,
    timeline.audit_router,
    tokens.router,
)


class Service(FastAPI):
    """An application whose OpenAPI document also describes headers and refusals."""

    def openapi(self) -> dict[str, Any]:
        return document.build(self)


def create_app(settings: Settings, engine: Engine) -> FastAPI:
    """Build the API over a database. It starts nothing in the background."""
    app = Service(
        title="gpuaas.slice reconciler",
        version=version("gpuaas-slice"),
        openapi_url=f"{PREFIX}/openapi.json",
        # FastAPI's viewers load their scripts from other sites.
        docs_url=None,
        redoc_url=None,
        generate_unique_id_function=_operation_id,
    )
    app.state.settings = settings
    app.state.engine = engine
    problems.install(app)
    app.add_middleware(Correlation)
    api = APIRouter(prefix=PREFIX)
    for router in ROUTERS:
        api.include_router(router)
    app.include_router(api)
    app.include_router(health.router)
    app.include_router(health.operator_router)
    return app


def _operation_id(route: APIRoute) -> str:
    """The name of an operation in the contract, such as slots_approve."""
    return f"{route.tags[0]}_{route.name}".replace(" ", "_")

"""The application: every route, and nothing else that could answer."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

from fastapi import APIRouter, FastAPI
from fastapi.routing import APIRoute
from sqlalchemy import Engine

from reconciler.api import (
    allocations,
    apps,
    audit,
    baremetal,
    billing,
    document,
    enrolment,
    health,
    images,
    launches,
    nodes,
    nodestate,
    nodework,
    operator,
    placement,
    problems,
    projects,
    recovery,
    recoverypolicy,
    slots,
    tasks,
    timeline,
    tokens,
    topology,
)
from reconciler.api.correlation import Correlation
from reconciler.settings import Settings

PREFIX = "/api/v1"
# Tried in this order, one route after the other: what tenants do comes first.
NOUNS = (
    launches,
    apps,
    nodes,
    enrolment,
    nodestate,
    nodework,
    baremetal,
    topology,
    slots,
    images,
    projects,
    allocations,
    recovery,
    placement,
    recoverypolicy,
    billing,
    tasks,
    timeline,
    audit,
    tokens,
)


class Service(FastAPI):
    """An application that describes all of its answers, not only its requests."""

    def openapi(self) -> dict[str, Any]:
        return document.build(self)


def create_app(settings: Settings, engine: Engine) -> FastAPI:
    """The API over one database; it starts nothing in the background."""
    app = Service(
        title="gpuaas.slice reconciler",
        version=version("gpuaas-slice"),
        openapi_url=f"{PREFIX}/openapi.json",
        # The viewers that FastAPI brings load their scripts from elsewhere.
        docs_url=None,
        redoc_url=None,
        generate_unique_id_function=_operation,
    )
    app.state.settings = settings
    app.state.engine = engine
    problems.install(app)
    app.add_middleware(Correlation)
    api = APIRouter(prefix=PREFIX)
    for noun in NOUNS:
        api.include_router(noun.router)
    app.include_router(api)
    app.include_router(health.router)
    app.include_router(operator.router)
    return app


def _operation(route: APIRoute) -> str:
    """The name of an operation in the contract, such as slots_approve."""
    return f"{route.tags[0]}_{route.name}".replace(" ", "_")

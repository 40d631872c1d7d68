"""The operators' routes, which have no prefix: with a token on the main listener, and without one
on a listener that only this machine can reach.

Whoever can connect to that is a platform admin, so a page in somebody's browser must not be able
to: a request with the name of another site, or from a page, is refused.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib.metadata import version
from ipaddress import ip_address
from typing import Any

from fastapi import APIRouter, Depends, FastAPI, Request
from sqlalchemy import Connection, Engine

from reconciler.api import health, problems, views
from reconciler.api.correlation import Correlation
from reconciler.api.security import Admin, Caller, caller
from reconciler.db import leader
from reconciler.model.errors import Problem
from reconciler.model.states import Role
from reconciler.settings import Settings

NAME = "local-operator"
_HOST = re.compile(r"(?P<name>[A-Za-z0-9.-]+|\[[0-9A-Fa-f:.]+\])(:[0-9]{1,5})?")

router = APIRouter(tags=["operator"])


@dataclass(frozen=True)
class _Local(Caller):
    """Whoever connects to the operators' listener."""

    @property
    def actor(self) -> str:
        # Actors of tokens have a colon, so audit cannot take one for the other.
        return self.name

    def still(self, _request: Request) -> bool:
        # There is no token that could end.
        return True


_LOCAL = _Local(NAME, NAME, Role.PLATFORM_ADMIN.value, frozenset())


def create_operator_app(settings: Settings, engine: Engine) -> FastAPI:
    """The application of the operators' listener; that it is loopback is the listener's duty."""
    app = FastAPI(
        title="gpuaas.slice reconciler, for operators on its machine",
        version=version("gpuaas-slice"),
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        dependencies=[Depends(of_this_machine)],
    )
    app.state.settings = settings
    app.state.engine = engine
    # The main listener's application has no such branch: it cannot be opened by mistake.
    app.dependency_overrides[caller] = lambda: _LOCAL
    problems.install(app)
    app.add_middleware(Correlation)
    app.include_router(health.router)
    app.include_router(router)
    return app


def of_this_machine(request: Request) -> None:
    """Refuse what a web page made a browser send here, by its own name for us or across sites."""
    origin = request.headers.get("Origin")
    if origin is None and _is_loopback(request):
        return
    raise Problem(
        "origin_refused",
        403,
        expected="a program on this machine that asks for a loopback address by its number,"
        " or for localhost",
        found=f"a web page of {origin}"
        if origin is not None
        else f"host {request.headers.get('Host', '')!r}",
        remedy="use the API with a token",
    )


def _is_loopback(request: Request) -> bool:
    # From the header itself: `request.url` has our own address in place of one that it refuses.
    given = _HOST.fullmatch(request.headers.get("Host", ""))
    if given is None:
        return False
    name = given["name"].strip("[]")
    try:
        return name == "localhost" or ip_address(name).is_loopback
    except ValueError:
        return False


@router.get("/health")
def site(request: Request, context: Admin) -> dict[str, Any]:
    """As `/readyz`, with who does the site's work: 503 when it cannot be done."""
    found = health.ready(request)
    living = context.read(leader.live_roles)
    return {**found, "processes": living, "leader": context.read(_leader)}


@router.get("/status/leader")
def current_leader(context: Admin) -> dict[str, Any]:
    """Which process leads, or led last; nobody has yet when its epoch is 0."""
    return context.read(_leader)


def _leader(conn: Connection) -> dict[str, Any]:
    found = leader.read(conn, leader.LOOPS)
    if found is None:
        return {**_NOBODY}
    names = ("live", "holder", "epoch", "acquired_at", "expires_at")
    known = {process["id"]: process for process in leader.processes(conn)}
    # A process that ended in order is not there any more.
    process = known.get(found["holder"], {})
    told = {name: found[name] for name in names}
    where = {"host": process.get("host", ""), "pid": process.get("pid")}
    return views.record({**told, "live": bool(found["live"]), **where})


_NOBODY: dict[str, Any] = {
    "live": False,
    "holder": "",
    "epoch": 0,
    "acquired_at": None,
    "expires_at": None,
    "host": "",
    "pid": None,
}

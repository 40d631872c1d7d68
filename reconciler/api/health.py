"""Health, metrics and the leader: for probes, Prometheus and the operators of the machine.

Operators have a listener of their own, which serves these routes without a token on a loopback
address. Everybody who can connect to it is a platform admin, so requests that a web page made a
browser send are refused there: those with a foreign Host or with any Origin.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib.metadata import version
from ipaddress import ip_address
from typing import Annotated, Literal

from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from pydantic import Field
from sqlalchemy import Connection, Engine

from reconciler.api import admission, jobs, metrics, pools, problems
from reconciler.api.models import Answer, Moment, Reasoned
from reconciler.api.security import Admin, Caller, caller
from reconciler.db import leader, migrations
from reconciler.db.engine import reading
from reconciler.db.rows import Record
from reconciler.inventory import maas_sync, sync
from reconciler.model.act import Act
from reconciler.model.errors import Problem
from reconciler.model.states import Role
from reconciler.settings import Settings

NAME = "local-operator"
_HOST = re.compile(r"(?P<name>[A-Za-z0-9.-]+|\[[0-9A-Fa-f:.]+\])(:[0-9]{1,5})?")

router = APIRouter(tags=["health"])
operator_router = APIRouter(tags=["operator"])


class Alive(Answer):
    """The process answers."""

    status: Literal["ok"]


class Ready(Answer):
    """The site can do its work."""

    status: Literal["ok"]
    revision: str = Field(serialization_alias="schema")


class Leader(Answer):
    """The process that leads, or led last. host and pid are unknown after the process ended."""

    live: bool
    holder: str
    epoch: int
    acquired_at: Moment | None
    expires_at: Moment | None
    host: str
    pid: int | None


class Process(Answer):
    """A process that reports, or has ended without a word. roles: without those that hang.

    remedy: what to do about a live process of another version than the one that answers.
    """

    host: str
    pid: int
    roles: list[str]
    version: str
    started_at: Moment
    seen_at: Moment
    live: bool
    remedy: str = ""


class Health(Ready):
    """The site can do its work, and which processes do it."""

    processes: dict[str, Annotated[int, Field(ge=1)]] = Field(
        description="The number of living processes of each role."
    )
    instances: list[Process] = Field(description="Each of them, by machine.")
    leader: Leader


@router.get("/healthz")
def alive() -> Alive:
    """The process answers."""
    return Alive(status="ok")


@router.get("/readyz")
def ready(request: Request) -> Ready:
    """The database answers, its schema is that of this version, and a worker and a leader live.

    A load balancer that probes this route removes all API processes when the last worker ends. To
    keep them, let it probe /healthz.
    """
    return Ready(status="ok", revision=_ready(request))


@router.get("/metrics", response_class=PlainTextResponse)
def numbers(context: Admin) -> Response:
    """Metrics of this process's requests and of the site, for Prometheus."""
    settings = context.settings
    urls = {sync.READINGS: settings.netbox_url, maas_sync.READINGS: settings.maas_url}
    inventories = [readings for readings, url in urls.items() if url]
    text = metrics.exposition(context.engine, settings.redis_url, inventories)
    return Response(text, media_type=CONTENT_TYPE_LATEST)


@operator_router.get("/health")
def site(request: Request, context: Admin) -> Health:
    """As `/readyz`, with the processes that do the site's work; 503 when it cannot be done."""
    revision = _ready(request)
    return Health(
        status="ok",
        revision=revision,
        processes=context.read(leader.live_roles),
        instances=sorted(
            map(_process, context.read(leader.processes)),
            key=lambda process: (process.host, process.pid),
        ),
        leader=context.read(_leader),
    )


@operator_router.get("/status/leader")
def current_leader(context: Admin) -> Leader:
    """The process that leads, or led last. The epoch is 0 before the first leader."""
    return context.read(_leader)


@operator_router.post("/control/leader/release", response_model=Leader)
def release_leader(context: Admin, body: Reasoned | None = None) -> JSONResponse:
    """End the term of the leader. It lets the other processes be elected before it leads again."""

    def work(conn: Connection, act: Act) -> Leader:
        leader.release(conn, leader.LOOPS, act)
        return _leader(conn)

    return context.write(work, body=body)


def create_operator_app(settings: Settings, engine: Engine) -> FastAPI:
    """The application of the operators' listener. The listener must bind a loopback address."""
    app = FastAPI(
        title="gpuaas.slice reconciler, for operators on its machine",
        version=version("gpuaas-slice"),
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        dependencies=[Depends(require_local_program)],
    )
    app.state.settings = settings
    app.state.engine = engine
    # Only this application overrides authentication; the main application cannot be opened
    # by mistake.
    app.dependency_overrides[caller] = lambda: _LOCAL_OPERATOR
    problems.install(app)
    app.add_middleware(admission.Admission, strangers=False)
    app.add_middleware(metrics.Correlation)
    app.include_router(router)
    app.include_router(operator_router)
    app.include_router(pools.router)
    app.include_router(jobs.control_router)
    return app


def require_local_program(request: Request) -> None:
    """Refuse requests that a web page made a browser send, by DNS rebinding or across sites."""
    origin = request.headers.get("Origin")
    if origin is None and _names_loopback(request):
        return
    raise Problem(
        "origin_refused",
        403,
        expected="a program on this machine that connects to localhost or to a loopback address"
        " by its number",
        found=f"a web page of {origin}"
        if origin is not None
        else f"host {request.headers.get('Host', '')!r}",
        remedy="use the API with a token",
    )


@dataclass(frozen=True)
class _LocalOperator(Caller):
    """The caller on the operators' listener."""

    @property
    def actor(self) -> str:
        # Actors of tokens have a colon, so the audit log cannot confuse the two.
        return self.name

    def still(self, _request: Request) -> bool:
        # Without a token nothing can expire.
        return True


_LOCAL_OPERATOR = _LocalOperator(NAME, NAME, Role.PLATFORM_ADMIN.value, frozenset())


def _names_loopback(request: Request) -> bool:
    # The header itself, because `request.url` replaces a malformed host by the server's address.
    match = _HOST.fullmatch(request.headers.get("Host", ""))
    if match is None:
        return False
    name = match["name"].strip("[]")
    try:
        return name == "localhost" or ip_address(name).is_loopback
    except ValueError:
        return False


def _ready(request: Request) -> str:
    """The revision of the schema; a Problem when the site cannot do its work."""
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
    if not needed:
        return revision
    with reading(engine) as conn:
        living = leader.live_roles(conn)
        term = leader.read(conn, leader.LOOPS)
    missing = [role for role in needed if not living.get(role)]
    if missing:
        raise Problem(
            "process_missing",
            503,
            expected=f"living processes of the roles {', '.join(needed)}",
            found=f"none of the role {' and none of the role '.join(missing)}",
            remedy="start `gpuaas worker`, or `gpuaas serve` without --api-only",
        )
    if not term or not term["live"]:
        raise Problem(
            "leader_missing",
            503,
            expected="a process that leads",
            found="none: the last term has ended",
            remedy="wait for the next election, then read the log of the workers",
        )
    return revision


def _process(row: Record) -> Process:
    return Process.of(row, remedy=leader.other_version(row, migrations.program_version()))


_NO_TERM = {"live": False, "holder": "", "epoch": 0, "acquired_at": None, "expires_at": None}


def _leader(conn: Connection) -> Leader:
    term = leader.read(conn, leader.LOOPS) or _NO_TERM
    processes = {process["id"]: process for process in leader.processes(conn)}
    # A process that ended in order has removed its record.
    process = processes.get(term["holder"], {})
    return Leader.of(term, host=process.get("host", ""), pid=process.get("pid"))

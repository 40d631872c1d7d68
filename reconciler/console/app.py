"""The console as an application of its own, mounted beside the API."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from urllib.parse import quote

from fastapi import FastAPI
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from reconciler.api.http import body_size, correlation_id
from reconciler.console import (
    forms,
    guard,
    login,
    nodes,
    operators,
    pages,
    pools,
    session,
    stream,
    tenants,
)
from reconciler.console.visit import Refused, Visit
from reconciler.model.errors import Problem

PREFIX = "/console"
_LOGIN = f"{PREFIX}/login"

Page = Callable[[Visit], Awaitable[Response]]
# What every session may open; the API decides what it sees there.
SHARED: dict[str, Page] = {
    "/": tenants.start,
    "/projects": tenants.list_projects,
    "/projects/{project}": tenants.project,
    "/projects/{project}/apps": tenants.apps,
    "/projects/{project}/apps/{app}": tenants.app,
    "/projects/{project}/jobs": tenants.jobs,
    "/projects/{project}/jobs/{job}": tenants.job,
    "/projects/{project}/launch": tenants.launch,
    "/projects/{project}/ssh": tenants.ssh,
    "/projects/{project}/usage": operators.project_usage,
    "/projects/{project}/allocations/{allocation}": tenants.allocation,
    "/projects/{project}/allocations/{allocation}/terminal": tenants.terminal,
    "/catalog": tenants.catalog,
    "/account": operators.account,
}
# To others than operators these pages do not exist.
OPERATORS: dict[str, Page] = {
    "/fleet": operators.glance,
    "/nodes/new": nodes.add,
    "/nodes/{node}": nodes.show,
    "/nodes/{node}/discovery": nodes.discovery,
    "/nodes/{node}/parity": nodes.parity,
    "/nodes/{node}/timeline": nodes.timeline,
    "/nodes/{node}/slots/{slot}": nodes.slot,
    "/allocations": operators.list_allocations,
    "/allocations/{allocation}": operators.allocation,
    "/allocations/{allocation}/recovery": operators.recovery,
    "/pools": pools.list_pools,
    "/pools/{pool}": pools.show,
    "/maintenance": pools.maintenance,
    "/sessions/{session}": operators.replay,
    "/tasks": operators.list_tasks,
    "/tasks/{task}": operators.task,
    "/audit": operators.audit,
    "/trace/{correlation}": operators.trace,
    "/images": operators.images,
    "/tokens": operators.tokens,
    "/usage": operators.usage,
    "/inventory": operators.inventory,
    "/health": operators.health,
}

# Streams of the pages' live parts, at the address of the page with `/stream`.
STREAMS: dict[str, stream.Read] = {
    "/projects/{project}/allocations/{allocation}": tenants.read_allocation,
    "/allocations/{allocation}": operators.read_allocation,
    "/tasks/{task}": operators.read_task,
}


def mount(api: FastAPI, examine: operators.Examine | None = None) -> FastAPI:
    """Add the console to the API's application. examine: checks this machine (`gpuaas doctor`)."""
    routes = [
        Route("/login", partial(login.by_token, api), methods=["GET", "POST"]),
        Route("/login/provider", partial(login.to_provider, api), methods=["GET"]),
        Route("/login/callback", partial(login.from_provider, api), methods=["GET"]),
        Route("/logout", partial(_logout, api), methods=["POST"]),
        *(_route(api, path, page) for path, page in {**SHARED, **OPERATORS}.items()),
        *(_stream(api, path, read) for path, read in STREAMS.items()),
        Mount("/static", StaticFiles(directory=pages.HERE / "static")),
    ]
    console = Starlette(
        routes=routes,
        middleware=[Middleware(guard.Protected)],
        exception_handlers={
            Problem: _problem,
            Refused: _refused,
            HTTPException: _http_error,
            Exception: _internal_error,
        },
    )
    console.state.examine = examine
    api.mount(PREFIX, console)
    api.add_route(PREFIX, lambda _: RedirectResponse(f"{PREFIX}/"), include_in_schema=False)
    return api


def _route(api: FastAPI, path: str, page: Page) -> Route:
    async def handle(request: Request) -> Response:
        guard.require_same_origin(request.method, request.headers, request.url.scheme)
        visit = await _visit(api, request)
        if visit is None:
            return _to_login(request)
        if request.method == "GET" and "HX-Request" not in request.headers:
            asking = await login.ask_again(api, request)
            if asking is not None:
                return asking
        if path in OPERATORS and not visit.admin:
            raise HTTPException(404)
        if request.method == "POST":
            if not visit.admin:
                api.state.rates.take_bytes(visit.caller.owner, body_size(request.headers))
            form = visit.form = await forms.read(request)
            try:
                answer = await visit.send(form)
            except Refused as refused:
                if refused.status == 401:
                    return _to_login(request)
                visit.refused = refused
            else:
                # A secret is shown once, so there is nothing to which a redirect could lead.
                if not {"token", "ticket", "script", "cast"} & answer.keys():
                    return visit.after(form, answer)
                visit.shown = answer
        return await page(visit)

    return Route(path, handle, methods=["GET", "POST"], name=path)


def _stream(api: FastAPI, path: str, read: stream.Read) -> Route:
    async def handle(request: Request) -> Response:
        guard.require_own_page(request.headers)
        visit = await _visit(api, request)
        if visit is None:
            return stream.ended(request)
        if path in OPERATORS and not visit.admin:
            raise HTTPException(404)
        return await stream.follow(visit, read)

    return Route(f"{path}/stream", handle, methods=["GET"], name=f"{path}/stream")


async def _visit(api: FastAPI, request: Request) -> Visit | None:
    """The visit of a session that has not ended; None without a session."""
    identity = partial(session.identity, api.state, session.secret_of(request))
    caller = await run_in_threadpool(identity)
    return None if caller is None else Visit(request, api, caller, identity)


def _to_login(request: Request) -> Response:
    """To the login page, and from there back to this page. A form that was sent is not kept."""
    target = _LOGIN
    if request.url.path.rstrip("/") != PREFIX:
        query = f"?{request.url.query}" if request.url.query else ""
        target += f"?next={quote(request.url.path + query, safe='/')}"
        if request.method == "POST":
            target += "&unsent=form"
    if "HX-Request" in request.headers:
        # A part of a page cannot be replaced by the login page.
        return Response(status_code=204, headers={"HX-Redirect": target})
    return RedirectResponse(target, 303)


async def _logout(api: FastAPI, request: Request) -> Response:
    guard.require_same_origin(request.method, request.headers, request.url.scheme)
    visit = await _visit(api, request)
    if visit is not None:
        await run_in_threadpool(session.end, request, api.state.engine, visit.caller)
    answer = RedirectResponse(_LOGIN, 303)
    session.set_cookie(request, answer, "")
    return answer


# -- Refusals -----------------------------------------------------------------------------------


def _problem(request: Request, error: Exception) -> Response:
    assert isinstance(error, Problem)  # noqa: S101  # Starlette's type of a handler is wider
    return _error_page(request, error.status, error.document())


def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, Refused)  # noqa: S101
    if error.status == 401:
        return _to_login(request)
    return _error_page(request, error.status, error.problem)


def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)  # noqa: S101
    problem = {
        "code": "page_not_found" if error.status_code == 404 else "http_error",
        "expected": "a page of the console that you may open",
        "found": f"{request.method} {request.url.path}",
        "remedy": "go back to the start page",
    }
    return _error_page(request, error.status_code, problem)


def _internal_error(request: Request, _error: Exception) -> Response:
    problem = {
        "code": "internal_error",
        "expected": "the page to be shown",
        "found": "an error of the service itself",
        "remedy": "report the correlation id to the operators; their log has the cause",
    }
    return _error_page(request, 500, problem)


def _error_page(request: Request, status: int, problem: Mapping[str, object]) -> Response:
    shown = {"correlation_id": correlation_id(request), **problem}
    return pages.render("error.html", status=status, problem=shown, code=status)

"""Every refusal as one RFC 9457 document, whoever raised it."""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Sequence
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.encoders import jsonable_encoder
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from sqlalchemy import exc
from sqlalchemy.exc import DBAPIError, IntegrityError, InterfaceError, OperationalError
from starlette.exceptions import HTTPException

from reconciler.api import correlation
from reconciler.model.errors import Problem
from reconciler.trust.errors import TrustError

log = logging.getLogger("gpuaas.api")

MEDIA_TYPE = "application/problem+json"


def respond(request: Request, problem: Problem) -> JSONResponse:
    """The problem as the caller sees it."""
    found = problem.document()
    document = {
        "type": f"urn:gpuaas:problem:{problem.code}",
        "title": problem.code.replace("_", " ").capitalize(),
        "status": problem.status,
        "detail": f"Expected {problem.expected}; found {problem.found}. {problem.remedy}.",
        "instance": request.url.path,
        "correlation_id": correlation.of(request),
    }
    # Errors of our own are answered outside of the middleware that adds it to all others.
    headers = {correlation.HEADER: correlation.of(request)}
    if problem.status == HTTPStatus.UNAUTHORIZED:
        headers["WWW-Authenticate"] = "Bearer"
    if problem.status == HTTPStatus.SERVICE_UNAVAILABLE:
        headers["Retry-After"] = "1"
    return JSONResponse(
        jsonable_encoder(found | document),
        problem.status,
        headers=headers,
        media_type=MEDIA_TYPE,
    )


def install(app: FastAPI) -> None:
    """Answer all errors of the application in this one form."""

    @app.exception_handler(Problem)
    def refused(request: Request, problem: Problem) -> JSONResponse:
        return respond(request, problem)

    @app.exception_handler(TrustError)
    def distrusted(request: Request, error: TrustError) -> JSONResponse:
        return respond(
            request,
            Problem(
                error.code, 422, expected=error.expected, found=error.found, remedy=error.remedy
            ),
        )

    @app.exception_handler(RequestValidationError)
    def malformed(request: Request, error: RequestValidationError) -> JSONResponse:
        return respond(request, _invalid(error.errors(), request.headers.get("Content-Type", "")))

    @app.exception_handler(HTTPException)
    def http(request: Request, error: HTTPException) -> JSONResponse:
        return respond(request, _http(request, error))

    @app.exception_handler(DBAPIError)
    def database(request: Request, error: DBAPIError) -> JSONResponse:
        # The driver's text can quote the statement's values, so it is kept in the log.
        log.error("database: %s", error.orig, exc_info=error)
        return respond(request, _of_database(error))

    @app.exception_handler(exc.TimeoutError)
    def busy(request: Request, error: exc.TimeoutError) -> JSONResponse:
        log.error("database: no connection was free in time: %s", error)
        return respond(request, _DATABASE)

    @app.exception_handler(Exception)
    def broken(request: Request, error: Exception) -> JSONResponse:
        log.error("%s %s failed", request.method, request.url.path, exc_info=error)
        return respond(request, _BROKEN)


_SEND_JSON = "send JSON with Content-Type: application/json"
_DATABASE = Problem(
    "database_unavailable",
    503,
    expected="the database to take the request",
    found="an error of the database; the service's log has it",
    remedy="try again with the same idempotency key",
)
_CONFLICT = Problem(
    "conflict",
    409,
    expected="values that no other record has",
    found="one that the schema lets only one record have",
    remedy="read what there is, then choose other values",
)
_BROKEN = Problem(
    "internal_error",
    500,
    expected="the request to be handled",
    found="an error of the service itself",
    remedy="report the correlation id to the operators; their log has the cause",
)


def _of_database(error: DBAPIError) -> Problem:
    """Trying again helps when the database is away or busy, not when our statement is wrong."""
    if isinstance(error, IntegrityError):
        return _CONFLICT
    # SQLite calls everything operational: its code tells a statement that it cannot read (an
    # unknown table, a syntax error) from a file that is locked, full or broken.
    ours = getattr(error.orig, "sqlite_errorcode", None) == sqlite3.SQLITE_ERROR
    away = isinstance(error, OperationalError | InterfaceError)
    return _DATABASE if away and not ours else _BROKEN


def _invalid(errors: Sequence[Any], content_type: str) -> Problem:
    # Only where and why: the value itself may be a token or a key.
    fields = [
        {"field": ".".join(str(part) for part in error["loc"]), "message": error["msg"]}
        for error in errors
    ]
    unread = _unread(errors, content_type)
    return Problem(
        "request_invalid",
        422,
        expected="a request that fits the schema",
        found=unread or "; ".join(f"{row['field']}: {row['message']}" for row in fields[:5]),
        remedy=_SEND_JSON
        if unread
        else "correct the named fields; /api/v1/openapi.json has the schema",
        detail={"errors": fields},
    )


def _unread(errors: Sequence[Any], content_type: str) -> str:
    """What is wrong with a body that was never taken for JSON; "" when its fields were judged."""
    for error in errors:
        if error["type"] == "json_invalid":
            return f"a body that is no JSON from character {error['loc'][-1]} on"
        # What is not called JSON, as curl sends it unless told otherwise, comes here as it is.
        if tuple(error["loc"]) == ("body",) and isinstance(error.get("input"), bytes):
            return f"a body with Content-Type: {content_type[:100] or 'none'}"
    return ""


def _http(request: Request, error: HTTPException) -> Problem:
    unread = isinstance(error.__cause__, ValueError | RecursionError)
    if error.status_code == HTTPStatus.BAD_REQUEST and unread:
        # FastAPI could not even decode the body: no UTF-8, a number too long, nested too deep.
        return Problem(
            "request_invalid",
            400,
            expected="a body that is JSON, in UTF-8",
            found="bytes that cannot be read as that",
            remedy=_SEND_JSON,
        )
    code = {404: "route_not_found", 405: "method_not_allowed"}.get(error.status_code, "http_error")
    return Problem(
        code,
        error.status_code,
        expected="a route of this service",
        found=f"{request.method} {request.url.path}: {error.detail}",
        remedy="see /api/v1/openapi.json for the routes",
    )

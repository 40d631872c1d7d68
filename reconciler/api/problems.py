"""Error answers: RFC 9457 problem documents and their codes."""

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
from pydantic import BaseModel
from sqlalchemy import exc
from sqlalchemy.exc import DBAPIError, IntegrityError, InterfaceError, OperationalError
from starlette.exceptions import HTTPException

from reconciler.api.http import CORRELATION_HEADER, correlation_id
from reconciler.model.approval import REMEDIES
from reconciler.model.errors import Problem
from reconciler.trust.keygen import TrustError

log = logging.getLogger("gpuaas.api")

MEDIA_TYPE = "application/problem+json"

# A code keeps its meaning forever. A test compares this list with the codes that are raised.
_REQUEST = """
    body_too_large conflict cursor_invalid database_missing database_unavailable
    field_without_effect generation_conflict http_error
    idempotency_in_flight idempotency_key_invalid idempotency_key_required
    idempotency_key_reused internal_error leader_missing method_not_allowed period_invalid
    precondition_failed process_missing reason_required request_invalid route_not_found
    schema_missing schema_outdated secret_shown_once transition_refused
"""
_ACCESS = """
    certificate_invalid enrolment_ca_unreadable enrolment_invalid enrolment_pin_without_tls
    enrolment_without_tls
    host_certificate_expired host_certificate_missing host_key_invalid host_key_not_accepted
    identity_provider_unavailable keygen_failed login_failed node_id_invalid origin_refused
    gateway_trust_excessive gateway_trust_missing
    role_required access_unknown gateway_missing host_keys_unknown ssh_key_expired ssh_key_revoked
    recording_full recording_required
    terminal_off token_ended too_many_tickets too_many_tokens
    token_invalid token_owner_invalid unauthenticated
"""
_UNKNOWN = """
    allocation_not_found claim_not_found disk_not_found fabric_vf_not_found gpu_not_found
    image_file_not_found image_not_found ingress_rule_not_found node_not_found profile_unknown
    maas_not_configured maas_reading_not_found
    netbox_not_configured netbox_reading_not_found project_not_found recording_not_found
    proof_not_found recovery_case_not_found slot_not_found ssh_session_not_found
    task_not_found token_not_found
"""
_NODES = """
    boot_unknown expected_identity_missing fabric_link_missing fabric_numbers_missing
    field_not_changeable firmware_plan_changed machine_clean machine_not_clean maintenance_under_way
    disk_not_proven maas_machine_unknown mgmt_attachment_unsupported no_drift
    no_firmware_difference node_busy node_exists node_in_service node_in_slice_mode node_in_use
    node_is_baremetal node_not_enrolled node_not_slice node_reachable node_retired
    node_unhealthy node_unreachable project_exists public_url_missing reboot_unconfirmed
    reinstall_required runtime_unproven scheduling_not_ready serial_twice
"""
_SLOTS = """
    bundle_incomplete discovery_missing discovery_stale disk_in_use disk_is_partition disk_present
    disk_too_small
    disk_not_by_identity duplicate_disk duplicate_fabric_vf duplicate_gpu duplicate_ip
    duplicate_mac duplicate_slot_index fabric_not_vf gate_closed gpu_link_degraded gpu_unproven
    identity_mismatch ip_invalid mac_invalid numa_cpus_exceeded numa_hugepages_exceeded
    numa_memory_exceeded numa_mismatch proof_class_refused proof_mismatch
    proof_missing proof_unverified slot_in_use slot_not_blocked slot_withdrawn
"""
_ALLOCATIONS = """
    absence_unproven allocation_active allocation_baremetal allocation_busy
    allocation_not_baremetal allocation_not_releasable allocation_released allocation_releasing
    attempts_exhausted claim_live digest_invalid fabric_numbers_used_up gpu_count_invalid
    fabric_manager_exposed gpu_count_not_sold gpu_module_unknown numa_node_exceeded
    nvlink_partitions_incomplete nvlink_unsupported
    host_unproven host_unreachable image_check_busy image_exists image_file_invalid no_capacity
    power_of_whole_machine quota_exceeded rate_exceeded
    ready_deadline_too_short scheduling_off shape_not_schedulable sku_unknown stale_lease
    image_runtime_missing user_data_invalid user_data_too_large
    telemetry_of_whole_machine
"""
_INGRESS = """
    ingress_address_in_use ingress_address_reserved ingress_address_unknown ingress_expiry_invalid
    ingress_limit ingress_needs_slice ingress_off ingress_port_in_use
"""
_APPS = """
    allocation_in_app allocation_not_active app_instance_ended app_instance_exists
    app_instance_not_found app_member_not_found app_member_repeated app_operation_not_found
"""
_JOBS = """
    device_leased device_unknown input_invalid input_too_large job_ended job_limit job_not_found
    maintenance model_unknown networks_not_applied
    pool_ended pool_exists pool_full pool_host_missing pool_in_use pool_limit
    pool_memory_exceeded pool_not_for_slices pool_not_found pool_unreachable
    pool_host_present pool_without_token project_required sample_unfinished timeout_too_long
    worker_not_found
"""
CODES: frozenset[str] = frozenset(
    " ".join(
        (_REQUEST, _ACCESS, _UNKNOWN, _NODES, _SLOTS, _ALLOCATIONS, _INGRESS, _APPS, _JOBS)
    ).split()
) | frozenset(REMEDIES)


def respond(request: Request, problem: Problem) -> JSONResponse:
    """The answer for a problem."""
    document = {
        **problem.document(),
        "type": f"urn:gpuaas:problem:{problem.code}",
        "title": problem.code.replace("_", " ").capitalize(),
        "status": problem.status,
        "detail": f"Expected {problem.expected}; found {problem.found}."
        f" {problem.remedy[:1].upper()}{problem.remedy[1:]}.",
        "instance": request.url.path,
        "correlation_id": correlation_id(request),
    }
    # The middleware that adds the header to other answers does not see internal errors.
    headers = {CORRELATION_HEADER: correlation_id(request)}
    if problem.status == HTTPStatus.UNAUTHORIZED:
        headers["WWW-Authenticate"] = "Bearer"
    if problem.status == HTTPStatus.SERVICE_UNAVAILABLE:
        headers["Retry-After"] = "1"
    if "retry_after_s" in problem.detail:
        headers["Retry-After"] = str(problem.detail["retry_after_s"])
    return JSONResponse(
        jsonable_encoder(document), problem.status, headers=headers, media_type=MEDIA_TYPE
    )


def require_default(body: BaseModel, field: str, why: str) -> None:
    """Problem `field_without_effect` for a value in a field that nothing reads."""
    value = getattr(body, field)
    if value != type(body).model_fields[field].default:
        raise Problem(
            "field_without_effect",
            422,
            expected=f"no {field}: {why}",
            found=f"{field} {value!r}",
            remedy=f"leave {field} out",
        )


def install(app: FastAPI) -> None:
    """Answer every error of the application with a problem document."""

    @app.exception_handler(Problem)
    def handle_problem(request: Request, problem: Problem) -> JSONResponse:
        return respond(request, problem)

    @app.exception_handler(TrustError)
    def handle_trust_error(request: Request, error: TrustError) -> JSONResponse:
        return respond(
            request,
            Problem(
                error.code, 422, expected=error.expected, found=error.found, remedy=error.remedy
            ),
        )

    @app.exception_handler(RequestValidationError)
    def handle_invalid_request(request: Request, error: RequestValidationError) -> JSONResponse:
        return respond(request, invalid(error.errors(), request.headers.get("Content-Type", "")))

    @app.exception_handler(HTTPException)
    def handle_http_error(request: Request, error: HTTPException) -> JSONResponse:
        return respond(request, _http(request, error))

    @app.exception_handler(DBAPIError)
    @app.exception_handler(exc.TimeoutError)
    def handle_database_error(request: Request, error: exc.SQLAlchemyError) -> JSONResponse:
        return respond(request, of(error))

    @app.exception_handler(Exception)
    def handle_internal_error(request: Request, error: Exception) -> JSONResponse:
        log.error("%s %s failed", request.method, request.url.path, exc_info=error)
        return respond(request, _INTERNAL)


def of(error: Problem | exc.SQLAlchemyError) -> Problem:
    """The problem that a caller is told."""
    if isinstance(error, Problem):
        return error
    if not isinstance(error, DBAPIError):
        log.error("database: no connection was free in time: %s", error)
        return _DATABASE
    # The driver's text can quote the statement's values, so it only goes into the log.
    log.error("database: %s", error.orig, exc_info=error)
    return _of_database(error)


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
    expected="values that no other record has",
    found="a value that the schema allows in one record only",
    remedy="read the existing records, then choose other values",
)
_INTERNAL = Problem(
    "internal_error",
    500,
    expected="the request to be handled",
    found="an error of the service itself",
    remedy="report the correlation id to the operators; their log has the cause",
)


def _of_database(error: DBAPIError) -> Problem:
    """Repeating the request helps when the database is away or busy, but not when the statement is
    wrong.
    """
    if isinstance(error, IntegrityError):
        return _CONFLICT
    # SQLite calls everything operational. Its error code separates a statement that it cannot read
    # (unknown table, syntax error) from a file that is locked, full or broken.
    wrong_statement = getattr(error.orig, "sqlite_errorcode", None) == sqlite3.SQLITE_ERROR
    away = isinstance(error, OperationalError | InterfaceError)
    return _DATABASE if away and not wrong_statement else _INTERNAL


def invalid(errors: Sequence[Any], content_type: str = "") -> Problem:
    """Problem `request_invalid` for fields of a body that do not fit their schema."""
    # Field and reason only: the value itself may be a token or a key.
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
    """Why the body was not read as JSON; "" when its fields were checked."""
    for error in errors:
        if error["type"] == "json_invalid":
            return f"a body that is no JSON from character {error['loc'][-1]} on"
        # A body without the JSON content type arrives undecoded; curl sends it by default.
        if tuple(error["loc"]) == ("body",) and isinstance(error.get("input"), bytes):
            return f"a body with Content-Type: {content_type[:100] or 'none'}"
    return ""


def _http(request: Request, error: HTTPException) -> Problem:
    unread = isinstance(error.__cause__, ValueError | RecursionError)
    if error.status_code == HTTPStatus.BAD_REQUEST and unread:
        # FastAPI could not decode the body: not UTF-8, a number too long, or nested too deep.
        return Problem(
            "request_invalid",
            400,
            expected="a body that is JSON, in UTF-8",
            found="bytes that cannot be read as JSON",
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

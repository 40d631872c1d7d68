"""Refusals have a common form, and contain no secret or internal text."""

from __future__ import annotations

import logging

import pytest
import sqlalchemy as sa
from sqlalchemy.exc import (
    DataError,
    InterfaceError,
    OperationalError,
    ProgrammingError,
    TimeoutError,
)

from reconciler.records import nodes
from tests.unit.reconciler.api.stack import Stack

FIELDS = {
    "type",
    "title",
    "status",
    "detail",
    "instance",
    "correlation_id",
    "code",
    "expected",
    "found",
    "remedy",
}


@pytest.mark.covers("CTRL-1")
def test_form_of_a_problem(new: Stack) -> None:
    answer = new.client("admin").get("admin/nodes/none", headers={"X-Correlation-Id": "abc-1"})
    assert answer.headers["Content-Type"] == "application/problem+json"
    assert answer.headers["X-Correlation-Id"] == "abc-1"
    document = answer.json()
    assert set(document) == FIELDS
    assert (document["code"], document["status"]) == ("node_not_found", 404)
    assert document["correlation_id"] == "abc-1"
    assert document["detail"].endswith(". Name an existing node; `gpuaas nodes list` shows them.")


def test_a_bad_request_names_fields_but_not_values(new: Stack) -> None:
    body = {"name": "x", "role": "canary-4711", "tokn": "canary-4711"}
    answer = new.client("admin").post("admin/tokens", json=body)
    assert answer.status_code == 422
    assert answer.json()["code"] == "request_invalid"
    assert {row["field"] for row in answer.json()["errors"]} == {"body.role", "body.tokn"}
    assert "canary-4711" not in answer.text


@pytest.mark.covers("CTRL-1")
@pytest.mark.parametrize(
    ("content", "status"),
    [
        (b'{"name": ', 422),
        (b'{"name": "canary-\xff"}', 400),
        (b"[" * 100_000, 400),
        (b'{"name": ' + b"9" * 5000 + b"}", 400),
    ],
    ids=["cut", "no utf-8", "deep", "long number"],
)
def test_a_body_that_is_no_json_is_called_that(new: Stack, content: bytes, status: int) -> None:
    headers = {"Content-Type": "application/json"}
    answer = new.client("admin").post("admin/projects", content=content, headers=headers)
    assert (answer.status_code, answer.json()["code"]) == (status, "request_invalid")
    assert "JSON" in answer.json()["detail"] and "canary" not in answer.text


def test_countless_wrong_parts_are_not_named(new: Stack) -> None:
    """A megabyte of them took seconds of a processor, for callers without a token too."""
    few, many = ({f"f{number}": 0 for number in range(count)} for count in (16, 17_000))
    job = {"model": "m", "input": {}}
    # A stranger's larger body is not read.
    stranger = {f"f{number}": 0 for number in range(1_170)}
    for who, path, body in (
        ("", "nodes/lab-host/enrol", stranger),
        ("member", "projects/demo/jobs", many),
        ("member", "projects/demo/jobs/batch", {"jobs": [job | many] * 2}),
        ("member", "projects/demo/app-instances", {"worker_allocation_ids": [1] * 17_000}),
    ):
        answer = new.client(who).post(path, json=body)
        assert (answer.status_code, answer.json()["code"]) == (422, "request_invalid")
        assert "17" in answer.json()["found"] and len(answer.content) < 2000, answer.text[:500]
    answer = new.client("member").post("projects/demo/jobs", json=job | few).json()
    assert len(answer["errors"]) == len(few)


@pytest.mark.parametrize(
    ("content", "headers"),
    [(b"{}", {"Content-Type": "application/x-www-form-urlencoded"}), (b"{}", {}), (b"x", None)],
    ids=["as curl sends it", "without a type", "no JSON"],
)
def test_a_body_that_was_not_read_is_not_blamed_on_its_fields(
    new: Stack, content: bytes, headers: dict[str, str] | None
) -> None:
    typed = {"Content-Type": "application/json"} if headers is None else headers
    problem = new.client("admin").post("admin/projects", content=content, headers=typed).json()
    assert problem["code"] == "request_invalid"
    assert problem["remedy"] == "send JSON with Content-Type: application/json"
    assert ("no JSON from character 0" if headers is None else "Content-Type: ") in problem["found"]
    text = new.client("admin").post("admin/projects", json="{}").json()
    assert "/api/v1/openapi.json" in text["remedy"], "JSON it was, and no object"


def test_a_path_with_an_empty_id_leads_nowhere(new: Stack) -> None:
    admin = new.client("admin", follow_redirects=False)
    for path in ("admin/tokens/", "projects/demo/allocations/", "projects/"):
        for verb in ("GET", "POST", "DELETE"):
            answer = admin.request(verb, path)
            assert (answer.status_code, answer.json()["code"]) == (404, "route_not_found"), path


def test_unknown_routes_and_verbs(new: Stack) -> None:
    admin = new.client("admin")
    assert admin.get("nothing").json()["code"] == "route_not_found"
    assert admin.delete("admin/nodes").json()["code"] == "method_not_allowed"


def test_a_body_without_limit_is_refused_unread(new: Stack) -> None:
    client = new.client()
    large = client.post("nodes/lab-host/enrol", content=b" " * (1 << 20) + b"{}")
    chunked = client.post("nodes/lab-host/enrol", content=iter([b"{}"]))
    for answer in (large, chunked):
        assert (answer.status_code, answer.json()["code"]) == (413, "body_too_large")
        assert answer.headers["X-Correlation-Id"]


def test_a_correlation_id_that_could_do_harm_is_replaced(new: Stack) -> None:
    given = "a{{ lookup('pipe','id') }}"
    answer = new.client().get("http://test/healthz", headers={"X-Correlation-Id": given})
    assert len(answer.headers["X-Correlation-Id"]) == 36


def test_the_request_log_has_no_query(new: Stack, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "gpuaas.api.request")
    new.client().get("images/abc/content?token=canary-4711")
    assert "GET /api/v1/images/abc/content 401" in caplog.text
    assert "canary-4711" not in caplog.text


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (OperationalError("SELECT canary", {}, Exception("locked")), 503, "database_unavailable"),
        (InterfaceError("SELECT canary", {}, Exception("closed")), 503, "database_unavailable"),
        (TimeoutError("QueuePool limit canary"), 503, "database_unavailable"),
        # A wrong query stays wrong on a retry.
        (ProgrammingError("SELECT canary", {}, Exception("no column")), 500, "internal_error"),
        (DataError("SELECT canary", {}, Exception("out of range")), 500, "internal_error"),
        (ZeroDivisionError("canary"), 500, "internal_error"),
    ],
)
def test_errors_of_our_own_stay_in_the_log(
    new: Stack, monkeypatch: pytest.MonkeyPatch, error: Exception, status: int, code: str
) -> None:
    def broken(*_arguments: object, **_options: object) -> None:
        raise error

    monkeypatch.setattr(nodes, "every", broken)
    answer = new.client("admin", raise_server_exceptions=False).get("admin/nodes")
    assert (answer.status_code, answer.json()["code"]) == (status, code)
    assert "canary" not in answer.text
    assert answer.json()["correlation_id"]


def test_a_statement_that_sqlite_cannot_read_is_our_error(
    new: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(conn: sa.Connection, **_options: object) -> None:
        conn.exec_driver_sql("SELECT canary FROM nowhere")

    monkeypatch.setattr(nodes, "every", wrong)
    answer = new.client("admin", raise_server_exceptions=False).get("admin/nodes")
    assert (answer.status_code, answer.json()["code"]) == (500, "internal_error")
    assert "canary" not in answer.text


@pytest.mark.covers("CTRL-1")
def test_the_contract_names_operations_and_problems(new: Stack) -> None:
    document = new.client().get("openapi.json").json()
    operations = [operation for verbs in document["paths"].values() for operation in verbs.values()]
    names = [operation["operationId"] for operation in operations]
    assert len(set(names)) == len(names)
    assert "slots_approve" in names
    ours = [operation for operation in operations if operation["tags"] != ["health"]]
    assert all("Problem" in operation["responses"]["default"]["$ref"] for operation in ours)
    assert "HTTPValidationError" not in document["components"]["schemas"]

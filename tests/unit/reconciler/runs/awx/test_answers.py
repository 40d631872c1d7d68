"""Answers of AWX 24.6.1, as they were measured, in the stand-in: each of these was once another.
Names of fields and explanations are those of its source (tests/data/awx).
"""

from __future__ import annotations

import json
import ssl
from typing import Any

import httpx
import pytest

from reconciler.runs.awx import job as launcher
from reconciler.runs.awx import request
from tests.standin.awx import ACTIVE, REAPED_AT_START, REAPED_BY_PEER, REAPED_FROM_QUEUE
from tests.standin.controller import TOKEN, Controller
from tests.unit.reconciler.runs.awx.conftest import ROOT, events, spec

pytestmark = pytest.mark.covers("CTRL-9")
SOURCE = json.loads((ROOT / "tests/data/awx/fields-24.6.1.json").read_text())
FORBIDDEN = "You do not have permission to perform this action."


def ask(awx: Controller, request: str, token: str = TOKEN) -> tuple[int, Any]:
    """The status with the document, or with the detail of a refusal."""
    method, path = request.split()
    answer = httpx.request(
        method,
        f"{awx.url}/api/v2{path}",
        headers={"Authorization": f"Bearer {token}"},
        verify=ssl.create_default_context(cafile=str(awx.ca_file)),
        timeout=60,
    )
    document = answer.json()
    return answer.status_code, document if answer.is_success else document["detail"]


def begin(awx: Controller, **faults: Any) -> dict[str, Any]:
    """Launch a job and read it until its end."""
    awx.begin(**{"events": events("One"), "steps": 0, **faults})
    awx.launch(9)
    job: dict[str, Any] = ask(awx, "GET /jobs/1/")[1]
    return job


@pytest.mark.parametrize("explanation", [REAPED_AT_START, REAPED_FROM_QUEUE])
@pytest.mark.parametrize("count", [0, 3])
def test_a_lost_job_has_failed(awx: Controller, explanation: str, count: int) -> None:
    """Its number of events was never reported: without any event it looks complete."""
    job = begin(awx, lost=explanation, events=events("One")[:count])
    assert (job["status"], job["job_explanation"], job["artifacts"]) == ("failed", explanation, {})
    assert job["event_processing_finished"] is (count == 0)
    assert ask(awx, "GET /jobs/1/")[1]["event_processing_finished"] is (count == 0)


def test_a_canceled_job_without_a_dispatcher_is_canceled_at_once(awx: Controller) -> None:
    begin(awx, steps=1000, deaf=True)
    assert ask(awx, "POST /jobs/1/cancel/")[0] == 202
    job = ask(awx, "GET /jobs/1/")[1]
    assert (job["status"], job["event_processing_finished"]) == ("canceled", False)


def test_a_job_that_could_not_begin_has_a_traceback(awx: Controller) -> None:
    job = begin(awx, ends="error", traceback="ConnectionRefusedError", unit=None, events=[])
    assert (job["status"], job["job_explanation"]) == ("error", "")
    assert (job["result_traceback"], job["event_processing_finished"]) == (
        "ConnectionRefusedError",
        True,
    )


@pytest.mark.parametrize(("privileged", "status"), [(False, 403), (True, 405)])
def test_canceling_an_ended_job(awx: Controller, privileged: bool, status: int) -> None:
    begin(awx, privileged=privileged)
    assert ask(awx, "POST /jobs/1/cancel/")[0] == status


def test_a_job_that_ended_by_itself_has_all_its_events(awx: Controller) -> None:
    job = begin(awx, ends="failed", explanation="Job terminated due to timeout")
    assert (job["status"], job["event_processing_finished"]) == ("failed", True)


def test_output_has_colours_and_line_ends_of_a_terminal(awx: Controller) -> None:
    begin(awx, events=[{**events()[0], "stdout": "\nTASK [One]"}])
    (event,) = ask(awx, "GET /jobs/1/job_events/")[1]["results"]
    assert event["stdout"] == "\x1b[0;32m\r\nTASK [One]\x1b[0m"


@pytest.mark.parametrize(
    ("request_line", "status", "detail"),
    [
        ("GET /jobs/?artifacts=x", 200, None),
        ("GET /jobs/?extra_vars=x", 403, "Filtering on extra_vars is not allowed."),
        ("GET /jobs/?order_by=extra_vars", 403, "Ordering by extra_vars is not allowed."),
        ("GET /jobs/?nonsense=x", 400, "no field or lookup: nonsense"),
        ("GET /jobs/2/", 404, "No Job matches the given query."),
        ("GET /jobs/1/", 403, FORBIDDEN),
        ("GET /settings/jobs/", 403, FORBIDDEN),
        ("GET /nonsense/", 404, "The requested resource could not be found."),
    ],
)
def test_lists_and_refusals(
    awx: Controller, request_line: str, status: int, detail: str | None
) -> None:
    begin(awx)
    awx.change(hidden=[1])
    answer = ask(awx, request_line)
    assert answer[0] == status
    assert detail is None or answer[1] == detail


def test_a_stranger(awx: Controller) -> None:
    status, detail = ask(awx, "GET /jobs/", token="another")
    assert (status, "To establish a login session" in detail) == (401, True)


def test_answers_and_requests_have_the_fields_of_awx_and_no_others(awx: Controller) -> None:
    def fields(request_line: str) -> set[str]:
        answer = ask(awx, request_line)[1]
        return set(answer["results"][0] if "results" in answer else answer)

    names = {kind: set(names.split()) for kind, names in SOURCE["launched"].items()}
    begin(awx)
    page, listed = fields("GET /jobs/1/"), fields("GET /jobs/")
    assert page <= names["job"]
    # Fields that only a job's own page shows.
    assert page - listed == page & set(SOURCE["not_in_lists_of_jobs"])
    assert {"result_traceback", "event_processing_finished"} <= page - listed
    assert fields("GET /jobs/1/job_events/") <= names["job_event"]
    assert fields("GET /inventories/3/hosts/") <= names["host"]
    inventory = SOURCE["kinds"]["inventories"]
    named = {*inventory["writable"].split(), *inventory["read_only"].split()}
    assert fields("GET /inventories/3/") <= named
    template = SOURCE["kinds"]["job_templates"]
    written = {*template["writable"].split(), *template["read_only"].split()}
    assert fields("GET /job_templates/") <= written
    assert set(request.body(spec())) <= names["launch"]


def test_ends_of_jobs_are_told_by_words_of_awx() -> None:
    assert set(SOURCE["statuses"]) - {"new"} == {*ACTIVE, *launcher._OVER}
    explanations = SOURCE["explanations"]
    assert {REAPED_AT_START, REAPED_FROM_QUEUE, REAPED_BY_PEER} == {
        text for text in explanations if text.startswith(launcher._REAPED)
    }
    assert any(launcher._TIMED_OUT.startswith(text) for text in explanations)

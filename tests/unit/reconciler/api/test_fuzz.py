"""schemathesis over the whole contract as every role: no error of our own, nothing undocumented."""

from __future__ import annotations

import uuid
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from reconciler.api import contract
from tests.unit.reconciler.api.conformity import Client
from tests.unit.reconciler.api.test_launches import launch
from tests.unit.reconciler.api.world import NODE, World

# Of every operation as every role. More find more; these take seconds.
EXAMPLES = {"admin": 8, "member": 3, "node": 1, "": 1}
# An endless answer: its own test reads it.
STREAMS = {"tasks_events"}


@pytest.fixture
def known(selling: World) -> dict[str, str]:
    """Objects that are there, so that more than 404 is reached."""
    made = launch(selling).json()
    admin = selling.client("admin")
    return {
        "node_id": NODE,
        "project_id": "demo",
        "allocation_id": made["id"],
        "slot_id": admin.get(f"admin/nodes/{NODE}/resource-slots").json()["items"][0]["id"],
        "task_id": admin.get("admin/tasks").json()["items"][0]["id"],
    }


def repeat(client: Client, asked: dict[str, Any]) -> str:
    """How an act is answered that was done before: never by doing it again."""
    if not asked["headers"].keys() & {"Idempotency-Key", "X-Idempotency-Key"}:
        asked["headers"]["Idempotency-Key"] = str(uuid.uuid4())
        if not client.request(**asked).is_success:
            return "once"  # what it asks for can be done a single time
    again = client.request(**asked)
    if again.headers.get("Idempotency-Replayed") == "true":
        return "replayed"
    return str(again.json().get("code", f"done again: {asked['method']} {asked['url']}"))


@pytest.mark.covers("CTRL-1", "CTRL-10")
@pytest.mark.parametrize("role", EXAMPLES)
def test_no_request_breaks_the_service(selling: World, known: dict[str, str], role: str) -> None:
    schema = schemathesis.openapi.from_dict(contract.contract())
    # Errors of the service are its answer here, not the test client's exception.
    client = selling.client(role, raise_server_exceptions=False)
    statuses: set[int] = set()
    repeated: set[str] = set()
    for found in schema.get_all_operations():
        operation = found.ok()
        if operation.definition.raw["operationId"] in STREAMS:
            continue

        @seed(20_26)
        @settings(
            max_examples=EXAMPLES[role],
            database=None,
            deadline=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(case=operation.as_strategy(), real=st.booleans())
        def send(case: Any, real: bool) -> None:
            if real:
                names = case.path_parameters
                names.update({name: known[name] for name in names if name in known})
            asked = case.as_transport_kwargs(base_url="http://test")
            # Who asks is not part of what is tried out.
            asked["headers"] = {
                name: value
                for name, value in asked["headers"].items()
                if name.lower() not in ("authorization", "user-agent")
            }
            asked.pop("cookies", None)
            if "data" in asked:
                asked["content"] = asked.pop("data")
            answer = client.request(**asked)  # the client holds it against the contract
            assert answer.status_code < 500 or answer.status_code == 503, (asked, answer.text)
            statuses.add(answer.status_code)
            if answer.is_success and case.method != "GET":
                repeated.add(repeat(client, asked))

        send()
    assert repeated <= {"once", "replayed", "secret_shown_once"}
    assert role != "admin" or "replayed" in repeated
    expected = {"admin": {200, 404, 409, 422}, "member": {200, 403}, "node": {403}, "": {401}}
    assert expected[role] <= statuses

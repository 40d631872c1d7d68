"""schemathesis over the whole contract as every role: no error of our own, nothing undocumented."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode

from reconciler.api import contract
from reconciler.api.http import IDEMPOTENCY_HEADERS as HEADERS
from reconciler.db.engine import open_engine
from reconciler.db.migrations import migrate
from reconciler.settings import Settings
from tests.postgresql import running
from tests.unit.reconciler.api.conformity import Client
from tests.unit.reconciler.api.stack import NODE, Stack
from tests.unit.reconciler.api.test_launches import launch
from tests.unit.reconciler.api.test_security import app_instance

# Of every operation as every role. More find more; these take seconds. In CI a role with rights
# asks PostgreSQL only: its types, ranges and texts are narrower.
EXAMPLES = {"admin": 2, "member": 2, "node": 1, "": 1}
ON_POSTGRESQL = {"admin": 4, "member": 3}
# Status codes that must occur; without them the requests covered too little.
EXPECTED = {"admin": {200, 404, 409, 422}, "member": {200, 403, 422}, "node": {403}, "": {401}}
# An endless answer: its own test reads it.
STREAMS = {"tasks_events"}
# Answers 503 by design: there is no worker here.
SAYS_UNREADY = {"/readyz"}
# A request that came before may have put the site's jobs into maintenance.
DRAINED = "maintenance"
# A service, and objects in it.
Known = tuple[Stack, dict[str, str]]


@pytest.fixture(scope="module")
def postgresql(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Known]:
    """The service that sells two slots, on PostgreSQL, and its known objects."""
    with running(fsync=False) as server:
        state = Settings(state_dir=tmp_path_factory.mktemp("state"), database_url=server.url)
        stack = Stack(state, open_engine(server.url))
        migrate(stack.engine)
        for act in (stack.add_node, stack.issue, stack.prepare, stack.sell):
            act()
        yield stack, known_in(stack)
        stack.engine.dispose()


def known_in(selling: Stack) -> dict[str, str]:
    """Objects that are there, so that more than 404 is reached."""
    made = launch(selling).json()
    admin = selling.client("admin")
    return {
        "node_id": NODE,
        "project_id": "demo",
        "allocation_id": made["id"],
        "slot_id": admin.get(f"admin/nodes/{NODE}/resource-slots").json()["items"][0]["id"],
        "task_id": admin.get("admin/tasks").json()["items"][0]["id"],
        "app_instance_id": app_instance(selling),
        "rule_id": selling.ingress_rule(made["id"]),
    }


def repeat(client: Client, request: dict[str, Any]) -> str:
    """How an act is answered that was done before: never by doing it again."""
    # A key of no characters is none.
    if not any(request["headers"].get(name) for name in HEADERS):
        request["headers"]["Idempotency-Key"] = str(uuid.uuid4())
        if not client.request(**request).is_success:
            return "once"  # the operation can be done only once
    again = client.request(**request)
    if again.headers.get("Idempotency-Replayed") == "true":
        return "replayed"
    return str(again.json().get("code", f"done again: {request['method']} {request['url']}"))


@pytest.mark.covers("CTRL-1", "CTRL-10")
@pytest.mark.parametrize(
    "role",
    [
        pytest.param(role, marks=pytest.mark.long if role in ON_POSTGRESQL else ())
        for role in EXAMPLES
    ],
)
def test_no_request_breaks_the_service(selling: Stack, role: str) -> None:
    fuzz((selling, known_in(selling)), role, EXAMPLES[role])


@pytest.mark.postgres
@pytest.mark.covers("CTRL-1", "CTRL-10")
@pytest.mark.parametrize("role", ON_POSTGRESQL)
def test_no_request_breaks_the_service_on_postgresql(postgresql: Known, role: str) -> None:
    """PostgreSQL refuses values that SQLite accepts: types, ranges, bytes in a text."""
    fuzz(postgresql, role, ON_POSTGRESQL[role])


@cache
def cases() -> list[st.SearchStrategy[Any]]:
    """Requests to each operation, within the contract and against it, of all roles."""
    modes = list(GenerationMode)
    made = []
    for result in schemathesis.openapi.from_dict(contract.contract()).get_all_operations():
        operation = result.ok()
        modes.reverse()  # the only example of an operation is of the first
        if operation.definition.raw["operationId"] not in STREAMS:
            made.append(st.one_of([operation.as_strategy(mode) for mode in modes]))
    return made


def fuzz(there: Known, role: str, examples: int) -> None:
    """So many requests to every operation in this role."""
    selling, ids = there
    # Errors of the service are its answer here, not the test client's exception.
    client = selling.client(role, raise_server_exceptions=False)
    statuses: set[int] = set()
    repeated: set[str] = set()
    wrong: set[int] = set()
    for requests in cases():

        @seed(20_26)
        @settings(
            max_examples=examples,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(case=requests, real=st.booleans())
        def send(case: Any, real: bool) -> None:
            if real:
                names = case.path_parameters
                names.update({name: ids[name] for name in names if name in ids})
            request = case.as_transport_kwargs(base_url="http://test")
            # The caller is not part of the fuzzed input.
            request["headers"] = {
                name: value
                for name, value in request["headers"].items()
                if name.lower() not in ("authorization", "user-agent")
            }
            request.pop("cookies", None)
            if "data" in request:
                request["content"] = request.pop("data")
            answer = client.request(**request)  # the client holds it against the contract
            unready = answer.status_code == 503 and (
                case.path in SAYS_UNREADY or answer.json()["code"] == DRAINED
            )
            assert answer.status_code < 500 or unready, (request, answer.text)
            statuses.add(answer.status_code)
            if case.meta.generation.mode is GenerationMode.NEGATIVE:
                wrong.add(answer.status_code)
            if answer.is_success and case.method != "GET":
                repeated.add(repeat(client, request))

        send()
    assert repeated <= {"once", "replayed", "secret_shown_once"}
    assert role != "admin" or "replayed" in repeated
    assert EXPECTED[role] <= statuses
    assert wrong, "none that the contract does not allow"
    assert role not in {"admin", "member"} or 422 in wrong

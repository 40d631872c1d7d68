"""The API application: its routers, middleware and OpenAPI document."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from importlib.metadata import version
from typing import Annotated, Any

from fastapi import APIRouter, FastAPI
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute
from pydantic import BaseModel, ConfigDict, Field
from sqlalchemy import Engine
from typing_extensions import TypeAliasType

from reconciler.api import (
    admission,
    allocations,
    apps,
    catalog,
    console_sessions,
    fleet,
    health,
    images,
    ingress,
    jobs,
    maas,
    metrics,
    netbox,
    nodes,
    nodework,
    placement,
    pools,
    problems,
    projects,
    recovery,
    slice_telemetry,
    slots,
    ssh_access,
    tasks,
    terminals,
    timeline,
    tokens,
    usage,
    worker,
)
from reconciler.api.http import CORRELATION_HEADER
from reconciler.api.security import Places, Rates
from reconciler.model import jobs as job_rules
from reconciler.model import pools as pool_rules
from reconciler.model import states
from reconciler.model.states import Described
from reconciler.settings import Settings

Document = dict[str, Any]

PREFIX = "/api/v1"
# Requests are matched in this order, so the routes of tenants come first.
ROUTERS = (
    allocations.router,
    slice_telemetry.router,
    ingress.router,
    ssh_access.router,
    terminals.router,
    terminals.admin_router,
    jobs.router,
    jobs.own_router,
    jobs.admin_router,
    pools.project_router,
    worker.router,
    apps.router,
    catalog.router,
    fleet.router,
    nodes.router,
    nodes.enrolment_router,
    nodework.state_router,
    nodework.router,
    nodework.baremetal_router,
    nodework.topology_router,
    slots.router,
    images.router,
    projects.router,
    allocations.admin_router,
    recovery.router,
    placement.router,
    recovery.policy_router,
    maas.router,
    netbox.router,
    usage.router,
    tasks.router,
    timeline.router,
    timeline.audit_router,
    tokens.admin_router,
    tokens.router,
    console_sessions.router,
)


MUTATING = frozenset({"post", "put", "patch", "delete"})
_KEY: Document = {"type": "string", "minLength": 1, "maxLength": 255, "pattern": "^[!-~]+$"}
_PARAMETERS: dict[str, Document] = {
    "CorrelationId": {
        "name": CORRELATION_HEADER,
        "in": "header",
        "required": False,
        "description": "Goes into every record, log line and run of the request; made if absent.",
        "schema": {"type": "string", "maxLength": 64, "pattern": "^[A-Za-z0-9][A-Za-z0-9._-]*$"},
    },
    "IdempotencyKey": {
        "name": "Idempotency-Key",
        "in": "header",
        "required": False,
        "description": "A repetition with the same key and token does nothing twice. Keys are"
        " remembered for a week, or GPUAAS_KEEP_ANSWERS_DAYS, and while their allocation lives;"
        " those of inference jobs at most as long as the last of the jobs.",
        "schema": _KEY,
    },
    "XIdempotencyKey": {
        "name": "X-Idempotency-Key",
        "in": "header",
        "required": False,
        "description": "Another name of Idempotency-Key. If both are sent they must be equal.",
        "schema": _KEY,
    },
}
_HEADERS: dict[str, Document] = {
    "CorrelationId": {
        "description": "The id in all records and log lines of the request.",
        "required": True,
        "schema": {"type": "string"},
    },
    "ETag": {
        "description": "The record's generation, for If-Match.",
        "required": True,
        "schema": {"type": "string", "pattern": '^"[0-9]+"$'},
    },
    "IdempotencyReplayed": {
        "description": "true: this is the answer of an earlier request; nothing was done now.",
        "schema": {"const": "true"},
    },
}
ProblemCode = TypeAliasType(
    "ProblemCode",
    Annotated[
        str,
        Field(
            description="The cause, for programs. A code keeps its meaning forever.",
            json_schema_extra={"enum": sorted(problems.CODES)},
        ),
    ],
)


class Problem(BaseModel):
    """RFC 9457. Some codes add members of their own."""

    model_config = ConfigDict(extra="allow")

    type: Annotated[str, Field(pattern="^urn:gpuaas:problem:[a-z0-9_]+$")]
    title: str
    status: Annotated[int, Field(ge=400, le=599)]
    detail: str
    instance: str = Field(default_factory=str)
    code: ProblemCode
    expected: str
    found: str
    remedy: str
    correlation_id: str


class Service(FastAPI):
    """An application whose OpenAPI document also describes headers and refusals."""

    def openapi(self) -> Document:
        if self.openapi_schema is None:
            written = get_openapi(title=self.title, version=self.version, routes=self.routes)
            # A page of `Node` is NodePage instead of PageOf_Node_, as pydantic calls it.
            text = re.sub(r"PageOf_(\w+?)_(?=\")", r"\1Page", json.dumps(written))
            document = json.loads(text)
            components = document["components"]
            _describe_states(components["schemas"])
            for path, verb, operation in operations(document):
                mutating = verb in MUTATING
                _complete(path, operation, mutating=mutating, schemas=components["schemas"])
            components["parameters"] = _PARAMETERS | _share_parameters(document)
            components["headers"] = _HEADERS
            components["responses"] = {"Problem": _problem_response()}
            self.openapi_schema = _tidy_schema(document, names=False) | {"info": document["info"]}
        return self.openapi_schema


def create_app(settings: Settings, engine: Engine) -> FastAPI:
    """Build the API over a database. It starts nothing in the background."""
    app = Service(
        title="gpuaas.slice reconciler",
        version=version("gpuaas-slice"),
        openapi_url=f"{PREFIX}/openapi.json",
        # FastAPI's viewers load their scripts from other sites.
        docs_url=None,
        redoc_url=None,
        # An id that a script has left empty would lead to the list, and a client would follow.
        redirect_slashes=False,
        # A response by default also replaces FastAPI's own description of a 422.
        responses={"default": {"model": Problem}},
        generate_unique_id_function=_operation_id,
    )
    app.state.settings = settings
    app.state.engine = engine
    app.state.rates = Rates()
    app.state.places = Places()
    app.state.waits = worker.Waits()
    app.state.availability = catalog.AnswerCache()
    problems.install(app)
    app.add_middleware(admission.Admission)
    # Added last, it is the first.
    app.add_middleware(metrics.Correlation)
    api = APIRouter(prefix=PREFIX)
    for router in ROUTERS:
        api.include_router(router)
    app.include_router(api)
    app.include_router(health.router)
    app.include_router(health.operator_router)
    app.include_router(pools.router)
    app.include_router(jobs.control_router)
    return app


def _operation_id(route: APIRoute) -> str:
    """The name of an operation in the contract, such as slots_approve."""
    return f"{route.tags[0]}_{route.name}".replace(" ", "_")


def operations(document: Document) -> Iterator[tuple[str, str, Document]]:
    """Path, verb and description of every operation of a document."""
    for path, verbs in document["paths"].items():
        for verb, operation in verbs.items():
            yield path, verb, operation


def _complete(path: str, operation: Document, *, mutating: bool, schemas: Document) -> None:
    secured = "security" in operation
    parameters = [_tidy_parameter(part) for part in operation.get("parameters", [])]
    refusals = _refusals(path, operation, parameters, mutating=mutating)
    if secured and mutating:
        parameters += [_ref("parameters", "IdempotencyKey"), _ref("parameters", "XIdempotencyKey")]
    operation["parameters"] = [*parameters, _ref("parameters", "CorrelationId")]
    responses = operation["responses"]
    del responses["default"]
    for status, response in responses.items():
        if status != "204":
            # FastAPI leaves the content of a file out.
            response.setdefault("content", {"application/octet-stream": {}})
            response["headers"] = {"X-Correlation-Id": _ref("headers", "CorrelationId")}
            if _has_generation(response, schemas):
                response["headers"]["ETag"] = _ref("headers", "ETag")
            if secured and mutating:
                response["headers"]["Idempotency-Replayed"] = _ref("headers", "IdempotencyReplayed")
    problem = _ref("responses", "Problem")
    operation["responses"] = responses | dict.fromkeys([*sorted(refusals), "default"], problem)


def _refusals(
    path: str, operation: Document, parameters: list[Document], *, mutating: bool
) -> set[str]:
    """The statuses with which the operation can refuse a request."""
    secured = "security" in operation
    statuses = {"401", "403"} if secured else set()
    if not path.startswith("/api/"):
        return statuses | ({"503"} if path != "/healthz" else set())
    statuses |= {"503"}
    if not secured and any(word in path for word in ("content", "enrol", "userdata", "worker")):
        # The credential of these is a token of their own.
        statuses |= {"401"}
    if "{" in path:
        statuses |= {"404"}
    if "requestBody" in operation:
        statuses |= {"409", "413", "422"}
    names = {parameter["name"] for parameter in parameters}
    if "cursor" in names or (secured and mutating):
        statuses |= {"400"}
    if parameters:
        statuses |= {"422"}
    if "If-Match" in names:
        statuses |= {"412"}
    return statuses


def _has_generation(response: Document, schemas: Document) -> bool:
    """Whether the answer is a single record with an ETag."""
    schema = response["content"].get("application/json", {}).get("schema", {})
    name = schema.get("$ref", "").rpartition("/")[2]
    return "generation" in schemas.get(name, {}).get("properties", {})


def _tidy_parameter(parameter: Document) -> Document:
    """Without null: an optional parameter is left out."""
    schema = {name: part for name, part in parameter["schema"].items() if name != "description"}
    options = [part for part in schema.pop("anyOf", []) if part != {"type": "null"}]
    for option in options:
        schema |= option
    return parameter | {"schema": schema}


def _share_parameters(document: Document) -> dict[str, Document]:
    """Move parameters that several operations have alike to the components."""
    texts = Counter(
        json.dumps(parameter)
        for _path, _verb, operation in operations(document)
        for parameter in operation["parameters"]
        if "$ref" not in parameter
    )
    shared: dict[str, Document] = {}
    for text, count in texts.most_common():
        if count > 1:
            parameter = json.loads(text)
            shared.setdefault(_component_name(parameter), parameter)
    for _path, _verb, operation in operations(document):
        operation["parameters"] = [
            _ref("parameters", _component_name(parameter))
            if "$ref" not in parameter and shared.get(_component_name(parameter)) == parameter
            else parameter
            for parameter in operation["parameters"]
        ]
    return shared


def _component_name(parameter: Document) -> str:
    words = f"{parameter['in']}_{parameter['name']}".replace("-", "_")
    return words.title().replace("_", "")


def _describe_states(schemas: Document) -> None:
    """Explain each value of the states."""
    for name, kind in (vars(states) | vars(job_rules) | vars(pool_rules)).items():
        if name in schemas and isinstance(kind, type) and issubclass(kind, Described):
            lines = [f"- `{member.value}`: {member.meaning}" for member in kind]
            schemas[name]["description"] = "\n".join([f"{kind.__doc__}", "", *lines])


def _problem_response() -> Document:
    return {
        "description": "Refused: what was expected, what was found, what to do.",
        "headers": {"X-Correlation-Id": _ref("headers", "CorrelationId")},
        "content": {problems.MEDIA_TYPE: {"schema": _ref("schemas", "Problem")}},
    }


def _tidy_schema(part: Any, *, names: bool) -> Any:
    """Without titles made of names and without `additionalProperties: true`, which is the default;
    with whole numbers as integers.
    """
    if isinstance(part, list):
        return [_tidy_schema(item, names=False) for item in part]
    if isinstance(part, float) and part.is_integer():
        return int(part)
    if not isinstance(part, dict):
        return part
    return {
        name: _tidy_schema(value, names=name == "properties" and not names)
        for name, value in part.items()
        if names or not (name == "title" or (name == "additionalProperties" and value is True))
    }


def _ref(kind: str, name: str) -> Document:
    return {"$ref": f"#/components/{kind}/{name}"}

"""The OpenAPI document of the service: FastAPI's, completed by headers, refusals and states."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from reconciler.api import problems, telemetry
from reconciler.model import states
from reconciler.model.states import Described

Document = dict[str, Any]

MUTATING = frozenset({"post", "put", "patch", "delete"})
_ORDER = (
    "tags",
    "summary",
    "description",
    "operationId",
    "security",
    "parameters",
    "requestBody",
    "responses",
)
# FastAPI's own form of a validation error; this service answers with `Problem` instead.
_UNUSED_SCHEMAS = ("HTTPValidationError", "ValidationError")
_KEY: Document = {"type": "string", "minLength": 1, "maxLength": 255, "pattern": "^[!-~]+$"}
_PARAMETERS: dict[str, Document] = {
    "CorrelationId": {
        "name": telemetry.CORRELATION_HEADER,
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
        " remembered for a week, or GPUAAS_KEEP_ANSWERS_DAYS, and while their allocation lives.",
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


def build(app: FastAPI) -> Document:
    """The OpenAPI document, built once for each application."""
    if app.openapi_schema is None:
        document = _name_pages(get_openapi(title=app.title, version=app.version, routes=app.routes))
        components = document["components"]
        schemas = components["schemas"]
        for name in _UNUSED_SCHEMAS:
            schemas.pop(name, None)
        _describe_states(schemas)
        schemas["Problem"] = _problem_schema()
        schemas["ProblemCode"] = problems.CODE_SCHEMA
        for path, _verb, operation in operations(document):
            _complete(path, operation, mutating=_verb in MUTATING, schemas=schemas)
        components["parameters"] = _PARAMETERS | _share_parameters(document)
        components["headers"] = _HEADERS
        components["responses"] = {"Problem": _problem_response()}
        for path in document["paths"].values():
            for verb, operation in path.items():
                path[verb] = {name: operation[name] for name in _ORDER if name in operation}
        app.openapi_schema = _tidy_schema(document, names=False) | {"info": document["info"]}
    return app.openapi_schema


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
    responses = {
        status: response
        for status, response in operation["responses"].items()
        if status not in ("default", "422")
    }
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
    if not secured and ("content" in path or "enrol" in path):
        # The credential of these two is a token of their own.
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
    """Title case for headers, and no null: an optional parameter is left out."""
    schema = {name: part for name, part in parameter["schema"].items() if name != "description"}
    options = [part for part in schema.pop("anyOf", []) if part != {"type": "null"}]
    for option in options:
        schema |= option
    name = parameter["name"]
    return parameter | {
        "name": name.title() if parameter["in"] == "header" else name,
        "schema": schema,
    }


def _share_parameters(document: Document) -> dict[str, Document]:
    """Move parameters that several operations have alike to the components."""
    uses: dict[str, Counter[str]] = {}
    for _path, _verb, operation in operations(document):
        for parameter in operation["parameters"]:
            if "$ref" not in parameter:
                same = uses.setdefault(_component_name(parameter), Counter())
                same[json.dumps(parameter)] += 1
    most_common = {name: same.most_common(1)[0] for name, same in uses.items()}
    shared = {name: json.loads(text) for name, (text, count) in most_common.items() if count > 1}
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


def _name_pages(document: Document) -> Document:
    """Call a page of `Node` NodePage instead of PageOf_Node_, as pydantic does."""
    text = re.sub(r"PageOf_(\w+?)_(?=\")", r"\1Page", json.dumps(document))
    renamed: Document = json.loads(text)
    return renamed


def _describe_states(schemas: Document) -> None:
    """Explain each value of the states."""
    for name, kind in vars(states).items():
        if name in schemas and isinstance(kind, type) and issubclass(kind, Described):
            lines = [f"- `{member.value}`: {member.meaning}" for member in kind]
            schemas[name]["description"] = "\n".join([f"{kind.__doc__}", "", *lines])


def _problem_schema() -> Document:
    schema = problems.ProblemDocument.model_json_schema()
    schema["properties"]["code"] = _ref("schemas", "ProblemCode")
    del schema["properties"]["instance"]["default"]
    return schema


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

"""The service's description of itself: what FastAPI knows, and the documents it answers with."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from reconciler.api import correlation, problems
from reconciler.api.answers import ANSWERS
from reconciler.api.schemas import SCHEMAS
from reconciler.api.shapes import Schema, ref

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
# FastAPI's own form of a refusal, which no route of ours answers with.
_VALIDATION = ("HTTPValidationError", "ValidationError")
_PROBLEM: Document = {"$ref": "#/components/responses/Problem"}
_KEY: Schema = {"type": "string", "minLength": 1, "maxLength": 255, "pattern": "^[!-~]+$"}
_PARAMETERS: dict[str, Document] = {
    "CorrelationId": {
        "name": correlation.HEADER,
        "in": "header",
        "required": False,
        "description": "Goes into every record, log line and run of the request; made if absent.",
        "schema": {"type": "string", "maxLength": 64, "pattern": "^[A-Za-z0-9][A-Za-z0-9._-]*$"},
    },
    "IdempotencyKey": {
        "name": "Idempotency-Key",
        "in": "header",
        "required": False,
        "description": "Repeats an act without doing it twice, of this token alone; remembered for"
        " a week unless GPUAAS_KEEP_ANSWERS_DAYS says otherwise, and while its allocation lives.",
        "schema": _KEY,
    },
    "XIdempotencyKey": {
        "name": "X-Idempotency-Key",
        "in": "header",
        "required": False,
        "description": "Another name of Idempotency-Key; if both are there they are the same.",
        "schema": _KEY,
    },
}
_HEADERS: dict[str, Document] = {
    "CorrelationId": {
        "description": "The id under which everything that followed is found.",
        "required": True,
        "schema": {"type": "string"},
    },
    "ETag": {
        "description": "The record's generation, for If-Match.",
        "required": True,
        "schema": {"type": "string", "pattern": '^"[0-9]+"$'},
    },
    "IdempotencyReplayed": {
        "description": "true: this answer was given before, and nothing was done now.",
        "schema": {"const": "true"},
    },
}


def build(app: FastAPI) -> Document:
    """The OpenAPI document; the same object every time."""
    if app.openapi_schema is None:
        document = get_openapi(title=app.title, version=app.version, routes=app.routes)
        components = document.setdefault("components", {})
        for own in _VALIDATION:
            components.get("schemas", {}).pop(own, None)
        components["schemas"] = components.get("schemas", {}) | SCHEMAS
        for path, verbs in document["paths"].items():
            for verb, operation in verbs.items():
                _complete(path, verb, operation, components["schemas"])
                verbs[verb] = {name: operation[name] for name in _ORDER if name in operation}
        components["parameters"] = _PARAMETERS
        components["headers"] = _HEADERS
        components["responses"] = {"Problem": _problem()}
        app.openapi_schema = _untitled(document, names=False) | {"info": document["info"]}
    return app.openapi_schema


def _complete(path: str, verb: str, operation: Document, shapes: Document) -> None:
    parameters = operation.setdefault("parameters", [])
    _tidy(parameters)
    secured = "security" in operation
    if secured and verb in MUTATING:
        parameters += [_parameter("IdempotencyKey"), _parameter("XIdempotencyKey")]
    parameters.append(_parameter("CorrelationId"))
    responses = operation["responses"]
    responses.pop("default", None)
    responses.pop("422", None)
    for status, answer in responses.items():
        if status != "204":
            _answer(operation["operationId"], answer)
            answer["headers"] = _told_beside(answer, shapes)
            if secured and verb in MUTATING:
                answer["headers"]["Idempotency-Replayed"] = _header("IdempotencyReplayed")
    if not path.startswith("/api/"):
        statuses = {"503"} if path != "/healthz" else set()
        statuses |= {"401", "403"} if secured else set()
    else:
        statuses = _refusals(path, operation, parameters)
    operation["responses"] = {
        **responses,
        **dict.fromkeys(sorted(statuses), _PROBLEM),
        "default": _PROBLEM,
    }


def _refusals(path: str, operation: Document, parameters: list[Document]) -> set[str]:
    """The statuses of refusals that the operation must be expected to give."""
    found = {"503"}
    if "security" in operation:
        found |= {"401", "403"}
    elif "content" in path or "enrol" in path:
        # Their credential is a token of their own.
        found |= {"401"}
    if "{" in path:
        found |= {"404"}
    if "requestBody" in operation:
        found |= {"409", "413", "422"}
    named = {parameter.get("name", parameter.get("$ref")) for parameter in parameters}
    if named & {"cursor", "#/components/parameters/IdempotencyKey"}:
        found |= {"400"}
    if any("schema" in parameter for parameter in parameters):
        found |= {"422"}
    if "If-Match" in named:
        found |= {"412"}
    return found


def _answer(operation: str, answer: Document) -> None:
    name = ANSWERS.get(operation)
    told = answer.get("content", {}).get("application/json")
    if name is not None and told is not None:
        told["schema"] = ref(name)
    # A file is bytes and nothing more.
    answer.setdefault("content", {"application/octet-stream": {}})


def _told_beside(answer: Document, shapes: Document) -> Document:
    """The headers of an answer, by the document that it is."""
    headers = {"X-Correlation-Id": _header("CorrelationId")}
    schema = answer["content"].get("application/json", {}).get("schema", {})
    shape = shapes.get(schema.get("$ref", "").rpartition("/")[2], {})
    if "generation" in shape.get("properties", {}) and not _is_change(shape):
        headers["ETag"] = _header("ETag")
    return headers


def _is_change(shape: Schema) -> bool:
    # History names the generation that a change led to; it is no record with one of its own.
    return "entity" in shape["properties"]


def _tidy(parameters: list[Document]) -> None:
    """One spelling for headers, and no null for what is simply left out."""
    for parameter in parameters:
        if parameter["in"] == "header":
            parameter["name"] = parameter["name"].title()
        schema = parameter["schema"]
        options = [one for one in schema.pop("anyOf", []) if one != {"type": "null"}]
        if options:
            (only,) = options
            schema.update(only)
        schema.pop("description", None)


def _untitled(part: Any, *, names: bool) -> Any:
    """Without the titles that are made of names, and with whole limits of whole numbers."""
    if isinstance(part, list):
        return [_untitled(one, names=False) for one in part]
    if isinstance(part, float) and part.is_integer():
        return int(part)
    if not isinstance(part, dict):
        return part
    return {
        name: _untitled(value, names=name == "properties" and not names)
        for name, value in part.items()
        if names or name != "title"
    }


def _problem() -> Document:
    return {
        "description": "Refused: what was expected, what was found, what to do.",
        "headers": {"X-Correlation-Id": _header("CorrelationId")},
        "content": {problems.MEDIA_TYPE: {"schema": ref("Problem")}},
    }


def _parameter(name: str) -> Document:
    return {"$ref": f"#/components/parameters/{name}"}


def _header(name: str) -> Document:
    return {"$ref": f"#/components/headers/{name}"}

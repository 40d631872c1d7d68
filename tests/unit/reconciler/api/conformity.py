"""A client that checks every answer against the OpenAPI document of the service.

Another test compares that document with the written contract.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from functools import cached_property
from typing import Any

import httpx
from fastapi import FastAPI
from jsonschema import Draft202012Validator

from reconciler.api import contract

with warnings.catch_warnings():
    # Starlette warns that it prefers httpx2, which is not a dependency here.
    warnings.simplefilter("ignore")
    from starlette.testclient import TestClient

Document = dict[str, Any]


def operations() -> Iterator[tuple[str, str, Document]]:
    """Verb, path and description of every operation of the written contract."""
    for path, verbs in contract.contract()["paths"].items():
        for verb, operation in verbs.items():
            yield verb, path, operation


def roles(operation: Document) -> set[str]:
    return {role for security in operation.get("security", []) for role in security["token"]}


class Conformity:
    """Check of answers against an OpenAPI document."""

    def __init__(self, document: Document) -> None:
        self.document = document
        self._validators: dict[tuple[str, str, str], Draft202012Validator] = {}

    @cached_property
    def _paths(self) -> list[tuple[re.Pattern[str], str]]:
        patterns = [
            (re.compile(re.sub(r"\\{[^}]*\\}", "[^/]+", re.escape(path))), path)
            for path in self.document["paths"]
        ]
        # Paths with fewer variables first, as the service matches them.
        return sorted(patterns, key=lambda pair: pair[1].count("{"))

    def check(self, answer: httpx.Response) -> None:
        """Fail unless the contract allows this answer to this request."""
        path = next(
            (path for pattern, path in self._paths if pattern.fullmatch(answer.url.path)), None
        )
        verb = answer.request.method.lower()
        if path is None or verb not in self.document["paths"][path]:
            return
        responses = self.document["paths"][path][verb]["responses"]
        status = str(answer.status_code)
        where = f"{answer.request.method} {path} {status}"
        assert status in responses or not answer.is_success, f"{where} is not in the contract"
        response = self._resolve(responses.get(status) or responses["default"])
        for name, header in response.get("headers", {}).items():
            if self._resolve(header).get("required"):
                assert name in answer.headers, f"{where} without {name}"
        media = answer.headers.get("content-type", "").partition(";")[0]
        assert media in response["content"], f"{where}: {media}"
        if media.endswith("json"):
            self._validate(
                (path, verb, status), response["content"][media]["schema"], answer, where
            )

    def _validate(
        self, key: tuple[str, str, str], schema: Document, answer: httpx.Response, where: str
    ) -> None:
        validator = self._validators.get(key)
        if validator is None:
            whole = {**schema, "components": self.document["components"]}
            validator = self._validators[key] = Draft202012Validator(whole)
        wrong = [
            f"{'/'.join(map(str, error.absolute_path))}: {error.message[:300]}"
            for error in validator.iter_errors(answer.json())
        ]
        assert not wrong, f"{where}: {wrong}; see the answer's model in reconciler/api"

    def _resolve(self, part: Document) -> Document:
        reference = part.get("$ref")
        if reference is None:
            return part
        target: Any = self.document
        for name in reference.removeprefix("#/").split("/"):
            target = target[name]
        return dict(target)


class Client(TestClient):
    """`judge` sees every answer."""

    judge: Conformity | None = None

    def send(self, *arguments: Any, **options: Any) -> httpx.Response:
        answer: httpx.Response = super().send(*arguments, **options)
        if self.judge is not None:
            self.judge.check(answer)
        return answer


def client(app: FastAPI, judge: Conformity, **options: Any) -> Client:
    """A client whose every answer is checked."""
    made = Client(app, **options)
    made.judge = judge
    return made

"""A client that holds every answer against what the service says of itself.

The service's document is compared with the written contract elsewhere, so what passes here is in
the contract.
"""

from __future__ import annotations

import re
import warnings
from functools import cached_property
from typing import Any

import httpx
from fastapi import FastAPI
from jsonschema import Draft202012Validator

with warnings.catch_warnings():
    # Starlette asks for httpx2, which is no dependency of ours; httpx serves as well.
    warnings.simplefilter("ignore")
    from starlette.testclient import TestClient

Document = dict[str, Any]


class Conformity:
    """Answers against one OpenAPI document."""

    def __init__(self, document: Document) -> None:
        self.document = document
        self._validators: dict[tuple[str, str, str], Draft202012Validator] = {}

    @cached_property
    def _paths(self) -> list[tuple[re.Pattern[str], str]]:
        patterns = [
            (re.compile(re.sub(r"\\{[^}]*\\}", "[^/]+", re.escape(path))), path)
            for path in self.document["paths"]
        ]
        # The more exact path first, as the service matches it.
        return sorted(patterns, key=lambda pair: pair[1].count("{"))

    def check(self, answer: httpx.Response) -> None:
        """Fail unless the contract allows this answer to this request."""
        path = next((path for one, path in self._paths if one.fullmatch(answer.url.path)), None)
        verb = answer.request.method.lower()
        if path is None or verb not in self.document["paths"][path]:
            return
        responses = self.document["paths"][path][verb]["responses"]
        named = str(answer.status_code)
        where = f"{answer.request.method} {path} {named}"
        assert named in responses or not answer.is_success, f"{where} is not in the contract"
        told = self._told(responses.get(named) or responses["default"])
        for name, header in told.get("headers", {}).items():
            if self._told(header).get("required"):
                assert name in answer.headers, f"{where} without {name}"
        media = answer.headers.get("content-type", "").partition(";")[0]
        assert media in told["content"], f"{where}: {media}"
        if media.endswith("json"):
            self._validate((path, verb, named), told["content"][media]["schema"], answer, where)

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

    def _told(self, part: Document) -> Document:
        reference = part.get("$ref")
        if reference is None:
            return part
        found: Any = self.document
        for name in reference.removeprefix("#/").split("/"):
            found = found[name]
        return dict(found)


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

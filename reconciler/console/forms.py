"""Forms of the console, and the API call that each of them makes.

A field's name says how its text becomes JSON: `reason` is text, `gpu_count:int` a number,
`ssh_keys:lines` a list. Empty fields are left out, except with `:text`, and with `:limit`, where
null is no limit.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qsl

from starlette.requests import Request

from reconciler.model.errors import Problem

_METHODS = frozenset({"POST", "PUT", "PATCH", "DELETE"})
_PATH = re.compile(r"(?=.{1,1000}$)(/[A-Za-z0-9][A-Za-z0-9._:%-]*)+")
# Fields that control the call, and are not part of its body.
_CONTROL = "_"
# More fields and bytes than any page sends. The login reads a form before it knows who sends it,
# and a page shows a refused form again.
_MOST, _LARGEST = 2_000, 256 << 10


@dataclass(frozen=True)
class Form:
    """A form as the browser sent it. want: which of two opposite calls of a path it makes. values:
    its fields by name, for showing it again.
    """

    method: str
    path: str
    key: str
    back: str
    generation: str
    body: dict[str, Any]
    want: str = ""
    values: dict[str, list[str]] = field(default_factory=dict)

    @property
    def call(self) -> str:
        """Method, path and wish of the API call, by which a page recognises its form."""
        return f"{self.method} {self.path}#{self.want}".removesuffix("#")


async def read(request: Request) -> Form:
    """The form in the request's body."""
    values = await fields(request)
    method, _, path = _last(values, "_call").partition(" ")
    if method not in _METHODS or not _PATH.fullmatch(path):
        raise _invalid("a form of the console", "a form without a known call")
    key, generation = _last(values, "_key"), _last(values, "_generation")
    if not (key + generation).isascii():
        raise _invalid("the key and generation of a page", "letters beyond ASCII")
    return Form(
        method=method,
        path=path,
        key=key,
        back=_last(values, "_back"),
        generation=generation,
        body=body(values),
        want=_last(values, "_want"),
        values=values,
    )


async def fields(request: Request) -> dict[str, list[str]]:
    """The fields of the request's body by name, each with all its values."""
    content = await request.body()
    if len(content) > _LARGEST:
        raise _invalid(f"a form of at most {_LARGEST} bytes", f"{len(content)}")
    try:
        text = content.decode()
        pairs = parse_qsl(
            text, keep_blank_values=True, strict_parsing=bool(text), max_num_fields=_MOST
        )
    except ValueError as error:
        raise _invalid("fields as a browser sends them", "another body") from error
    values: dict[str, list[str]] = {}
    for name, value in pairs:
        # Browsers end the lines of a text area with both characters.
        values.setdefault(name, []).append(value.replace("\r\n", "\n"))
    return values


def body(values: dict[str, list[str]]) -> dict[str, Any]:
    """The JSON body that the fields stand for."""
    document: dict[str, Any] = {}
    for full, texts in values.items():
        name, _, kind = full.partition(":")
        if name.startswith(_CONTROL):
            continue
        if kind not in _KINDS:
            raise _invalid(f"a kind of field among {', '.join(sorted(_KINDS))}", kind)
        value = _KINDS[kind](texts)
        if value is not None or kind in _NULLS:
            document[name] = value
    return document


def _number(texts: list[str]) -> int | str | None:
    text = texts[-1].strip()
    try:
        return int(text) if text else None
    except ValueError:
        return text  # The API names the field that should be a number.


def _lines(texts: list[str]) -> list[str] | None:
    lines = [line.strip() for text in texts for line in text.splitlines() if line.strip()]
    return lines or None


def _document(texts: list[str]) -> Any:
    if not texts[-1].strip():
        return None
    try:
        return json.loads(texts[-1])
    except (ValueError, RecursionError) as error:
        raise _invalid("JSON", "a text that is none") from error


_KINDS: dict[str, Callable[[list[str]], Any]] = {
    "": lambda texts: texts[-1].strip() or None,
    "text": lambda texts: texts[-1].strip(),
    "int": _number,
    "limit": _number,
    "bool": lambda texts: texts[-1] in ("on", "true"),
    "lines": _lines,
    "words": lambda texts: texts[-1].replace(",", " ").split() or None,
    "list": lambda texts: [text for text in texts if text] or None,
    "json": _document,
    "jsons": lambda texts: [_document([text]) for text in texts],
    # An input of the kind datetime-local; the page says that it means UTC.
    "utc": lambda texts: f"{texts[-1]}Z" if texts[-1] else None,
}
# Kinds whose empty field is null in the body.
_NULLS = frozenset({"limit"})


def _last(values: dict[str, list[str]], name: str) -> str:
    return values.get(name, [""])[-1]


def _invalid(expected: str, found: str) -> Problem:
    return Problem(
        "request_invalid",
        422,
        expected=expected,
        found=found,
        remedy="open the page again and use its form",
    )

"""A visit to a page: who visits, and calls of the API in the visitor's name.

Pages call the API's own routes within this process. So a page shows nothing and does nothing that
the API would refuse to the same caller, and its refusals have the same words.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

import httpx
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from reconciler.api.http import CORRELATION_HEADER, correlation_id
from reconciler.api.models import ID_LENGTH, ID_PATTERN
from reconciler.api.security import SECRET, SESSION, Caller
from reconciler.client import route
from reconciler.console.forms import Form
from reconciler.console.pages import render
from reconciler.console.session import Identity, secret_of
from reconciler.model.errors import Problem
from reconciler.model.states import Role

Document = dict[str, Any]
# Browsers leave these characters of a form's fields as they are.
_PAGE = re.compile(r"/console/(?!.*\.\.)[A-Za-z0-9._:/?=&%+*~-]*")


def is_page(target: str) -> bool:
    """Whether an address leads to a page of the console, and nowhere else."""
    return bool(_PAGE.fullmatch(target))


class Refused(Exception):
    """An answer of the API that is a problem document."""

    def __init__(self, status: int, problem: Document) -> None:
        super().__init__(problem.get("code"))
        self.status = status
        self.problem = problem


@dataclass
class Visit:
    """A request to a page by a session. form, refused: the form that was sent, and its refusal."""

    request: Request
    api: ASGIApp
    caller: Caller
    identity: Identity
    form: Form | None = None
    refused: Refused | None = None
    shown: Document = field(default_factory=dict)

    @property
    def admin(self) -> bool:
        """Whether the visitor runs the platform."""
        return self.caller.role == Role.PLATFORM_ADMIN

    def named(self, name: str) -> str:
        """An id in the path; 404 for any other text. A single dot, for example, would lead the call
        to another route of the API.
        """
        part = str(self.request.path_params[name])
        if len(part) > ID_LENGTH or not re.fullmatch(ID_PATTERN, part):
            raise HTTPException(404)
        return part

    def query(self, *names: str) -> dict[str, str]:
        """Parameters of the page's address, "" for a parameter that is not there."""
        return {name: self.request.query_params.get(name, "") for name in names}

    async def get(self, path: str, **parameters: Any) -> Document:
        """Read a document of the API."""
        given = {name: value for name, value in parameters.items() if value not in (None, "")}
        return await self._call("GET", path, params=given)

    async def get_or_none(self, path: str) -> Document | None:
        """Read a document of the API; None when it does not exist."""
        try:
            return await self.get(path)
        except Refused as refused:
            if refused.status != 404:
                raise
            return None

    async def send(self, form: Form) -> Document:
        """Make the call of a form, at most once for its key."""
        headers = {"Idempotency-Key": form.key or str(uuid.uuid4())}
        if form.generation:
            headers["If-Match"] = f'"{form.generation}"'
        content = json.dumps(form.body) if form.body else None
        if content:
            headers["Content-Type"] = "application/json"
        return await self._call(form.method, form.path, headers=headers, content=content)

    def page(self, template: str, **values: Any) -> Response:
        """The page, with the refusal of the form that was sent from it."""
        status = self.refused.status if self.refused else 200
        return render(template, status=status, visit=self, **values)

    def after(self, form: Form, answer: Mapping[str, Any]) -> Response:
        """Redirect to the page that the form names; its {fields} are those of the answer."""
        target = re.sub(
            r"\{(\w+)\}", lambda part: quote(str(answer.get(part[1], "")), safe=""), form.back
        )
        # Only pages of the console, so that a forged form cannot lead elsewhere.
        back = target if is_page(target) else self.request.url.path
        return RedirectResponse(back, 303)

    async def _call(self, method: str, path: str, **options: Any) -> Document:
        headers = {CORRELATION_HEADER: correlation_id(self.request), **options.pop("headers", {})}
        transport = httpx.ASGITransport(app=self._as_visitor, raise_app_exceptions=False)
        address = f"http://console{route(path)}"
        async with httpx.AsyncClient(transport=transport, trust_env=False) as client:
            try:
                answer = await client.request(method, address, headers=headers, **options)
            except httpx.InvalidURL as error:
                raise Problem(
                    "request_invalid",
                    422,
                    expected="parameters that fit into an address of the API",
                    found=str(error),
                    remedy="open the page by a link of the console",
                ) from error
        document: Document = answer.json()
        if answer.is_error:
            raise Refused(answer.status_code, document)
        return document

    async def _as_visitor(self, scope: Scope, receive: Receive, send: Send) -> None:
        session = {SESSION: self.identity, SECRET: secret_of(self.request)}
        await self.api({**scope, **session}, receive, send)

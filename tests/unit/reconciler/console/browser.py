"""A browser without scripts: cookies, links and forms as a page gives them."""

from __future__ import annotations

from dataclasses import dataclass, field
from html.parser import HTMLParser
from typing import Any

import httpx
from fastapi import FastAPI
from starlette.testclient import TestClient

SAME = {"Sec-Fetch-Site": "same-origin"}


@dataclass
class SentForm:
    """A form of a page with the fields that a browser would send. action: "" for the page."""

    method: str
    action: str = ""
    fields: list[tuple[str, str]] = field(default_factory=list)
    button: str = ""
    disabled: bool = False

    @property
    def call(self) -> str:
        return dict(self.fields).get("_call", "")


class Page(HTMLParser):
    """The links and forms of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.forms: list[SentForm] = []
        self._form: SentForm | None = None
        self._in = self._named = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self._in = tag
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        elif tag == "form":
            self._form = SentForm(values.get("method", "get"), values.get("action", ""))
            self.forms.append(self._form)
        elif self._form is None:
            return
        elif tag == "button":
            self._form.disabled = "disabled" in values
            self._form.button = self._named = values.get("aria-label", "")
        elif tag in ("input", "textarea", "select") and values.get("name"):
            ticked = values.get("type") not in ("checkbox", "radio") or "checked" in values
            if ticked and "disabled" not in values:
                self._form.fields.append((values["name"], values.get("value", "")))

    def handle_endtag(self, tag: str) -> None:
        if tag == "form":
            self._form = None

    def handle_data(self, data: str) -> None:
        if self._form is not None and self._in == "button" and not self._named:
            self._form.button += data.strip()

    def form(self, call: str) -> SentForm:
        """The form of an API call."""
        (form,) = [form for form in self.forms if form.call == call]
        return form


class Browser:
    """A session. Redirects are not followed, so that a test sees them."""

    def __init__(self, app: FastAPI, base: str = "http://localhost") -> None:
        self.client = TestClient(
            app, base_url=base, follow_redirects=False, raise_server_exceptions=False
        )

    def log_in(self, token: str, **options: Any) -> httpx.Response:
        data = {"token": token}
        answer: httpx.Response = self.client.post(
            "/console/login", data=data, headers=SAME, **options
        )
        return answer

    def get(self, path: str, **options: Any) -> httpx.Response:
        answer: httpx.Response = self.client.get(path, **options)
        return answer

    def open(self, path: str) -> Page:
        answer = self.get(path)
        assert answer.status_code == 200, (path, answer.status_code, answer.text)
        return Page(answer.text)

    def send(self, path: str, form: SentForm, **changed: Any) -> httpx.Response:
        """Send a form of a page, with some fields filled in. Names replace `:` by `__`."""
        typed = {name.replace("__", ":"): value for name, value in changed.items()}
        fields: dict[str, Any] = {}
        for name, value in [*form.fields, *typed.items()]:
            fields[name] = value
        answer: httpx.Response = self.client.post(path, data=fields, headers=SAME)
        return answer

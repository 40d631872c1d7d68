"""AWX's REST API: verified TLS, a bearer token, every answer a document or a named error."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reconciler.runs.service_access import Conversation, ServiceAccess
from reconciler.runs.spec import LauncherAway
from reconciler.settings import Settings

API = "/api/v2"
# AWX's own limit for a page.
PAGE_SIZE = 200
# Of a list.
_MOST_PAGES = 500
_REFUSALS = {
    401: ("unauthorized", "a valid token", "put a new token into the token file"),
    403: ("forbidden", "the right to do this", "give the token's user execute on the template"),
    404: ("not_found", "an object that the token's user may see", "look at it in AWX"),
}


class Silent(LauncherAway):
    """No reliable answer: whether AWX carried out the request is unknown."""


class NotSent(Silent):
    """No connection was made: AWX certainly did not carry out the request."""


@dataclass(frozen=True)
class AwxAccess(ServiceAccess):
    """Access to AWX, whose address has no /api.

    templates: prefix of a job template's name, before the name of its playbook. project,
    execution_environment, credential: names of those that the templates must have; "": the same in
    all.
    project_url, project_branch: those of the project in AWX; "": any. image: that of the execution
    environment; "": any.
    """

    NAME = "AWX"
    REMEDY = "write the OAuth2 token of AWX's service user there, readable by the reconciler"

    templates: str = "gpuaas.slice."
    project: str = ""
    execution_environment: str = ""
    credential: str = ""
    project_url: str = ""
    project_branch: str = ""
    image: str = ""

    def document(self) -> dict[str, Any]:
        """The entry in a run's manifest: paths, never the token."""
        return {
            "url": self.url,
            "token_file": str(self.token_file.resolve()),
            "ca_file": str(self.ca_file.resolve()) if self.ca_file else "",
            "templates": self.templates,
        }

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> AwxAccess:
        ca_file = Path(document["ca_file"]) if document["ca_file"] else None
        return cls(document["url"], Path(document["token_file"]), ca_file, document["templates"])


def awx_access(settings: Settings) -> AwxAccess:
    """The AWX of the site's settings."""
    return AwxAccess(
        settings.awx_url,
        settings.awx_token_file or Path(),
        settings.awx_ca_file,
        settings.awx_template_prefix,
        project=settings.awx_project,
        execution_environment=settings.awx_execution_environment,
        credential=settings.awx_credential,
        project_url=settings.awx_project_url,
        project_branch=settings.awx_project_branch,
        image=settings.awx_execution_environment_image,
    )


class Client(Conversation):
    """Requests about a launch or a check. Not thread-safe; a single connection at a time."""

    # All requests before a launch take less than a worker's lease of its task. With a lower limit
    # for the silence of one, a busy AWX would count as silent.
    DEADLINE_S, REQUEST_S = 20.0, 8.0
    LARGEST = 32 << 20
    SILENT, NOT_SENT = Silent, NotSent
    REFUSALS = _REFUSALS

    def get(self, path: str, **query: str | int) -> dict[str, Any]:
        return self._request("GET", path, params=query)

    def post(self, path: str, document: dict[str, Any]) -> dict[str, Any]:
        return self._request("POST", path, json=document)

    def every(self, path: str, **query: str | int) -> Iterator[dict[str, Any]]:
        """All results of a list, page by page. `next` is not followed, because it names a host."""
        page, more = 0, True
        while more:
            page += 1
            answer = self.get(path, page=page, page_size=PAGE_SIZE, **query)
            objects = results(answer)
            yield from objects
            more = bool(answer.get("next"))
            if more and (not objects or page >= _MOST_PAGES):
                raise self.silent(f"GET {API}{path}", f"a list that does not end, page {page}")

    def _request(self, method: str, path: str, **arguments: Any) -> dict[str, Any]:
        headers = {"Authorization": f"Bearer {self._access.token()}"}
        request = f"{method} {API}{path}"
        answer, body = self._ask(method, f"{API}{path}", request, headers=headers, **arguments)
        if not answer.is_success:
            raise self._refusal(answer, body, request)
        document = self._document(body, request) if body else {}
        if not isinstance(document, dict):
            raise self.silent(request, "an answer that is no document")
        return document


def results(answer: dict[str, Any]) -> list[dict[str, Any]]:
    """The objects of a page."""
    objects = answer.get("results")
    if not isinstance(objects, list):
        raise Silent(
            "awx_silent",
            expected="AWX to answer a list",
            found="an answer without results",
            remedy="look at AWX's answer, and at the proxy before it",
        )
    return [item for item in objects if isinstance(item, dict)]

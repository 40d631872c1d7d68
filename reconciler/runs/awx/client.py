"""AWX's REST API: verified TLS, a bearer token, every answer a document or a named error."""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from types import TracebackType
from typing import Any

import httpx

from reconciler.runs.awx.access import AwxAccess
from reconciler.runs.awx.errors import NotSent, Silent
from reconciler.runs.errors import RunError
from reconciler.runs.scrub import scrub

API = "/api/v2"
# AWX's own limit for a page.
PAGE_SIZE = 200
# Between two bytes, not for a whole answer. Too low, and a busy AWX counts as silent; too high, and
# a launch holds its worker for longer than the lease of the task.
_TIMEOUT_S = 8.0
# A proxy's words for "later"; everything from 500 on is also no answer of AWX.
_LATER = frozenset({408, 425, 429})
_LONGEST_FOUND = 300
_NAMES = {
    401: ("awx_unauthorized", "a valid token", "put a new token into the token file"),
    403: ("awx_forbidden", "the right to do this", "give the token's user execute on the template"),
    404: ("awx_not_found", "an object that the token's user may see", "look at it in AWX"),
}


class Client:
    """One connection at a time; used from one thread."""

    def __init__(self, access: AwxAccess) -> None:
        self._access = access
        cafile = str(access.ca_file) if access.ca_file else None
        try:
            context = ssl.create_default_context(cafile=cafile)
        except (OSError, ssl.SSLError) as unreadable:
            raise RunError(
                "awx_ca_unreadable",
                expected=f"certificates in {cafile}",
                found=str(unreadable),
                remedy="correct GPUAAS_AWX_CA_FILE",
            ) from unreadable
        # No proxy and no .netrc of whoever started us, and no redirect takes the token elsewhere.
        self._http = httpx.Client(
            base_url=access.url, verify=context, trust_env=False, timeout=_TIMEOUT_S
        )

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _e: BaseException | None, _t: TracebackType | None
    ) -> None:
        self._http.close()

    def get(self, path: str, **query: str | int) -> dict[str, Any]:
        return self._ask("GET", path, params=query)

    def post(self, path: str, document: dict[str, Any]) -> dict[str, Any]:
        return self._ask("POST", path, json=document)

    def every(self, path: str, **query: str | int) -> Iterator[dict[str, Any]]:
        """All results of a list, page by page. `next` is not followed: it names a host."""
        page, more = 0, True
        while more:
            page += 1
            answer = self.get(path, page=page, page_size=PAGE_SIZE, **query)
            yield from results(answer)
            more = bool(answer.get("next"))

    def _ask(self, method: str, path: str, **more: Any) -> dict[str, Any]:
        headers = {"Authorization": f"Bearer {self._access.token()}"}
        about = f"{method} {API}{path}"
        try:
            answer = self._http.request(method, f"{API}{path}", headers=headers, **more)
        except (httpx.ConnectError, httpx.ConnectTimeout) as lost:
            if _distrusted(lost):
                raise _untrusted(self._access.url, lost) from lost
            raise _away(NotSent, about, lost) from lost
        except httpx.HTTPError as lost:
            raise _away(Silent, about, lost) from lost
        return _document(answer, about)


def results(answer: dict[str, Any]) -> list[dict[str, Any]]:
    """The objects of one page."""
    found = answer.get("results")
    if not isinstance(found, list):
        raise _away(Silent, "a list", "an answer without results")
    return [item for item in found if isinstance(item, dict)]


def _document(answer: httpx.Response, about: str) -> dict[str, Any]:
    status = answer.status_code
    if status >= 500 or status in _LATER:
        raise _away(Silent, about, f"HTTP {status}")
    if not answer.is_success:
        raise _refused(answer, about)
    if not answer.content:
        return {}
    try:
        document = answer.json()
    except ValueError as broken:
        raise _away(Silent, about, "an answer that is not JSON") from broken
    if not isinstance(document, dict):
        raise _away(Silent, about, "an answer that is no document")
    return document


def _refused(answer: httpx.Response, about: str) -> RunError:
    other = ("awx_refused", "AWX to accept the request", "read what AWX says")
    code, expected, remedy = _NAMES.get(answer.status_code, other)
    said = scrub(" ".join(answer.text.split()))[:_LONGEST_FOUND]
    return RunError(
        code,
        expected=f"{expected} for {about}",
        found=f"HTTP {answer.status_code}: {said}",
        remedy=remedy,
    )


def _away(kind: type[Silent], about: str, found: object) -> Silent:
    text = f"{type(found).__name__}: {found}" if isinstance(found, Exception) else str(found)
    return kind(
        "awx_silent",
        expected=f"AWX to answer {about}",
        found=text[:_LONGEST_FOUND],
        remedy="nothing to do if it comes back; else look at AWX and the way to it",
    )


def _distrusted(cause: BaseException | None) -> bool:
    while cause is not None:
        if isinstance(cause, ssl.SSLCertVerificationError):
            return True
        cause = cause.__cause__ or cause.__context__
    return False


def _untrusted(url: str, cause: Exception) -> RunError:
    return RunError(
        "awx_untrusted",
        expected=f"a certificate for {url} by a trusted CA",
        found=str(cause)[:_LONGEST_FOUND],
        remedy="set GPUAAS_AWX_CA_FILE to the CA that vouches for AWX",
    )

"""Access to a service of the site over HTTPS: verified TLS, and a token from a file."""

from __future__ import annotations

import json
import re
import ssl
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar

import httpx
from pydantic import BaseModel, ValidationError

from reconciler.runs.scrub import scrub
from reconciler.runs.spec import LauncherAway, RunError

# Statuses of a proxy that mean "later". Every status from 500 on is no answer of the service.
LATER = frozenset({408, 425, 429})
LONGEST_FOUND = 300
_TOKEN = re.compile(r"[\x21-\x7e]{1,512}")
T = TypeVar("T", bound=BaseModel)


@dataclass(frozen=True)
class ServiceAccess:
    """Address and credentials of a service, whose settings begin with GPUAAS_<NAME>.

    ca_file: the only CA that may vouch for it; None: the system's CAs. REMEDY: of a token file that
    cannot be read.
    """

    NAME: ClassVar[str]
    REMEDY: ClassVar[str]

    url: str
    token_file: Path
    ca_file: Path | None = None

    def token(self) -> str:
        """Read for each request, so that a token may be replaced while runs are alive."""
        try:
            text = self.token_file.read_text(encoding="ascii").strip()
        except (OSError, UnicodeDecodeError) as unreadable:
            raise self._no_token(type(unreadable).__name__) from unreadable
        if not _TOKEN.fullmatch(text):
            raise self._no_token("none, or more than one line")
        return text

    def open(self, *, timeout: float | None = None) -> httpx.Client:
        """A client for the service. The user's proxy and .netrc settings are ignored, and redirects
        are not followed, so that the token goes to no other host.
        """
        cafile = str(self.ca_file) if self.ca_file else None
        try:
            context = ssl.create_default_context(cafile=cafile)
        except (OSError, ssl.SSLError) as unreadable:
            raise self.refuse(
                "ca_unreadable",
                f"certificates in {cafile}",
                unreadable,
                f"correct GPUAAS_{self.NAME}_CA_FILE",
            ) from unreadable
        return httpx.Client(base_url=self.url, verify=context, trust_env=False, timeout=timeout)

    def require_trust(self, lost: Exception) -> None:
        """RunError `<name>_untrusted` when the request ended because of the certificate."""
        cause: BaseException | None = lost
        while cause is not None:
            if isinstance(cause, ssl.SSLCertVerificationError):
                raise self.refuse(
                    "untrusted",
                    f"a certificate for {self.url} by a trusted CA",
                    lost,
                    f"set GPUAAS_{self.NAME}_CA_FILE to the CA that vouches for {self.NAME}",
                ) from lost
            cause = cause.__cause__ or cause.__context__

    def refuse(self, code: str, expected: str, found: object, remedy: str) -> RunError:
        """A refusal whose code begins with the service's name."""
        text = str(found)[:LONGEST_FOUND]
        return RunError(f"{self.NAME.lower()}_{code}", expected=expected, found=text, remedy=remedy)

    def _no_token(self, found: str) -> RunError:
        expected = f"one token in {self.token_file}"
        return self.refuse("token_unreadable", expected, found, self.REMEDY)


class Endless(Exception):
    """An answer is larger, or takes longer, than it may."""


def bounded(answer: httpx.Response, largest: int, ends: float) -> bytes:
    """The body of a streamed answer, up to the bytes and the time (monotonic) that it may take.

    A timeout of the transport starts anew with each byte.
    """
    parts, size = [], 0
    for part in answer.iter_bytes():
        parts.append(part)
        size += len(part)
        if size > largest:
            raise Endless(f"more than {largest} bytes")
        if time.monotonic() > ends:
            raise Endless("an answer that does not end")
    return b"".join(parts)


class Conversation:
    """Requests to a service that end together at a deadline, whatever the service does.

    TITLE: the service's name for people. DEADLINE_S, REQUEST_S: of all requests, and of the silence
    in each. LARGEST: bytes of an answer.
    """

    TITLE: ClassVar[str]
    DEADLINE_S: ClassVar[float]
    REQUEST_S: ClassVar[float]
    LARGEST: ClassVar[int]

    def __init__(self, access: ServiceAccess) -> None:
        self._access = access
        self._ends = time.monotonic() + self.DEADLINE_S
        self._http = access.open()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    @property
    def left_s(self) -> float:
        """Seconds until the deadline."""
        return self._ends - time.monotonic()

    def silent(self, request: str, found: str) -> LauncherAway:
        """No reliable answer: it is not known whether the service carried out the request."""
        title = self.TITLE
        return LauncherAway(
            f"{self._access.NAME.lower()}_silent",
            expected=f"{title} to answer {request}",
            found=found[:LONGEST_FOUND],
            remedy=f"none if {title} comes back; else check {title} and the connection to it",
        )

    def _ask(
        self, method: str, path: str, request: str, **arguments: Any
    ) -> tuple[httpx.Response, bytes]:
        """The answer and its body. request: the request as a refusal names it."""
        arguments["timeout"] = min(self.REQUEST_S, max(self.left_s, 0.01))
        try:
            with self._http.stream(method, path, **arguments) as answer:
                body = bounded(answer, self.LARGEST, self._ends)
        except Endless as endless:
            raise self.silent(request, str(endless)) from endless
        except httpx.HTTPError as lost:
            self._access.require_trust(lost)
            raise self.silent(request, f"{type(lost).__name__}: {lost}") from lost
        if answer.status_code >= 500 or answer.status_code in LATER:
            raise self.silent(request, f"HTTP {answer.status_code}")
        return answer, body

    def _document(self, body: bytes, request: str) -> Any:
        """An answer that must be JSON."""
        try:
            return json.loads(body)
        except (ValueError, RecursionError) as broken:
            raise self.silent(request, "an answer that is not JSON") from broken

    def _parse(self, kind: type[T], document: Any, request: str) -> T:
        """An object of an answer, in its expected form."""
        try:
            return kind.model_validate(document)
        except (ValidationError, RecursionError) as broken:
            text = "an object in another form"
            if isinstance(broken, ValidationError):
                wrong = broken.errors(include_input=False, include_url=False)[0]
                text = f"{text}: {'.'.join(map(str, wrong['loc']))}: {wrong['msg']}"
            raise self.silent(request, text) from broken


def shown(answer: httpx.Response, body: bytes) -> str:
    """Status and beginning of an answer, for a refusal."""
    text = " ".join(body[:4000].decode(errors="replace").split())
    return f"HTTP {answer.status_code}: {scrub(text)}"

"""Access to a service of the site over HTTPS: verified TLS, and a token from a file."""

from __future__ import annotations

import json
import re
import ssl
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar

import httpcore
import httpx
from pydantic import BaseModel, ValidationError

from reconciler import names
from reconciler.runs.scrub import GONE, scrub
from reconciler.runs.spec import LauncherAway, RunError

# Statuses of a proxy that mean "later". Every status from 500 on is no answer of the service.
LATER = frozenset({408, 425, 429})
LONGEST_TEXT = 300
# Shortest part of a token that is removed from texts; a shorter one is a word.
_SECRET = 8
_TOKEN = re.compile(r"[\x21-\x7e]{1,512}")
T = TypeVar("T", bound=BaseModel)


@dataclass
class Deadline:
    """End of a request, or of several, by the monotonic clock."""

    ends: float

    @property
    def left_s(self) -> float:
        return self.ends - time.monotonic()

    def within(self, timeout: float | None) -> float:
        """The time that a step may take; `httpcore.TimeoutException` after the deadline."""
        left = self.left_s
        if left <= 0:
            raise httpcore.TimeoutException("the time for it is over")
        return left if timeout is None else min(left, timeout)


class _Stream(httpcore.NetworkStream):
    """A connection that is not used after the deadline. A timeout of the transport starts anew with
    each byte, in headers as in a body.
    """

    def __init__(self, stream: httpcore.NetworkStream, deadline: Deadline) -> None:
        self._stream, self._deadline = stream, deadline

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        return self._stream.read(max_bytes, self._deadline.within(timeout))

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        self._stream.write(buffer, self._deadline.within(timeout))

    def close(self) -> None:
        self._stream.close()

    def start_tls(
        self,
        ssl_context: ssl.SSLContext,
        server_hostname: str | None = None,
        timeout: float | None = None,
    ) -> httpcore.NetworkStream:
        within = self._deadline.within(timeout)
        return _Stream(self._stream.start_tls(ssl_context, server_hostname, within), self._deadline)

    def get_extra_info(self, info: str) -> Any:
        return self._stream.get_extra_info(info)


class _Backend(httpcore.SyncBackend):
    def __init__(self, deadline: Deadline) -> None:
        self._deadline = deadline

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.NetworkStream:
        try:
            rows = names.look_up(host, port, self._deadline.within(timeout))
        except TimeoutError as silent:
            raise httpcore.ConnectTimeout(f"no answer to the lookup of {host}") from silent
        except (OSError, UnicodeError) as unknown:
            raise httpcore.ConnectError(str(unknown)) from unknown
        # Of a name, each address would have the whole time.
        for address in [str(row[4][0]) for row in rows]:
            try:
                within = self._deadline.within(timeout)
                stream = super().connect_tcp(address, port, within, local_address, socket_options)
                return _Stream(stream, self._deadline)
            except (httpcore.ConnectError, httpcore.ConnectTimeout) as failed:
                lost = failed
                if self._deadline.left_s <= 0:
                    break
        raise lost


def end_at(client: httpx.Client, deadline: Deadline) -> None:
    """Let all connections of a client end at a deadline, those by proxies included."""
    for transport in (client._transport, *client._mounts.values()):
        if isinstance(transport, httpx.HTTPTransport):
            transport._pool._network_backend = _Backend(deadline)


@dataclass(frozen=True)
class ServiceAccess:
    """Address and credentials of a service. NAME: for people; in capitals, of its settings.

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

    def hide(self, text: str) -> str:
        """The text without the token, which a service or a proxy may repeat in an answer."""
        for part in self.token().split(":"):
            text = text.replace(part, GONE) if len(part) >= _SECRET else text
        return text

    def open(self, deadline: Deadline) -> httpx.Client:
        """A client for the service, until the deadline. The user's proxy and .netrc settings are
        ignored, and redirects are not followed, so that the token goes to no other host.
        """
        cafile = str(self.ca_file) if self.ca_file else None
        try:
            context = ssl.create_default_context(cafile=cafile)
        except (OSError, ssl.SSLError) as unreadable:
            raise self.refuse(
                "ca_unreadable",
                f"certificates in {cafile}",
                unreadable,
                f"correct {self.setting('CA_FILE')}",
            ) from unreadable
        headers = {"Accept-Encoding": "identity"}
        client = httpx.Client(base_url=self.url, verify=context, trust_env=False, headers=headers)
        end_at(client, deadline)
        return client

    def require_trust(self, lost: Exception) -> None:
        """RunError `<name>_untrusted` when the request ended because of the certificate."""
        cause: BaseException | None = lost
        while cause is not None:
            if isinstance(cause, ssl.SSLCertVerificationError):
                raise self.refuse(
                    "untrusted",
                    f"a certificate for {self.url} by a trusted CA",
                    lost,
                    f"set {self.setting('CA_FILE')} to the CA that vouches for {self.NAME}",
                ) from lost
            cause = cause.__cause__ or cause.__context__

    def refuse(self, code: str, expected: str, found: object, remedy: str) -> RunError:
        """A refusal whose code begins with the service's name."""
        text = str(found)[:LONGEST_TEXT]
        return RunError(f"{self.NAME.lower()}_{code}", expected=expected, found=text, remedy=remedy)

    def setting(self, name: str) -> str:
        """A setting of the service."""
        return f"GPUAAS_{self.NAME.upper()}_{name}"

    def _no_token(self, found: str) -> RunError:
        expected = f"one token in {self.token_file}"
        return self.refuse("token_unreadable", expected, found, self.REMEDY)


class Conversation:
    """Requests to a service that end at a deadline, whatever the service does.

    DEADLINE_S, REQUEST_S: of all requests since `begin`, and of the silence in each. LARGEST,
    TOTAL: bytes of an answer, and of all since `begin`. SILENT, NOT_SENT: of requests without an
    answer, and without a connection. REFUSALS: code, expectation and remedy of a status.
    """

    DEADLINE_S: ClassVar[float]
    REQUEST_S: ClassVar[float]
    LARGEST: ClassVar[int]
    TOTAL: ClassVar[int] = 256 << 20
    REFUSALS: ClassVar[Mapping[int, tuple[str, str, str]]]
    SILENT: ClassVar[type[LauncherAway]] = LauncherAway
    NOT_SENT: ClassVar[type[LauncherAway]] = LauncherAway

    def __init__(self, access: ServiceAccess) -> None:
        self._access = access
        self._deadline = Deadline(0.0)
        self.begin()
        self._http = access.open(self._deadline)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def begin(self) -> None:
        """Begin the time of the requests that follow."""
        self._deadline.ends = time.monotonic() + self.DEADLINE_S
        self._received = 0

    @contextmanager
    def within(self, seconds: float) -> Iterator[None]:
        """End the requests inside after so many seconds, if the deadline is later."""
        ends = self._deadline.ends
        self._deadline.ends = min(ends, time.monotonic() + seconds)
        try:
            yield
        finally:
            self._deadline.ends = ends

    @property
    def left_s(self) -> float:
        """Seconds until the deadline."""
        return self._deadline.left_s

    def silent(self, request: str, found: str, *, sent: bool = True) -> LauncherAway:
        """No reliable answer. sent: it is not known whether the service carried out the request."""
        title, kind = self._access.NAME, self.SILENT if sent else self.NOT_SENT
        return kind(
            f"{title.lower()}_silent",
            expected=f"{title} to answer {request}",
            found=found[:LONGEST_TEXT],
            remedy=f"nothing if {title} comes back; otherwise check {title} and the way to it",
        )

    def too_large(self, request: str, found: str) -> LauncherAway:
        """An answer, or all of them, with more than any site has."""
        return self.silent(request, found)

    def _ask(
        self, method: str, path: str, request: str, **arguments: Any
    ) -> tuple[httpx.Response, bytes]:
        """The answer and its body. request: the request as a refusal names it."""
        arguments["timeout"] = min(self.REQUEST_S, max(self.left_s, 0.01))
        try:
            with self._http.stream(method, path, **arguments) as answer:
                parts, size = [], 0
                # httpx decodes a piece before its size can be looked at, and stacked encodings
                # make gigabytes of a few hundred bytes.
                encoding = answer.headers.get("Content-Encoding", "identity")
                if encoding.lower() != "identity":
                    raise self.silent(request, f"an answer in the encoding {scrub(encoding)}")
                for part in answer.iter_raw():
                    parts.append(part)
                    size += len(part)
                    self._received += len(part)
                    for count, most in ((size, self.LARGEST), (self._received, self.TOTAL)):
                        if count > most:
                            raise self.too_large(request, f"more than {most} bytes")
        # httpx reads the address of a redirect, although none is followed.
        except (httpx.HTTPError, httpx.InvalidURL) as lost:
            self._access.require_trust(lost)
            sent = not isinstance(lost, httpx.ConnectError | httpx.ConnectTimeout)
            raise self.silent(request, f"{type(lost).__name__}: {lost}", sent=sent) from lost
        if answer.status_code >= 500 or answer.status_code in LATER:
            raise self.silent(request, f"HTTP {answer.status_code}")
        if answer.has_redirect_location:
            place = self._access.hide(scrub(answer.headers["Location"]))
            raise self._access.refuse(
                "redirected",
                f"{self._access.NAME} to answer {request} at {self._access.url} itself",
                f"HTTP {answer.status_code}, a redirect to {place}",
                f"correct {self._access.setting('URL')}: no redirect is followed, because the token"
                " would go along",
            )
        return answer, b"".join(parts)

    def _refusal(self, answer: httpx.Response, body: bytes, request: str) -> RunError:
        """For an answer without success."""
        name = self._access.NAME
        default = ("refused", f"{name} to accept it", f"read {name}'s answer")
        code, expected, remedy = self.REFUSALS.get(answer.status_code, default)
        shown = self._shown(answer, body)
        return self._access.refuse(code, f"{expected} for {request}", shown, remedy)

    def _shown(self, answer: httpx.Response, body: bytes) -> str:
        """Status and beginning of an answer, for a refusal."""
        text = " ".join(body[:4000].decode(errors="replace").split())
        return f"HTTP {answer.status_code}: {self._access.hide(scrub(text))}"

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

"""Requests to an HTTP service of the site: verified TLS, and answers bounded in size and time."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit

from ansible.module_utils.urls import open_url
from ansible_collections.gpuaas.slice.plugins.module_utils.core._errors import Refusal

# Most bytes of an answer. MAAS shows a machine with eight GPUs in about 100 KB.
LARGEST = 64 << 20
_CHUNK = 65536
_LOOPBACK = ("127.0.0.1", "::1", "localhost")


def refuse(code: str, expected: str, found: object, remedy: str) -> Refusal:
    """A refusal; `found` may come from the service, so it is shown on a bounded line."""
    text = found if isinstance(found, str) else repr(found)
    return Refusal(code, expected=expected, found=_line(text), remedy=remedy)


def credential(path: object, name: str) -> str:
    """The token in a file, which contains one word. name: of the service, for the refusal."""
    try:
        with Path(str(path)).open(encoding="ascii") as file:
            text = file.read(4096).strip()
        problem = "" if text.isprintable() and len(text.split()) == 1 else "none, or several words"
    except (OSError, UnicodeDecodeError) as unreadable:
        text, problem = "", type(unreadable).__name__
    if problem:
        expected, remedy = f"one word in {path}", "write the service's token or key there"
        raise refuse(f"{name}_token_unreadable", expected, problem, remedy)
    return text


class Service:
    """A service. name: begins the codes of its refusals. remedy: of a credential that it refuses.

    timeout: seconds for all of a conversation. An answer that never ends is left behind in its
    thread, which ends with the process.
    """

    def __init__(self, name: str, url: str, ca_file: str, timeout: int, remedy: str) -> None:
        self.url = url.rstrip("/")
        self._name, self._ca_file, self._timeout, self._remedy = name, ca_file, timeout, remedy
        parts = urlsplit(self.url)
        local = parts.scheme == "http" and parts.hostname in _LOOPBACK
        if not parts.hostname or "@" in parts.netloc or not (parts.scheme == "https" or local):
            expected = "an address https://…; plain HTTP only on this machine"
            raise refuse(f"{name}_url_invalid", expected, parts.hostname or "none", "correct url")

    def converse(self, talk: Callable[[Callable[..., Any]], Any]) -> Any:
        """Run `talk(ask)` within the timeout and return its value. ask(method, path, headers, body)
        sends a request and returns the JSON of its answer.
        """
        ends = time.monotonic() + self._timeout
        outcome: list[Any] = []

        def work() -> None:
            try:
                outcome.append((talk(lambda *request: self._ask(ends, *request)), None))
            except Exception as error:  # raised again by the caller
                outcome.append((None, error))

        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        thread.join(self._timeout + 1)
        if not outcome:
            raise self._failed("requests", f"no end of its answers in {self._timeout} s")
        value, error = outcome[0]
        if error is not None:
            raise error
        return value

    def _ask(
        self,
        ends: float,
        method: str,
        path: str,
        headers: Mapping[str, str],
        body: Mapping[str, Any] | None = None,
    ) -> Any:
        request = f"{method} {path.partition('?')[0]}"
        try:
            answer = open_url(
                self.url + path,
                method=method,
                data=None if body is None else json.dumps(body),
                headers={
                    **headers,
                    "Accept": "application/json",
                    "Content-Type": "application/json",
                },
                timeout=max(0.1, ends - time.monotonic()),
                ca_path=self._ca_file or None,
                # A credential goes to no other host: neither by a redirect nor by a proxy.
                follow_redirects="none",
                use_proxy=False,
                # A line of ~/.netrc for this host would be sent in place of the credential.
                use_netrc=False,
            )
            with answer:
                content = self._read(answer, ends)
        except HTTPError as error:
            raise self._refused(request, error) from None
        except (URLError, OSError, ValueError) as lost:
            raise self._failed(request, str(getattr(lost, "reason", lost))) from None
        try:
            return json.loads(content)
        except (ValueError, RecursionError):
            raise self._failed(request, "an answer that is not JSON") from None

    def _read(self, answer: Any, ends: float) -> bytes:
        content = bytearray()
        while part := answer.read1(_CHUNK):
            content += part
            if len(content) > LARGEST or time.monotonic() > ends:
                raise ValueError(f"an answer of more than {LARGEST} bytes, or without an end")
        return bytes(content)

    def _refused(self, request: str, error: HTTPError) -> Refusal:
        """The service's own refusal, if its answer has the four parts."""
        if error.code >= 500:
            return self._failed(request, f"HTTP {error.code}")
        try:
            document = json.loads(error.read(_CHUNK))
        except (OSError, ValueError, RecursionError):
            document = None
        if isinstance(document, dict) and all(
            isinstance(document.get(p), str) for p in Refusal.PARTS
        ):
            code, *parts = (_line(document[part]) for part in Refusal.PARTS)
            return refuse(code, *parts)
        expected, answer = f"{self._name} to accept {request}", f"HTTP {error.code}"
        return refuse(f"{self._name}_refused", expected, answer, f"check {self._remedy}")

    def _failed(self, request: str, found: str) -> Refusal:
        expected = f"{self._name} to answer {request}"
        return refuse(f"{self._name}_silent", expected, found, "check url and ca_file")


def _line(text: str) -> str:
    return "".join(letter if letter.isprintable() else " " for letter in text[:300])

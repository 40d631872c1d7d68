"""Redfish session with a BMC: login, requests with retries, and always a logout.

A BMC has few sessions (an iDRAC eight) and keeps a forgotten session for half an hour. A client
that does not log out therefore locks out all others.
"""

from __future__ import annotations

import contextlib
import functools
import json
import re
import signal
import time
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from http import HTTPStatus
from types import TracebackType
from typing import Any, NoReturn
from urllib.parse import urlsplit

from ansible_collections.gpuaas.slice.plugins.module_utils.core._errors import Refusal
from ansible_collections.gpuaas.slice.plugins.module_utils.firmware import _redfish_connection
from ansible_collections.gpuaas.slice.plugins.module_utils.firmware._redfish_connection import (
    Answer,
    Trust,
)

ROOT = "/redfish/v1/"
_SESSIONS = "/redfish/v1/SessionService/Sessions"
# Longest single exchange. An iDRAC takes up to ten seconds for its registry.
_EXCHANGE_S = 60.0
# Extra time for the logout after the deadline, because a session left open costs more.
_LOGOUT_S = 10.0
# Used without Retry-After. A pause below the shortest would be a busy loop against a small
# processor.
_PAUSE_S, _SHORTEST_PAUSE_S = 5.0, 0.2
_BUSY = (HTTPStatus.SERVICE_UNAVAILABLE, HTTPStatus.TOO_MANY_REQUESTS)
_MESSAGE_ID = re.compile(r"[A-Za-z]{2,20}(\.\d{1,4}){1,3}\.[A-Za-z0-9]{1,60}")
_PATH = re.compile(r"/redfish/v1[!-~]*")


@dataclass(frozen=True)
class Account:
    user: str
    password: str = field(repr=False)


class Client:
    """Client for a BMC and a user. It logs in at the first request that needs it.

    timeout: seconds for all requests and waits since `begin`; the logout has time of its own.
    """

    def __init__(
        self, address: str, account: Account, trust: Trust, *, timeout: float = 180
    ) -> None:
        self._address = address
        self.opened: list[str] = []
        self._account = account
        self._trust = trust
        self._token = ""
        self._documents: dict[str, dict[str, Any]] = {}
        self._timeout = timeout
        self.begin()

    def begin(self) -> None:
        """Restart the time limit, for a read or a change."""
        self._deadline = time.monotonic() + self._timeout

    def __enter__(self) -> Client:
        return self

    @functools.cached_property
    def where(self) -> _redfish_connection.Place:
        """The BMC's address, parsed at the first request, so that a wrong one is refused there like
        all other errors.
        """
        return _redfish_connection.place(self._address)

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _problem: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        self.close()

    def get(self, path: str) -> dict[str, Any]:
        """The document at `path`. Raises Refusal; `bmc_answer_missing` when it does not exist."""
        return self._document(path, self._authorised("GET", path))

    def once(self, path: str) -> dict[str, Any]:
        """Like get, but cached, for documents that do not change during the client's life. An
        attribute registry alone takes an iDRAC seconds.
        """
        if path not in self._documents:
            self._documents[path] = self.get(path)
        return self._documents[path]

    def patch(self, path: str, body: dict[str, Any]) -> Answer:
        return self._authorised("PATCH", path, body)

    def post(self, path: str, body: dict[str, Any]) -> Answer:
        return self._authorised("POST", path, body)

    def close(self) -> bool:
        """End every session this client opened; True when the BMC confirmed it for each.

        An expired session may still count on the BMC, so it is deleted too. 404 confirms that it is
        gone, and so does 401 for a token that was valid before.
        """
        gone = [HTTPStatus.OK, HTTPStatus.ACCEPTED, HTTPStatus.NO_CONTENT, HTTPStatus.NOT_FOUND]
        if self._token:
            gone.append(HTTPStatus.UNAUTHORIZED)
        self._deadline = time.monotonic() + _LOGOUT_S
        # The newest session last, because its token authorises all of these requests.
        for session in list(self.opened):
            with contextlib.suppress(Refusal):
                if self._patient("DELETE", session, None).status in gone:
                    self.opened.remove(session)
        self._token = ""
        return not self.opened

    def link(self, document: dict[str, Any], *keys: str) -> str:
        """The path that `document` gives under `keys`, or "" without such a key.

        A path outside the Redfish tree is refused, because the document comes from the BMC and is
        not trusted.
        """
        inner: Any = document
        for key in keys:
            inner = inner.get(key) if isinstance(inner, dict) else None
        target = inner.get("@odata.id") if isinstance(inner, dict) else None
        return "" if target is None else self.path(target)

    def path(self, link: object) -> str:
        """`link` (an @odata.id or a Location) as a path on this BMC. Raises Refusal."""
        path = ""
        with contextlib.suppress(ValueError):
            if isinstance(link, str):
                path = urlsplit(link)._replace(scheme="", netloc="").geturl()
        if not _PATH.fullmatch(path):
            raise _redfish_connection.malformed(
                self.where, ROOT, f"the link {ascii(link)[:200]}, which is not a Redfish path"
            )
        return path

    def _authorised(self, method: str, path: str, body: dict[str, Any] | None = None) -> Answer:
        """A request in a session; an expired session is replaced once."""
        if not self._token:
            self._login()
        answer = self._patient(method, path, body)
        if answer.status == HTTPStatus.UNAUTHORIZED:
            self._login()
            answer = self._patient(method, path, body)
        return self._accepted(method, path, answer)

    def _login(self) -> None:
        """Log in. Raises Refusal `bmc_login_refused` without a retry, because an iDRAC blocks after
        three failures.
        """
        self._token = ""
        account = {"UserName": self._account.user, "Password": self._account.password}
        answer = self._patient("POST", _SESSIONS, account)
        if answer.status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
            raise Refusal(
                "bmc_login_refused",
                expected=f"a session on {self.where.shown} for the user given",
                found=self._message(answer),
                remedy="check user, password and that the account may use Redfish; MAAS's IPMI "
                "account usually may not; several wrong tries block this address for a while",
            )
        self._accepted("POST", _SESSIONS, answer)
        token = answer.headers.get("x-auth-token", "")
        place = answer.headers.get("location") or self._document(_SESSIONS, answer).get("@odata.id")
        if place:
            self.opened.append(self.path(place))
        if not token or not place:
            raise _redfish_connection.malformed(
                self.where, _SESSIONS, "a login without X-Auth-Token or without a Location"
            )
        self._token = token

    def _patient(self, method: str, path: str, body: dict[str, Any] | None) -> Answer:
        """A request, repeated while the BMC is busy, after the pause that the BMC requests."""
        headers = {"Accept": "application/json", "Connection": "close", "OData-Version": "4.0"}
        if self._token:
            headers["X-Auth-Token"] = self._token
        content = None if body is None else json.dumps(body).encode()
        if content is not None:
            headers["Content-Type"] = "application/json"
        while True:
            now = time.monotonic()
            answer = _redfish_connection.exchange(
                self.where,
                self._trust,
                (method, path, headers, content),
                deadline=min(self._deadline, now + _EXCHANGE_S),
            )
            if answer.status not in _BUSY:
                return answer
            pause = _pause(answer)
            if time.monotonic() + pause >= self._deadline:
                raise Refusal(
                    "bmc_busy",
                    expected=f"{method} {path} to be served by {self.where.shown} in time",
                    found=f"{self._message(answer)}; it asks for {pause:g} s more",
                    remedy="close sessions on the BMC, let its jobs end, or give more time",
                )
            time.sleep(pause)

    def _accepted(self, method: str, path: str, answer: Answer) -> Answer:
        if HTTPStatus.OK <= answer.status < HTTPStatus.MULTIPLE_CHOICES:
            return answer
        code = {
            401: "bmc_session_refused",
            403: "bmc_privilege_missing",
            404: "bmc_answer_missing",
        }.get(answer.status, "bmc_request_refused")
        raise Refusal(
            code,
            expected=f"{method} {path} to be accepted by {self.where.shown}",
            found=self._message(answer),
            remedy="see the BMC's message; its account needs login and system configuration rights",
        )

    def _document(self, path: str, answer: Answer) -> dict[str, Any]:
        try:
            document = json.loads(answer.body)
        except (ValueError, RecursionError) as garbage:
            raise _redfish_connection.malformed(
                self.where, path, f"{len(answer.body)} bytes that are not JSON"
            ) from garbage
        if not isinstance(document, dict):
            raise _redfish_connection.malformed(self.where, path, "JSON that is not an object")
        return document

    def _message(self, answer: Answer) -> str:
        """Status and message ids. Never the BMC's free text, because it may repeat the request."""
        ids: list[str] = []
        with contextlib.suppress(Refusal):
            ids = message_ids(self._document("", answer))
        ids = [each for each in ids if self._account.password not in each]
        return f"HTTP {answer.status}" + (f" ({', '.join(ids)})" if ids else "")


def message_ids(document: dict[str, Any]) -> list[str]:
    """The ids in a Redfish error, such as `IDRAC.2.14.SYS011`; only well-formed ids."""
    error = document.get("error")
    infos = error.get("@Message.ExtendedInfo") if isinstance(error, dict) else None
    listed = infos if isinstance(infos, list) else []
    ids = [info.get("MessageId") for info in listed if isinstance(info, dict)]
    return [each for each in ids if isinstance(each, str) and _MESSAGE_ID.fullmatch(each)][:5]


def end_by_signals() -> None:
    """Let a signal end this program as an exception, which logs out.

    Without this it would leave a session on the BMC for half an hour.
    """

    def leave(number: int, _frame: object) -> NoReturn:
        raise SystemExit(128 + number)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, leave)


def _pause(answer: Answer) -> float:
    """Seconds that the BMC asks the client to wait: Retry-After as seconds or as a date."""
    delay = answer.headers.get("retry-after", "").strip()
    if delay.isascii() and delay.isdecimal():
        return max(_SHORTEST_PAUSE_S, float(delay[:6]))
    with contextlib.suppress(ValueError, TypeError):
        return max(_SHORTEST_PAUSE_S, parsedate_to_datetime(delay).timestamp() - time.time())
    return _PAUSE_S

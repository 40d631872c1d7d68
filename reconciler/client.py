"""Client of the reconciler's API, for the CLI and the demonstration."""

from __future__ import annotations

import json
import math
import re
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import httpx

from reconciler.model.errors import Problem
from reconciler.wait_timeout import WaitTimeout

API = "/api/v1"
_EVENTS = "text/event-stream"
_OPERATORS = ("/control/", "/health", "/leases", "/metrics", "/pools", "/status/")
ENDED = frozenset({"succeeded", "failed", "canceled", "lost"})
_TIMEOUT_S = 60.0
_PATH = re.compile(r"(/(?!\.{1,2}(/|$))[^/?#\\\s\x00-\x1f\x7f\ud800-\udfff]+)+")
# About a minute, in which a service can restart.
_RECONNECTS, _REPEAT_S = 15, 60.0
_NO_PROXY = "check that GPUAAS_API names the reconciler, and that a proxy in front of it reaches it"
_AWAY = (HTTPStatus.BAD_GATEWAY, HTTPStatus.SERVICE_UNAVAILABLE, HTTPStatus.GATEWAY_TIMEOUT)


@dataclass(frozen=True)
class Event:
    """A server-sent event; place: the id from which a reader continues."""

    name: str
    place: str
    document: dict[str, Any]


class _Answer(dict[str, Any]):
    """An object of an answer. Problem `http_error` for a field that it lacks."""

    def __missing__(self, name: str) -> Any:
        raise Problem(
            "http_error",
            expected=f"an answer of the reconciler with `{name}`",
            found=f"an object with {', '.join(self) or 'no field'}"[:300],
            remedy=_NO_PROXY,
        )


class Client:
    """A session with the reconciler. Errors of the service are raised as `Problem`."""

    def __init__(self, base_url: str, token: str, *, correlation_id: str = "") -> None:
        headers = {"Authorization": f"Bearer {token}"}
        if correlation_id:
            headers["X-Correlation-Id"] = correlation_id
        # A proxy would read a token that travels without TLS.
        private = base_url.startswith("https:")
        self._http = httpx.Client(
            base_url=base_url, headers=headers, timeout=_TIMEOUT_S, trust_env=private
        )
        # The service has answered before.
        self._reached = False

    def close(self) -> None:
        self._http.close()

    def get(self, path: str, **query: Any) -> Any:
        """The document of a path. Empty values of the query are left out.

        Repeated for a minute once the service has answered this client: it may restart meanwhile.
        """
        return self._send("GET", path, params=query)

    def items(self, path: str, **query: Any) -> Iterator[Any]:
        """Every item of a list, over all pages."""
        while True:
            page = self.get(path, **query)
            rows, following = page.get("items"), page.get("next")
            if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
                raise self._strange(path)
            yield from rows
            if not following:
                return
            if following == query.get("cursor"):
                raise self._strange(path)
            query["cursor"] = following

    def post(
        self,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        key: str | None = "",
        timeout_s: float = _TIMEOUT_S,
    ) -> Any:
        """POST with an idempotency key: a new key, `key` to repeat a request, None for no key.

        A request with a key that is cut off is repeated, because it may have been done.
        """
        wait = {"timeout": httpx.Timeout(timeout_s).as_dict()}
        headers = {} if key is None else {"Idempotency-Key": key or str(uuid.uuid4())}
        return self._send("POST", path, json=body or {}, headers=headers, extensions=wait)

    def put(self, path: str, body: Mapping[str, Any]) -> Any:
        return self._send("PUT", path, json=body)

    def patch(self, path: str, body: Mapping[str, Any]) -> Any:
        return self._send("PATCH", path, json=body)

    def delete(self, path: str) -> Any:
        return self._send("DELETE", path)

    def events(self, path: str, *, after: str = "") -> Iterator[Event]:
        """The server-sent events of a path, up to its event `end`.

        A connection that is lost, or closed before `end`, is opened again after the last event. The
        last failure is raised when that fails repeatedly without an event or a keep-alive between.
        """
        failures = 0
        while True:
            headers = {"Accept": _EVENTS} | ({"Last-Event-ID": after} if after else {})
            try:
                with self._http.stream("GET", _address(path), headers=headers) as response:
                    if response.status_code == HTTPStatus.NO_CONTENT:
                        return
                    kind = response.headers.get("Content-Type", "")
                    if not (response.is_success and kind.startswith(_EVENTS)):
                        response.read()
                        raise _refusal(response)
                    self._reached = True
                    for event in _parse_events(response.iter_lines()):
                        failures = 0
                        if event is None:
                            continue
                        after = event.place
                        yield event
                        if event.name == "end":
                            return
                    # The token may have ended meanwhile. The next request is then refused.
                    raise httpx.RemoteProtocolError("the stream ended before its last event")
            except httpx.TransportError as lost:
                problem = self._unreachable(lost)
            except Problem as refusal:
                if not (self._reached and _is_away(refusal)):
                    raise
                problem = refusal
            failures += 1
            if failures > _RECONNECTS:
                raise problem
            time.sleep(min(0.5 * failures, 5))

    def wait(
        self,
        task_id: str,
        *,
        unbegun_s: float = math.inf,
        deadline_s: float = math.inf,
        on_progress: Callable[[dict[str, Any]], None] = lambda _task: None,
    ) -> dict[str, Any]:
        """The task once it has ended; `task_timeout` when it does not end in time.

        A running task has until its own deadline, a task that cannot begin has unbegun_s.
        deadline_s limits both together.
        """
        timeout = WaitTimeout(unbegun_s)
        end = time.monotonic() + deadline_s
        while True:
            task: dict[str, Any] = self.get(f"/admin/tasks/{task_id}")
            on_progress(task)
            if task["state"] in ENDED:
                return task
            if timeout.ends_for(task) or time.monotonic() > end:
                raise _timed_out(task)
            time.sleep(0.5)

    def text(self, path: str, **query: Any) -> str:
        """A document that is not JSON."""
        return self._answer("GET", path, params=query).text

    def _send(self, method: str, path: str, **arguments: Any) -> Any:
        if "json" in arguments:
            # The library fails for half a surrogate pair and for NaN, which the service refuses.
            arguments["content"] = json.dumps(arguments.pop("json"))
            headers = arguments.get("headers", {})
            arguments["headers"] = {**headers, "Content-Type": "application/json"}
        response = self._answer(method, path, **arguments)
        try:
            document = response.json(object_hook=_Answer)
        except (ValueError, RecursionError):
            document = None
        if not isinstance(document, dict):
            # The answer came from a portal or another program, so its status means nothing.
            raise _refusal(response)
        return document

    def _answer(self, method: str, path: str, **arguments: Any) -> httpx.Response:
        params = {k: v for k, v in arguments.pop("params", {}).items() if v not in ("", None)}
        address = _address(path)
        keyed = "Idempotency-Key" in arguments.get("headers", {})
        again = method == "GET" and self._reached
        cut_off, ends = 0, math.inf
        while True:
            try:
                response = self._http.request(method, address, params=params, **arguments)
            except UnicodeEncodeError as broken:
                raise _invalid(f"{broken.object!r}") from None
            except httpx.TransportError as lost:
                unsent = not cut_off and isinstance(lost, httpx.ConnectError | httpx.ConnectTimeout)
                # A service that hangs is not asked again: it has had its time.
                repeat = again and not isinstance(lost, httpx.ReadTimeout)
                if not (repeat or (keyed and not unsent)) or time.monotonic() > ends:
                    unknown = not unsent and method != "GET"
                    raise self._unreachable(lost, unknown=unknown) from lost
            else:
                self._reached = True
                if response.is_success:
                    return response
                # What leads elsewhere was not done either.
                refusal = _refusal(response)
                # The first request may still be worked on.
                under_way = cut_off and refusal.code == "idempotency_in_flight"
                away = again and _is_away(refusal) and time.monotonic() < ends
                if not (under_way or away):
                    raise refusal
            cut_off += 1
            ends = min(ends, time.monotonic() + _REPEAT_S)
            time.sleep(min(0.5 * cut_off, 5))

    def _strange(self, path: str) -> Problem:
        return Problem(
            "http_error",
            expected=f"a list of the reconciler from {self._http.base_url}",
            found=f"another answer to {path}",
            remedy=_NO_PROXY,
        )

    def _unreachable(self, lost: httpx.TransportError, *, unknown: bool = False) -> Problem:
        again = "look whether it was done before you repeat it; " if unknown else ""
        way = "correct --api or GPUAAS_API; on its own machine start it, with"
        way += " `systemctl start gpuaas` or `gpuaas serve`"
        if "CERTIFICATE_VERIFY_FAILED" in str(lost):
            way = "correct --api or GPUAAS_API; for a CA of the site's own, set SSL_CERT_FILE to a"
            way += " file with its certificate in PEM"
        return Problem(
            "reconciler_unreachable",
            503,
            expected=f"the reconciler to answer on {self._http.base_url}",
            found=str(lost) or type(lost).__name__,
            remedy=f"{again}{way}",
        )


def _address(path: str) -> str:
    """The address of a route; Problem `name_invalid` for a word in it that would make it another
    route's.
    """
    if not _PATH.fullmatch(path):
        raise _invalid(f"the path {path!r}")
    return route(path)


def _invalid(found: str) -> Problem:
    return Problem(
        "name_invalid",
        422,
        expected="ids and names of one character at least, without spaces and slashes",
        found=found,
        remedy="correct the words of the command: one may be an empty variable",
    )


def route(path: str) -> str:
    """The address of a path. Routes of operators have no prefix."""
    return path if path.startswith(_OPERATORS) else API + path


def _timed_out(task: Mapping[str, Any]) -> Problem:
    waits = task.get("waits_for") or {}
    why = f", waits for {waits['code']}: {waits['detail']}" if waits else ""
    return Problem(
        "task_timeout",
        504,
        expected=f"task {task['id']} to have ended; its deadline is {task['deadline_at']}",
        found=f"state {task['state']}{why}",
        remedy=f"read `gpuaas tasks show {task['id']}`; the task goes on by itself",
    )


def _refusal(response: httpx.Response) -> Problem:
    parts = ("code", "expected", "found", "remedy")
    try:
        document = response.json()
    except (ValueError, RecursionError):
        document = None
    if isinstance(document, dict) and document.keys() >= set(parts):
        code, expected, actual, remedy = (document.pop(part) for part in parts)
        status = response.status_code
        return Problem(
            code, status, expected=expected, found=actual, remedy=remedy, detail=document
        )
    # An error without a code comes from a proxy in front of the service.
    kind = response.headers.get("Content-Type", "no type")
    text = " ".join(response.text.split())[:200]
    return Problem(
        "http_error",
        response.status_code,
        expected=f"an answer of the reconciler from {response.request.url}",
        found=f"status {response.status_code}, {kind}: {text}",
        remedy=_NO_PROXY,
    )


def _is_away(refusal: Problem) -> bool:
    """Whether a proxy has answered for a service that restarts."""
    return refusal.code == "http_error" and refusal.status in _AWAY


def _parse_events(lines: Iterator[str]) -> Iterator[Event | None]:
    """Complete events of a stream, and None for a keep-alive. An event that is cut off by the end
    of the connection is dropped.
    """
    fields: dict[str, str] = {}
    for line in lines:
        name, _, value = line.partition(":")
        if line and name:
            fields[name] = value.removeprefix(" ")
        elif not line and "data" in fields:
            document = json.loads(fields["data"])
            yield Event(fields.get("event", "message"), fields.get("id", ""), document)
            fields = {}
        elif line:
            yield None

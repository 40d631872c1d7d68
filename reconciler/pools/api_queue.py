"""The queue of a worker without the database: HTTPS with the token of its pool."""

from __future__ import annotations

import json
import logging
import math
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any

import httpx

from reconciler.db.migrations import program_version
from reconciler.model.errors import Problem
from reconciler.model.jobs import Call, Outcome
from reconciler.pools import leases
from reconciler.pools.queue import Away, Dismissed, Ended, Turn
from reconciler.pools.remote import HELD
from reconciler.runs.service_access import Deadline, end_at

log = logging.getLogger("gpuaas.jobs")

_PATH = "/api/v1/worker"
# An answer has at most 64 inputs of 64 KiB, with room for characters that JSON escapes.
ANSWER_BYTES = 32 << 20
# Below the limit of the service for a request.
_REQUEST_BYTES = 900 << 10
# Limit of a request with its answer, however slowly the answer comes.
_TIMEOUT_S = 15.0
# Time that a request waits for a job to be due. SIGTERM may have to wait as long.
_WAIT_S = 5
# Interval at which a worker that has jobs looks whether more are due.
_LOOK_S = 1.0
# Time that a worker whose token is refused waits for another token in its file: people replace it
# on each machine after the old token has ended. Its leases, and so its calls, end meanwhile.
_PATIENCE_S = 60.0
# Statuses of a service, or of a proxy before it, after which a later request may succeed.
_PASSING = frozenset({408, 425, 429})


class ApiQueue:
    """secret: reads the token, which may be replaced while the worker runs.

    stopping: set once the pool does not serve any more.
    """

    most = HELD
    apart = 0
    lease_s = leases.LEASE_S
    beat_s = leases.BEAT_S

    def __init__(
        self, url: str, secret: Callable[[], str], models: Sequence[str], stopping: threading.Event
    ) -> None:
        self._secret = secret
        self._token = secret()
        self._models = models
        self._stopping = stopping
        self._url = url
        # The heartbeat must not wait for the end of another request, nor have its deadline.
        self._local = threading.local()
        self._id = ""
        self._registering = threading.Lock()
        self._serving = True
        # Token of a claim without an answer yet. A repetition gets the same jobs.
        self._claim = ""
        self._due = True
        self._looked_at = 0.0
        # When the service last accepted a token of this worker. Before the first time, the worker
        # waits for no other token.
        self._admitted = -math.inf

    def enter(self) -> bool:
        return True

    def serve(self, _digests: Mapping[str, str]) -> str:
        self._register()
        return self._id

    def _register(self) -> None:
        body = {"host": socket.gethostname()[:64], "pid": os.getpid(), "models": self._models}
        answer = self._ask("register", body)
        try:
            self._id = str(answer["worker_id"])
            self.lease_s = min(max(float(answer["lease_s"]), 1.0), 3600.0)
            self.beat_s = min(max(float(answer["beat_s"]), 0.1), self.lease_s / 2)
        except (KeyError, TypeError, ValueError) as error:
            raise _strange(answer) from error

    def turn(
        self,
        ended: Ended,
        returned: Sequence[Call],
        limit: int,
        _alone: bool = True,
        _behind: Collection[str] = (),
    ) -> Turn:
        counted = 0
        parts = _parts(ended)
        for part in parts[:-1]:
            counted += self._turn(part, (), 0).counted
        last = self._turn(parts[-1], returned, limit)
        return Turn(counted + last.counted, last.calls)

    def is_idle(self) -> bool:
        if self._due:
            self._due = False
            return False
        if time.monotonic() < self._looked_at + _LOOK_S:
            return True
        return not self._look(0)

    def wait(self, stopping: threading.Event) -> None:
        if not stopping.is_set():
            self._due = self._look(_WAIT_S)

    def renew(self, tokens: Sequence[str]) -> set[str]:
        answer = self._ask("renew", {"worker_id": self._id, "tokens": list(tokens)})
        held = answer.get("held")
        if not isinstance(held, list):
            raise _strange(answer)
        return {str(id) for id in held}

    def tend(self) -> None:
        """The service does it."""

    def leave(self) -> None:
        if self._claim:
            # The answer to this claim was lost. Its jobs would count as lost by this worker.
            self._turn((), self._turn((), (), 1).calls, 0)
        # A pool that ends may have ended with the last job.
        if not self._serving:
            return
        self._ask("leave", {"worker_id": self._id})

    def _turn(self, ended: Ended, returned: Sequence[Call], limit: int) -> Turn:
        body: dict[str, Any] = {
            "worker_id": self._id,
            "ended": [_outcome(call, outcome) for call, outcome in ended],
            "returned": [{"id": call.id, "token": call.token} for call in returned],
        }
        if limit:
            self._claim = self._claim or str(uuid.uuid4())
            body["claim"] = {"token": self._claim, "limit": limit}
        answer = self._ask("turn", body)
        try:
            calls = [self._call(job) for job in answer["jobs"]]
            counted = int(answer["counted"])
        except (KeyError, TypeError, ValueError) as error:
            raise _strange(answer) from error
        if limit:
            self._claim = ""
        return Turn(counted, calls)

    def _call(self, job: Mapping[str, Any]) -> Call:
        given, numbers = job["input"], (int(job["timeout_s"]), int(job.get("lost", 0)))
        if job["model"] not in self._models or not isinstance(given, dict):
            raise ValueError(job["model"])
        return Call(str(job["id"]), str(job["token"]), job["model"], given, *numbers)

    def _look(self, wait_s: int) -> bool:
        self._looked_at = time.monotonic()
        return bool(self._ask("due", {"worker_id": self._id, "wait_s": wait_s}).get("due"))

    def _ask(self, act: str, body: Mapping[str, Any]) -> dict[str, Any]:
        token = self._token
        status, answer = self._send(act, body, token)
        if status == httpx.codes.UNAUTHORIZED and self._renewed(token):
            status, answer = self._send(act, body, self._token)
        if status == httpx.codes.OK:
            self._admitted = time.monotonic()
            # A pool that drains gives out nothing more.
            if answer.get("serving") is False:
                self._serving = False
                self._stopping.set()
            return answer
        if not {"code", "expected", "remedy"} <= answer.keys():
            raise _strange(f"status {status}, {answer}")
        code = answer["code"]
        reason = f"{code} ({status}): expected {answer['expected']}, {answer['remedy']}"
        # A seat of the pool comes free within its lease.
        if status >= httpx.codes.INTERNAL_SERVER_ERROR or status in _PASSING or code == "pool_full":
            raise Away(f"the service refuses: {reason}")
        waits = time.monotonic() < self._admitted + _PATIENCE_S
        if status == httpx.codes.UNAUTHORIZED and waits and not self._stopping.is_set():
            raise Away(f"the token's file is read again: {reason}")
        if code == "worker_not_found" and not self._stopping.is_set():
            self._return(str(body["worker_id"]))
            raise Away("the service had recorded this worker as ended; it is registered again")
        raise Dismissed(reason)

    def _return(self, ended_id: str) -> None:
        """Register again after a silence in which the service has given this worker up.

        Its jobs have gone to others. The next heartbeat, under the new id, shows it.
        """
        with self._registering:
            # Heartbeat and turn may both get this answer; the first of them registers.
            if self._id == ended_id:
                self._register()

    def _renewed(self, refused: str) -> bool:
        """Whether there is another token now. The other thread may have read it already."""
        with suppress(Problem):
            self._token = self._secret()
        return self._token != refused

    def _send(self, act: str, body: Mapping[str, Any], token: str) -> tuple[int, dict[str, Any]]:
        """Status and document of an answer, which is limited in size and time."""
        http, deadline = self._client()
        limit_s = _TIMEOUT_S + body.get("wait_s", 0)
        deadline.ends = time.monotonic() + limit_s
        headers = {"Authorization": f"Bearer {token}", "Accept-Encoding": "identity"}
        content = bytearray()
        try:
            with http.stream(
                "POST", f"{_PATH}/{act}", json=body, headers=headers, timeout=limit_s
            ) as response:
                for piece in response.iter_raw():
                    content += piece
                    if len(content) > ANSWER_BYTES:
                        raise Away("the service's answer is too long")
            document = json.loads(content)
        except (httpx.HTTPError, httpx.InvalidURL) as failure:
            raise Away(f"the service does not answer: {failure!r}") from failure
        except (ValueError, RecursionError) as failure:
            raise Away(f"no answer of the service, status {response.status_code}") from failure
        if not isinstance(document, dict):
            raise _strange(document)
        return response.status_code, document

    def _client(self) -> tuple[httpx.Client, Deadline]:
        """The calling thread's own."""
        if not hasattr(self._local, "client"):
            agent = {"user-agent": f"gpuaas-worker/{program_version()}"}
            # A proxy would read a token that travels without TLS.
            private = self._url.startswith("https:")
            client = httpx.Client(base_url=self._url, trust_env=private, headers=agent)
            deadline = Deadline(0.0)
            end_at(client, deadline)
            self._local.client = client, deadline
        mine: tuple[httpx.Client, Deadline] = self._local.client
        return mine


def _outcome(call: Call, outcome: Outcome) -> dict[str, Any]:
    end = {"result": outcome.result} if outcome.result is not None else {"error": outcome.error}
    return {"id": call.id, "token": call.token, "permanent": outcome.permanent, **end}


def _parts(ended: Ended) -> list[Ended]:
    """Outcomes by requests that the service takes; at least one part."""
    parts: list[list[tuple[Call, Outcome]]] = [[]]
    room = _REQUEST_BYTES
    for call, outcome in ended:
        size = len(json.dumps(_outcome(call, outcome)))
        if size > room and parts[-1]:
            parts.append([])
            room = _REQUEST_BYTES
        parts[-1].append((call, outcome))
        room -= size
    return list(parts)


def _strange(answer: object) -> Away:
    return Away(f"no answer of this service: {str(answer)[:200]}")

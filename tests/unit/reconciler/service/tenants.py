"""Tenants who launch and release, ask again until they get an answer, and keep account."""

from __future__ import annotations

import math
import threading
import time
import uuid
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus
from typing import Any, Self

import httpx

from tests.unit.reconciler.api.stack import KEY

BODY = {
    "capacity_shape": "gpu_slice",
    "gpu_count": 1,
    "username": "tenant",
    "ssh_keys": [KEY],
    "hostname": "slice-1",
    "image": "ubuntu",
}


# Time limit of an answer once the service is no longer killed: before, it may be away for longer.
LIMIT_S = 60.0


class Tenants:
    """They begin and stop with the `with`; the launches promised by then are requested once more.

    launched: allocations promised to them, by idempotency key; answers: statuses seen.

    unavailable: why they were told to come back later, by the codes of the problems.
    """

    def __init__(
        self, url: str, token: str, many: int = 2, project: str = "demo", image: str = "ubuntu"
    ) -> None:
        self.launched: dict[str, str] = {}
        self.answers: list[int] = []
        self.unavailable: Counter[str] = Counter()
        self.refused = 0
        self.cut_off = 0
        self._over = threading.Event()
        self._ended_at, self._limit_s = math.inf, LIMIT_S
        self._url = f"{url}/api/v1/projects/{project}/allocations"
        self._body = BODY | {"image": image}
        self._client = httpx.Client(
            headers={"Authorization": f"Bearer {token}"},
            timeout=10,
            trust_env=False,  # a proxy would answer for a service that is away
        )
        self._pool = ThreadPoolExecutor(many)
        self._lives = [self._pool.submit(self._live) for _ in range(many)]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, failed: type[BaseException] | None, *_: object) -> None:
        # After a failure the service may not answer, and the failure is to be seen.
        if failed is not None:
            self._limit_s = 0
        self._ended_at = time.monotonic()
        self._over.set()
        self._pool.shutdown()
        if failed is None:
            for life in self._lives:
                life.result()
            self._ask_again()
        self._client.close()

    def _ask_again(self) -> None:
        for key, name in self.launched.items():
            again = self._ask("", self._body, key)
            assert again.json()["id"] == name
            assert again.headers["Idempotency-Replayed"] == "true"

    def _live(self) -> None:
        while not self._over.is_set():
            key = str(uuid.uuid4())
            answer = self._ask("", self._body, key)
            if answer.status_code != 201:
                # Everything is sold, or another tenant was quicker.
                self.refused += 1
                assert answer.json()["code"] in {"no_capacity", "generation_conflict"}, answer.text
                time.sleep(0.03)
                continue
            name = answer.json()["id"]
            # A promise is a promise: asked again, under the same key, it is the same.
            assert self._ask("", self._body, key).json()["id"] == name
            self.launched[key] = name
            self._until_released(name)

    def _until_released(self, name: str) -> None:
        while not self._over.is_set():
            state = self._ask(f"/{name}", None, "").json()["state"]
            if state == "active":
                self._ask(f"/{name}/release", {}, str(uuid.uuid4()))
            if state in {"released", "failed"}:
                return
            time.sleep(0.03)

    def _ask(self, path: str, body: dict[str, Any] | None, key: str) -> httpx.Response:
        """Until there is an answer: a service that is away comes back."""
        began = time.monotonic()
        while True:
            try:
                answer = self._send(path, body, key)
            except httpx.TransportError as error:
                self.cut_off += 1
                text = repr(error)
            else:
                self.answers.append(answer.status_code)
                if answer.status_code == HTTPStatus.SERVICE_UNAVAILABLE:
                    self.unavailable[answer.json()["code"]] += 1
                if answer.status_code not in {500, 503} and not _in_flight(answer):
                    return answer
                text = answer.text
            if time.monotonic() - max(began, self._ended_at) > self._limit_s:
                what = f"{'GET' if body is None else 'POST'} {self._url}{path}"
                raise TimeoutError(f"{what}: no answer in {self._limit_s:g} s, last {text}")
            time.sleep(0.02)

    def _send(self, path: str, body: dict[str, Any] | None, key: str) -> httpx.Response:
        if body is None:
            return self._client.get(self._url + path)
        headers = {"Idempotency-Key": key}
        return self._client.post(self._url + path, json=body, headers=headers)


def _in_flight(answer: httpx.Response) -> bool:
    return answer.status_code == 409 and answer.json()["code"] == "idempotency_in_flight"

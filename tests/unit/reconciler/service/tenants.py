"""Tenants who launch and release, ask again until they get an answer, and keep account."""

from __future__ import annotations

import threading
import time
import uuid
from typing import Any

import httpx

from tests.unit.reconciler.api.world import KEY

BODY = {
    "capacity_shape": "gpu_slice",
    "gpu_count": 1,
    "username": "tenant",
    "ssh_keys": [KEY],
    "hostname": "slice-1",
    "image": "ubuntu",
}


class Tenants:
    """launched: what was promised to them, by idempotency key; answers: statuses seen."""

    def __init__(self, url: str, token: str, many: int = 2) -> None:
        self.launched: dict[str, str] = {}
        self.answers: list[int] = []
        self.refused = 0
        self.cut_off = 0
        self._over = threading.Event()
        self._url = f"{url}/api/v1/projects/demo/allocations"
        self._client = httpx.Client(
            headers={"Authorization": f"Bearer {token}"},
            timeout=10,
            trust_env=False,  # a proxy would answer for a service that is away
        )
        self._threads = [threading.Thread(target=self._live) for _ in range(many)]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Nobody begins anything new; what is under way gets its answer."""
        self._over.set()
        for thread in self._threads:
            thread.join()
        self._client.close()

    def _live(self) -> None:
        while not self._over.is_set():
            key = str(uuid.uuid4())
            answer = self._ask("", BODY, key)
            if answer.status_code != 201:
                # Everything is sold, or somebody else was quicker.
                self.refused += 1
                assert answer.json()["code"] in {"no_capacity", "generation_conflict"}, answer.text
                time.sleep(0.03)
                continue
            name = answer.json()["id"]
            # A promise is a promise: asked again, under the same key, it is the same.
            assert self._ask("", BODY, key).json()["id"] == name
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
        while True:
            try:
                if body is None:
                    answer = self._client.get(self._url + path)
                else:
                    headers = {"Idempotency-Key": key}
                    answer = self._client.post(self._url + path, json=body, headers=headers)
            except httpx.TransportError:
                self.cut_off += 1
                time.sleep(0.02)
                continue
            self.answers.append(answer.status_code)
            if answer.status_code in {500, 503} or _in_flight(answer):
                time.sleep(0.02)
                continue
            return answer


def _in_flight(answer: httpx.Response) -> bool:
    return answer.status_code == 409 and answer.json()["code"] == "idempotency_in_flight"

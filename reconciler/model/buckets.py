"""Token buckets: how often each of many may do something, at once and over time."""

from __future__ import annotations

import time

_LARGEST = 10_000


class Buckets:
    """The time until which what each has done is paid for, at so much a second."""

    def __init__(self) -> None:
        self._paid: dict[str, float] = {}

    def wait_s(self, name: str, per_s: float, burst: int) -> float:
        """How long one more would have to wait; zero or less if it need not."""
        return self._next(name, per_s) - time.monotonic() - burst / per_s

    def count(self, name: str, per_s: float) -> None:
        """Count one more, whether it had to wait or not."""
        paid = self._next(name, per_s)
        if len(self._paid) >= _LARGEST:
            now = time.monotonic()
            self._paid = {key: until for key, until in self._paid.items() if until > now}
        self._paid[name] = paid

    def _next(self, name: str, per_s: float) -> float:
        return max(time.monotonic(), self._paid.get(name, 0.0)) + 1 / per_s

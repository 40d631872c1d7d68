"""Rate of a token's requests, counted in each process."""

from __future__ import annotations

import time

from reconciler.model.errors import Problem

# Sustained, and at once: more than a person or a script of a person makes, and less than what keeps
# a process from others.
PER_S, BURST = 100.0, 1000
_LARGEST = 10_000


class Rates:
    """The time until which the requests of each token are paid for, at PER_S of them a second."""

    def __init__(self) -> None:
        self._paid: dict[str, float] = {}

    def take(self, token_id: str, holders: int = 1) -> None:
        """Count a request; Problem `rate_exceeded` for one too many, which is not counted.

        holders: so many share the token.
        """
        now = time.monotonic()
        paid = max(now, self._paid.get(token_id, 0.0)) + 1 / (PER_S * holders)
        wait_s = paid - now - BURST / PER_S
        if wait_s > 0:
            raise Problem(
                "rate_exceeded",
                429,
                expected=f"at most {PER_S * holders:.0f} requests a second of a token",
                found=f"more, after {BURST * holders} at once",
                remedy="send fewer; a stream of events needs no repeated request",
                detail={"retry_after_s": int(wait_s) + 1},
            )
        if len(self._paid) >= _LARGEST:
            self._paid = {key: until for key, until in self._paid.items() if until > now}
        self._paid[token_id] = paid

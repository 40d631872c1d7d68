"""Hints by Redis streams: they wake idle workers. Losing them all costs a worker's poll, no job."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from typing import Any

from reconciler import names

log = logging.getLogger("gpuaas.jobs")

STREAM = "stream:orchestrator:inference_jobs"
GROUP = "cg:inference"
DEAD = f"{STREAM}:dlq"
# One for all workers: Redis keeps each name for ever, and who had a hint does not matter.
_CONSUMER = "workers"
# Streams are cut to about these lengths: a hint that was lost is no loss.
_LONGEST = 100_000
_LONGEST_DEAD = 10_000
# Hints that a worker takes at a time, and the age at which it takes over those of another worker.
_COUNT = 32
# Hints at a time after hints that brought no job, so that old hints are soon gone.
STALE = 1_000
_IDLE_MS = 30_000
# While Redis is away it is asked this rarely, so that it delays neither requests nor workers.
_PAUSE_S = 5.0
_TIMEOUT_S = 2.0
# Of a whole exchange, however slowly its answer comes.
_LIMIT_S = 3.0
_CONNECT_S = 0.5
# A request waits so long for that of another, which takes a millisecond. The requests of a silent
# Redis would otherwise hold all threads of the service.
_TURN_S = 0.25


class Hints:
    """Connection to the Redis of a URL, which may be away at any time."""

    def __init__(self, url: str) -> None:
        # Most sites have no Redis, and its client is an eighth of what a worker loads.
        import redis  # noqa: PLC0415

        self._errors = redis.exceptions
        # Not decoded: an entry of any bytes must not keep those behind it from being read.
        self._redis: Any = redis.Redis.from_url(
            url,
            socket_timeout=_TIMEOUT_S,
            socket_connect_timeout=_CONNECT_S,
            retry=redis.retry.Retry(redis.backoff.NoBackoff(), 0),
        )
        pool = self._redis.connection_pool
        if "host" in pool.connection_kwargs:
            pool.connection_class = _named(pool.connection_class, redis.exceptions.TimeoutError)
        self._away_until = 0.0
        self._turn = threading.Lock()
        self._turn_began = 0.0
        # Why it was of no use the last time.
        self._failure = ""
        self._reclaims = True

    def announce(self, ids: Iterable[str]) -> None:
        """Tell workers of new jobs, which must be committed."""
        self._add(STREAM, ({"job": id} for id in ids), _LONGEST)

    def bury(self, codes: Mapping[str, str]) -> None:
        """Tell watchers of new dead letters: the codes of their errors by id."""
        if codes:
            letters = ({"job": id, "code": code} for id, code in codes.items())
            self._add(DEAD, letters, _LONGEST_DEAD)

    def wait(self, seconds: float, most: int = _COUNT) -> bool:
        """Wait for a hint, or so long; False at once while Redis is away, or does not wait.

        most: hints to take at a time.
        """
        woken: list[bool] = []
        self._try(lambda: woken.append(self._read(seconds, most)))
        return any(woken)

    def check(self) -> str:
        """Why Redis is of no use at present; "" if workers can use both streams."""
        self._away_until = 0.0

        def use() -> None:
            self._make_group()
            for name in (STREAM, DEAD):
                self._redis.xlen(name)

        return "" if self._try(use) else self._failure

    def lengths(self) -> dict[str, int]:
        """Lengths of the streams; {} while Redis is away."""
        lengths: dict[str, int] = {}
        self._in_turn(
            lambda: lengths.update({name: int(self._redis.xlen(name)) for name in (STREAM, DEAD)})
        )
        return lengths

    def _add(self, stream: str, fields: Iterable[Mapping[str, str]], longest: int) -> None:
        pipe = self._redis.pipeline(transaction=False)
        for values in fields:
            pipe.xadd(stream, values, maxlen=longest, approximate=True)
        self._in_turn(pipe.execute)

    def _in_turn(self, act: Callable[[], object]) -> None:
        """An exchange for a request, unless that of another takes long: then Redis is silent."""
        patience_s = _TURN_S
        if self._turn.locked():
            patience_s -= time.monotonic() - self._turn_began
        if self._turn.acquire(timeout=max(patience_s, 0.0)):
            try:
                self._turn_began = time.monotonic()
                self._try(act)
            finally:
                self._turn.release()

    def _read(self, seconds: float, most: int) -> bool:
        began = time.monotonic()
        block = max(1, int(min(seconds, _TIMEOUT_S / 2) * 1000))
        entries = self._reclaim()
        if not entries:
            streams = {STREAM: ">"}
            answer = self._redis.xreadgroup(GROUP, _CONSUMER, streams, count=most, block=block)
            entries = [id for _, part in answer or () for id, _ in part]
        if entries:
            # The database says what is left to do, so a hint has served when it was read.
            pipe = self._redis.pipeline(transaction=False)
            pipe.xack(STREAM, GROUP, *entries)
            pipe.xdel(STREAM, *entries)
            pipe.execute()
        return bool(entries) or time.monotonic() - began > block / 2000

    def _reclaim(self) -> list[bytes]:
        """Hints that a worker took and did not acknowledge before it died."""
        if not self._reclaims:
            return []
        try:
            _, claimed, *_ = self._redis.xautoclaim(
                STREAM, GROUP, _CONSUMER, min_idle_time=_IDLE_MS, count=_COUNT
            )
        except self._errors.ResponseError as error:
            if "unknown command" not in str(error):
                raise
            # Before Redis 6.2. Workers find these jobs in the database.
            log.warning("XAUTOCLAIM not available")
            self._reclaims = False
            return []
        return [id for id, _ in claimed]

    def _try(self, act: Callable[[], object]) -> bool:
        if time.monotonic() < self._away_until:
            return False
        guard = threading.Timer(_LIMIT_S, self._redis.connection_pool.disconnect)
        guard.daemon = True
        guard.start()
        try:
            try:
                act()
            except self._errors.ResponseError as error:
                if not str(error).startswith("NOGROUP"):
                    raise
                self._make_group()
                act()
        # Its answers may be of any form, and jobs must go on without it.
        except Exception as error:
            # Errors of the connection name its address, and none has the password.
            words = str(error).split() if isinstance(error, self._errors.RedisError) else ()
            text = " ".join(words)[:200]
            self._failure = f"{type(error).__name__}: {text}" if text else type(error).__name__
            log.warning("Redis is of no use, jobs go on without it: %s", self._failure)
            self._away_until = time.monotonic() + _PAUSE_S
            return False
        finally:
            guard.cancel()
        return True

    def _make_group(self) -> None:
        try:
            self._redis.xgroup_create(STREAM, GROUP, id="0", mkstream=True)
        except self._errors.ResponseError as error:
            if not str(error).startswith("BUSYGROUP"):  # Another worker was quicker.
                raise


def _named(kind: Any, silent: type[Exception]) -> Any:
    """The class of connections, whose deadline includes the lookup of the name."""

    class Named(kind):  # type: ignore[misc]
        def _connect(self) -> Any:
            try:
                names.look_up(self.host, self.port, _CONNECT_S)
            except TimeoutError as hangs:
                raise silent(f"no answer to the lookup of {self.host}") from hangs
            except (OSError, UnicodeError):
                pass  # Redis's own lookup has the words for it.
            return super()._connect()

    return Named


def bury(url: str, codes: Mapping[str, str]) -> None:
    """Tell watchers of a site's dead letters, which must be committed: error codes by id. Nothing
    happens without Redis.
    """
    if codes and (streams := of(url)) is not None:
        streams.bury(codes)


@lru_cache(maxsize=4)
def of(url: str) -> Hints | None:
    """The hints of a site; None for a site without Redis."""
    return Hints(url) if url else None

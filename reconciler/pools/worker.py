"""A worker of jobs: claims them in groups, has them run by its child, records how they ended."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TypeVar

from reconciler.model.errors import Problem
from reconciler.model.jobs import Call, Outcome
from reconciler.pools import watch
from reconciler.pools.child import START_S, Runner
from reconciler.pools.queue import TEND_S, Away, Dismissed, JobQueue, Turn

log = logging.getLogger("gpuaas.jobs")
T = TypeVar("T")
Key = tuple[str, str]

# A worker holds as many jobs as end in this time. Half of them end in a transaction, which claims
# as many, while the runner does the other half. The number grows from 1. Jobs that wait for longer
# behind another go back, so that slow jobs are not kept from other workers.
_QUICK_S = 0.1
# The longest wait for outcomes, and so for a signal.
_LOOK_S = 0.1
_AGAIN_S = 1.0
# A call that goes on for so long has an early heartbeat. That brings its claim, which did not wait
# for the disk, there: should the call take the machine down, it has to count as lost.
_SOON_S = 0.5
# A worker hangs when its main thread makes no progress for this time, for example while it waits
# for a child that a driver keeps alive. Its heartbeats would keep its jobs from other workers. A
# heartbeat without an answer for this time counts as a hang, too.
_STUCK_S = START_S + 60.0


class Worker:
    """stopping: once set, the worker finishes and records its job within drain_s and ends."""

    def __init__(
        self,
        queue: JobQueue,
        runner: Runner,
        stopping: threading.Event,
        *,
        drain_s: float = 30.0,
    ) -> None:
        self._queue = queue
        self._runner = runner
        self._stopping = stopping
        self._drain_s = drain_s
        self._limit = 1
        # Id and token of the jobs that the runner has, and those of them whose lease was lost.
        self._held: dict[Key, Call] = {}
        self._lost: set[Key] = set()
        # The lease of each job lasts for at least so long, on the monotonic clock.
        self._leased_until = 0.0
        self._moved = time.monotonic()
        # When the worker ends at the latest.
        self._ends_at = math.inf
        # When the heartbeat began that has had no answer yet.
        self._beats_since = math.inf
        # When the next heartbeat begins early, and whether it does now.
        self._early = math.inf
        self._hurry = threading.Event()
        self._ended = threading.Event()
        self._left = threading.Event()

    def run(self) -> None:
        """Run jobs until `stopping` is set. Ends the process if a thread hangs."""
        watch.start(
            lambda: min(self._moved, self._beats_since), _STUCK_S, self._left, "this worker"
        )
        try:
            self._run()
        finally:
            self._left.set()

    def _run(self) -> None:
        if not self._persist(self._queue.enter):
            return
        self._runner.start()
        id = self._persist(partial(self._queue.serve, self._runner.digests))
        if id is None:
            self._runner.stop()
            return
        log.info("worker %s takes jobs", id)
        heart = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        heart.start()
        try:
            self._work()
        except Problem:  # The models do not load again. None of these jobs has begun.
            self._give_back(self._runner.recall())
            raise
        finally:
            self._ended.set()
            self._hurry.set()
            self._runner.stop()
            heart.join(timeout=5)
            self._persist(self._queue.leave)

    def _work(self) -> None:
        tended = 0.0
        while not self._stopping.is_set():
            self._moved = time.monotonic()
            try:
                if time.monotonic() - tended > TEND_S:
                    tended = time.monotonic()
                    self._queue.tend()
                self._turn(self._outcomes())
                if not self._held:
                    self._queue.wait(self._stopping)
            except Away as away:
                log.error("%s", away)
                self._stopping.wait(_LOOK_S if self._held else _AGAIN_S)
            except Dismissed as reason:
                self._dismiss(reason)
        self._drain()

    def _outcomes(self) -> list[tuple[Call, Outcome]]:
        """Outcomes of half of the jobs, or those that a moment brings."""
        if not self._held:
            return []
        ended = self._runner.outcomes(_LOOK_S, (len(self._held) + 1) // 2)
        if time.monotonic() > self._early:
            self._early = math.inf
            self._hurry.set()
        if ended:
            growth = min(_QUICK_S / max(self._runner.lag_s, 0.001), 2)
            self._limit = max(1, min(int(self._limit * growth), self._queue.most))
        if self._has_lost():
            ended += self._runner.outcomes(0, len(self._runner))
            self._revoke()
        elif self._runner.waits_s() > _QUICK_S:
            self._give_back(self._runner.recall())
            self._limit = max(len(self._runner), 1)
        return ended

    def _turn(self, ended: list[tuple[Call, Outcome]]) -> None:
        """Claim jobs and record outcomes, together or in two turns."""
        first = self._runner.first()
        # A job that was lost before runs alone.
        alone = first is not None and first.lost
        room = 0 if alone else max(self._limit - len(self._runner), 0)
        # Without its process, the runner would load the models before outcomes are recorded.
        apart = not ended or (len(ended) <= self._queue.apart and self._runner.lives())
        if apart and room:
            due = not self._stopping.is_set() and self._is_due(ended)
            if due:
                self._exchange((), room)
            # If that brings nothing, what waits runs alone: it comes with the record of the ended.
            if not due or len(self._runner):
                room = 0
        if ended:
            self._exchange(ended, room)

    def _is_due(self, ended: Sequence[tuple[Call, Outcome]]) -> bool:
        """Whether jobs wait. Outcomes must be recorded, even if the queue cannot answer this."""
        try:
            return not self._queue.is_idle()
        except Away:
            if not ended:
                raise
            return False

    def _exchange(self, ended: Sequence[tuple[Call, Outcome]], room: int) -> None:
        """Record these outcomes and claim so many jobs."""

        def turn() -> Turn:
            # A job whose outcome is not recorded would be lost with the worker, too.
            began, others = time.monotonic(), len(self._held) > len(ended)
            limit = 0 if self._stopping.is_set() else room
            done = self._queue.turn(ended, (), limit, not others, self._runner.behind())
            if done.calls and not others:
                self._leased_until = began + self._queue.lease_s
            return done

        done = self._persist(turn)
        self._recorded(ended, done)
        if done is not None:
            if ended:
                self._early = math.inf
            elif done.calls and self._queue.apart:
                self._early = time.monotonic() + _SOON_S
            self._held.update((_key(call), call) for call in done.calls)
            self._runner.send(done.calls)

    def _recorded(self, ended: Sequence[tuple[Call, Outcome]], done: Turn | None) -> None:
        self._forget(call for call, _ in ended)
        late = len(ended) - (0 if done is None else done.counted)
        if late:
            log.warning("%d outcomes came too late and do not count", late)

    def _drain(self) -> None:
        """Finish the job that runs, within a bound, and give back the others."""
        self._has_to_end()  # From now on, if it was not told before.
        self._give_back(self._runner.recall())
        ended: list[tuple[Call, Outcome]] = []
        while len(self._runner) and not self._has_to_end():
            self._moved = time.monotonic()
            ended += self._runner.outcomes(_LOOK_S, len(self._runner))
            if self._has_lost():
                self._revoke()
        # A call may have ended while jobs were given back.
        ended += self._runner.outcomes(0, len(self._runner))
        rest = self._runner.drop()
        if ended or rest:
            self._recorded(ended, self._persist(partial(self._queue.turn, ended, rest, 0)))
        self._forget(rest)

    def _has_lost(self) -> bool:
        """Whether leases are lost: all are if they end while a heartbeat waits for its answer."""
        if self._beats_since < self._leased_until < time.monotonic():
            self._lost = set(self._held)
        return bool(self._lost)

    def _revoke(self) -> None:
        """Let go of the jobs whose lease is lost; the one that runs is ended."""
        lost, self._lost = self._lost, set()
        call = self._runner.first()
        if call is not None and _key(call) in lost:
            calls = self._runner.drop()
        else:
            calls = self._runner.recall()
        mine = [call for call in calls if _key(call) not in lost]
        self._forget(call for call in calls if _key(call) in lost)
        self._give_back(mine)

    def _give_back(self, calls: list[Call]) -> None:
        if calls:
            self._persist(partial(self._queue.turn, (), calls, 0))
            self._forget(calls)

    def _forget(self, calls: Iterable[Call]) -> None:
        for call in calls:
            self._held.pop(_key(call), None)

    def _beat(self) -> None:
        pause, refused = self._queue.beat_s, ""
        while self._rests(pause):
            pause = self._queue.beat_s
            began, held = time.monotonic(), set(self._held)
            self._beats_since = began
            try:
                kept = self._queue.renew(sorted({token for _, token in held}))
            except Dismissed as reason:
                self._dismiss(reason)
                return
            except Exception as failure:
                # Whatever it is: without heartbeats, each longer call would be lost.
                before, refused = refused, f"{type(failure).__name__}: {failure}"
                if refused != before:
                    unknown = not isinstance(failure, Away)
                    log.error("could not renew leases: %s", failure, exc_info=unknown)
                if time.monotonic() > self._leased_until:
                    self._lost = set(self._held)
                pause = min(pause, _AGAIN_S)
                continue
            finally:
                self._beats_since = math.inf
            refused, self._leased_until = "", began + self._queue.lease_s
            # Jobs that have just been finished are not held any more either, and need no call.
            self._lost = {key for key in held if key[0] not in kept} & set(self._held)

    def _rests(self, seconds: float) -> bool:
        """Wait for the next heartbeat; False once the worker ends."""
        self._hurry.wait(seconds)
        self._hurry.clear()
        return not self._ended.is_set()

    def _persist(self, work: Callable[[], T]) -> T | None:
        """Do the work, again and again until the queue takes it.

        Given up once the leases have ended, so that what it holds goes to others, and when the
        worker has to end. One that holds outcomes has its time to drain for them: the database may
        restart together with it.
        """
        while True:
            self._moved = time.monotonic()
            try:
                return work()
            except Away as away:
                log.error("%s", away)
                if not self._waits():
                    return None
            except Dismissed as reason:
                self._dismiss(reason)
                return None

    def _waits(self) -> bool:
        """Wait a moment for the queue; False if it is too late for that."""
        if self._held and time.monotonic() > self._leased_until:
            return False
        if self._stopping.wait(_AGAIN_S):
            if not self._held or self._has_to_end():
                return False
            time.sleep(_AGAIN_S)
        return True

    def _has_to_end(self) -> bool:
        """Whether the time is over in which a worker that was told to end may finish its job."""
        if self._stopping.is_set():
            self._ends_at = min(self._ends_at, time.monotonic() + self._drain_s)
        return time.monotonic() >= self._ends_at

    def _dismiss(self, reason: Dismissed) -> None:
        log.error("this worker ends: %s", reason)
        self._lost = set(self._held)
        self._stopping.set()


def _key(call: Call) -> Key:
    return call.id, call.token

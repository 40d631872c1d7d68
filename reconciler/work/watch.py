"""Probes of unreachable hosts, so that waiting tasks continue when a host answers again.

Nothing is stored: each process probes independently. The first process that gets an answer marks
the node as reachable, and that happens once.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from typing import Any

from sqlalchemy import Connection, Engine

from reconciler.db.engine import reading, retrying
from reconciler.db.schema import Node
from reconciler.lifecycle import drift, host
from reconciler.model.act import Act
from reconciler.model.states import NodeMode, NodeState
from reconciler.records import nodes
from reconciler.runs import ssh
from reconciler.runs.spec import NodeAccess
from reconciler.runs.ssh import SshAccess

log = logging.getLogger("gpuaas.watch")

ACT = Act("reconciler", "the host answers again")
# Probe interval of an unreachable host: it doubles from FIRST_S to LONGEST_S and stays there. A
# restart takes minutes, so probing faster gains nothing.
FIRST_S = 5.0
LONGEST_S = 120.0
# A host that is lost again within this time after its last answer is probed later each time. Each
# answer starts the runs of its tasks, so a hostile host would keep this machine busy with them.
FORGET_S = 600.0
# Parallel requests to quick hosts, and to slow hosts. A host whose request takes longer than SLOW_S
# counts as slow until a quick answer; from the second time on, for an hour.
_AT_ONCE, SLOW_S, _REMEMBERED_S = 8, 5.0, 3600.0
# A pass waits so long for its probes.
_WAIT_S = 1.0


@dataclass(frozen=True)
class _Slow:
    """A host that was slow. at: the last time. pardoned: it has answered quickly since. again: it
    was slow, pardoned and slow again within the hour.
    """

    at: float
    again: bool = False
    pardoned: bool = False


class Places:
    """Places for parallel requests to hosts. Slow hosts have places of their own, so that hosts
    that hang delay no others.

    A request returns why its host did not answer, "" if it did.
    """

    def __init__(self, name: str, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._slow: dict[str, _Slow] = {}
        self._pools = [
            ThreadPoolExecutor(_AT_ONCE, name),
            ThreadPoolExecutor(_AT_ONCE, f"{name}-slow"),
        ]

    def submit(self, node_id: str, ask: Callable[..., str], *arguments: Any) -> Future[str]:
        """Ask a host as soon as it has a place."""
        slow = self._remembered(node_id)
        pool = self._pools[slow is not None and not slow.pardoned]
        return pool.submit(self._timed, node_id, ask, *arguments)

    def close(self) -> None:
        for pool in self._pools:
            pool.shutdown(wait=False, cancel_futures=True)

    def _remembered(self, node_id: str) -> _Slow | None:
        slow = self._slow.get(node_id)
        return slow if slow and self._clock() - slow.at < _REMEMBERED_S else None

    def _timed(self, node_id: str, ask: Callable[..., str], *arguments: Any) -> str:
        begun, reason = self._clock(), "no answer"
        try:
            reason = ask(*arguments)
        finally:
            now, before = self._clock(), self._remembered(node_id)
            if now - begun > SLOW_S:
                # A host that hangs every second time would hold a quick place as often.
                again = before is not None and (before.again or before.pardoned)
                self._slow[node_id] = _Slow(now, again)
            elif before and not (reason or before.again):
                self._slow[node_id] = replace(before, pardoned=True)
        return reason


class Watch:
    """Prober of unreachable hosts. access: makes an SSH identity, for each pass with due hosts.

    drift: whether a slice host that answers again is compared with the records at once.
    """

    def __init__(
        self,
        engine: Engine,
        access: Callable[[], SshAccess],
        *,
        drift: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._access = access
        self._drift = drift
        self._clock = clock
        # Per node: time of the next probe, and the pause after it.
        self._plan: dict[str, tuple[float, float]] = {}
        # Probes that have not ended, by node.
        self._probes: dict[str, Future[str]] = {}
        self._places = Places("probe", clock)
        # Per node that answered lately: how often, and the last time.
        self._answered: dict[str, tuple[int, float]] = {}

    def run(self, stopping: threading.Event, every_s: float = 1.0) -> None:
        """Probe the due hosts every `every_s` seconds until `stopping` is set."""
        while not stopping.wait(every_s):
            try:
                self.look()
            except Exception:
                log.exception("asking silent hosts failed; trying again")
        self._places.close()

    def look(self) -> list[str]:
        """Probe every silent host that is due; returns the ids of nodes that answered by now."""
        with reading(self._engine) as conn:
            silent = {node.id: node for node in nodes.every(conn, state=NodeState.UNREACHABLE)}
        now = self._clock()
        self._answered = {
            node_id: row for node_id, row in self._answered.items() if now - row[1] < FORGET_S
        }
        self._plan = {
            node_id: self._plan.get(node_id) or self._first(node_id, now) for node_id in silent
        }
        due = {node_id for node_id, (at, _) in self._plan.items() if at <= now}
        if turn := [silent[node_id] for node_id in sorted(due - self._probes.keys())]:
            access = self._access()
            for node in turn:
                place = NodeAccess(node.id, node.address, node.port, node.ssh_user)
                self._probes[node.id] = self._places.submit(node.id, ssh.probe, access, place)
        wait(self._probes.values(), _WAIT_S)
        ended = [node_id for node_id, probe in self._probes.items() if probe.done()]
        # Of a host that is no longer silent, nothing is to be recorded.
        reasons = {node_id: _reason(self._probes.pop(node_id)) for node_id in ended}
        return [
            node_id
            for node_id, reason in reasons.items()
            if node_id in silent and self._answers(silent[node_id], reason)
        ]

    def _first(self, node_id: str, now: float) -> tuple[float, float]:
        times, _ = self._answered.get(node_id, (0, 0.0))
        pause = min(FIRST_S * 2 ** min(times, 10), LONGEST_S)
        return now + pause, pause

    def _answers(self, node: Node, reason: str) -> bool:
        """Record the end of a probe. reason: why the host did not answer, "" if it did."""
        if reason:
            pause = min(self._plan[node.id][1] * 2, LONGEST_S)
            self._plan[node.id] = (self._clock() + pause, pause)
            log.info("node %s is still silent: %s", node.id, reason)
            return False
        retrying(self._engine, lambda conn: self._record(conn, node))
        times, _ = self._answered.get(node.id, (0, 0.0))
        self._answered[node.id] = (times + 1, self._clock())
        # It may be lost again before the next look.
        del self._plan[node.id]
        log.info("node %s answers again", node.id)
        return True

    def _record(self, conn: Connection, node: Node) -> None:
        if host.record_answer(conn, node.id, ACT) and self._drift and node.mode == NodeMode.SLICE:
            # It may have been restarted. Until that is seen, a launch there would fail.
            drift.queue_comparison(conn, node.id, ACT)


def _reason(probe: Future[str]) -> str:
    """Why a host did not answer; "" if it did."""
    failure = probe.exception()
    return f"{type(failure).__name__}: {failure}" if failure else probe.result()

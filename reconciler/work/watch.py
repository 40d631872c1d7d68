"""Probes of unreachable hosts, so that waiting tasks continue when a host answers again.

Nothing is stored: each process probes independently. The first process that gets an answer marks
the node as reachable, and that happens once.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

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
# Parallel probes, because a probe of a silent host takes long to time out.
_AT_ONCE = 8


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

    def run(self, stopping: threading.Event, every_s: float = 1.0) -> None:
        """Probe the due hosts every `every_s` seconds until `stopping` is set."""
        while not stopping.wait(every_s):
            try:
                self.look()
            except Exception:
                log.exception("asking silent hosts failed; trying again")

    def look(self) -> list[str]:
        """Probe every silent host that is due; returns the ids of the nodes that answered."""
        with reading(self._engine) as conn:
            silent = {node.id: node for node in nodes.every(conn, state=NodeState.UNREACHABLE)}
        now = self._clock()
        first = (now + FIRST_S, FIRST_S)
        self._plan = {node_id: self._plan.get(node_id, first) for node_id in silent}
        turn = [silent[node_id] for node_id, (at, _) in self._plan.items() if at <= now]
        if not turn:
            return []
        access = self._access()
        with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="probe") as pool:
            answers = list(pool.map(lambda node: self._probe(access, node), turn))
        return [node.id for node, answer in zip(turn, answers, strict=True) if answer]

    def _probe(self, access: SshAccess, node: Node) -> bool:
        reason = ssh.probe(access, NodeAccess(node.id, node.address, node.port, node.ssh_user))
        if reason:
            pause = min(self._plan[node.id][1] * 2, LONGEST_S)
            self._plan[node.id] = (self._clock() + pause, pause)
            log.info("node %s is still silent: %s", node.id, reason)
            return False
        retrying(self._engine, lambda conn: self._record(conn, node))
        log.info("node %s answers again", node.id)
        return True

    def _record(self, conn: Connection, node: Node) -> None:
        if host.record_answer(conn, node.id, ACT) and self._drift and node.mode == NodeMode.SLICE:
            # It may have been restarted. Until that is seen, a launch there would fail.
            drift.queue_comparison(conn, node.id, ACT)

"""Asking hosts that fell silent whether they are back; the tasks that wait for them then go on.

Nothing here is remembered: each process asks by itself, and a node is regained once, whoever hears
its host first.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from sqlalchemy import Engine

from reconciler.db.engine import reading, retrying
from reconciler.db.schema import Node
from reconciler.lifecycle import host
from reconciler.model.act import Act
from reconciler.runs import ssh
from reconciler.runs.spec import NodeAccess
from reconciler.runs.ssh import SshAccess

log = logging.getLogger("gpuaas.watch")

ACT = Act("reconciler", "the host answers again")
# A restart takes minutes; a host that is gone is asked at this rate for as long as it is wanted.
FIRST_S = 5.0
LONGEST_S = 120.0
# Hosts asked at once: one that is silent takes its time to be so.
_AT_ONCE = 8


class Watch:
    """access: our identity for SSH, made anew for each look that has somebody to ask."""

    def __init__(
        self,
        engine: Engine,
        access: Callable[[], SshAccess],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._access = access
        self._clock = clock
        # When a node is asked next, and how long it is left alone after that.
        self._plan: dict[str, tuple[float, float]] = {}

    def run(self, stopping: threading.Event, every_s: float = 1.0) -> None:
        """Look until stopping."""
        while not stopping.wait(every_s):
            try:
                self.look()
            except Exception:
                log.exception("asking silent hosts failed; trying again")

    def look(self) -> list[str]:
        """Ask every silent host whose turn it is; the ids of those that answered."""
        with reading(self._engine) as conn:
            found = {node.id: node for node in host.lost_nodes(conn)}
        now = self._clock()
        self._plan = {
            node_id: self._plan.get(node_id, (now + FIRST_S, FIRST_S)) for node_id in found
        }
        turn = [found[node_id] for node_id, (at, _) in self._plan.items() if at <= now]
        if not turn:
            return []
        access = self._access()
        with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="probe") as pool:
            answers = list(pool.map(lambda node: self._ask(access, node), turn))
        return [node.id for node, answer in zip(turn, answers, strict=True) if answer]

    def _ask(self, access: SshAccess, node: Node) -> bool:
        to = NodeAccess(node.id, node.address, node.port, node.ssh_user)
        reason = ssh.probe(access, to)
        if reason:
            pause = min(self._plan[node.id][1] * 2, LONGEST_S)
            self._plan[node.id] = (self._clock() + pause, pause)
            log.info("node %s is still silent: %s", node.id, reason)
            return False
        retrying(self._engine, lambda conn: host.record_answer(conn, node.id, ACT))
        log.info("node %s answers again", node.id)
        return True

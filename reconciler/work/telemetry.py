"""Collection of telemetry: every host of active slices is asked once per minute, over SSH.

Nothing is stored but the samples: a process asks a host whose slices have no sample of this minute.
Hosts that were slow to answer are asked beside the others, so that they delay none of them.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from functools import partial

from sqlalchemy import Connection, Engine

from reconciler.db.engine import reading, retrying
from reconciler.db.schema import Node
from reconciler.lifecycle import drift, slice_telemetry
from reconciler.model.act import Act
from reconciler.model.slice_telemetry import Snapshot
from reconciler.runs import ssh
from reconciler.runs.spec import NodeAccess, RunError
from reconciler.runs.ssh import SshAccess
from reconciler.trust.ca import TELEMETRY
from reconciler.work.watch import Places

log = logging.getLogger("gpuaas.telemetry")

# An answer of eight slices has some 10 KiB.
LONGEST = 1 << 20
# Pause after an answer or a first failure; it doubles up to the longest.
FIRST_S = slice_telemetry.PERIOD_S - 5
LONGEST_S = 600.0
_OFF = Act("reconciler", "a slice is off unasked")
_DIFFERS = Act("reconciler", "the host's baseline differs, as its telemetry says")
_ENDED = Act("reconciler", "the host gives no telemetry")
_SILENT = frozenset({"telemetry"})
# A host is compared no more often for what its telemetry says of its baseline, which may be a lie.
_COMPARED_S = 300.0


class Telemetry:
    """access: makes the SSH identity for telemetry, for each pass with hosts that are due. drift:
    whether a host is compared with the records at once that has a slice off unasked, a part of its
    baseline that differs, or no telemetry any more.
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
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._busy: set[str] = set()
        # Per node: time of the next question, the pause after it, and the last failure.
        self._plan: dict[str, tuple[float, float, str]] = {}
        # Per node: what of its baseline differed when it was compared for that.
        self._differing: dict[str, frozenset[str]] = {}
        # Nodes with a slice off unasked that could not be compared then.
        self._unasked: set[str] = set()
        self._places = Places("telemetry", clock)

    def run(self, stopping: threading.Event, every_s: float = 5.0) -> None:
        """Ask the hosts that are due every `every_s` seconds until `stopping` is set."""
        self._stopping = stopping
        while not stopping.wait(every_s):
            try:
                self.look()
            except Exception:
                log.exception("collecting telemetry failed; trying again")
        self._places.close()

    def look(self) -> list[str]:
        """Begin to ask every host that is due, without waiting; returns the ids of their nodes."""
        with reading(self._engine) as conn:
            nodes = slice_telemetry.due(conn)
        now = self._clock()
        with self._lock:
            never = (now, FIRST_S, "")
            self._plan = {node.id: self._plan.get(node.id, never) for node in nodes} | {
                node_id: plan for node_id, plan in self._plan.items() if node_id in self._busy
            }
            turn = [
                node
                for node in nodes
                if node.id not in self._busy and self._plan[node.id][0] <= now
            ]
        if turn:
            # Before any of them counts as busy: this machine may have no room for an identity.
            access = self._access()
            with self._lock:
                self._busy.update(node.id for node in turn)
            for node in turn:
                self._places.submit(node.id, self._ask, access, node)
        return [node.id for node in turn]

    def _ask(self, access: SshAccess, node: Node) -> str:
        try:
            failure = self._collect(access, node)
        except Exception as broken:
            failure = f"{type(broken).__name__}: {broken}"
        with self._lock:
            _, pause, before = self._plan.get(node.id, (0.0, FIRST_S, ""))
            pause = min(pause * 2, LONGEST_S) if failure and before else FIRST_S
            self._plan[node.id] = (self._clock() + pause, pause, failure)
            self._busy.discard(node.id)
        if failure and failure != before:
            log.warning("no telemetry of node %s: %s", node.id, failure)
        return failure

    def _collect(self, access: SshAccess, node: Node) -> str:
        """Store the host's snapshot; returns the reason why not."""
        target = NodeAccess(node.id, node.address, node.port, TELEMETRY)
        try:
            text = ssh.telemetry(access, target, self._stopping.is_set)
        except RunError as silent:
            # A host that is unreachable is compared as soon as it answers again. The end of this
            # process ends the question, too.
            if not (ssh.is_unreachable(silent.found) or self._stopping.is_set()):
                self._compare(node.id, _SILENT, _ENDED)
            return silent.found
        snapshot = Snapshot.read(text) if len(text) <= LONGEST else f"{len(text)} bytes"
        if isinstance(snapshot, str):
            self._compare(node.id, _SILENT, _ENDED)
            return f"not a snapshot: {snapshot}"
        record = partial(self._record, node_id=node.id, snapshot=snapshot)
        if retrying(self._engine, record):
            self._unasked.add(node.id)
        else:
            self._unasked.discard(node.id)
        self._compare(node.id, frozenset(snapshot.differs), _DIFFERS)
        if snapshot.problems:
            log.info("node %s measures without %s", node.id, ", ".join(snapshot.problems))
        return ""

    def _record(self, conn: Connection, node_id: str, snapshot: Snapshot) -> bool:
        """Store the samples; whether a comparison is owed, because one under way may have looked at
        the host before a slice went off.
        """
        again = node_id in self._unasked
        off = slice_telemetry.switched_off(conn, node_id, snapshot, again=again)
        slice_telemetry.record(conn, node_id, snapshot)
        # The host may lose power before its next turn, and would start the slice again then.
        return bool(off) and self._drift and not drift.queue_unasked(conn, node_id, _OFF)

    def _compare(self, node_id: str, differs: frozenset[str], act: Act) -> None:
        """Have the host compared and repaired when something differs that did not before."""
        if differs - self._differing.get(node_id, frozenset()) and self._drift:
            queue = partial(drift.queue_unasked, node_id=node_id, act=act, pause_s=_COMPARED_S)
            if not retrying(self._engine, queue):
                return
        self._differing[node_id] = differs

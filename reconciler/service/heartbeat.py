"""Heartbeat of a process in the database, and its candidacy for the leader's term."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable
from importlib.metadata import version

from sqlalchemy import Connection, Engine, exc

from reconciler.db import leader
from reconciler.db.engine import retrying
from reconciler.db.leader import Lease

# Runbooks quote the lines of this logger, so their wording must not change.
log = logging.getLogger("gpuaas.leader")


class Heartbeat:
    """roles: the current roles of the process. candidate: whether it may become the leader."""

    def __init__(
        self,
        engine: Engine,
        roles: Callable[[], list[str]],
        *,
        candidate: bool,
        lease_s: float = 10.0,
    ) -> None:
        self.id = str(uuid.uuid4())
        self._engine = engine
        self._roles = roles
        self._candidate = candidate
        self._lease_s = lease_s
        self._every_s = min(leader.ELECTION_S, lease_s / 4)
        self._term: tuple[Lease, float] | None = None
        self._refused = False
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def start(self) -> None:
        """Beat once before returning, so that the process is listed from then on."""
        self._beat()
        self._thread.start()

    def stop(self) -> None:
        """Resign and sign off, so that another process need not wait for the end of the term."""
        self._stopping.set()
        self._thread.join(timeout=10)
        try:
            retrying(self._engine, self._leave)
        except exc.SQLAlchemyError:
            log.warning("could not sign off in the database; the term ends when it expires")

    def lease(self) -> Lease | None:
        """The term that this process holds by its own clock; the database decides on each write."""
        term = self._term
        if term is None or time.monotonic() - term[1] > self._lease_s:
            return None
        return term[0]

    def _run(self) -> None:
        while not self._stopping.wait(self._every_s):
            self._beat()

    def _beat(self) -> None:
        sent_at = time.monotonic()
        try:
            lease = retrying(self._engine, self._report)
        except Exception as failure:
            if self._term is not None:
                log.error("Leader DB connection lost: %s", failure)
                self._term = None
            else:
                log.warning("could not write the heartbeat of this process: %s", failure)
            return
        self._log_change(lease)
        # Measured from before the request, because the term began while it was answered.
        self._term = None if lease is None else (lease, sent_at)

    def _report(self, conn: Connection) -> Lease | None:
        leader.record_process(
            conn,
            self.id,
            self._roles(),
            host=socket.gethostname(),
            pid=os.getpid(),
            version=version("gpuaas-slice"),
        )
        if not self._candidate:
            return None
        return leader.campaign(conn, leader.LOOPS, self.id, self._lease_s)

    def _log_change(self, lease: Lease | None) -> None:
        before = self._term[0].epoch if self._term else None
        if lease is not None and lease.epoch != before:
            log.info("leading, epoch %d", lease.epoch)
        if lease is None and self._candidate and (before is not None or not self._refused):
            log.info("Failed to acquire leader lock: another process leads")
        self._refused = lease is None

    def _leave(self, conn: Connection) -> None:
        leader.remove_process(conn, self.id)
        if self._term is not None:
            leader.resign(conn, self._term[0])

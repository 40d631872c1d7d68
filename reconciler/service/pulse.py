"""A process says that it lives, and asks to lead if it may."""

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

# Runbooks name this logger's lines; they are kept as they are.
log = logging.getLogger("gpuaas.leader")


class Pulse:
    """roles: what the process does at this moment. candidate: whether it may lead."""

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
        self._held: tuple[Lease, float] | None = None
        self._refused = False
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pulse", daemon=True)

    def start(self) -> None:
        """The first beat is over when this returns: whoever asks next hears of the process."""
        self._beat()
        self._thread.start()

    def stop(self) -> None:
        """Resign and be gone, so that nobody has to wait for it."""
        self._stopping.set()
        self._thread.join(timeout=10)
        try:
            retrying(self._engine, self._leave)
        except exc.SQLAlchemyError:
            log.warning("the database did not hear of the end; the lease runs out by itself")

    def lease(self) -> Lease | None:
        """What this process holds, as far as it knows. The database has the last word."""
        held = self._held
        if held is None or time.monotonic() - held[1] > self._lease_s:
            return None
        return held[0]

    def _run(self) -> None:
        while not self._stopping.wait(self._every_s):
            self._beat()

    def _beat(self) -> None:
        asked = time.monotonic()
        try:
            lease = retrying(self._engine, self._say)
        except Exception as failure:
            if self._held is not None:
                log.error("Leader DB connection lost: %s", failure)
                self._held = None
            else:
                log.warning("the database did not hear that this process lives: %s", failure)
            return
        self._told(lease)
        # From before the question: the lease began while it was being answered.
        self._held = None if lease is None else (lease, asked)

    def _say(self, conn: Connection) -> Lease | None:
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

    def _told(self, lease: Lease | None) -> None:
        before = self._held[0].epoch if self._held else None
        if lease is not None and lease.epoch != before:
            log.info("leading, epoch %d", lease.epoch)
        if lease is None and self._candidate and (before is not None or not self._refused):
            log.info("Failed to acquire leader lock: another process leads")
        self._refused = lease is None

    def _leave(self, conn: Connection) -> None:
        leader.remove_process(conn, self.id)
        if self._held is not None:
            leader.resign(conn, self._held[0])

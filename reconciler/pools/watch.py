"""Watchdog over threads that a silent database can block: it ends their process."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable

log = logging.getLogger("gpuaas.pools")


def start(moved: Callable[[], float], limit_s: float, ended: threading.Event, name: str) -> None:
    """Start a thread that ends the process with status 1 once nothing has moved for limit_s.

    The thread makes no requests: a server that never answers would block it too, as long as the
    network acknowledges. moved: when the watched thread last made progress, on the monotonic clock.
    name: of the watched part, for the log.
    """

    def watch() -> None:
        while not ended.wait(min(limit_s / 10, 1.0)):
            if time.monotonic() - moved() > limit_s:
                log.critical("%s hangs, so this process ends", name)
                os._exit(1)

    threading.Thread(target=watch, name="watch", daemon=True).start()

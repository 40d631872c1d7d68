"""Jobs that are sent all the time, while something happens to their workers."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Load:
    """Sends jobs until it is stopped. send: sends those after so many, and returns their ids."""

    def __init__(self, send: Callable[[int], list[str]], pause_s: float) -> None:
        self.sent: list[str] = []
        self._send = send
        self._pause_s = pause_s
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(self._pause_s):
            self.sent += self._send(len(self.sent))

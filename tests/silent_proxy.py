"""A proxy of PostgreSQL that may fall silent: it acknowledges all data, and forwards nothing."""

from __future__ import annotations

import select
import socket
import threading
from contextlib import suppress

import sqlalchemy as sa

from reconciler.db.engine import open_engine


class SilentProxy:
    """url: of a database behind a socket of this machine. engine: goes through this proxy."""

    def __init__(self, url: sa.URL) -> None:
        self._target = f"{url.query['host']}/.s.PGSQL.5432"
        self._silent = threading.Event()
        self._sockets: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        port = str(self._listener.getsockname()[1])
        self.engine = open_engine(
            url.update_query_dict({"host": "127.0.0.1", "port": port}).render_as_string(False)
        )
        threading.Thread(target=self._accept, daemon=True).start()

    def fall_silent(self) -> None:
        """From now on, clients wait for ever."""
        self._silent.set()

    def close(self) -> None:
        """End all connections."""
        self._silent.set()
        for end in (self._listener, *self._sockets):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()
        self.engine.dispose()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                self._sockets.append(near)
                if self._silent.is_set():
                    continue
                far = socket.socket(socket.AF_UNIX)
                far.connect(self._target)
                self._sockets.append(far)
                threading.Thread(target=self._relay, args=(near, far), daemon=True).start()

    def _relay(self, near: socket.socket, far: socket.socket) -> None:
        other = {near: far, far: near}
        with suppress(OSError, ValueError):
            while True:
                for end in select.select([near, far], [], [])[0]:
                    piece = end.recv(1 << 16)
                    if self._silent.is_set():
                        return  # From now on only the kernel acknowledges data.
                    if not piece:
                        other[end].shutdown(socket.SHUT_WR)
                        return
                    other[end].sendall(piece)

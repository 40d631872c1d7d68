"""A stand-in for a service of the site: a process that serves HTTPS and records its requests.

Requests below /standin/ are the test's: POST resets it with faults, GET answers with its record.
"""

from __future__ import annotations

import io
import ssl
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any, BinaryIO

from tests.standin.bmc import ask, listening


@dataclass(frozen=True)
class Manager:
    """The process. name: as in the settings. token: the first that it accepts. ca_file: verifies
    its certificate. token_file: holds the accepted token.
    """

    name: str
    token: str
    port: int
    ca_file: Path
    token_file: Path

    @property
    def settings(self) -> dict[str, Any]:
        return {
            f"{self.name}_url": f"https://127.0.0.1:{self.port}",
            f"{self.name}_token_file": self.token_file,
            f"{self.name}_ca_file": self.ca_file,
        }

    def begin(self, **faults: Any) -> None:
        """Reset it with these faults."""
        self.token_file.write_text(f"{faults.get('token', self.token)}\n")
        self._ask("POST", faults)

    def record(self) -> dict[str, Any]:
        return self._ask("GET", {})

    def _ask(self, method: str, body: dict[str, Any]) -> dict[str, Any]:
        answer: dict[str, Any] = ask(self.port, self.ca_file, method, "/standin/", body)
        return answer


class Dripping(io.BufferedIOBase):
    """A stream that writes a byte after each pause; without a pause, all at once."""

    def __init__(self, whole: BinaryIO | io.BufferedIOBase, pause_s: float) -> None:
        self._whole, self._pause_s = whole, pause_s

    def write(self, content: Any) -> int:
        step = 1 if self._pause_s else len(content)
        for begin in range(0, len(content), step or 1):
            self._whole.write(content[begin : begin + step])
            time.sleep(self._pause_s)
        return len(content)


@contextmanager
def standing(folder: Path, name: str, token: str) -> Iterator[Manager]:
    """The stand-in `tests.standin.<name>`, which listens until the end of the block."""
    with listening(folder, name) as (port, certificate):
        yield Manager(name, token, port, certificate, folder / "token")


def serve(server: ThreadingHTTPServer) -> None:
    """Serve with the certificate and key of the command line; the first line says the port."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(sys.argv[1], sys.argv[2])
    server.socket = context.wrap_socket(server.socket, server_side=True)
    print(server.server_address[1], flush=True)
    server.serve_forever()

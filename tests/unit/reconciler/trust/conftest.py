"""A machine that runs the enrolment script, and the reconciler's side of it.

Real curl, ssh-keygen and python3, a real HTTP server. Only programs that would change this machine
are stand-ins: sshd, systemctl and logger.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from reconciler.trust import ca

TOKEN = "one-time-canary-0123456789"
Reply = Callable[[dict[str, Any]], tuple[int, Any]]

STAND_INS = {
    "sshd": """[ "$1" = -T ] || [ ! -e "$HOST/broken" ] || { echo 'line 3: bad' >&2; exit 255; }
[ "$1" = -t ] || [ -e "$HOST/no-include" ] ||
  tr A-Z a-z < "$HOST/etc/ssh/sshd_config.d/60-gpuaas.conf" """,
    "systemctl": 'echo "$@" >> "$HOST/systemctl"',
    "logger": 'shift 3; echo "$@" >> "$HOST/syslog"',
    "curl": 'echo "$@" >> "$HOST/arguments"; env >> "$HOST/arguments"; exec "$CURL" "$@"',
}


class Host:
    """A machine's /etc, and the script run on it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        for folder in ("etc/ssh/sshd_config.d", "bin", "run"):
            (root / folder).mkdir(parents=True)
        (root / "etc/machine-id").write_text("0123456789abcdef0123456789abcdef\n")
        for name, body in STAND_INS.items():
            program = root / "bin" / name
            program.write_text(f"#!/bin/sh\n{body}\n")
            program.chmod(0o755)

    def run(self, script: str) -> subprocess.CompletedProcess[str]:
        path = self.root / "user-data"
        path.write_text(script)
        environment = {
            "PATH": f"{self.root}/bin:{os.environ['PATH']}",
            "HOST": str(self.root),
            "CURL": str(shutil.which("curl")),
            "GPUAAS_ENROL_ETC": f"{self.root}/etc",
            "GPUAAS_ENROL_RUN": f"{self.root}/run",
            "GPUAAS_ENROL_LOG": f"{self.root}/log",
            "GPUAAS_ENROL_PAUSE": "0",
        }
        done = subprocess.run(
            ["sh", str(path)],
            env=environment,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        path.unlink()
        return done

    def text(self, name: str) -> str:
        return (self.root / name).read_text()


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path / "host")


@pytest.fixture
def trust(tmp_path: Path) -> ca.Trust:
    return ca.open_trust(tmp_path / "state")


class Api:
    """The reconciler's side: requests and replies."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, dict[str, Any]]] = []
        self.reply: Reply = lambda _body: (500, {})
        self.server: HTTPServer
        self.url = ""


@pytest.fixture
def api() -> Iterator[Api]:
    state = Api()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            state.requests.append((self.path, body))
            status, document = state.reply(body)
            text = document if isinstance(document, str) else json.dumps(document)
            content = text.encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: object) -> None:
            return

    class Server(HTTPServer):
        def handle_error(self, request: object, client_address: object) -> None:
            # A host that refuses our certificate ends the connection: that is a test's point.
            return

    server = state.server = Server(("127.0.0.1", 0), Handler)
    state.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield state
    server.shutdown()
    thread.join()
    server.server_close()

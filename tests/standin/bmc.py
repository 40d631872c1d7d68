"""Stand-in BMC of `redfish.py` as a process, with its own certificate."""

from __future__ import annotations

import hashlib
import http.client
import json
import ssl
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PROGRAM = Path(__file__).with_name("redfish.py")
# Canary: no output, log or file of a test may contain it.
PASSWORD = "canary-3f9c1b-do-not-print"


@dataclass(frozen=True)
class Bmc:
    """ca_file: verifies its certificate, which is good for 127.0.0.1 only."""

    port: int
    ca_file: str
    fingerprint: str

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def begin(self, **faults: Any) -> None:
        """Reset it with the faults of `redfish.Faults`."""
        self._ask("POST", "/standin/begin", {"password": PASSWORD, **faults})

    def record(self) -> dict[str, Any]:
        found: dict[str, Any] = self._ask("GET", "/standin/record")
        return found

    def asked(self, request: str) -> int:
        return int(self.record()["requests"].count(request))

    def _ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        context = ssl.create_default_context(cafile=self.ca_file)
        connection = http.client.HTTPSConnection(
            "127.0.0.1", self.port, context=context, timeout=60
        )
        try:
            connection.request(method, path, json.dumps(body or {}))
            return json.loads(connection.getresponse().read())
        finally:
            connection.close()


@contextmanager
def standing(folder: Path) -> Iterator[Bmc]:
    """A BMC that listens until the end of the block."""
    certificate, key = authority(folder, "bmc", "IP:127.0.0.1")
    argv = [sys.executable, str(PROGRAM), str(certificate), str(key)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            der = ssl.PEM_cert_to_DER_cert(certificate.read_text())
            port = int(process.stdout.readline())
            yield Bmc(port, str(certificate), hashlib.sha256(der).hexdigest())
        finally:
            process.kill()


def authority(folder: Path, name: str, subject: str) -> tuple[Path, Path]:
    """Return a self-signed certificate and its key."""
    certificate, key = folder / f"{name}.pem", folder / f"{name}.key"
    words = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2"
    subprocess.run(
        ["openssl", *words.split(), "-subj", f"/CN={name}", "-addext", f"subjectAltName={subject}",
         "-keyout", str(key), "-out", str(certificate)],
        check=True, capture_output=True,
    )  # fmt: skip
    return certificate, key

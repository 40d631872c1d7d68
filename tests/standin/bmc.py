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

ROOT = Path(__file__).resolve().parents[2]
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
        record: dict[str, Any] = self._ask("GET", "/standin/record")
        return record

    def count(self, request: str) -> int:
        return int(self.record()["requests"].count(request))

    def _ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        return ask(self.port, self.ca_file, method, path, body or {})


@contextmanager
def standing(folder: Path) -> Iterator[Bmc]:
    """A BMC that listens until the end of the block."""
    with listening(folder, "redfish") as (port, certificate):
        der = ssl.PEM_cert_to_DER_cert(certificate.read_text())
        yield Bmc(port, str(certificate), hashlib.sha256(der).hexdigest())


@contextmanager
def listening(folder: Path, name: str) -> Iterator[tuple[int, Path]]:
    """Port and certificate of the stand-in `tests.standin.<name>`, which ends with the block."""
    certificate, key = authority(folder, name, "IP:127.0.0.1")
    argv = [sys.executable, "-m", f"tests.standin.{name}", str(certificate), str(key)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        try:
            yield int(process.stdout.readline()), certificate
        finally:
            process.kill()


def ask(
    port: int, ca_file: Path | str, method: str, path: str, body: dict[str, Any], **headers: str
) -> Any:
    """Make a request to a stand-in; an empty answer is an empty document."""
    context = ssl.create_default_context(cafile=str(ca_file))
    connection = http.client.HTTPSConnection("127.0.0.1", port, context=context, timeout=60)
    try:
        connection.request(method, path, json.dumps(body), headers)
        return json.loads(connection.getresponse().read() or "{}")
    finally:
        connection.close()


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

"""Stand-in for UFM that answers like its REST API for partitions, as a separate process.

    python -m tests.standin.ufm CERTIFICATE KEY       prints its port on the first line

Its answers follow the NVIDIA UFM Enterprise REST API Guide 6.22, "PKey GUIDs Rest API": tokens as
Basic credentials below /ufmRestV3, partitions as a document by key, GUIDs without colons, changes
that show only later, and partitions that disappear with their last GUID. It was not compared with a
real UFM.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tests.standin.service import Dripping, serve

API = "/ufmRestV3/resources/pkeys"
# Canary: no record or log of a test may contain it.
TOKEN = "canary-7c41ae-do-not-print"


@dataclass
class Faults:
    """accepts: the accepted token. default: membership in the default partition; "" as before 6.19.
    partitions: GUIDs by key. late: reads until a change shows. status: `METHOD` to a status that
    is answered instead. deaf: methods without effect. body: answer to GET. drip_s: pause before
    each byte of an answer.
    """

    accepts: str = TOKEN
    default: str = "limited"
    partitions: dict[str, dict[str, str]] = field(default_factory=dict)
    late: int = 0
    status: dict[str, int] = field(default_factory=dict)
    deaf: list[str] = field(default_factory=list)
    body: str = ""
    drip_s: float = 0.0


class Ufm(ThreadingHTTPServer):
    """partitions: memberships by GUID, by key. shown: those that a GET shows at first."""

    daemon_threads = True

    def begin(self, faults: Faults) -> None:
        self.faults, self.record = faults, list[str]()
        self.partitions = {"0x7fff": dict[str, str](), **faults.partitions}
        self.shown, self.reads = self.document(), 0

    def document(self) -> dict[str, Any]:
        pages = {
            key: {
                "partition": "management" if key == "0x7fff" else f"api_pkey_{key}",
                "ip_over_ib": True,
                "guids": [
                    {"guid": guid, "membership": kind, "index0": False}
                    for guid, kind in members.items()
                ],
            }
            for key, members in self.partitions.items()
        }
        if self.faults.default:
            pages["0x7fff"]["membership"] = self.faults.default
        return pages


class Handler(BaseHTTPRequestHandler):
    """A request."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # headers and body are two writes; the second would wait 40 ms
    server: Ufm

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing, because the record is the log."""

    def do_GET(self) -> None:
        ufm, faults = self.server, self.server.faults
        raw = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        body = json.loads(raw) if raw else {}
        if self.path.startswith("/standin/"):
            if self.command == "POST":
                ufm.begin(Faults(**body))
            self._send(200, {"requests": ufm.record, "partitions": ufm.partitions})
            return
        ufm.record.append(f"{self.command} {self.path}")
        if self.headers.get("Authorization") != f"Basic {faults.accepts}":
            self._send(401, "Unauthorized")
        elif self.command in faults.status:
            self._send(faults.status[self.command], "the subnet manager is busy")
        elif not self.path.startswith(API):
            self._send(404, "not found")
        elif self.command == "GET":
            self._send(200, self._read())
        elif self.command in faults.deaf:
            self._send(200, {})
        else:
            self._change(body)
            ufm.reads = 0
            self._send(200, {})

    do_POST = do_DELETE = do_GET

    def _read(self) -> Any:
        ufm = self.server
        ufm.reads += 1
        if ufm.reads > ufm.faults.late:
            ufm.shown = ufm.document()
        return ufm.shown

    def _change(self, body: dict[str, Any]) -> None:
        partitions = self.server.partitions
        if self.command == "POST":
            members = partitions.setdefault(body["pkey"], {})
            members.update(dict.fromkeys(body["guids"], body["membership"]))
            return
        key, _guids, names = self.path.removeprefix(f"{API}/").split("/")
        for guid in names.split(","):
            partitions.get(key, {}).pop(guid, None)
        if not partitions.get(key):
            partitions.pop(key, None)

    def _send(self, status: int, answer: Any) -> None:
        content = json.dumps(answer).encode()
        if self.command == "GET" and self.server.faults.body and self.path.startswith(API):
            content = self.server.faults.body.encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        pause = 0 if self.path.startswith("/standin/") else self.server.faults.drip_s
        Dripping(self.wfile, pause).write(content)


def main() -> None:
    server = Ufm(("127.0.0.1", 0), Handler)
    server.begin(Faults())
    serve(server)


if __name__ == "__main__":
    main()

"""Stand-in for MAAS that answers like its REST API 2.0, as a separate process.

    python -m tests.standin.maas CERTIFICATE KEY       prints its port on the first line

Operations, their parameters and the fields of a machine are held against a table from MAAS's own
source (tests/data/maas): others are recorded as violations and refused. So are a key that is not
sent as OAuth PLAINTEXT, and a nonce that comes twice. States and refusals follow the source: a
locked machine cannot be changed, a release of a machine in Ready succeeds, a machine takes some
reads to be deployed or released. It was not compared with a real MAAS.
"""

from __future__ import annotations

import base64
import copy
import json
import re
import ssl
import time
from contextlib import suppress
from dataclasses import dataclass, field
from email import message_from_bytes, policy
from email.message import EmailMessage
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from tests.standin.bmc import ROOT
from tests.standin.service import serve

TABLE = json.loads((ROOT / "tests/data/maas/operations-9e51f33.json").read_text())
# Canary: no record or log of a test may contain it.
TOKEN = "consumer91:token:canary-secret-do-not-print"
USER = "gpuaas"
_HEADER = re.compile(
    r'OAuth oauth_version="1\.0", oauth_signature_method="PLAINTEXT",'
    r' oauth_consumer_key="(?P<consumer>[^"]+)", oauth_token="(?P<token>[^"]+)",'
    r' oauth_signature="(?P<signature>[^"]+)", oauth_nonce="(?P<nonce>[0-9a-f]{16,})",'
    r' oauth_timestamp="(?P<timestamp>[0-9]+)"'
)
_NAMES = {row["number"]: row["label"] for row in TABLE["statuses"].values()}
# Statuses that end by themselves, with their end.
_MOVING = {9: 6, 12: 4, 14: 4}
_DEFAULTS: dict[str, Any] = {
    **{"owner": "", "locked": False, "tag_names": [], "status_message": "", "status": 4},
    **{"workload_annotations": {}, "osystem": "ubuntu", "distro_series": "noble"},
}


@dataclass
class Faults:
    """machines: as at first, with only the values that matter. slow: reads until a state ends.
    lost: operations that MAAS carries out, but answers 504. status: operations, or `operation
    system_id`, that are answered by a status without effect. other: operations that are answered
    with another machine. failing: the final status of a moving machine instead. edits: changes by
    another user, by operation, just before it. vanish: machine that MAAS loses at its next moving
    state. body: answer to each GET. list_s: seconds until a list of machines is answered.
    takes_s: seconds that a moving state lasts, instead of reads. fails: machines whose next
    deployment fails. erases: MAAS is set to erase disks at each release. missing: tags that do
    not exist. events: those from before, oldest first. wrong: fields in another form, by machine.
    trickle_s: seconds in which an answer comes byte by byte, by operation and machine.
    """

    token: str = TOKEN
    version: str = "3.5.4"
    superuser: bool = True
    skew_s: int = 0
    machines: list[dict[str, Any]] = field(default_factory=list)
    subnets: list[str] = field(default_factory=lambda: ["10.0.2.0/24", "192.0.2.0/24"])
    scripts: dict[str, str] = field(default_factory=dict)
    slow: int = 1
    lost: list[str] = field(default_factory=list)
    status: dict[str, int] = field(default_factory=dict)
    other: dict[str, str] = field(default_factory=dict)
    failing: dict[str, int] = field(default_factory=dict)
    edits: dict[str, dict[str, Any]] = field(default_factory=dict)
    vanish: str = ""
    body: str = ""
    takes_s: float = 0.0
    fails: list[str] = field(default_factory=list)
    events: list[dict[str, str]] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    erases: bool = False
    list_s: float = 0.0
    wrong: dict[str, dict[str, Any]] = field(default_factory=dict)
    trickle_s: dict[str, float] = field(default_factory=dict)


class Maas(ThreadingHTTPServer):
    """machines: by system id. nonces: those of all requests."""

    daemon_threads = True

    def begin(self, faults: Faults) -> None:
        self.faults = faults
        self.requests, self.violations = list[dict[str, Any]](), list[str]()
        self.nonces = set[str]()
        self.scripts, self.events = dict(faults.scripts), list(faults.events)
        self.machines = {row["system_id"]: self.machine(row) for row in faults.machines}
        self.left = dict.fromkeys(self.machines, faults.slow)
        self.since = dict.fromkeys(self.machines, time.monotonic())
        self.addresses = {key: row["ip_addresses"] for key, row in self.machines.items()}

    @staticmethod
    def machine(row: dict[str, Any]) -> dict[str, Any]:
        """A machine with every field that MAAS shows. macs, serial: of its hardware."""
        row = {**dict.fromkeys(TABLE["machine"]), **copy.deepcopy(_DEFAULTS), **row}
        row["hardware_info"] = {"system_serial": row.pop("serial", "Unknown")}
        row["interface_set"] = [{"mac_address": mac} for mac in row.pop("macs", ())]
        row.setdefault("hostname", row["system_id"])
        row["ip_addresses"] = row["ip_addresses"] or []
        row["status_name"] = _NAMES.get(row["status"], "Unknown")
        return row

    def move(self, machine: dict[str, Any], status: int) -> None:
        machine["status"], machine["status_name"] = status, _NAMES[status]
        key = machine["system_id"]
        self.left[key], self.since[key] = self.faults.slow, time.monotonic()
        if status == 6 and self.faults.takes_s:
            machine["ip_addresses"] = self.addresses[key]
        if status == 4:
            machine |= {"owner": "", "locked": False, "workload_annotations": {}}
            machine["ip_addresses"] = []

    def read(self, machine: dict[str, Any]) -> dict[str, Any]:
        key, end = machine["system_id"], _MOVING.get(machine["status"])
        if end is not None:
            self.left[key] -= 1
            lasted_s = time.monotonic() - self.since[key]
            if lasted_s >= self.faults.takes_s if self.faults.takes_s else self.left[key] < 0:
                if machine["status"] == 9 and key in self.faults.fails:
                    self.faults.fails.remove(key)
                    machine["status_message"] = "Installation failed: no disk was found"
                    end = 11
                self.move(machine, self.faults.failing.get(str(machine["status"]), end))
        return {**machine, **self.faults.wrong.get(key, {})}


class Handler(BaseHTTPRequestHandler):
    """A request."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # headers and body are two writes; the second would wait 40 ms
    server: Maas

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing, because the record is the log."""

    def do_GET(self) -> None:
        maas = self.server
        raw = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.path.startswith("/standin/"):
            if self.command == "POST":
                maas.begin(Faults(**json.loads(raw)))
            names = ("requests", "violations", "machines", "scripts", "events")
            self._send(200, {name: getattr(maas, name) for name in names})
            return
        url = urlsplit(self.path)
        query = {name: values[-1] for name, values in parse_qs(url.query).items()}
        verb = query.pop("op", "")
        path = url.path.removeprefix("/MAAS/api/2.0/")
        fields = self._fields(raw)
        kind, _, key = path.partition("/")
        where = f"{kind}/{{id}}{'/' if path.endswith('/') else ''}" if key.strip("/") else path
        keys = TABLE["operations"].get(operation := f"{self.command} {where} {verb}".rstrip(), ())
        unknown = sorted({*query, *fields} - set(keys)) if keys is not None else []
        if operation not in TABLE["operations"] or unknown or path == url.path:
            maas.violations.append(f"{operation} {url.path}: {', '.join(unknown)}")
            self._send(400, maas.violations[-1])
            return
        label = f"{verb or self.command} {key.strip('/')}".rstrip()
        maas.requests.append({"operation": operation, "key": key.strip("/"), "fields": fields})
        if refusal := self._unauthorized():
            self._send(401, refusal)
        elif self.command == "GET" and maas.faults.body:
            self._send(200, maas.faults.body.encode())
        elif status := maas.faults.status.get(label, maas.faults.status.get(verb)):
            self._send(status, f"{label} is refused")
        else:
            if verb in maas.faults.edits:
                maas.machines[key.strip("/")] |= maas.faults.edits.pop(verb)
            status, answer = self._answer(kind, key.strip("/"), verb, {**query, **fields})
            lost = verb in maas.faults.lost
            if lost:
                maas.faults.lost.remove(verb)
            if verb in maas.faults.other and status == 200:
                answer = maas.machines[maas.faults.other[verb]]
            self._send(504 if lost else status, answer, maas.faults.trickle_s.get(label, 0.0))

    do_POST = do_PUT = do_GET

    def _unauthorized(self) -> str:
        faults = self.server.faults
        header = _HEADER.fullmatch(self.headers.get("Authorization", ""))
        if header is None:
            self.server.violations.append("no OAuth header")
            return "Authorization Error: no OAuth header"
        if header["nonce"] in self.server.nonces:
            self.server.violations.append("a nonce twice")
        self.server.nonces.add(header["nonce"])
        signature = unquote(header["signature"])
        if f"{header['consumer']}:{header['token']}:{signature[1:]}" != faults.token:
            return "Authorization Error: Invalid API key."
        if abs(int(header["timestamp"]) - time.time() - faults.skew_s) > 300:
            return "Authorization Error: Expired timestamp"
        return ""

    def _fields(self, raw: bytes) -> dict[str, str]:
        """Fields and files of a multipart form."""
        kind = self.headers.get("Content-Type", "")
        if not raw or not kind.startswith("multipart/form-data"):
            return {}
        head = f"Content-Type: {kind}\r\n\r\n".encode()
        form = message_from_bytes(head + raw, EmailMessage, policy=policy.HTTP)
        fields = {}
        for part in form.iter_parts():
            name = part.get_param("name", header="content-disposition")
            fields[str(name)] = bytes(part.get_payload(decode=True) or b"").decode()  # type: ignore[arg-type]
        if "user_data" in fields:
            fields["user_data"] = base64.b64decode(fields["user_data"]).decode()
        return fields

    def _answer(self, kind: str, key: str, verb: str, fields: dict[str, str]) -> tuple[int, Any]:
        maas = self.server
        pages: dict[str, Any] = {
            "users": {"username": USER, "is_superuser": maas.faults.superuser, "email": "x@y.z"},
            "version": {"version": maas.faults.version, "subversion": "", "capabilities": []},
            "subnets": [{"cidr": cidr} for cidr in maas.faults.subnets],
        }
        if kind in pages:
            return 200, pages[kind]
        if kind == "events":
            rows = [row for row in reversed(maas.events) if row["node"] == fields["id"]]
            return 200, {"count": len(rows), "events": rows, "next_uri": "", "prev_uri": None}
        if kind in ("scripts", "tags"):
            return (self._script if kind == "scripts" else self._tag)(key, fields)
        if not key:
            time.sleep(maas.faults.list_s)
            rows = maas.machines.values()
            named = [row for row in rows if fields.get("tags", "") in ("", *row["tag_names"])]
            return 200, [maas.read(row) for row in named]
        if maas.faults.vanish == key and maas.machines[key]["status"] in _MOVING:
            del maas.machines[key]
        machine = maas.machines.get(key)
        if machine is None:
            return 404, "No Machine matches the given query."
        return (200, maas.read(machine)) if not verb else self._operate(machine, verb, fields)

    def _operate(
        self, machine: dict[str, Any], verb: str, fields: dict[str, str]
    ) -> tuple[int, Any]:
        maas, status = self.server, machine["status"]
        held = machine["locked"] or machine["owner"] not in ("", USER)
        refused = ""
        if verb in ("lock", "unlock"):
            if machine["locked"] == (verb == "lock"):
                refused = f"Machine is {'already' if verb == 'lock' else 'not'} locked"
            elif verb == "lock" and status not in (6, 9):
                refused = "Can't lock, machine isn't deployed"
            else:
                machine["locked"] = verb == "lock"
                text = f"({USER}) - {fields['comment']}"
                kind = TABLE["events"][("lock", "unlock").index(verb)]
                row = {"node": machine["system_id"], "type": kind}
                maas.events.append({**row, "description": text})
        elif held:
            return 403, "You do not have permission to edit this machine."
        elif verb == "set_workload_annotations":
            machine["workload_annotations"] |= fields
        elif verb == "release" and status not in (4, 12, *TABLE["releasable"]):
            refused = f"Machine cannot be released in its current state ({status})."
        elif verb == "release" and fields.get("scripts", "") not in ("", *maas.scripts):
            return 400, {"scripts": [f"{fields['scripts']} is not one of the available choices."]}
        elif verb == "release" and status not in (4, 12):
            # With a script of ours beside MAAS's own, MAAS shows "Releasing".
            erases = maas.faults.erases or fields.get("erase") == "true"
            maas.move(machine, 14 if erases and not fields.get("scripts") else 12)
        elif verb == "deploy" and status not in (4, 10):
            refused = f"Can't deploy a machine that is in the '{_NAMES[status]}' state"
        elif verb == "deploy":
            maas.move(machine, 9)
            machine["owner"] = USER
        return (409, refused) if refused else (200, machine)

    def _tag(self, name: str, fields: dict[str, str]) -> tuple[int, Any]:
        if not self.server.faults.superuser:
            return 403, "You do not have permission."
        if name in self.server.faults.missing:
            return 404, "No Tag matches the given query."
        for verb, change in (("add", list.append), ("remove", list.remove)):
            machine = self.server.machines.get(fields.get(verb, ""))
            if machine and (name in machine["tag_names"]) == (verb == "remove"):
                change(machine["tag_names"], name)
        return 200, {"added": int("add" in fields), "removed": int("remove" in fields)}

    def _script(self, key: str, fields: dict[str, str]) -> tuple[int, Any]:
        scripts = self.server.scripts
        if self.command == "GET":
            text = scripts.get(key)
            return (404, "No Script matches") if text is None else (200, text.encode())
        if self.command == "POST" and fields["name"] in scripts:
            return 400, {"name": ["Script with this Name already exists."]}
        scripts[key or fields["name"]] = fields["script"]
        return 200, {"name": key or fields["name"]}

    def _send(self, status: int, answer: Any, trickle_s: float = 0.0) -> None:
        content = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        ends = time.monotonic() + trickle_s
        with suppress(ConnectionError, ssl.SSLError):
            while len(content) > 1 and time.monotonic() < ends:
                self.wfile.write(content[:1])
                content = content[1:]
                time.sleep(0.05)
            self.wfile.write(content)


def main() -> None:
    server = Maas(("127.0.0.1", 0), Handler)
    server.begin(Faults())
    serve(server)


if __name__ == "__main__":
    main()

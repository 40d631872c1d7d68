"""Stand-in for a BMC that answers like an iDRAC 9, as a separate process, over TLS.

    python tests/standin/redfish.py CERTIFICATE KEY     prints its port on the first line

`POST /standin/begin` resets it with faults (see `Faults`). `GET /standin/record` returns its
record: requests, sessions open now, sessions ever opened, wrong logins, resets, BIOS values. It
models sessions, Bios with its pending settings and registry, the manager's job queue, task
monitors, resets that run the waiting job, and the iDRAC's error messages.
"""

from __future__ import annotations

import itertools
import json
import ssl
import sys
import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

SYSTEM = "/redfish/v1/Systems/System.Embedded.1"
MANAGER = "/redfish/v1/Managers/iDRAC.Embedded.1"
JOBS = f"{MANAGER}/Oem/Dell/Jobs"
SESSIONS = "/redfish/v1/SessionService/Sessions"
REGISTRY = "/redfish/v1/Registries/BiosAttributeRegistry"
REGISTRY_FILE = f"{REGISTRY}/BiosAttributeRegistry.v1_0_3.json"
SECRET_OF_ANOTHER = "planted-chap-secret"

VALUES: dict[str, Any] = {
    "ProcVirtualization": "Disabled", "LogicalProc": "Disabled", "SriovGlobalEnable": "Disabled",
    "MemTest": "Disabled", "AcPwrRcvryUserDelay": 60, "Proc1NumCores": 56,
    "SystemServiceTag": "U8OIL5X", "IscsiDev1Con1ChapSecret": SECRET_OF_ANOTHER,
    "SetupPassword": None,
}  # fmt: skip


def _choice(name: str, *, read_only: bool = False) -> dict[str, Any]:
    values = [{"ValueName": value, "ValueDisplayName": value} for value in ("Enabled", "Disabled")]
    kind = {"AttributeName": name, "Type": "Enumeration", "Value": values}
    return {**kind, "ReadOnly": read_only, "Immutable": False}


ENTRIES: list[dict[str, Any]] = [
    _choice("ProcVirtualization"),
    _choice("LogicalProc"),
    _choice("SriovGlobalEnable"),
    _choice("MemTest"),
    {"AttributeName": "AcPwrRcvryUserDelay", "Type": "Integer", "LowerBound": 60,
     "UpperBound": 600, "ReadOnly": False, "Immutable": False},
    {"AttributeName": "Proc1NumCores", "Type": "Integer", "ReadOnly": True, "Immutable": False},
    {"AttributeName": "SystemServiceTag", "Type": "String", "ReadOnly": True, "Immutable": True},
    {"AttributeName": "IscsiDev1Con1ChapSecret", "Type": "Password", "ReadOnly": False},
]  # fmt: skip


@dataclass
class Faults:
    """password: of the user root. values: over VALUES. pending: settings that were staged before.

    expire_after: requests until a first session expires; -1: every session is forgotten at once.
    busy: how often `METHOD path` is answered with 503 and Retry-After `retry_after`. bodies: raw
    answers by path. echo: errors repeat the request. drip: seconds between the bytes of this path's
    answers. no_job: a change makes no job, as for a change already pending. forget: a change is not
    kept. slow_job: reads of the queue until a new job is Scheduled. job_fails: final state after
    the reset. jobs: entries in the queue. expand: whether the queue gives more than links. page:
    how many entries the queue gives at a time (0: all). next_link: replaces the next link. lacks:
    omitted parts, of `SupportedApplyTimes`, `Manager.Jobs`, `Root.Registries`. documents: further
    documents by path, or others in their place.
    """

    password: str = "calvin"
    values: dict[str, Any] = field(default_factory=dict)
    pending: dict[str, Any] = field(default_factory=dict)
    expire_after: int = 0
    busy: dict[str, int] = field(default_factory=dict)
    retry_after: str = "0"
    bodies: dict[str, str] = field(default_factory=dict)
    echo: bool = False
    documents: dict[str, Any] = field(default_factory=dict)
    drip: str = ""
    no_job: bool = False
    forget: bool = False
    slow_job: int = 0
    job_fails: bool = False
    jobs: list[dict[str, Any]] = field(default_factory=list)
    expand: bool = True
    page: int = 0
    next_link: str = ""
    lacks: list[str] = field(default_factory=list)
    powered: bool = True


class Bmc:
    """State behind the answers, under a single lock because requests come in threads."""

    def __init__(self, faults: Faults) -> None:
        self.faults = faults
        self.values = {**VALUES, **faults.values}
        self.pending = dict(faults.pending)
        self.jobs = list(faults.jobs)
        self.looks = faults.slow_job
        self.sessions: dict[str, str] = {}
        self.opened = 0
        self.wrong_logins = 0
        self.served = 0
        self.requests: list[str] = []
        self.patches: list[dict[str, Any]] = []
        self.resets: list[str] = []
        self.numbers = itertools.count(763788807801)

    def record(self) -> dict[str, Any]:
        return {
            "open_sessions": len(self.sessions), "opened": self.opened,
            "wrong_logins": self.wrong_logins, "requests": self.requests,
            "patches": self.patches, "resets": self.resets, "jobs": self.jobs,
            "values": self.values, "pending": self.pending,
        }  # fmt: skip

    def add_job(self) -> str:
        state = "New" if self.looks else "Scheduled"
        job = job_entry(f"JID_{next(self.numbers)}", state)
        self.jobs.append(job)
        return str(job["Id"])

    def settle_jobs(self) -> None:
        """Move new jobs on: a new job needs a moment before a reset would run it."""
        if self.looks:
            self.looks -= 1
            return
        for job in self.jobs:
            if job["JobState"] == "New":
                job.update(JobState="Scheduled", Message="Task successfully scheduled.")

    def reset(self, kind: str) -> None:
        self.resets.append(kind)
        for job in self.jobs:
            if job["JobState"] == "Scheduled":
                done = "Failed" if self.faults.job_fails else "Completed"
                job.update(JobState=done, PercentComplete=100, MessageId="PR19")
                if done == "Completed":
                    self.values.update(self.pending)
                self.pending = {}


def job_entry(id_: str, state: str, **more: Any) -> dict[str, Any]:
    return {
        "@odata.id": f"{JOBS}/{id_}", "Id": id_, "JobState": state,
        "JobType": "BIOSConfiguration", "Name": "Configure: BIOS.Setup.1-1",
        "Message": "New job.", "MessageId": "JCP000", "PercentComplete": 0,
        "TargetSettingsURI": None, **more,
    }  # fmt: skip


class Handler(BaseHTTPRequestHandler):
    """A request. Names and shapes are those of an iDRAC 9 with firmware 7."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # headers and body are two writes; the second would wait 40 ms
    server: Server

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing, because the record is the log."""

    def do_GET(self) -> None:
        self._serve()

    do_POST = do_PATCH = do_DELETE = do_GET

    def _serve(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        raw = self.rfile.read(length)
        with self.server.lock:
            status, body, headers = self._route(json.loads(raw) if raw else {})
        if status >= 400 and self.server.bmc.faults.echo:
            body = {**body, "echo": raw.decode(), "@Message": raw.decode()}
        if self.server.bmc.faults.drip == self._path():
            self._drip()
            return
        text = self.server.bmc.faults.bodies.get(self._path())
        content = text.encode() if text is not None else json.dumps(body).encode()
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def _drip(self) -> None:
        for byte in b"HTTP/1.1 200 OK\r\n" + b"X-Filler: y\r\n" * 50:
            self.wfile.write(bytes([byte]))
            time.sleep(0.05)

    def _path(self) -> str:
        return urlsplit(self.path).path.rstrip("/") or "/"

    def _route(self, body: dict[str, Any]) -> tuple[int, Any, dict[str, str]]:
        path, bmc = self._path(), self.server.bmc
        if path == "/standin/record":
            return 200, bmc.record(), {}
        if path == "/standin/begin":
            self.server.bmc = Bmc(Faults(**body))
            return 200, {}, {}
        bmc.requests.append(f"{self.command} {path}")
        request = f"{self.command} {path}"
        if bmc.faults.busy.get(request, 0) > 0:
            bmc.faults.busy[request] -= 1
            return 503, _error("IDRAC.2.8.RAC0218"), {"Retry-After": bmc.faults.retry_after}
        return self._login(body) if request == f"POST {SESSIONS}" else self._in_session(path, body)

    def _in_session(self, path: str, body: dict[str, Any]) -> tuple[int, Any, dict[str, str]]:
        bmc = self.server.bmc
        if self.headers.get("X-Auth-Token", "") not in bmc.sessions.values():
            return 401, _error("IDRAC.2.8.SYS403"), {}
        if self.command == "DELETE":
            gone = bmc.sessions.pop(path.rpartition("/")[2], None)
            return (404, _error("IDRAC.2.8.SYS403"), {}) if gone is None else (200, {}, {})
        bmc.served += 1
        if bmc.faults.expire_after in (bmc.served, -1):
            # An iDRAC forgets the token first, and counts the session for a while longer.
            kept = bmc.sessions if bmc.faults.expire_after > 0 else {}
            bmc.sessions = dict.fromkeys(kept, "expired")
            return 401, _error("IDRAC.2.8.SYS403"), {}
        act = {"GET": self._get, "PATCH": self._patch, "POST": self._post}[self.command]
        return act(path, body)

    def _login(self, body: dict[str, Any]) -> tuple[int, Any, dict[str, str]]:
        bmc = self.server.bmc
        if (body.get("UserName"), body.get("Password")) != ("root", bmc.faults.password):
            bmc.wrong_logins += 1
            return 401, _error("IDRAC.2.8.RAC0212"), {}
        bmc.opened += 1
        name = str(bmc.opened)
        bmc.sessions[name] = f"token-{name}-{time.monotonic_ns()}"
        at = f"{SESSIONS}/{name}"
        return 201, {"@odata.id": at}, {"X-Auth-Token": bmc.sessions[name], "Location": at}

    def _get(self, path: str, _body: dict[str, Any]) -> tuple[int, Any, dict[str, str]]:
        bmc = self.server.bmc
        if path == JOBS or path.startswith(f"{JOBS}/"):
            bmc.settle_jobs()
        for job in bmc.jobs:
            if path == f"{JOBS}/{job['Id']}":
                return 200, job, {}
        document = documents(bmc, expand=bmc.faults.expand and "expand" in self.path)
        document = (document | bmc.faults.documents).get(path)
        if document and path == JOBS and bmc.faults.page:
            document = _page(document["Members"], bmc.faults, self.path)
        return (200, document, {}) if document else (404, _error("Base.1.12.ResourceMissing"), {})

    def _patch(self, path: str, body: dict[str, Any]) -> tuple[int, Any, dict[str, str]]:
        bmc = self.server.bmc
        if path != f"{SYSTEM}/Bios/Settings":
            return 405, _error("Base.1.12.OperationNotAllowed"), {}
        if any(job["JobState"] in ("New", "Scheduled", "Running") for job in bmc.jobs):
            return 400, _error("IDRAC.2.14.SYS011"), {}
        bmc.patches.append(body)
        if not bmc.faults.forget:
            bmc.pending.update(body["Attributes"])
        if "@Redfish.SettingsApplyTime" not in body or bmc.faults.no_job:
            return 200, _error("Base.1.12.Success"), {}
        at = f"/redfish/v1/TaskService/TaskMonitors/{bmc.add_job()}"
        return 202, {}, {"Location": at}

    def _post(self, path: str, body: dict[str, Any]) -> tuple[int, Any, dict[str, str]]:
        bmc = self.server.bmc
        if path == JOBS and body == {"TargetSettingsURI": f"{SYSTEM}/Bios/Settings"}:
            return 200, {}, {"Location": f"{JOBS}/{bmc.add_job()}"}
        if path == f"{SYSTEM}/Actions/ComputerSystem.Reset":
            bmc.reset(body["ResetType"])
            return 204, {}, {}
        return 405, _error("Base.1.12.OperationNotAllowed"), {}


def documents(bmc: Bmc, *, expand: bool) -> dict[str, Any]:
    lacks = bmc.faults.lacks
    apply_times = ["OnReset", "AtMaintenanceWindowStart", "InMaintenanceWindowOnReset"]
    settings = {"SettingsObject": _link(f"{SYSTEM}/Bios/Settings")}
    root = {"Systems": _link("/redfish/v1/Systems"), "SessionService": _link(SESSIONS)}
    return {
        "/redfish/v1": root
        | ({} if "Root.Registries" in lacks else {"Registries": _link("/redfish/v1/Registries")}),
        "/redfish/v1/Systems": {"Members": [_link(SYSTEM)]},
        SYSTEM: {
            "Bios": _link(f"{SYSTEM}/Bios"),
            "Links": {"ManagedBy": [_link(MANAGER)]},
            "PowerState": "On" if bmc.faults.powered else "Off",
            "Actions": {
                "#ComputerSystem.Reset": {
                    "target": f"{SYSTEM}/Actions/ComputerSystem.Reset",
                    "ResetType@Redfish.AllowableValues": ["On", "ForceRestart", "PowerCycle"],
                }
            },
        },
        f"{SYSTEM}/Bios": {
            "AttributeRegistry": "BiosAttributeRegistry.v1_0_3",
            "Attributes": bmc.values,
            "@Redfish.Settings": settings
            | ({} if "SupportedApplyTimes" in lacks else {"SupportedApplyTimes": apply_times}),
        },
        f"{SYSTEM}/Bios/Settings": {"Attributes": bmc.pending},
        "/redfish/v1/Registries": {
            "Members": [_link("/redfish/v1/Registries/Base"), _link(REGISTRY)]
        },
        REGISTRY: {"Location": [{"Language": "en", "Uri": REGISTRY_FILE}]},
        REGISTRY_FILE: {"RegistryEntries": {"Attributes": ENTRIES}},
        MANAGER: {
            "Links": {"Oem": {"Dell": {} if "Manager.Jobs" in lacks else {"Jobs": _link(JOBS)}}}
        },
        JOBS: {"Members": bmc.jobs if expand else [_link(job["@odata.id"]) for job in bmc.jobs]},
    }


def _page(members: list[Any], faults: Faults, path: str) -> dict[str, Any]:
    """Page as an iDRAC does: the count covers all entries, and a link leads to the next page."""
    skip = int(path.rpartition("skip=")[2] or 0) if "skip=" in path else 0
    after = skip + faults.page
    page = {"Members": members[skip:after], "Members@odata.count": len(members)}
    if after < len(members):
        ahead = f"{JOBS}?$expand=*($levels=1)&$skip={after}"
        page["Members@odata.nextLink"] = faults.next_link or ahead
    return page


def _link(path: str) -> dict[str, str]:
    return {"@odata.id": path}


def _error(message_id: str) -> dict[str, Any]:
    return {"error": {"@Message.ExtendedInfo": [{"MessageId": message_id, "Message": "…"}]}}


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, certificate: str, key: str) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.bmc = Bmc(Faults())
        self.lock = threading.Lock()
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.load_cert_chain(certificate, key)

    def finish_request(self, request: Any, client_address: Any) -> None:
        """Do the handshake in the request's thread, so that a refusing client blocks no other."""
        with self.context.wrap_socket(request, server_side=True) as secured:
            super().finish_request(secured, client_address)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore a client that distrusts the certificate and disconnects, as some tests do on
        purpose."""


def main() -> None:
    server = Server(sys.argv[1], sys.argv[2])
    print(server.server_address[1], flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()

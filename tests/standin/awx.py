"""Stand-in for AWX that answers like its REST API, as a separate process.

    python -m tests.standin.awx [CERTIFICATE KEY]       prints its port on the first line

`POST /standin/begin` resets it (see `Faults`), `GET /standin/record` returns its record. The job
templates are those of awx/job_templates.yml. It models tokens, lists with pages and filters (the
variables of jobs cannot be searched, as in AWX), launches with their ignored fields, jobs with
their states and artifacts, events that are saved late, and cancel.
"""

from __future__ import annotations

import json
import os
import ssl
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import ansible_runner
import yaml

from reconciler.runs.launch import inert

ROOT = Path(__file__).resolve().parents[2]
API = "/api/v2"
INVENTORY = 3
ACTIVE = ("pending", "waiting", "running")


@dataclass
class Faults:
    """token: the accepted token. templates: overrides of each template's fields. without: omitted
    names.

    hosts, groups: of the inventory. page_size: the most that a list gives at a time. status:
    `METHOD path` to [status, times], answered instead of the normal status. cut: `METHOD path` to
    how often the connection is cut instead of an answer, after the act. drop: the same, before the
    act. later_s: delay until a cut launch is carried out. drip_s: pause before each answer. steps:
    number of reads of a job until it moves on. events: of each job. late: counters that are saved
    after the end. never: counters never saved. twice: each page repeats its events, and older ones.
    ends: final state of the job. artifacts, explanation: of the job. play: a playbook that is
    really run instead.
    """

    token: str = "token-1"
    templates: dict[str, Any] = field(default_factory=dict)
    without: list[str] = field(default_factory=list)
    hosts: list[str] = field(default_factory=lambda: ["node-1"])
    groups: list[str] = field(default_factory=list)
    page_size: int = 200
    status: dict[str, list[int]] = field(default_factory=dict)
    cut: dict[str, int] = field(default_factory=dict)
    drop: dict[str, int] = field(default_factory=dict)
    later_s: float = 0
    drip_s: float = 0
    steps: int = 2
    events: list[dict[str, Any]] = field(default_factory=list)
    late: list[int] = field(default_factory=list)
    never: list[int] = field(default_factory=list)
    twice: bool = False
    ends: str = "successful"
    artifacts: dict[str, Any] = field(default_factory=dict)
    explanation: str = ""
    play: str = ""


class Cut(Exception):
    """The connection ends here, without an answer."""


class Awx:
    """State behind the answers, under a single lock because requests come in threads."""

    def __init__(self, faults: Faults) -> None:
        self.faults = faults
        self.templates = _templates(faults)
        self.jobs: list[dict[str, Any]] = []
        self.events: dict[int, list[dict[str, Any]]] = {}
        self.looks: dict[int, int] = {}
        self.requests: list[str] = []
        self.bodies: list[dict[str, Any]] = []
        self.canceled: list[int] = []

    def launch(self, template: dict[str, Any], body: dict[str, Any]) -> dict[str, Any]:
        asked = {"extra_vars": "variables", "limit": "limit", "timeout": "timeout"}
        taken = {
            key: value
            for key, value in body.items()
            if key in asked and template[f"ask_{asked[key]}_on_launch"]
        }
        job = _job(len(self.jobs) + 1, template, taken, "pending")
        self.jobs.append(job)
        self.events[job["id"]] = list(self.faults.events)
        if self.faults.play:
            thread = threading.Thread(target=_play, args=(self, job, taken["extra_vars"]))
            thread.daemon = True
            thread.start()
        ignored = {key: value for key, value in body.items() if key not in taken}
        return {**job, "job": job["id"], "ignored_fields": ignored}

    def look(self, job: dict[str, Any]) -> None:
        """Move a scripted job on with each read."""
        if self.faults.play:
            return
        if job["status"] not in ACTIVE:
            job["event_processing_finished"] = True
            return
        looks = self.looks[job["id"]] = self.looks.get(job["id"], 0) + 1
        job["status"] = "running"
        job["started"] = "2026-11-21T10:00:00Z"
        if job["id"] in self.canceled:
            job["status"] = "canceled"
        elif looks > self.faults.steps:
            job.update(
                status=self.faults.ends,
                artifacts=self.faults.artifacts,
                job_explanation=self.faults.explanation,
            )

    def seen(self, job: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the events that are saved by now."""
        hidden = set(self.faults.never)
        hidden |= set() if job["event_processing_finished"] else set(self.faults.late)
        return [event for event in self.events[job["id"]] if event["counter"] not in hidden]


def _templates(faults: Faults) -> list[dict[str, Any]]:
    described = yaml.safe_load((ROOT / "awx" / "job_templates.yml").read_text())
    rights = {"summary_fields": {"user_capabilities": {"start": True}}}
    return [
        {**fields, "id": number, "inventory": INVENTORY, **rights, **faults.templates}
        for number, fields in enumerate(described["job_templates"], 7)
        if fields["name"] not in faults.without
    ]


def _job(number: int, template: dict[str, Any], taken: dict[str, Any], status: str) -> Any:
    return {
        "id": number,
        "type": "job",
        "name": template["name"],
        "job_template": template["id"],
        "limit": taken.get("limit", template.get("limit", "")),
        # AWX stores the variables as text.
        "extra_vars": json.dumps(taken.get("extra_vars", {})),
        "status": status,
        "started": None,
        "elapsed": 1.5,
        "artifacts": {},
        "job_explanation": "",
        "event_processing_finished": False,
    }


def _play(awx: Awx, job: dict[str, Any], variables: dict[str, Any]) -> None:
    """Play as AWX does: ansible-runner, untemplated variables, events saved one at a time."""

    def save(event: dict[str, Any]) -> bool:
        awx.events[job["id"]].append(event)
        artifacts = event.get("event_data", {}).get("artifact_data")
        if artifacts:
            job["artifacts"] = artifacts
        return False

    with tempfile.TemporaryDirectory() as folder:
        env = Path(folder) / "env"
        env.mkdir()
        (env / "extravars").write_text(inert(variables))
        inventory = Path(folder) / "hosts.json"
        inventory.write_text(json.dumps({"all": {"hosts": {job["limit"]: {}}}}))
        job["status"] = "running"
        runner = ansible_runner.run(
            private_data_dir=folder,
            playbook=awx.faults.play,
            inventory=str(inventory),
            envvars={"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
            event_handler=save,
            cancel_callback=lambda: job["id"] in awx.canceled,
            limit=job["limit"],
            quiet=True,
        )
        job.update(status=runner.status, event_processing_finished=True)


class Handler(BaseHTTPRequestHandler):
    """A request."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: Server

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing, because the record is the log."""

    def do_GET(self) -> None:
        self._serve()

    do_POST = do_GET

    def _serve(self) -> None:
        raw = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        body = json.loads(raw) if raw else {}
        path = urlsplit(self.path).path
        try:
            if path.startswith("/standin/"):
                status, answer = self._standin(path, body)
            else:
                time.sleep(self.server.awx.faults.drip_s)
                status, answer = self._answer(path, body)
        except Cut:
            self.close_connection = True
            return
        content = json.dumps(answer).encode() if status != 202 else b"{}"
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def _standin(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        with self.server.lock:
            if path == "/standin/begin":
                self.server.awx = Awx(Faults(**body))
                return 200, {}
            if path == "/standin/change":
                for name, value in body.items():
                    setattr(self.server.awx.faults, name, value)
                return 200, {}
            awx = self.server.awx
            return 200, {
                "requests": awx.requests,
                "bodies": awx.bodies,
                "canceled": awx.canceled,
                "jobs": awx.jobs,
            }

    def _answer(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        awx, asked = self.server.awx, f"{self.command} {path.removeprefix(API)}"
        with self.server.lock:
            awx.requests.append(asked)
            if self.headers.get("Authorization") != f"Bearer {awx.faults.token}":
                return 401, {"detail": "Authentication credentials were not provided."}
            if _due(awx.faults.drop, asked):
                raise Cut
            instead = awx.faults.status.get(asked, [0, 0])
            if instead[1]:
                instead[1] -= 1
                return instead[0], {"detail": "made to fail"}
            if not _due(awx.faults.cut, asked):
                return self._act(path.removeprefix(API), body)
            if not awx.faults.later_s:
                self._act(path.removeprefix(API), body)
        if awx.faults.later_s:
            # AWX has the request and carries it out later; the client never learns the outcome.
            timer = threading.Timer(awx.faults.later_s, self._act, (path.removeprefix(API), body))
            timer.daemon = True
            timer.start()
        raise Cut

    def _act(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        awx = self.server.awx
        words = path.strip("/").split("/")
        query = dict(parse_qsl(urlsplit(self.path).query))
        number = int(words[1]) if len(words) > 1 else 0
        if words == ["job_templates"]:
            return self._list(awx.templates, query)
        if words == ["jobs"]:
            return self._list(awx.jobs, query)
        if words[0] == "inventories" and number == INVENTORY:
            names = awx.faults.hosts if words[2] == "hosts" else awx.faults.groups
            return self._list([{"id": 1, "name": name, "enabled": True} for name in names], query)
        if words[0] == "job_templates" and words[2:] == ["launch"] and self.command == "POST":
            awx.bodies.append(body)
            template = next((one for one in awx.templates if one["id"] == number), None)
            return (201, awx.launch(template, body)) if template else (404, _NOT_FOUND)
        job = next((job for job in awx.jobs if job["id"] == number), None)
        if words[0] != "jobs" or job is None:
            return 404, _NOT_FOUND
        return self._job(job, words[2:], query)

    def _job(self, job: dict[str, Any], rest: list[str], query: dict[str, str]) -> tuple[int, Any]:
        awx = self.server.awx
        if rest == ["job_events"]:
            status, page = self._list(awx.seen(job), query)
            if status == 200 and awx.faults.twice:
                page["results"] = [*page["results"] * 2, *awx.seen(job)[:2]]
            return status, page
        if rest == ["cancel"] and self.command == "POST":
            if job["status"] not in ACTIVE:
                return 405, {"detail": 'Method "POST" not allowed.'}
            awx.canceled.append(job["id"])
            return 202, {}
        awx.look(job)
        return 200, job

    def _list(self, items: list[dict[str, Any]], query: dict[str, str]) -> tuple[int, Any]:
        page, size = int(query.pop("page", "1")), int(query.pop("page_size", "25"))
        size = min(size, self.server.awx.faults.page_size)
        order = query.pop("order_by", "id")
        for key, value in query.items():
            name, _, lookup = key.partition("__")
            if name in ("extra_vars", "artifacts"):
                return 403, {"detail": f"Filtering on {name} is not allowed."}
            if lookup not in ("", "gt"):
                return 400, {"detail": f"{key} is not modelled"}
            keeps = _greater if lookup else _same
            items = [item for item in items if keeps(item[name], value)]
        items = sorted(items, key=lambda item: item[order.lstrip("-")])
        if order.startswith("-"):
            items.reverse()
        following = items[page * size :]
        # AWX gives only the path.
        more = f"{API}/…?page={page + 1}" if following else None
        found = items[(page - 1) * size : page * size]
        return 200, {"count": len(items), "next": more, "results": found}


_NOT_FOUND = {"detail": "Not found."}


def _same(found: Any, value: str) -> bool:
    return str(found) == value


def _greater(found: Any, value: str) -> bool:
    return bool(found > int(value))


def _due(times: dict[str, int], asked: str) -> bool:
    if times.get(asked, 0) <= 0:
        return False
    times[asked] -= 1
    return True


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, certificate: str = "", key: str = "") -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.awx = Awx(Faults())
        self.lock = threading.RLock()
        self.context = None
        if certificate:
            self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            self.context.load_cert_chain(certificate, key)

    def finish_request(self, request: Any, client_address: Any) -> None:
        if self.context is None:
            super().finish_request(request, client_address)
            return
        try:
            secured = self.context.wrap_socket(request, server_side=True)
        except ssl.SSLError:
            return  # the client does not trust the certificate
        with secured:
            super().finish_request(secured, client_address)


def main() -> None:
    server = Server(*sys.argv[1:3])
    sys.stdout.write(f"{server.server_port}\n")
    sys.stdout.flush()
    server.serve_forever()


if __name__ == "__main__":
    main()

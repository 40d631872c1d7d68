"""Stand-in for AWX that answers like its REST API, as a separate process.

    python -m tests.standin.awx [CERTIFICATE KEY]       prints its port on the first line

`POST /standin/begin` resets it (see `Faults`), `GET /standin/record` returns its record. The job
templates are those that awx/import.yml makes. It models tokens, lists with pages and filters (the
variables of jobs cannot be searched, as in AWX), launches with their ignored fields, jobs with
their states and artifacts, events that are saved late, and cancel. Its answers are as measured at a
real AWX 24.6.1; `test_answers.py` checks them, and compares their fields with AWX's source.
"""

from __future__ import annotations

import json
import os
import ssl
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import ansible_runner
import yaml

from reconciler.runs.contract import PLAYBOOKS
from reconciler.runs.launch import inert
from tests.standin.awx_objects import KINDS, Objects

ROOT = Path(__file__).resolve().parents[2]
# Id of the first job template.
FIRST_TEMPLATE = 7
# Id of the first object of an AWX to which nothing was imported, its organization.
FIRST_OBJECT = 1
API = "/api/v2"
INVENTORY = 3
# Image of the execution environment.
IMAGE = "registry.example/gpuaas-slice-ee:0.1.0"
Query = dict[str, str]
STARTED = "2026-11-21T10:00:00Z"
ACTIVE = ("pending", "waiting", "running")
# Explanations of AWX's reaper, which gives up jobs without knowing their end.
REAPED_AT_START = (
    "Task was marked as running at system start up. The system must have not shut down properly,"
    " so it has been marked as failed."
)
REAPED_FROM_QUEUE = (
    "Task was marked as running but was not present in the job queue, so it has been marked as"
    " failed."
)
REAPED_BY_PEER = "Job reaped due to instance shutdown"
# Fields of a job that only its own page shows.
_DETAIL = ("result_traceback", "event_processing_finished")


@dataclass
class Faults:
    """token: the accepted token. templates: overrides of each template's fields. without: omitted
    names.

    hosts, groups: of the inventory. variables: text by `host`, `group` (of the host) and
    `inventory`. page_size: the most that a list gives at a time. status:
    `METHOD path` to [status, times], answered instead of the normal status. cut: `METHOD path` to
    how often the connection is cut instead of an answer, after the act. drop: the same, before the
    act. strange: `METHOD path` to documents, each answered once instead; None: an empty answer.
    later_s: delay until a cut launch is carried out. drip_s: pause before each answer. steps:
    number of reads of a job until it moves on. events: of each job. late: counters that are saved
    after the end. never: counters never saved. twice: each page repeats its events, and older ones.
    ends: final state of the job. artifacts, explanation, traceback: of the job. unit: the id of
    the job's work in receptor, "" for a job that never got there. lost: the explanation with which
    the reaper gives up a job that goes on; a job that is really run is given up after `steps`
    events. deaf: the dispatcher acknowledges no cancel request, so the job counts as canceled and
    goes on. ends_on_cancel: the job ends just before a cancel request. queued: jobs wait for
    capacity. queue_s: seconds from a job's creation to its start. privileged: the user of the token
    is superuser, and reads the settings. hidden: jobs that the user may not see. jinja: the setting
    for Jinja in variables. project: changed fields of the project. changed: fields of single
    templates by name. play: a playbook that is really run instead. empty: nothing was imported, and
    objects can be made (`awx_objects`). pace_s: jobs go on by the clock, a state or an event each
    so many seconds, also without reads.
    """

    token: str = "token-1"
    templates: dict[str, Any] = field(default_factory=dict)
    without: list[str] = field(default_factory=list)
    hosts: list[str] = field(default_factory=lambda: ["node-1"])
    groups: list[str] = field(default_factory=list)
    variables: dict[str, str] = field(default_factory=dict)
    page_size: int = 200
    status: dict[str, list[int]] = field(default_factory=dict)
    cut: dict[str, int] = field(default_factory=dict)
    drop: dict[str, int] = field(default_factory=dict)
    strange: dict[str, list[Any]] = field(default_factory=dict)
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
    traceback: str = ""
    unit: str | None = "qLL2JFNT"
    lost: str = ""
    deaf: bool = False
    ends_on_cancel: bool = False
    queued: bool = False
    queue_s: int = 0
    privileged: bool = False
    hidden: list[int] = field(default_factory=list)
    jinja: str = "template"
    project: dict[str, Any] = field(default_factory=dict)
    changed: dict[str, Any] = field(default_factory=dict)
    play: str = ""
    empty: bool = False
    pace_s: float = 0


class Cut(Exception):
    """The connection ends here, without an answer."""


class Awx:
    """State behind the answers, under a single lock because requests come in threads."""

    def __init__(self, faults: Faults) -> None:
        self.faults = faults
        self.templates = [] if faults.empty else _templates(faults)
        self.objects = Objects(API, self.templates, FIRST_OBJECT) if faults.empty else None
        self.jobs: list[dict[str, Any]] = []
        self.events: dict[int, list[dict[str, Any]]] = {}
        self.looks: dict[int, int] = {}
        # Numbers of events that AWX's workers reported at the end of their jobs.
        self.emitted: dict[int, int] = {}
        self.requests: list[str] = []
        self.bodies: list[dict[str, Any]] = []
        self.canceled: list[int] = []

    def launch(self, template: dict[str, Any], body: dict[str, Any]) -> dict[str, Any]:
        fields = {"extra_vars": "variables", "limit": "limit", "timeout": "timeout"}
        taken = {
            key: value
            for key, value in body.items()
            if key in fields and template[f"ask_{fields[key]}_on_launch"]
        }
        job = _job(len(self.jobs) + 1, template, taken, "pending")
        created = datetime.fromisoformat(STARTED) - timedelta(seconds=self.faults.queue_s)
        job["created"] = created.isoformat()
        self.jobs.append(job)
        self.events[job["id"]] = list(self.faults.events)
        if self.faults.play or self.faults.pace_s:
            play = (_play, taken["extra_vars"]) if self.faults.play else (_live, {})
            thread = threading.Thread(target=play[0], args=(self, job, play[1]), daemon=True)
            thread.start()
        ignored = {key: value for key, value in body.items() if key not in taken}
        return {**job, "job": job["id"], "ignored_fields": ignored}

    def look(self, job: dict[str, Any]) -> None:
        """Move a scripted job on with each read."""
        if self.faults.play or self.faults.queued or self.faults.pace_s:
            return
        looks = self.looks[job["id"]] = self.looks.get(job["id"], 0) + 1
        if job["status"] not in ACTIVE:
            return
        unit = self.faults.unit
        job.update(status="running", started=STARTED, work_unit_id=unit)
        if job["id"] in self.canceled:
            self.end(job, "canceled")
        elif looks > self.faults.steps and self.faults.lost:
            job.update(status="failed", job_explanation=self.faults.lost)
        elif looks > self.faults.steps:
            self.end(job, self.faults.ends)
            job.update(
                artifacts=self.faults.artifacts,
                job_explanation=self.faults.explanation,
                result_traceback=self.faults.traceback,
            )
        if job["status"] not in ACTIVE:
            self.looks[job["id"]] = 0

    def end(self, job: dict[str, Any], status: str) -> None:
        """The worker of a job sees its end."""
        job["status"] = status
        self.emitted[job["id"]] = len(self.events[job["id"]])

    def cancel(self, job: dict[str, Any]) -> None:
        """A worker that acknowledges ends its job later. Otherwise only the status changes."""
        if self.faults.deaf or job["status"] == "pending":
            job["status"] = "canceled"
        if not self.faults.deaf:
            self.canceled.append(job["id"])

    def saved(self, job: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the events that are saved by now."""
        alone = self.faults.play or self.faults.pace_s
        over = job["status"] not in ACTIVE and (alone or self.looks.get(job["id"]))
        hidden = {*self.faults.never, *(() if over else self.faults.late)}
        return [event for event in self.events[job["id"]] if event["counter"] not in hidden]

    def shown(self, job: dict[str, Any]) -> dict[str, Any]:
        """A job's own page. Equal counts mean that all events are saved, also without any event."""
        saved = len(self.saved(job))
        finished = job["status"] not in ACTIVE and self.emitted.get(job["id"], 0) == saved
        return {**job, "event_processing_finished": finished}


def _templates(faults: Faults) -> list[dict[str, Any]]:
    common = yaml.safe_load((ROOT / "awx" / "job_templates.yml").read_text())["job_template"]
    names = {"project": 5, "execution_environment": 4, "inventory": INVENTORY}
    machine = {"id": 2, "name": "gpuaas.slice", "kind": "ssh", "cloud": False}
    templates = []
    # Shown in the summary only.
    common.pop("credentials")
    for number, playbook in enumerate(PLAYBOOKS, FIRST_TEMPLATE):
        fields = {**common, "name": f"gpuaas.slice.{playbook}"}
        fields["playbook"] = f"playbooks/{playbook}.yml"
        # AWX stores variables as text, and its form leaves this mark in an empty field.
        fields["extra_vars"] = "---\n"
        faulty = {**faults.templates, **faults.changed.get(fields["name"], {})}
        summary = {
            **{kind: {"id": id, "name": fields[kind]} for kind, id in names.items()},
            "execution_environment": {
                **{"id": 4, "name": fields["execution_environment"]},
                "image": IMAGE,
            },
            "credentials": [machine],
            "user_capabilities": {"start": True},
            **faulty.get("summary_fields", {}),
        }
        template = {**fields, **names, "id": number, **faulty, "summary_fields": summary}
        if fields["name"] not in faults.without:
            templates.append(template)
    return templates


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
        "result_traceback": "",
        "work_unit_id": None,
    }


def _play(awx: Awx, job: dict[str, Any], variables: dict[str, Any]) -> None:
    """Play as AWX does: ansible-runner, coloured output, events saved one at a time, artifacts
    with the end. Variables are untemplated, unless the setting allows Jinja in them.
    """
    artifacts: dict[str, Any] = {}

    def save(event: dict[str, Any]) -> bool:
        if awx.faults.lost and len(awx.events[job["id"]]) >= awx.faults.steps:
            job.update(status="failed", job_explanation=awx.faults.lost)
            return False
        awx.events[job["id"]].append(event)
        artifacts.update(event.get("event_data", {}).get("artifact_data") or {})
        return False

    with tempfile.TemporaryDirectory() as folder:
        env = Path(folder) / "env"
        env.mkdir()
        trusted = awx.faults.jinja == "always"
        text = yaml.safe_dump(variables) if trusted else inert(variables)
        (env / "extravars").write_text(text)
        inventory = Path(folder) / "hosts.json"
        inventory.write_text(json.dumps({"all": {"hosts": {job["limit"]: {}}}}))
        job.update(status="running", started=STARTED, work_unit_id="qLL2JFNT")
        programs = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        runner = ansible_runner.run(
            private_data_dir=folder,
            playbook=awx.faults.play,
            inventory=str(inventory),
            envvars={"PATH": programs, "ANSIBLE_FORCE_COLOR": "True"},
            event_handler=save,
            cancel_callback=lambda: job["id"] in awx.canceled,
            limit=job["limit"],
            quiet=True,
        )
        if not awx.faults.lost:
            awx.end(job, runner.status)
            job.update(artifacts=artifacts)


def _live(awx: Awx, job: dict[str, Any], _variables: object) -> None:
    """Go through the states of a job and save its events. A canceled job ends at the next."""
    events, pace_s = awx.events[job["id"]], awx.faults.pace_s
    task = {"task": "Look at the machine", "host": job["limit"]}
    stats = {"ok": {job["limit"]: 1}, "failures": {}, "dark": {}, "changed": {}}
    script = (
        ("playbook_on_start", {}, ""),
        ("playbook_on_task_start", task, "TASK [Look at the machine]\n"),
        ("runner_on_ok", task, f"ok: [{job['limit']}]\n"),
        ("playbook_on_stats", stats, "PLAY RECAP\n"),
    )
    for status in ("waiting", "running"):
        time.sleep(pace_s)
        if job["id"] in awx.canceled:
            return awx.end(job, "canceled")
        job["status"] = status
    job.update(started=STARTED, work_unit_id=awx.faults.unit)
    for counter, (name, data, text) in enumerate(script, 1):
        time.sleep(pace_s)
        if job["id"] in awx.canceled:
            return awx.end(job, "canceled")
        events.append({"counter": counter, "event": name, "event_data": data, "stdout": text})
    awx.end(job, awx.faults.ends)
    return None


class Handler(BaseHTTPRequestHandler):
    """A request."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: Server

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing, because the record is the log."""

    def do_GET(self) -> None:
        self._serve()

    do_POST = do_PATCH = do_DELETE = do_GET

    def _serve(self) -> None:
        raw = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        body = json.loads(raw) if raw else {}
        path = urlsplit(self.path).path
        try:
            if path.startswith("/standin/"):
                status, answer = self._standin(path, body)
            else:
                awx = self.server.awx
                time.sleep(awx.faults.drip_s)
                status, answer = self._answer(awx, path, body)
        except Cut:
            self.close_connection = True
            return
        content = json.dumps(answer).encode() if status != 202 else b"{}"
        content = b"" if status == 204 or answer is None else content
        self.send_response(status)
        # The collection awx.awx compares them with its own.
        self.send_header("X-API-Product-Name", "AWX")
        self.send_header("X-API-Product-Version", "24.6.1")
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
            if path == "/standin/objects" and awx.objects:
                return 200, {**awx.objects.all(), "teams_of": awx.objects.teams_of()}
            return 200, {
                "requests": awx.requests,
                "bodies": awx.bodies,
                "canceled": awx.canceled,
                "jobs": awx.jobs,
            }

    def _answer(self, awx: Awx, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        request = f"{self.command} {path.removeprefix(API)}"
        with self.server.lock:
            if self.server.awx is not awx:
                raise Cut  # The test that asked is over.
            awx.requests.append(request)
            if self.headers.get("Authorization") != f"Bearer {awx.faults.token}":
                return 401, _UNAUTHORIZED
            if _due(awx.faults.drop, request):
                raise Cut
            instead = awx.faults.status.get(request, [0, 0])
            if instead[1]:
                instead[1] -= 1
                return instead[0], {"detail": "made to fail"}
            if awx.faults.strange.get(request):
                return 200, awx.faults.strange[request].pop(0)
            if not _due(awx.faults.cut, request):
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
        words = path.strip("/").split("/")
        query = dict(parse_qsl(urlsplit(self.path).query))
        if not self.server.awx.objects and words == ["projects", "5"]:
            project = {"id": 5, "scm_url": "https://git.example/gpuaas", "scm_branch": "v1"}
            project |= {"name": "gpuaas.slice", "scm_refspec": ""}
            return 200, {**project, **self.server.awx.faults.project}
        objects, launches = self.server.awx.objects, words[-1] in ("launch", "hosts", "groups")
        named = words[0] in KINDS or words[0] in ("unified_job_templates", "roles")
        if objects and named and not launches:
            return objects.answer(self.command, words, query, body)
        parts = {
            "job_templates": self._templates,
            "jobs": self._jobs,
            "inventories": self._inventory,
            "hosts": self._groups_of_host,
            "settings": self._settings,
        }
        if part := parts.get(words[0]):
            return part(words[1:], query, body)
        return 404, {"detail": "The requested resource could not be found."}

    def _templates(self, rest: list[str], query: Query, body: dict[str, Any]) -> tuple[int, Any]:
        awx = self.server.awx
        if not rest:
            return self._list(awx.templates, query)
        if rest[1:] == ["launch"]:
            awx.bodies.append(body)
        for template in awx.templates:
            if template["id"] == int(rest[0]):
                return (201, awx.launch(template, body)) if rest[1:] else (200, template)
        return 404, {"detail": "No JobTemplate matches the given query."}

    def _jobs(self, rest: list[str], query: Query, _body: object) -> tuple[int, Any]:
        awx = self.server.awx
        if not rest:
            return self._list(awx.jobs, query, awx.faults.hidden)
        if int(rest[0]) in awx.faults.hidden:
            return 403, _FORBIDDEN
        for job in awx.jobs:
            if job["id"] == int(rest[0]):
                return self._job(job, rest[1:], query)
        return 404, {"detail": "No Job matches the given query."}

    def _inventory(self, rest: list[str], query: Query, _body: object) -> tuple[int, Any]:
        faults = self.server.awx.faults
        if not rest[1:]:
            text = faults.variables.get("inventory", "")
            return 200, {"id": INVENTORY, "name": "gpuaas.slice", "variables": text}
        names = faults.hosts if rest[1] == "hosts" else faults.groups
        more = {"enabled": True, "variables": faults.variables.get("host", "")}
        return self._list([{"id": 1, "name": name, **more} for name in names], query)

    def _groups_of_host(self, rest: list[str], query: Query, _body: object) -> tuple[int, Any]:
        if rest[1:] != ["all_groups"]:
            return 404, {"detail": "The requested resource could not be found."}
        text = self.server.awx.faults.variables.get("group", "---")
        return self._list([{"id": 1, "name": "slices", "variables": text}], query)

    def _settings(self, _rest: object, _query: object, _body: object) -> tuple[int, Any]:
        faults = self.server.awx.faults
        settings = {"ALLOW_JINJA_IN_EXTRA_VARS": faults.jinja}
        return (200, settings) if faults.privileged else (403, _FORBIDDEN)

    def _job(self, job: dict[str, Any], rest: list[str], query: Query) -> tuple[int, Any]:
        awx = self.server.awx
        if rest == ["job_events"]:
            events = [_coloured(event) for event in awx.saved(job)]
            status, page = self._list(events, query)
            if status == 200 and awx.faults.twice:
                page["results"] = [*page["results"] * 2, *events[:2]]
            return status, page
        if rest == ["cancel"] and self.command == "POST":
            while awx.faults.ends_on_cancel and job["status"] in ACTIVE:
                awx.look(job)
            if job["status"] not in ACTIVE:
                # The right to cancel is checked first, and only a superuser has it here.
                privileged = awx.faults.privileged
                return (405, _NOT_ALLOWED) if privileged else (403, _FORBIDDEN)
            awx.cancel(job)
            return 202, {}
        awx.look(job)
        return 200, awx.shown(job)

    def _list(
        self, items: list[dict[str, Any]], query: Query, hidden: Sequence[int] = ()
    ) -> tuple[int, Any]:
        page, size = int(query.pop("page", "1")), int(query.pop("page_size", "25"))
        size = min(size, self.server.awx.faults.page_size)
        order = query.pop("order_by", "id")
        if "extra_vars" in order:
            return 403, {"detail": "Ordering by extra_vars is not allowed."}
        for key, value in query.items():
            name, _, lookup = key.partition("__")
            if name == "extra_vars":
                return 403, {"detail": "Filtering on extra_vars is not allowed."}
            if lookup not in _LOOKUPS or (items and name not in items[0]):
                return 400, {"detail": f"no field or lookup: {key}"}
            items = [item for item in items if _LOOKUPS[lookup](item[name], value)]
        items = [item for item in items if item["id"] not in hidden]
        items = sorted(items, key=lambda item: item[order.lstrip("-")])
        if order.startswith("-"):
            items.reverse()
        following = items[page * size :]
        # AWX gives only the path.
        more = f"{API}/…?page={page + 1}" if following else None
        rows = items[(page - 1) * size : page * size]
        rows = [{k: v for k, v in item.items() if k not in _DETAIL} for item in rows]
        return 200, {"count": len(items), "next": more, "results": rows}


_UNAUTHORIZED = {
    "detail": "Authentication credentials were not provided."
    " To establish a login session, visit /api/login/."
}
_FORBIDDEN = {"detail": "You do not have permission to perform this action."}
_NOT_ALLOWED = {"detail": 'Method "POST" not allowed.'}
_LOOKUPS: dict[str, Callable[[Any, str], bool]] = {
    "": lambda field, value: str(field) == value,
    "gt": lambda field, value: bool(field > int(value)),
    "startswith": lambda field, value: str(field).startswith(value),
}


def _coloured(event: dict[str, Any]) -> dict[str, Any]:
    """Jobs run with ANSIBLE_FORCE_COLOR on a terminal. Text that has its colours stays."""
    text = str(event.get("stdout", ""))
    if text and "\x1b" not in text:
        text = f"\x1b[0;32m{text}\x1b[0m".replace("\n", "\r\n")
    return {**event, "id": event["counter"], "stdout": text}


def _due(times: dict[str, int], request: str) -> bool:
    if times.get(request, 0) <= 0:
        return False
    times[request] -= 1
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

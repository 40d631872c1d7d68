"""Objects of the stand-in for AWX that an import makes, with surveys, associations and roles.

Fields and choices are those of AWX 24.6.1's source (tests/data/awx). As in AWX, unknown fields are
dropped and read-only fields do not change. Surveys, schedules, credential types and references get
the checks of AWX.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from jinja2 import StrictUndefined, TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tests.standin.bmc import ROOT

Record = dict[str, Any]
Answer = tuple[int, Any]

_SOURCE = ROOT / "tests/data/awx/fields-24.6.1.json"
KINDS: dict[str, dict[str, Any]] = json.loads(_SOURCE.read_text())["kinds"]
# Kind of the object that a field refers to.
_REFERENCES = {
    "organization": "organizations",
    "credential_type": "credential_types",
    "credential": "credentials",
    "signature_validation_credential": "credentials",
    "default_environment": "execution_environments",
    "execution_environment": "execution_environments",
    "project": "projects",
    "source_project": "projects",
    "inventory": "inventories",
    "workflow_job_template": "workflow_job_templates",
}
_UNIFIED = ("projects", "inventory_sources", "job_templates", "workflow_job_templates")
_ROLES = {
    "inventories": "admin use adhoc update read",
    "job_templates": "admin execute read",
    "workflow_job_templates": "admin execute read approval",
}
_QUESTIONS = {
    **dict.fromkeys(("text", "textarea", "password", "multiplechoice"), str),
    "multiselect": str,
    "integer": int,
    "float": float,
}
_ABSENT = (404, {"detail": "Not found."})
_MANY = re.compile(r"credentials|\w+_nodes|notification_templates_\w+|labels|instance_groups")


class Objects:
    """The objects of an AWX to which nothing was imported. job_templates: list of the launcher."""

    def __init__(self, api: str, job_templates: list[Record], first: int) -> None:
        self._api = api
        self._next = first
        self._lists: dict[str, list[Record]] = {kind: [] for kind in KINDS}
        self._lists["job_templates"] = job_templates
        self._many: dict[str, list[int]] = {}
        self._surveys: dict[str, Record] = {}
        # Numbers of roles by object and name.
        self._roles: dict[int, str] = {}
        self.create("organizations", {"name": "Default"})
        machine = {"name": "Machine", "kind": "ssh", "inputs": {"fields": [{"id": "username"}]}}
        _, machine = self.create("credential_types", machine)
        fields = {"name": "gpuaas.slice", "credential_type": machine["id"], "organization": first}
        self.create("credentials", {**fields, "inputs": {"username": "root"}})

    def answer(self, method: str, words: list[str], query: dict[str, str], body: Record) -> Answer:
        """The answer; 404 for a missing object."""
        kind, rest = words[0], words[1:]
        if kind == "unified_job_templates":
            every = [item for name in _UNIFIED for item in self._lists[name]]
            return self._page(every, query)
        if kind == "roles":
            return self._associate(method, "/".join(words), body)
        if not rest and method == "POST":
            return self.create(kind, body)
        if not rest:
            return self._page(self._lists[kind], query)
        item = next((i for i in self._lists[kind] if str(i["id"]) == rest[0]), None)
        if item and len(rest) == 1:
            return self._one(method, kind, item, body)
        return self._part(method, kind, item, rest[1], body) if item else _ABSENT

    def _part(self, method: str, kind: str, item: Record, part: str, body: Record) -> Answer:
        if part == "survey_spec" and kind in ("job_templates", "workflow_job_templates"):
            return self._survey(method, item["url"], body)
        if part == "create_approval_template" and kind == "workflow_job_template_nodes":
            status, made = self.create("workflow_approval_templates", body)
            item["unified_job_template"] = made["id"]
            item["related"]["unified_job_template"] = made["url"]
            return status, made
        if not _MANY.fullmatch(part) or kind == "workflow_approval_templates":
            return _ABSENT
        answer = self._associate(method, f"{kind}/{item['id']}/{part}", body)
        self._summarise(kind, item)
        return answer

    def create(self, kind: str, body: Record) -> Answer:
        if problem := self._problem(kind, body, None):
            return 400, problem
        number, self._next = self._next, self._next + 1
        url = f"{self._api}/{kind}/{number}/"
        related = {"survey_spec": f"{url}survey_spec/"}
        item = {"id": number, "url": url, "type": _singular(kind), "name": "", "related": related}
        item |= {"description": "", **dict.fromkeys(_writable(kind) - item.keys())}
        # The collection compares it, although it cannot be set.
        item |= {"managed": False} if "managed" in KINDS[kind]["read_only"].split() else {}
        # As in a project whose first update has ended.
        item |= {"scm_revision": "4b825dc"} if kind == "projects" else {}
        self._lists[kind].append(item)
        self._store(kind, item, body)
        return 201, self._shown(item)

    def _one(self, method: str, kind: str, item: Record, body: Record) -> Answer:
        if method == "PATCH":
            if problem := self._problem(kind, body, item):
                return 400, problem
            self._store(kind, item, body)
        if method == "DELETE":
            self._delete(kind, item)
            return 204, {}
        return 200, self._shown(item)

    def _delete(self, kind: str, item: Record) -> None:
        """Delete it with its dependents, by the `on_delete` of AWX's models."""
        number = item["id"]
        self._lists[kind].remove(item)
        self._surveys.pop(item["url"], None)
        for key in [key for key in self._many if key.startswith(f"{kind}/{number}/")]:
            del self._many[key]
        for step in self._lists["workflow_job_template_nodes"]:
            if step["unified_job_template"] == number:
                step["unified_job_template"] = None
        schedules = self._lists["schedules"]
        schedules[:] = [row for row in schedules if row["unified_job_template"] != number]

    def _store(self, kind: str, item: Record, body: Record) -> None:
        allowed = _writable(kind)
        # AWX stores no null in a text.
        texts = {
            key: "" if key == "kind" and value is None else value for key, value in body.items()
        }
        item.update({key: value for key, value in texts.items() if key in allowed})
        if kind == "job_templates" and item["project"]:
            item["organization"] = self._by_id("projects", item["project"])["organization"]
        self._summarise(kind, item)

    def _summarise(self, kind: str, item: Record) -> None:
        summary: Record = {"user_capabilities": {"start": True}, "object_roles": {}}
        for field, target in _REFERENCES.items():
            if isinstance(item.get(field), int):
                summary[field] = {
                    "id": item[field],
                    "name": self._by_id(target, item[field])["name"],
                }
        for role in _ROLES.get(kind, "").split():
            number = item["id"] * 100 + len(summary["object_roles"])
            summary["object_roles"][f"{role}_role"] = {"id": number, "name": role}
            self._roles[number] = f"{kind}/{item['name']}/{role}"
        numbers = self._many.get(f"{kind}/{item['id']}/credentials", [])
        summary["credentials"] = [self._summary("credentials", number) for number in numbers]
        item["summary_fields"] = summary

    def _summary(self, kind: str, number: int) -> Record:
        item = self._by_id(kind, number)
        type_ = self._by_id("credential_types", item["credential_type"])
        return {"id": number, "name": item["name"], "kind": type_["kind"]}

    def _shown(self, item: Record) -> Record:
        """Secrets are never shown."""
        if item["type"] != "credential":
            return item
        kind = self._by_id("credential_types", item["credential_type"])
        secret = {field["id"] for field in kind["inputs"]["fields"] if field.get("secret")}
        inputs = {k: "$encrypted$" if k in secret else v for k, v in item["inputs"].items()}
        return {**item, "inputs": inputs}

    def _page(self, items: list[Record], query: dict[str, str]) -> Answer:
        for field, value in query.items():
            if field in ("page", "page_size", "order_by"):
                continue
            if field.partition("__")[2] == "startswith":
                items = [i for i in items if i[field.partition("__")[0]].startswith(value)]
                continue
            if items and not any(field in item for item in items):
                return 400, {"detail": f"{items[0]['type']} has no field named '{field}'"}
            items = [item for item in items if str(item.get(field)) == value]
        return 200, {"count": len(items), "next": None, "results": [self._shown(i) for i in items]}

    def _associate(self, method: str, key: str, body: Record) -> Answer:
        numbers = self._many.setdefault(key, [])
        if method == "POST":
            if body.get("disassociate"):
                numbers.remove(body["id"])
            elif body["id"] not in numbers:
                numbers.append(body["id"])
            return 204, {}
        results = [{"id": number} for number in numbers]
        return 200, {"count": len(results), "next": None, "results": results}

    def _survey(self, method: str, url: str, body: Record) -> Answer:
        if method == "POST":
            if problem := _survey_problem(body):
                return 400, {"error": problem}
            self._surveys[url] = body
            return 200, {}
        return 200, self._surveys.get(url, {})

    def teams_of(self) -> dict[str, list[str]]:
        """Teams by role, for tests."""
        names = {team["id"]: team["name"] for team in self._lists["teams"]}
        return {
            self._roles[int(key.split("/")[1])]: sorted(names[number] for number in numbers)
            for key, numbers in self._many.items()
            if key.startswith("roles/") and numbers
        }

    def all(self) -> dict[str, Any]:
        """All objects, links between steps of workflows and groups of templates, for tests."""
        steps = self._lists["workflow_job_template_nodes"]
        names = {step["id"]: step["identifier"] for step in steps}
        links = [
            {"from": names[int(key.split("/")[1])], "to": [names[number] for number in numbers]}
            for key, numbers in self._many.items()
            if key.endswith("/success_nodes") and numbers
        ]
        groups = {group["id"]: group["name"] for group in self._lists["instance_groups"]}
        groups_of = {
            item["name"]: [
                groups[number]
                for number in self._many.get(f"job_templates/{item['id']}/instance_groups", [])
            ]
            for item in self._lists["job_templates"]
        }
        surveys = [{"url": url, **survey} for url, survey in self._surveys.items()]
        return {
            **self._lists,
            "links": links,
            "surveys": surveys,
            "instance_groups_of": groups_of,
        }

    def _by_id(self, kind: str, number: int) -> Record:
        return next(item for item in self._lists[kind] if item["id"] == number)

    def _problem(self, kind: str, body: Record, item: Record | None) -> Record:
        for field, target in _REFERENCES.items():
            number = body.get(field)
            if number is not None and not any(i["id"] == number for i in self._lists[target]):
                return {field: [f'Invalid pk "{number}" - object does not exist.']}
        for field, choices in KINDS[kind]["choices"].items():
            if body.get(field) not in (None, "", *choices):
                return {field: [f'"{body[field]}" is not a valid choice.']}
        if item is None and "name" in _writable(kind) and not body.get("name"):
            return {"name": ["This field is required."]}
        check: Callable[[Record], Record] | None = {
            "schedules": _schedule_problem,
            "credential_types": _type_problem,
        }.get(kind)
        if check and (problem := check(body)):
            return problem
        if kind == "credentials" and "inputs" in body:
            type_id = body.get("credential_type") or (item or {}).get("credential_type")
            fields = self._by_id("credential_types", type_id)["inputs"]["fields"]
            unknown = set(body["inputs"]) - {field["id"] for field in fields}
            if unknown:
                return {"inputs": [f"Additional properties are not allowed ({sorted(unknown)})"]}
        return {}


def _writable(kind: str) -> set[str]:
    return set(KINDS[kind]["writable"].split())


def _singular(kind: str) -> str:
    return "inventory" if kind == "inventories" else kind.removesuffix("s")


def _schedule_problem(body: Record) -> Record:
    rule = str(body.get("rrule", "DTSTART;TZID=UTC:20260101T000000 RRULE:FREQ=DAILY;INTERVAL=1"))
    if not re.match(r"DTSTART(;TZID=[^:]+:\d{8}T\d{6}|:\d{8}T\d{6}Z) RRULE:", rule):
        return {"rrule": ["Valid DTSTART required in rrule."]}
    if "INTERVAL=" not in rule or "FREQ=SECONDLY" in rule:
        return {"rrule": ["INTERVAL required in rrule." if "SECONDLY" not in rule else "SECONDLY"]}
    return {}


def _type_problem(body: Record) -> Record:
    """AWX renders the injectors with an example of each field."""
    names = {field["id"]: "EXAMPLE" for field in body.get("inputs", {}).get("fields", [])}
    files = body.get("injectors", {}).get("file", {})
    if any(not re.fullmatch(r"template(\.[a-zA-Z_]\w*)?", name) for name in files):
        return {"injectors": ["file: additional properties are not allowed"]}
    filename = {name.partition(".")[2]: "EXAMPLE_FILENAME" for name in files}
    environment = ImmutableSandboxedEnvironment(undefined=StrictUndefined)
    for part in ("file", "env", "extra_vars"):
        for name, text in body.get("injectors", {}).get(part, {}).items():
            try:
                environment.from_string(text).render(**names, tower={"filename": filename})
            except TemplateError as problem:
                return {"injectors": [f"{name} uses an undefined field ({problem})"]}
    return {}


def _survey_problem(survey: Record) -> str:
    for field, kind in {"name": str, "description": str, "spec": list}.items():
        if not isinstance(survey.get(field), kind):
            return f"Field '{field}' is missing from survey spec."
    variables = [question.get("variable") for question in survey["spec"]]
    if not variables or len(set(variables)) < len(variables):
        return "'spec' doesn't contain any items, or a variable twice."
    problems = (_question_problem(question) for question in survey["spec"])
    return next((problem for problem in problems if problem), "")


def _question_problem(question: Record) -> str:
    for field in ("type", "question_name", "variable", "required"):
        if not isinstance(question.get(field), bool if field == "required" else str):
            return f"'{field}' missing from survey question"
    kind, default = _QUESTIONS.get(question["type"]), question.get("default", "")
    if kind is None or any(not isinstance(question.get(end, 0), int) for end in ("min", "max")):
        return f"'{question['type']}' is not allowed, or a limit is no integer"
    if default != "" and not isinstance(default, kind):
        return f"Default value in survey question expected to be {kind.__name__}."
    choices = question.get("choices") if question["type"].startswith("multi") else [default]
    if not choices or (default != "" and default not in choices):
        return "Survey question must specify choices, and its default among them."
    return ""

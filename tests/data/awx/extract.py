"""Fields of AWX's objects from its source: python tests/data/awx/extract.py GIT-FOLDER COMMIT

GIT-FOLDER: a clone of ansible/awx. Prints the text of fields-24.6.1.json. Names and choices, and
the explanations of jobs by which the launcher tells how they ended.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator

# Serializer by the name of the list in the API.
KINDS = {
    "organizations": "OrganizationSerializer",
    "credential_types": "CredentialTypeSerializer",
    "credentials": "CredentialSerializerCreate",
    "execution_environments": "ExecutionEnvironmentSerializer",
    "instance_groups": "InstanceGroupSerializer",
    "projects": "ProjectSerializer",
    "inventories": "InventorySerializer",
    "inventory_sources": "InventorySourceSerializer",
    "job_templates": "JobTemplateSerializer",
    "workflow_job_templates": "WorkflowJobTemplateSerializer",
    "workflow_job_template_nodes": "WorkflowJobTemplateNodeSerializer",
    "workflow_approval_templates": "WorkflowApprovalTemplateSerializer",
    "schedules": "ScheduleSerializer",
    "notification_templates": "NotificationTemplateSerializer",
    "teams": "TeamSerializer",
}
# Objects that the launcher reads and sends.
LAUNCHED = {
    "job": "JobDetailSerializer",
    "job_event": "JobEventSerializer",
    "host": "HostSerializer",
    "launch": "JobLaunchSerializer",
}
EXPLANATIONS = ("Task was marked as running", "Job reaped", "Job terminated due to")
FOLDER, COMMIT = sys.argv[1:]


def git(*words: str) -> str:
    command = ["git", "--git-dir", FOLDER, *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def modules(folder: str) -> Iterator[ast.Module]:
    for path in git("ls-tree", "-r", "--name-only", COMMIT, folder).split():
        if path.endswith(".py"):
            yield ast.parse(git("show", f"{COMMIT}:{path}"))


CLASSES: dict[str, ast.ClassDef] = {}
CONSTANTS: dict[str, ast.expr] = {}


def assignments(body: list[ast.stmt]) -> Iterator[tuple[str, ast.expr]]:
    for node in body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            yield node.targets[0].id, node.value


def bases(name: str) -> list[str]:
    """The class and those that it inherits from, the nearest first."""
    if name not in CLASSES:
        return []
    parents = [ast.unparse(base).rpartition(".")[2] for base in CLASSES[name].bases]
    return list(dict.fromkeys([name, *(row for parent in parents for row in bases(parent))]))


def texts(node: ast.AST) -> list[str]:
    return [str(c.value) for c in ast.walk(node) if isinstance(c, ast.Constant)]


def meta(name: str, attribute: str) -> list[str]:
    """A list of names of the class's Meta, as AWX's own metaclass inherits it."""
    if name not in CLASSES:
        return []
    parents = [ast.unparse(base).rpartition(".")[2] for base in CLASSES[name].bases]
    inherited: list[str] = []
    for parent in reversed(parents):
        inherited += [row for row in meta(parent, attribute) if row not in inherited]
    for node in CLASSES[name].body:
        if isinstance(node, ast.ClassDef) and node.name == "Meta":
            assigned = dict(assignments(node.body)).get(attribute)
            if assigned is None:
                return inherited
            words = texts(assigned)
            rows = [*(inherited if "*" in words else []), *words]
            gone = {word[1:] for word in words if word.startswith("-")}
            return [row for row in dict.fromkeys(rows) if row[0] not in "*-" and row not in gone]
    return inherited


def model(name: str) -> str:
    for row in bases(name):
        for node in CLASSES[row].body:
            body = node.body if isinstance(node, ast.ClassDef) and node.name == "Meta" else []
            if value := dict(assignments(body)).get("model"):
                return ast.unparse(value)
    return ""


def declared(name: str, field: str) -> ast.Call | None:
    for row in bases(name):
        value = dict(assignments(CLASSES[row].body)).get(field)
        if isinstance(value, ast.Call):
            return value
    return None


def keyword(call: ast.Call | None, name: str) -> ast.expr | None:
    return next((row.value for row in call.keywords if row.arg == name), None) if call else None


def is_read_only(name: str, field: str) -> bool:
    here, there = declared(name, field), declared(model(name), field)
    if here is not None:
        kind = ast.unparse(here.func).rpartition(".")[2]
        never = kind in ("SerializerMethodField", "ReadOnlyField")
        return never or ast.unparse(keyword(here, "read_only") or ast.Constant(0)) == "True"
    editable = ast.unparse(keyword(there, "editable") or ast.Constant(1))
    # Other names are properties of the model.
    return field in meta(name, "read_only_fields") or editable == "False" or there is None


def choices(name: str, field: str) -> list[object]:
    constants = dict(CONSTANTS)
    for row in reversed(bases(model(name))):
        constants.update(assignments(CLASSES[row].body))

    def value(node: ast.expr | None) -> ast.expr | None:
        if not isinstance(node, (ast.Name, ast.Attribute)):
            return node
        owner, _, name = ast.unparse(node).rpartition(".")
        if owner in CLASSES:
            return dict(assignments(CLASSES[owner].body)).get(name)
        return value(constants.get(name))

    given = value(keyword(declared(name, field) or declared(model(name), field), "choices"))
    rows = given.elts if isinstance(given, (ast.List, ast.Tuple)) else []
    pairs = [value(row.elts[0]) for row in rows if isinstance(row, ast.Tuple)]
    return [row.value for row in pairs if isinstance(row, ast.Constant)]


def explanations() -> Iterator[str]:
    for module in (*modules("awx/main/dispatch"), *modules("awx/main/tasks")):
        yield from (text for text in texts(module) if text.startswith(EXPLANATIONS))


def without(name: str) -> list[str]:
    """Fields that the class takes away from those that it inherits."""
    (meta,) = (node for node in CLASSES[name].body if isinstance(node, ast.ClassDef))
    words = texts(dict(assignments(meta.body))["fields"])
    return sorted(word[1:] for word in words if word.startswith("-"))


def main() -> None:
    for module in (*modules("awx/main/models"), *modules("awx/api/serializers.py")):
        CONSTANTS.update(assignments(module.body))
        for node in module.body:
            if isinstance(node, ast.ClassDef):
                CLASSES.setdefault(node.name, node)
    kinds = {}
    for kind, name in KINDS.items():
        fields = meta(name, "fields")
        writable = sorted(field for field in fields if not is_read_only(name, field))
        columns = {field: choices(name, field) for field in writable}
        kinds[kind] = {
            "writable": " ".join(writable),
            "read_only": " ".join(sorted(set(fields) - set(writable))),
            "choices": {field: rows for field, rows in columns.items() if rows},
        }
    source = f"ansible/awx at {git('rev-parse', f'{COMMIT}^{{commit}}').strip()} (Apache-2.0)"
    launched = {kind: " ".join(sorted(meta(name, "fields"))) for kind, name in LAUNCHED.items()}
    document = {
        "source": f"{source}, by {sys.argv[0]}: awx/api, awx/main",
        "kinds": kinds,
        "launched": launched,
        "not_in_lists_of_jobs": without("UnifiedJobListSerializer"),
        "statuses": choices("JobDetailSerializer", "status"),
        "explanations": sorted(set(explanations())),
    }
    print(json.dumps(document, indent=1))


if __name__ == "__main__":
    main()

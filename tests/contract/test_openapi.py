"""`contracts/openapi.yaml` against the service, and its problem codes against the raised codes."""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from reconciler.api import contract
from reconciler.api.problems import CODES
from reconciler.settings import PROJECT

Document = dict[str, Any]

# Paths as the requirements write them.
SEEDS = {
    "/api/v1/admin/nodes/{node_id}/resource-slots": {"get", "post"},
    "/api/v1/admin/allocations/{allocation_id}/force-cleanup": {"post"},
    "/api/v1/admin/allocations/{allocation_id}/force-release": {"post"},
    "/api/v1/admin/allocations/{allocation_id}": {"get"},
    "/api/v1/admin/nodes/{node_id}/enrollment-token": {"post"},
    "/api/v1/admin/nodes/{node_id}/slice-topology/discovery": {"get", "post"},
    "/api/v1/projects/{project_id}/app-instances/{app_instance_id}": {"get"},
    "/api/v1/projects/{project_id}/app-instances/{app_instance_id}/members": {"get"},
    "/api/v1/projects/{project_id}/app-instances/{app_instance_id}/member-operations": {"get"},
    "/api/v1/projects/{project_id}/app-instances/{app_instance_id}/bootstrap-ssh/reconcile": {
        "post"
    },
}
# Packages whose problems reach a caller of the API; other packages are separate programs.
RAISING = (
    *("api", "inventory", "model", "db", "records", "lifecycle", "trust"),
    *("pools/jobs.py", "pools/pools.py", "pools/remote.py", "profiles.py", "settings.py"),
)


@pytest.fixture(scope="module")
def written() -> Document:
    return contract.contract()


@pytest.fixture(scope="module")
def running() -> Document:
    return contract.service()


@pytest.mark.covers("CTRL-1")
def test_contract_and_service_say_the_same(written: Document, running: Document) -> None:
    differences = list(contract.differences(written, running))
    assert not differences, "see `python -m reconciler.api.contract`: " + "; ".join(
        differences[:10]
    )


NODE = ("paths", "/api/v1/admin/nodes/{node_id}", "patch")


@pytest.mark.parametrize(
    ("where", "change"),
    [
        (("paths",), lambda part: part.pop("/api/v1/admin/audit")),
        (NODE[:-1], lambda part: part.pop("patch")),
        ((*NODE, "parameters"), lambda part: part.pop()),
        ((*NODE, "parameters", 0), lambda part: part.update(required=False)),
        ((*NODE, "requestBody"), lambda part: part.update(required=False)),
        ((*NODE, "responses"), lambda part: part.pop("412")),
        ((*NODE, "responses", "200", "headers"), lambda part: part.pop("ETag")),
        ((*NODE, "security", 0), lambda part: part["token"].append("project-member")),
        (NODE, lambda part: part.pop("security")),
        (("components", "schemas", "Node", "properties"), lambda part: part.pop("mode")),
        (("components", "schemas", "Node", "required"), lambda part: part.remove("mode")),
        (("components", "schemas", "Problem", "properties"), lambda part: part.pop("title")),
        (("components", "schemas", "ProblemCode", "enum"), lambda part: part.append("new")),
        (("components", "schemas", "NodeChange", "properties"), lambda part: part.pop("pool")),
        (NODE, lambda part: part.update(description="Outdated.")),
    ],
)
def test_every_kind_of_difference_is_seen_from_both_sides(
    running: Document, where: tuple[Any, ...], change: Callable[[Any], object]
) -> None:
    other = copy.deepcopy(running)
    part: Any = other
    for step in where:
        part = part[step]
    change(part)
    assert list(contract.differences(other, running))
    assert list(contract.differences(running, other))


def test_writing_takes_the_service_over_and_keeps_the_head(running: Document) -> None:
    old = copy.deepcopy(running) | {"info": {"title": "Written by hand."}}
    patch = old["paths"][NODE[1]]["patch"]
    patch["description"] = "Outdated."
    patch["responses"].pop("412")
    old["paths"].pop("/api/v1/admin/audit")
    old["paths"]["/gone"] = {}
    new = contract.generated(old, running)
    assert new == running | {"info": {"title": "Written by hand."}}
    assert list(new["paths"]) == [*list(old["paths"])[:-1], "/api/v1/admin/audit"]
    assert list(contract.differences(new, running)) == []


@pytest.mark.covers("CTRL-1")
def test_the_paths_of_the_seeds(written: Document) -> None:
    for path, verbs in SEEDS.items():
        assert verbs <= set(written["paths"][path]), path


def test_references_lead_somewhere(written: Document) -> None:
    for reference in references(written):
        part: Any = written
        for step in reference.removeprefix("#/").split("/"):
            part = part[step]


def references(part: Any) -> Iterator[str]:
    if isinstance(part, dict):
        if isinstance(part.get("$ref"), str):
            yield part["$ref"]
        for below in part.values():
            yield from references(below)
    elif isinstance(part, list):
        for below in part:
            yield from references(below)


@pytest.mark.covers("CTRL-1")
def test_codes_are_those_that_are_raised() -> None:
    trees = [(file, ast.parse(file.read_text())) for file in sources()]
    raised = {code for _, tree in trees for code in raises(tree)}
    assert raised - CODES == set(), "add them to reconciler/api/problems.py"
    words = {
        node.value
        for _, tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    codes = words | {f"{word}_not_found" for word in words}
    assert CODES - codes == set(), "nothing raises these any more"


def sources() -> Iterator[Path]:
    for name in RAISING:
        place = PROJECT / "reconciler" / name
        yield from [place] if place.is_file() else sorted(place.rglob("*.py"))


def raises(tree: ast.Module) -> Iterator[str]:
    """Return the codes in calls that make a refusal, given directly or by a constant's name."""
    constants = {
        target.id: node.value.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name) or not node.args:
            continue
        first = node.args[0]
        code = first.value if isinstance(first, ast.Constant) else constants.get(ast.unparse(first))
        if isinstance(code, str) and node.func.id in ("Problem", "TrustError"):
            yield code
        elif isinstance(code, str) and node.func.id == "not_found":
            yield f"{code}_not_found"

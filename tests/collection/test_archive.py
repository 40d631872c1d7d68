"""The collection as Galaxy would hand it out: built, installed offline, and documented."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.collection.conftest import Installed

pytestmark = pytest.mark.covers("ECO-1")

ROOT = Path(__file__).resolve().parents[2]
MODULES = {f"gpuaas.slice.{path.stem}" for path in (ROOT / "plugins" / "modules").glob("*.py")}
INVENTORIES = {f"gpuaas.slice.{path.stem}" for path in (ROOT / "plugins/inventory").glob("*.py")}
ROLES = {f"gpuaas.slice.{path.name}" for path in (ROOT / "roles").iterdir() if path.is_dir()}


def test_the_archive_holds_the_collection_and_nothing_else(installed: Installed) -> None:
    """A new folder of the repository is left out in galaxy.yml, or is named here on purpose."""
    tops = {name.partition("/")[0] for name in installed.members}
    assert tops == {
        "CHANGELOG.rst", "FILES.json", "MANIFEST.json", "README.md", "LICENSE",
        "changelogs", "contracts", "docs", "inventory", "meta", "playbooks", "plugins", "profiles",
        "roles",
    }  # fmt: skip
    kinds = {name.split("/")[1] for name in installed.members if name.startswith("plugins/")}
    assert kinds <= {"doc_fragments", "inventory", "module_utils", "modules", "plugin_utils"}
    assert not [name for name in installed.members if "__pycache__" in name or "/." in name]


def test_the_changelog_of_the_version_is_made_of_the_fragments(installed: Installed) -> None:
    version = yaml.safe_load((ROOT / "galaxy.yml").read_text())["version"]
    assert tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"] == version
    fragments = {path.name: path for path in (ROOT / "changelogs" / "fragments").glob("*.yml")}
    record = yaml.safe_load((installed.path / "changelogs" / "changelog.yaml").read_text())
    assert set(record["releases"][version]["fragments"]) == set(fragments)
    text = " ".join((installed.path / "CHANGELOG.rst").read_text().split())
    assert f" v{version} " in text
    for path in fragments.values():
        for section in yaml.safe_load(path.read_text()).values():
            for line in [section] if isinstance(section, str) else section:
                assert " ".join(line.split()) in text, path


def test_everything_that_is_named_somewhere_is_in_the_archive(installed: Installed) -> None:
    """Roles and files are looked up at run time, so a missing file would show late."""
    for playbook in (installed.path / "playbooks").glob("*.yml"):
        text = playbook.read_text()
        for role in re.findall(r"name: gpuaas\.slice\.(\w+)$", text, re.MULTILINE):
            assert (installed.path / "roles" / role / "tasks" / "main.yml").is_file(), role
        for file in re.findall(r"tasks/\w+\.yml", text):
            assert (installed.path / "playbooks" / file).is_file(), file
        for file in re.findall(r"vars_files: \[(\w+\.yml)\]", text):
            assert (installed.path / "playbooks" / "vars" / file).is_file(), file
        for module in re.findall(r"^ +(gpuaas\.slice\.\w+):", text, re.MULTILINE):
            assert module in MODULES, module
    # Pages that README, remedies and documentation name, and the example of a page.
    named = re.compile(r"(?<![\w/])(?:docs|inventory)/[\w/-]+\.(?:md|png|yml)")
    for page in installed.path.rglob("*"):
        text = page.read_text() if page.suffix in (".md", ".py", ".yml") else ""
        for file in named.findall(text):
            assert (installed.path / file).is_file(), f"{page}: {file}"


def test_every_module_is_documented(installed: Installed) -> None:
    assert set(installed.json("ansible-doc", "--json", "--list", "gpuaas.slice")) == MODULES
    inventories = installed.json("ansible-doc", "-t", "inventory", "--json", *sorted(INVENTORIES))
    assert set(inventories) == INVENTORIES
    for name, document in inventories.items():
        options = document["doc"]["options"]
        assert {"compose", "cache", "ca_file", "timeout"} <= set(options), name
        assert set(yaml.safe_load(document["examples"])) <= set(options), name
    documents = installed.json("ansible-doc", "--json", *sorted(MODULES))
    assert set(documents) == MODULES
    assert_groups(installed, documents)
    for name, document in documents.items():
        doc = document["doc"]
        assert doc["description"] and doc["short_description"], f"{name} says nothing of itself"
        for key, value in {**doc["options"], **(document["return"] or {})}.items():
            assert value["description"], f"{name} says nothing of {key}"
        assert {"check_mode", "diff_mode"} <= set(doc["attributes"]), f"{name}: its attributes"
        assert document["return"], f"{name} documents no return value"
        assert doc["requirements"], f"{name} names no requirement"
        others = {other.get("module") or other["plugin"] for other in doc["seealso"]}
        assert others and others <= MODULES | INVENTORIES, f"{name}: its references {others}"
        examples = yaml.safe_load(document["examples"])
        assert any(name in task for task in examples), f"no example calls {name}"
        for task in examples:
            unknown = set(task.get(name) or {}) - set(doc["options"])
            assert not unknown, f"an example of {name} uses {unknown}"


def assert_groups(installed: Installed, documents: dict[str, Any]) -> None:
    """An action group has the modules that share an option."""
    groups = yaml.safe_load((installed.path / "meta" / "runtime.yml").read_text())["action_groups"]
    shared = {"allocation": "allocation_id", "profile": "profile", "reconciler": "token_file"}
    assert set(groups) == set(shared)
    for group, option in shared.items():
        sharing = {name for name, doc in documents.items() if option in doc["doc"]["options"]}
        assert {f"gpuaas.slice.{name}" for name in groups[group]} == sharing


def test_every_role_is_documented(installed: Installed) -> None:
    documents = installed.json("ansible-doc", "--type", "role", "--json", *sorted(ROLES))
    assert set(documents) == ROLES
    for name, document in documents.items():
        main = document["entry_points"]["main"]
        assert main["short_description"] and main["description"], name
        assert (installed.path / "roles" / name.rpartition(".")[2] / "README.md").is_file(), name

"""The collection as Galaxy would hand it out: built, installed offline, documented, and run."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
MODULES = {f"gpuaas.slice.{path.stem}" for path in (ROOT / "plugins" / "modules").glob("*.py")}
ROLES = {f"gpuaas.slice.{path.name}" for path in (ROOT / "roles").iterdir() if path.is_dir()}
PLAYBOOKS = {f"gpuaas.slice.{path.stem}" for path in (ROOT / "playbooks").glob("*.yml")}


@dataclass(frozen=True)
class Installed:
    """members: the files of the archive. path: the installed collection, the only one there is."""

    members: tuple[str, ...]
    home: Path

    @property
    def path(self) -> Path:
        return self.home / "collections" / "ansible_collections" / "gpuaas" / "slice"

    def run(self, *argv: str, **environment: str) -> str:
        """What an Ansible program prints; away from the checkout, and without its ansible.cfg."""
        return _run(self.home, *argv, **environment)

    def json(self, *argv: str) -> dict[str, Any]:
        document = json.loads(self.run(*argv))
        assert isinstance(document, dict)
        return document


def _run(home: Path, program: str, *argv: str, **environment: str) -> str:
    done = subprocess.run(
        [str(BIN / program), *argv],
        cwd=home,
        env={
            **{key: value for key, value in os.environ.items() if not key.startswith("ANSIBLE_")},
            "ANSIBLE_HOME": str(home / "ansible"),
            "ANSIBLE_COLLECTIONS_PATH": str(home / "collections"),
            **environment,
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    home = tmp_path_factory.mktemp("galaxy")
    _run(home, "ansible-galaxy", "collection", "build", str(ROOT), "--output-path", str(home))
    (archive,) = home.glob("gpuaas-slice-*.tar.gz")
    with tarfile.open(archive) as opened:
        members = tuple(member.name for member in opened if member.isfile())
    target = str(home / "collections")
    _run(home, "ansible-galaxy", "collection", "install", str(archive), "-p", target, "--offline")
    return Installed(members, home)


def test_the_archive_holds_the_collection_and_nothing_else(installed: Installed) -> None:
    """A new folder of the repository is left out in galaxy.yml, or is named here on purpose."""
    tops = {name.partition("/")[0] for name in installed.members}
    assert tops == {
        "FILES.json", "MANIFEST.json", "README.md", "LICENSE",
        "changelogs", "meta", "playbooks", "plugins", "profiles", "roles",
    }  # fmt: skip
    kinds = {name.split("/")[1] for name in installed.members if name.startswith("plugins/")}
    assert kinds <= {"doc_fragments", "inventory", "module_utils", "modules"}
    assert not [name for name in installed.members if "__pycache__" in name or "/." in name]


def test_everything_that_is_named_somewhere_is_in_the_archive(installed: Installed) -> None:
    """Roles and files are looked up when they are reached: a missing one would show late."""
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


def test_every_module_is_documented(installed: Installed) -> None:
    assert set(installed.json("ansible-doc", "--json", "--list", "gpuaas.slice")) == MODULES
    documents = installed.json("ansible-doc", "--json", *sorted(MODULES))
    assert set(documents) == MODULES
    for name, document in documents.items():
        doc = document["doc"]
        assert doc["description"] and doc["short_description"], f"{name} says nothing of itself"
        for key, value in {**doc["options"], **(document["return"] or {})}.items():
            assert value["description"], f"{name} says nothing of {key}"
        assert {"check_mode", "diff_mode"} <= set(doc["attributes"]), f"{name}: its attributes"
        assert document["return"], f"{name} documents no return value"
        examples = yaml.safe_load(document["examples"])
        assert any(name in task for task in examples), f"no example calls {name}"
        for task in examples:
            unknown = set(task.get(name) or {}) - set(doc["options"])
            assert not unknown, f"an example of {name} uses {unknown}"


def test_every_role_is_documented(installed: Installed) -> None:
    documents = installed.json("ansible-doc", "--type", "role", "--json", *sorted(ROLES))
    assert set(documents) == ROLES
    for name, document in documents.items():
        main = document["entry_points"]["main"]
        assert main["short_description"] and main["description"], name
        assert (installed.path / "roles" / name.rpartition(".")[2] / "README.md").is_file(), name


def test_every_playbook_is_found_by_its_full_name(installed: Installed) -> None:
    said = installed.run("ansible-playbook", "--syntax-check", "-i", "localhost,", *PLAYBOOKS)
    assert said.count("playbook: ") == len(PLAYBOOKS)


def test_a_playbook_runs_from_the_archive_alone(installed: Installed) -> None:
    """Reads this machine: module, its private utilities, a profile and the result document."""
    said = installed.run(
        "ansible-playbook", "gpuaas.slice.discover", "-i", "localhost,", "-c", "local",
        "-e", f"ansible_python_interpreter={sys.executable}",
        "-e", f"slice_profile_file={installed.path / 'profiles' / 'lab.yml'}",
        ANSIBLE_SHOW_CUSTOM_STATS="true",
    )  # fmt: skip
    result = json.loads(said.rpartition("RUN: ")[2])["slice_result"]
    assert result["ok"] is True
    assert result["evidence"]["discovery"]["schema"] == 1

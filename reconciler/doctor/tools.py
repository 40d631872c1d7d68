"""Checks of the needs of runs: programs, the collection, hardware profiles."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import yaml
from jsonschema import Draft202012Validator

from reconciler.doctor.finding import Finding, fail, ok
from reconciler.runs import contract
from reconciler.settings import Settings

# Programs on the search path of runs (runs.launch). Only the first is beside our interpreter.
_PROGRAMS = {
    "ansible-playbook": "install the Python packages of requirements.lock into one environment",
    "ssh": "install openssh-client",
    "ssh-keygen": "install openssh-client",
}


def programs(_settings: Settings) -> Iterator[Finding]:
    """The programs are on the search path of a run."""
    bin_folder = str(Path(sys.executable).parent)
    path = f"{bin_folder}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    for name, remedy in _PROGRAMS.items():
        program = shutil.which(name, path=path)
        if program:
            yield ok(name, program)
        else:
            yield fail(name, f"not in {path}", expected="the program", remedy=remedy)
    try:
        yield ok("ansible_runner", version("ansible-runner"))
    except PackageNotFoundError:
        yield fail(
            "ansible_runner",
            "not installed",
            expected="the package ansible-runner",
            remedy=_PROGRAMS["ansible-playbook"],
        )


def collection(settings: Settings) -> Iterator[Finding]:
    """The collection gpuaas.slice is installed with all playbooks of the tasks."""
    folder = settings.collections_path / "ansible_collections" / "gpuaas" / "slice"
    playbooks = {file.stem for file in (folder / "playbooks").glob("*.yml")}
    missing = [name for name in contract.PLAYBOOKS if name not in playbooks]
    if missing:
        yield fail(
            "collection",
            f"{folder} without {', '.join(missing) if playbooks else 'any playbook'}",
            expected="the collection gpuaas.slice of this version",
            remedy="ansible-galaxy collection install the archive there, or set"
            " GPUAAS_COLLECTIONS_PATH; in a checkout: scripts/collection-path",
        )
    else:
        yield ok("collection", f"{folder}, {len(playbooks)} playbooks")


def profiles(settings: Settings) -> Iterator[Finding]:
    """Each hardware profile is valid."""
    rules: dict[str, Any] = contract.schema("common")
    validator = Draft202012Validator({**rules, "$ref": "#/$defs/linked_profile"})
    files = sorted(settings.profiles_dir.glob("*.yml"))
    if not files:
        yield fail(
            "profiles",
            f"none in {settings.profiles_dir}",
            expected="hardware profiles, each a YAML file",
            remedy="set GPUAAS_PROFILES_DIR to the folder with the profiles",
        )
    for file in files:
        try:
            wrong = [
                f"{'.'.join(map(str, error.absolute_path)) or 'document'}: {error.message[:120]}"
                for error in validator.iter_errors(yaml.safe_load(file.read_text()))
            ]
        except yaml.YAMLError as unreadable:
            wrong = [" ".join(str(unreadable).split())[:200]]
        if wrong:
            yield fail(
                "profiles",
                f"{file.name}: {'; '.join(wrong[:3])}",
                expected="linked_profile of contracts/runs/common.schema.json",
                remedy=f"correct {file}",
            )
        else:
            yield ok("profiles", file.name)

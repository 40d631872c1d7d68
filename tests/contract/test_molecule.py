"""Molecule scenarios: every role has a scenario that makes drift, repairs it and verifies."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

pytestmark = pytest.mark.covers("ECO-5")

ROOT = Path(__file__).resolve().parents[2]
SCENARIOS = sorted(file.parent for file in (ROOT / "molecule").glob("*/molecule.yml"))
ROLES = sorted(folder.name for folder in (ROOT / "roles").iterdir() if (folder / "tasks").is_dir())
BASE = yaml.safe_load((ROOT / ".config" / "molecule" / "config.yml").read_text())


def roles_of(node: Any) -> Iterator[str]:
    """Return every role that plays or tasks name, at any depth, but not imported playbooks'."""
    if isinstance(node, list):
        for item in node:
            yield from roles_of(item)
    elif isinstance(node, dict):
        for key in ("ansible.builtin.include_role", "ansible.builtin.import_role"):
            if key in node:
                yield str(node[key]["name"])
        for role in node.get("roles", []):
            yield str(role["role"] if isinstance(role, dict) else role)
        for key in ("pre_tasks", "tasks", "block", "rescue", "always"):
            yield from roles_of(node.get(key))


def read(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


def sequence(folder: Path) -> list[str]:
    """Return the steps of `molecule test`, as molecule merges them."""
    scenario = read(folder / "molecule.yml").get("scenario", {})
    steps: list[str] = scenario.get("test_sequence", BASE["scenario"]["test_sequence"])
    return steps


def test_every_role_is_converged_by_a_scenario_of_its_own() -> None:
    converged = {name for folder in SCENARIOS for name in roles_of(read(folder / "converge.yml"))}
    assert {f"gpuaas.slice.{name}" for name in ROLES} == converged


@pytest.mark.parametrize("folder", SCENARIOS, ids=lambda folder: folder.name)
def test_a_scenario_has_idempotence_drift_and_a_look_in_this_order(folder: Path) -> None:
    steps = sequence(folder)
    first = [steps.index(name) for name in ("converge", "idempotence", "side_effect", "verify")]
    assert first == sorted(first)
    for name in ("converge", "side_effect", "verify"):
        assert (folder / f"{name}.yml").is_file(), name
    repaired_by_step = "converge" in steps[steps.index("side_effect") : steps.index("verify")]
    repaired_inside = any(
        "ansible.builtin.import_playbook" in play for play in read(folder / "side_effect.yml")
    )
    assert repaired_by_step or repaired_inside


@pytest.mark.parametrize("folder", SCENARIOS, ids=lambda folder: folder.name)
def test_what_a_scenario_keeps_it_puts_back(folder: Path) -> None:
    prepare = folder / "prepare.yml"
    if not prepare.is_file() or "tasks/keep.yml" not in prepare.read_text():
        return
    assert "cleanup" in sequence(folder)
    cleanup = (folder / "cleanup.yml").read_text()
    assert "tasks/put_back.yml" in cleanup or "tasks/forget_repository.yml" in cleanup


def test_molecule_fetches_nothing() -> None:
    assert BASE["prerun"] is False
    assert BASE["dependency"]["enabled"] is False
    for folder in SCENARIOS:
        document = read(folder / "molecule.yml")
        assert not {"prerun", "dependency"} & set(document), folder.name


def test_included_files_exist() -> None:
    named = [
        path.parent / row.partition("include_tasks: ")[2]
        for path in (ROOT / "molecule").rglob("*.yml")
        for row in path.read_text().splitlines()
        if "include_tasks: " in row
    ]
    assert [path for path in named if not path.is_file()] == []

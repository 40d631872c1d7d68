"""Repairs by parity against bootstrap: different values for a role would undo each other."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible_collections.gpuaas.slice.plugins.module_utils.parity import _slice_parity

pytestmark = pytest.mark.covers("HOST-10")

ROOT = Path(__file__).resolve().parents[2]
REPAIRS = ROOT / "roles" / "slice_parity" / "tasks" / "repair"
SOURCES = ("bootstrap", "bind_topology")
# A repair binds the missing devices; only bind_topology gives devices back to the host.
OWN = {"vfio_binding": {"vfio_binding_exclusive", "vfio_binding_state", "vfio_binding_addresses"}}


def includes(node: Any) -> Iterator[dict[str, Any]]:
    """Return every task that includes a role, at any depth."""
    if isinstance(node, list):
        for item in node:
            yield from includes(item)
    elif isinstance(node, dict):
        if "ansible.builtin.include_role" in node:
            yield node
        for key in ("tasks", "block", "rescue"):
            yield from includes(node.get(key))


def given(path: Path) -> dict[str, dict[str, str]]:
    """Return the variables of each role in a file of tasks or plays, by the role's name."""
    roles: dict[str, dict[str, str]] = {}
    for task in includes(yaml.safe_load(path.read_text())):
        name = str(task["ansible.builtin.include_role"]["name"]).removeprefix("gpuaas.slice.")
        roles[name] = {key: str(value) for key, value in (task.get("vars") or {}).items()}
    return roles


def of_playbooks() -> dict[str, dict[str, str]]:
    roles: dict[str, dict[str, str]] = {}
    for name in SOURCES:
        roles |= given(ROOT / "playbooks" / f"{name}.yml")
    return roles


@pytest.mark.parametrize("path", sorted(REPAIRS.glob("*.yml")), ids=lambda path: path.stem)
def test_a_repair_gives_a_role_what_its_playbook_gives_it(path: Path) -> None:
    (role, mine), *others = given(path).items()
    assert (role, others) == (path.stem, [])
    theirs = of_playbooks()[role]
    excluded = OWN.get(role, set())
    translated = {
        key: value.replace("slice_parity_profile", "slice_profile").replace(
            "slice_parity_allow_reboot", "slice_allow_reboot"
        )
        for key, value in mine.items()
    }
    assert set(translated) == set(theirs)
    assert {k: v for k, v in translated.items() if k not in excluded} == {
        k: v for k, v in theirs.items() if k not in excluded
    }


def test_every_role_that_a_check_names_has_its_repair_and_the_reverse() -> None:
    named = {check.remedy.role for check in _slice_parity.CHECKS} - {""}
    assert named == {path.stem for path in REPAIRS.glob("*.yml")}
    order = yaml.safe_load((REPAIRS.parent / "main.yml").read_text())[1]["vars"]
    assert set(order["slice_parity_order"]) == named

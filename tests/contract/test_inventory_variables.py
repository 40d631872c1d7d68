"""Variables of AWX's inventory, none of which a run takes.

A variable of an inventory stands for each name that a playbook reads and that neither the launch
nor the playbook sets: for optional variables, for parameters of roles, and for results of tasks
that a run does not reach.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml
from jinja2 import nodes
from jinja2.meta import find_undeclared_variables
from jinja2.sandbox import ImmutableSandboxedEnvironment

from reconciler.runs import contract
from reconciler.runs.awx import request
from reconciler.runs.spec import NodeAccess, RunSpec
from tests.playbooks import FOLDER

pytestmark = pytest.mark.covers("CTRL-9", "ECO-4")

ROLES = FOLDER.parent / "roles"
CONDITIONS = ("when", "failed_when", "changed_when", "until", "that", "var")
# Variables of Ansible itself, which override an inventory, and of a loop.
ANSIBLES = {
    *("item", "lookup", "omit", "ansible_check_mode", "ansible_skip_tags"),
    *("ansible_failed_result", "ansible_failed_task"),
}
# The launch names the profile and a single host, so that these are not read or change nothing. The
# last is of the firmware playbook, which always sets it.
UNREAD = {"slice_profile_file", "slice_profile_overrides", "slice_serial", "result_error"}
# Not read in the state that removes the network.
UNREAD |= {
    f"slice_network_{name}"
    for name in (
        *("allowed_networks", "denied_networks", "name_servers"),
        *("packets_per_second", "egress_probe"),
    )
}


class AnyName(dict[str, Any]):
    """Filters and tests of Ansible, which are not called here."""

    def __contains__(self, name: object) -> bool:
        return True

    def __missing__(self, name: str) -> Any:
        return lambda *_: ""

    def get(self, name: str, default: Any = None) -> Any:
        return self[name]


JINJA = ImmutableSandboxedEnvironment()
JINJA.filters = JINJA.tests = AnyName()


@dataclass
class Names:
    """read: each name. unset: names that may be unset where they are read, by `default` or a test.
    given: names that a play, a task or an include sets. made: results of tasks.
    """

    read: set[str] = field(default_factory=set)
    unset: set[str] = field(default_factory=set)
    given: set[str] = field(default_factory=set)
    made: set[str] = field(default_factory=set)


def template(text: str, names: Names) -> None:
    tree = JINJA.parse(text)
    names.read |= find_undeclared_variables(tree)
    defaults = [part for part in tree.find_all(nodes.Filter) if part.name in ("default", "d")]
    tests = [part for part in tree.find_all(nodes.Test) if part.name == "defined"]
    for part in (*defaults, *tests):
        inner: Any = part.node
        while isinstance(inner, nodes.Getattr | nodes.Getitem):
            inner = inner.node
        if isinstance(inner, nodes.Name):
            names.unset.add(inner.name)


def walk(part: Any, names: Names, key: str = "") -> None:
    if isinstance(part, dict):
        for name, value in part.items():
            if name == "register":
                names.made.add(value)
            elif name in ("vars", "ansible.builtin.set_fact"):
                (names.given if name == "vars" else names.made).update(value)
            elif name == "loop_control":
                names.given.add(value.get("loop_var", "item"))
            walk(value, names, name)
    elif isinstance(part, list):
        for value in part:
            walk(value, names, key)
    elif isinstance(part, str):
        template(f"{{{{ {part} }}}}" if key in CONDITIONS else part, names)


def files(path: Path, role: Path | None = None) -> Iterator[Path]:
    """A file of tasks or plays, and those that it includes, also of roles."""
    yield path

    def includes(part: Any) -> Iterator[Path]:
        if isinstance(part, list):
            for item in part:
                yield from includes(item)
        elif isinstance(part, dict):
            for word in ("include_tasks", "import_tasks"):
                if value := part.get(f"ansible.builtin.{word}"):
                    name = value["file"] if isinstance(value, dict) else value
                    base = role / "tasks" if role else FOLDER
                    # The name of a repair is that of its role.
                    for file in sorted(base.glob(name.replace("{{ slice_parity_role }}", "*"))):
                        yield from files(file, role)
            if include := part.get("ansible.builtin.include_role"):
                inner = ROLES / include["name"].removeprefix("gpuaas.slice.")
                yield from files(inner / f"tasks/{include.get('tasks_from', 'main')}.yml", inner)
            for word in ("tasks", "block", "rescue", "always"):
                yield from includes(part.get(word))

    yield from includes(yaml.safe_load(path.read_text()))


@pytest.mark.parametrize("playbook", contract.PLAYBOOKS)
def test_the_launch_or_the_playbook_sets_each_name_that_is_read(playbook: str) -> None:
    names = Names()
    paths = dict.fromkeys(files(FOLDER / f"{playbook}.yml"))
    for path in paths:
        walk(yaml.safe_load(path.read_text()), names)
    (play,) = yaml.safe_load((FOLDER / f"{playbook}.yml").read_text())
    run = {"id": "r", "task_id": "t", "kind": "k", "node_id": "node-1", "correlation_id": "c"}
    spec = RunSpec("r", playbook, NodeAccess("node-1", "192.0.2.7"), {"slice_run": run}, 60, "c")
    launch = {*contract.schema(playbook)["required"], *request.body(spec)["extra_vars"]}
    fixed = launch | ANSIBLES | UNREAD
    assert names.read - fixed - names.given - names.made - {"argument_specs"} == set()
    # Such a result has no value before its task, so the play must give it an initial value.
    assert (names.unset & names.made) - fixed - set(play.get("vars", {})) == set()

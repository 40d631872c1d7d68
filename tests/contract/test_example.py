"""The example inventory with its slice by hand, against the run contract and the playbooks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible_collections.gpuaas.slice.plugins.module_utils.parity._slice_parity import CHECKS

from reconciler.runs import contract
from reconciler.work.kinds.slices import machine_shape, seed_documents
from tests.worked_slice import COMMANDS, INVENTORY, subject

pytestmark = pytest.mark.covers("ECO-1")

ROOT = Path(__file__).resolve().parents[2]
SLICE = INVENTORY / "slice.yml"
PROFILE = "xe9680l-h200"
OTHERS = [path for path in sorted((ROOT / "profiles").glob("*.yml")) if path.stem != PROFILE]
RUN = {
    "id": "run-1",
    "task_id": "task-1",
    "kind": "by hand",
    "node_id": "slicehost",
    "correlation_id": "c-1",
}


def play(words: list[str]) -> subprocess.CompletedProcess[str]:
    program, *rest = words
    return subprocess.run(
        [Path(sys.executable).parent / program, *rest],
        env={
            **{name: value for name, value in os.environ.items() if "ANSIBLE" not in name},
            "ANSIBLE_COLLECTIONS_PATH": str(ROOT / "build" / "collections"),
            "ANSIBLE_PIPELINING": "1",
        },
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )


def render(folder: Path, *words: str) -> dict[str, Any]:
    """The example's variables as Ansible renders them for its host."""
    names = ["slice_profile", "ansible_become", *yaml.safe_load(SLICE.read_text())]
    pairs = ", ".join(f"'{name}': {name}" for name in names)
    task = {
        "ansible.builtin.copy": {
            "dest": str(folder / "made"),
            "content": f"{{{{ {{{pairs}}} | to_json }}}}",
        },
        "vars": {"ansible_python_interpreter": sys.executable, "ansible_connection": "local"},
    }
    plays = [{"hosts": "slice_hosts", "gather_facts": False, "tasks": [task]}]
    (folder / "play.yml").write_text(yaml.safe_dump(plays))
    given = ["-i", "inventory/example", "-e", f"@{SLICE}", *words]
    done = play(["ansible-playbook", str(folder / "play.yml"), *given])
    assert done.returncode == 0, done.stdout + done.stderr
    # Each file of the folder is an inventory.
    assert "Skipping" not in done.stderr, done.stderr
    made: dict[str, Any] = json.loads((folder / "made").read_text())
    return made


def test_its_variables_are_those_of_the_run_contract_and_of_the_reconciler(tmp_path: Path) -> None:
    rendered = render(tmp_path)
    for playbook in ("provision_slice", "verify_absent", "release_slice"):
        properties = contract.schema(playbook)["properties"]
        variables = {name: value for name, value in rendered.items() if name in properties}
        if playbook != "provision_slice":
            variables["slice_allocation"] = {"id": variables["slice_allocation"]["id"]}
        contract.check_vars(playbook, {**variables, "slice_run": RUN})
    assert rendered["slice_profile"]["name"] == PROFILE
    assert rendered["slice_profile"]["fabric"]["interface"] == "ibp65s0"
    # Its commands need root and have no `-b`.
    assert rendered["ansible_become"] is True
    assert rendered["slice_vm"] == machine_shape(rendered["slice_profile"], 1)
    mac = rendered["slice_slots"][0]["management_mac"]
    seed = seed_documents(rendered["slice_allocation"], mac, without_nvlink=True)
    assert rendered["slice_seed"] == seed
    # Parity can pass on a host without the service: the host is not enrolled, and so has no
    # certificate of a node and knows no API.
    exempt = {"node_agent", "name_resolution"}
    assert exempt <= set(rendered["slice_profile"]["not_applicable"])
    assert exempt <= {check.name for check in CHECKS}


@pytest.mark.parametrize("profile", OTHERS, ids=lambda p: p.stem)
def test_each_other_profile_has_what_the_example_takes(profile: Path, tmp_path: Path) -> None:
    made = render(tmp_path, "-e", f"slice_profile_file={profile}")
    assert made["slice_vm"] == machine_shape(made["slice_profile"], 1)


def test_a_release_has_a_higher_fence_than_its_launch(tmp_path: Path) -> None:
    """The host then refuses a launch that goes on after its release."""
    words = {subject(command): command[4:] for command in COMMANDS}
    launch, release = (
        render(tmp_path, *words[name])["slice_slots"][0]["fence"]
        for name in ("provision_slice", "release_slice")
    )
    assert launch < release


@pytest.mark.parametrize("words", COMMANDS, ids=subject)
def test_the_commands_of_the_page_reach_for_the_host(words: list[str]) -> None:
    """A missing variable would end them before they contact a host. Nothing listens on port 1."""
    done = play([*words, "-e", "ansible_host=127.0.0.1", "-e", "ansible_port=1"])
    report = "UNREACHABLE!" if words[0] == "ansible" else "unreachable=1"
    assert report in done.stdout, done.stdout + done.stderr
    assert "failed=0" in done.stdout or words[0] == "ansible"

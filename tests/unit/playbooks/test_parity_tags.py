"""Tags of a machine in MAAS, from the variables of parity to the host's check."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.unit.reconciler.cli.conftest import Gpuaas, gpuaas

__all__ = ["gpuaas"]

pytestmark = pytest.mark.covers("HOST-10")

ROOT = Path(__file__).resolve().parents[3]
SLICE = "gpuaas-profile-slice-vm"
# Writes its parameter to a file, and does not inspect the machine.
MODULE = """#!/usr/bin/python
import json
from ansible.module_utils.basic import AnsibleModule
module = AnsibleModule({{"profile": {{"type": "dict"}}, "slots": {{"type": "list"}}, "intent": {{}},
    "api_topology": {{"type": "dict"}}, "maas_tags": {{"type": "list", "elements": "str"}}}})
with open("{log}", "a") as file:
    file.write(json.dumps(module.params["maas_tags"]) + "\\n")
module.exit_json(parity={{"lines": [], "checks": []}})
"""


def module_tags(folder: Path, given: list[dict[str, Any]]) -> list[Any]:
    """The tags that the real role passes to the module, for each set of its caller's variables."""
    collection = folder / "ansible_collections" / "gpuaas" / "slice"
    (collection / "plugins" / "modules").mkdir(parents=True)
    file = collection / "plugins" / "modules" / "slice_parity.py"
    file.write_text(MODULE.format(log=folder / "log"))
    for part in ("galaxy.yml", "meta", "roles"):
        (collection / part).symlink_to(ROOT / part)
    shared: dict[str, Any] = {"slice_parity_profile": {"name": "lab"}}
    role = {"include_role": {"name": "gpuaas.slice.slice_parity"}}
    steps = [{**role, "vars": shared | variables} for variables in given]
    play = [{"hosts": "localhost", "gather_facts": False, "tasks": steps}]
    (folder / "play.yml").write_text(json.dumps(play))
    words = [
        "-i",
        "localhost,",
        "-c",
        "local",
        "-e",
        f"ansible_python_interpreter={sys.executable}",
    ]
    done = subprocess.run(
        ["ansible-playbook", *words, "play.yml"],
        env={
            "PATH": f"{ROOT}/.venv/bin:{os.environ['PATH']}",
            "ANSIBLE_COLLECTIONS_PATH": str(folder),
            "HOME": str(folder),
            "LC_ALL": "C.UTF-8",
        },
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout
    return [json.loads(line) for line in (folder / "log").read_text().splitlines()]


def test_the_role_leaves_out_only_tags_that_nobody_knows(tmp_path: Path) -> None:
    some = ["virtual", SLICE]
    given: list[Any] = [None, "", [], some]
    # Ansible before 2.19 renders null as ''.
    cases = [{}, *({"slice_parity_maas_tags": tags} for tags in given)]
    assert module_tags(tmp_path, cases) == [None, None, None, [], some]


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ((), "WARN"),
        (("--maas-tag", ""), "FAIL"),
        (("--maas-tag", "virtual", "--maas-tag", SLICE), "PASS"),
    ],
)
def test_by_hand_a_machine_is_judged_by_the_tags_that_were_said(
    gpuaas: Gpuaas, words: tuple[str, ...], line: str
) -> None:
    """The real playbook, role and module, by ansible-runner, on this machine.

    By the profile of a site with MAAS: the lab's profile requires no tag.
    """
    out = gpuaas("host", "parity", "--profile", "xe9680l-h200", *words)
    (verdict,) = (row for row in out.splitlines() if " check=maas_intent " in row)
    assert f" status={line} " in verdict, gpuaas.err

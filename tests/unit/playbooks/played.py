"""Playbooks played by Ansible on a copy of this machine, and the result that each hands over."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from reconciler.runs import contract
from tests.deployed_machine import ROOT, play


def play_states(story: str, folder: Path, variables: Callable[[str], dict[str, Any]]) -> list[str]:
    """Play the story with the variables of state present as $1 and of state absent as $2.

    Returns its output, split at lines of three dashes. It has no error output.
    """
    files = []
    for state in ("present", "absent"):
        file = folder / f"{state}.json"
        file.write_text(json.dumps(variables(state)))
        files.append(str(file))
    environment = {
        "PATH": f"{ROOT}/.venv/bin:{os.environ['PATH']}",
        "ANSIBLE_COLLECTIONS_PATH": f"{ROOT}/build/collections",
        "ANSIBLE_PIPELINING": "1",
        "ANSIBLE_SHOW_CUSTOM_STATS": "1",
        "LC_ALL": "C.UTF-8",
    }
    done = play(story, folder / "scratch", *files, environment=environment, limit_s=240)
    assert done.stderr == ""
    return done.stdout.split("---\n")


def result(text: str) -> dict[str, Any]:
    """The run's only result, as ansible-runner and AWX get it."""
    match = re.search(r'"slice_result": (\{.*\})\s*\}', text, re.DOTALL)
    assert match, text
    return contract.check_result(json.loads(match[1]))

"""The real playbook of public ingress, played by Ansible on a copy of this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.contract import test_variables
from tests.deployed_machine import NEEDS_ROOT
from tests.unit.playbooks.played import play_states, result

pytestmark = [pytest.mark.covers("SLICE-9"), NEEDS_ROOT]

STORY = """
play() {
  ansible-playbook -i localhost, -c local playbooks/apply_ingress.yml -e "@$1" \
    -e ansible_python_interpreter=/usr/bin/python3 2>&1
}
play "$1"
echo ---; play "$2"
echo ---; ls /var/lib/gpuaas/ingress 2>&1
"""


def variables(state: str) -> dict[str, Any]:
    """As the reconciler gives them."""
    given = test_variables.variables("apply_ingress")
    given["slice_ingress"]["rule"]["expires_at"] = 4_000_000_000
    given["slice_ingress"]["state"] = state
    return given


def test_a_run_without_the_lease_is_refused_and_says_that_nothing_is_in_force(
    tmp_path: Path,
) -> None:
    late, gone, left = play_states(STORY, tmp_path, variables)
    refused = result(late)
    assert (refused["ok"], refused["error"]["code"]) == (False, "lease_missing")
    assert refused["evidence"] == {"ingress": {"rules": []}}
    assert result(gone)["evidence"] == {"ingress": {"rules": []}}
    assert "No such file" in left, "no trace of an allocation that is not here"

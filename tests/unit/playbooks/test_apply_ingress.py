"""The real playbook of public ingress, played by Ansible on a copy of this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from reconciler.runs import contract
from tests.contract.test_variables import bundle
from tests.deployed_machine import NEEDS_ROOT, ROOT
from tests.unit.playbooks.played import play_states, result

pytestmark = [pytest.mark.covers("SLICE-9"), NEEDS_ROOT]

ALLOCATION = "0f8fad5b-d9cb-469f-a165-70867728950e"
RULE = "7c9e6679-7425-40de-944b-e07fc1f90ae7"
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
    run = {"id": "r", "task_id": "t", "kind": "k", "node_id": "n", "correlation_id": "c"}
    rule = {
        "id": RULE,
        "protocol": "tcp",
        "public_address": "192.0.2.10",
        "public_port": 443,
        "guest_port": 8443,
        "sources": ["198.51.100.0/24"],
        "expires_at": 4_000_000_000,
    }
    given = {
        "slice_run": run,
        "slice_profile": yaml.safe_load((ROOT / "profiles" / "lab.yml").read_text()),
        "slice_allocation": {"id": ALLOCATION},
        "slice_slots": [bundle(fence=7)],
        "slice_ingress": {"rule": rule, "state": state},
    }
    contract.check_vars("apply_ingress", given)
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

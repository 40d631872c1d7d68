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
mkdir -p /var/lib/gpuaas/ingress
echo '{' > /var/lib/gpuaas/ingress/gpuaas-slice-0f8fad5bd9cb469fa16570867728950e.json
echo ---; play "$1"
echo ---; play "$2"
"""


def variables(state: str) -> dict[str, Any]:
    """As the reconciler gives them."""
    given = test_variables.variables("apply_ingress")
    given["slice_ingress"]["rule"]["expires_at"] = 4_000_000_000
    given["slice_ingress"]["state"] = state
    return given


def test_a_refused_run_says_what_is_in_force_or_nothing_while_that_is_unknown(
    tmp_path: Path,
) -> None:
    late, gone, left, *unreadable = play_states(STORY, tmp_path, variables)
    refused = result(late)
    assert (refused["ok"], refused["error"]["code"]) == (False, "lease_missing")
    assert refused["evidence"] == {"ingress": {"rules": []}}
    assert result(gone)["evidence"] == {"ingress": {"rules": []}}
    assert "No such file" in left, "no trace of an allocation that is not here"
    codes = ("lease_missing", "ingress_file_unreadable")
    for code, text in zip(codes, unreadable, strict=True):
        unknown = result(text)
        assert (unknown["error"]["code"], unknown["evidence"]) == (code, {})

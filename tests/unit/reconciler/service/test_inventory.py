"""The collection's inventory plugin over the real service."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.plugins.inventory.inventories import ROOT, hosts, inventory, source
from tests.unit.reconciler.api.stack import NODE, Stack
from tests.unit.reconciler.service.service import serving, until

pytestmark = pytest.mark.covers("ECO-1", "ECO-4")


def test_nodes_of_the_service_are_hosts(selling: Stack, tmp_path: Path) -> None:
    with serving(selling.settings.state_dir) as service:
        service.start("serve", "--api-only")
        until(service.alive)
        for who in ("admin", "member"):
            (tmp_path / who).write_text(selling.secrets[who] + "\n")
        token = str(tmp_path / "member")
        member = source(tmp_path, "reconciler", "member", url=service.url, token_file=token)
        site = {"GPUAAS_API": service.url, "GPUAAS_TOKEN_FILE": str(tmp_path / "admin")}
        # As the credential of AWX gives it when there is no CA of the site.
        site["GPUAAS_CA_FILE"] = ""
        done = inventory(ROOT / "inventory" / "reconciler.yml", member, **site)
    node = hosts(done)[NODE]
    assert node["ansible_host"] == "192.0.2.7"
    assert (node["gpuaas_state"], node["gpuaas_mode"]) == ("ready", "slice")
    assert node["gpuaas_enabled"] is True
    assert '"state_ready"' in done.stdout
    assert '"mode_slice"' in done.stdout
    assert '"sellable"' in done.stdout
    assert "member.reconciler.yml: role_required: expected" in done.stderr

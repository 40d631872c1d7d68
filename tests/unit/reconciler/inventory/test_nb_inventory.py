"""NetBox's own inventory plugin over the objects of a sync: the example of docs/netbox.md."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from reconciler.db.engine import transaction
from tests.standin.netbox import TOKEN
from tests.unit.plugins.inventory.inventories import ROOT, hosts
from tests.unit.reconciler.inventory.conftest import Pass, device

pytestmark = [pytest.mark.covers("ECO-2"), pytest.mark.slow]
# The plugin imports it for an unused group.
PYTZ = ("pytz==2025.2", "sha256:5ddf76296dd8c44c26eb8f4b6f35488f3ccbf6fbbd7adee0b7262d43f0ec2f00")


def test_the_example_of_the_page_lists_nodes_and_slices(netbox: Pass, tmp_path: Path) -> None:
    scripts, pytz = ROOT / "scripts", ROOT / "build" / PYTZ[0].replace("==", "-")
    subprocess.run([scripts / "unpack-wheel", *PYTZ, pytz], check=True)
    done = subprocess.run(
        [scripts / "ansible-collections"], check=True, capture_output=True, text=True
    )
    with transaction(netbox.site.engine) as conn:
        key = netbox.site.allocate(conn)
    netbox.begin(device("n1", serial="S7", asset_tag="A-17"))
    assert netbox(apply=True).complete

    page = (ROOT / "docs" / "netbox.md").read_text()
    example = yaml.safe_load(page.partition("```yaml\n")[2].partition("```")[0])
    manager = netbox.manager
    example |= {
        "api_endpoint": f"https://127.0.0.1:{manager.port}",
        "ca_path": str(manager.ca_file),
    }
    example["token"]["value"] = TOKEN
    source = tmp_path / "site.netbox.yml"
    source.write_text(yaml.safe_dump(example))
    listed = subprocess.run(
        [Path(sys.executable).parent / "ansible-inventory", "-i", source, "--list"],
        env={
            **{name: value for name, value in os.environ.items() if "ANSIBLE" not in name},
            "ANSIBLE_COLLECTIONS_PATH": done.stdout.strip(),
            "ANSIBLE_INVENTORY_ENABLED": "auto",
            "ANSIBLE_INVENTORY_ANY_UNPARSED_IS_FAILED": "true",
            # The plugin keeps NetBox's description in the folder above.
            "ANSIBLE_LOCAL_TEMP": str(tmp_path / "ansible" / "tmp"),
            "PYTHONPATH": str(pytz),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    hostvars = hosts(listed)
    slice_ = f"gpuaas-slice-{key.replace('-', '')}"
    assert set(hostvars) == {"n1", slice_}
    node = hostvars["n1"]
    assert (node["gpuaas_state"], node["ansible_host"]) == ("ready", "10.0.2.15")
    assert (node["serial"], node["asset_tag"]) == ("S7", "A-17")
    assert hostvars[slice_]["gpuaas_allocation_id"] == key
    assert hostvars[slice_]["ansible_host"].startswith("10.100.0.")
    assert "gpuaas_ready" in listed.stdout
    assert netbox.record["violations"] == []

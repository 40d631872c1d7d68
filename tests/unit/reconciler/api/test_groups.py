"""From the host's sysfs to the API's refusal: an IOMMU group goes to one slot, or to none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ansible_collections.gpuaas.slice.plugins.module_utils.disk import _block
from ansible_collections.gpuaas.slice.plugins.module_utils.topology import _slice_discovery

from reconciler.db.engine import transaction
from reconciler.lifecycle import host
from tests.unit.plugins.module_utils.conftest import Machine
from tests.unit.plugins.module_utils.topology.test_slice_discovery import (
    LEFT,
    PROFILE,
    disk,
    fill,
    prepared,
)
from tests.unit.reconciler.api.refusals import refused
from tests.unit.reconciler.api.stack import ACT, NODE, Stack
from tests.unit.reconciler.api.test_slots import approve

pytestmark = pytest.mark.covers("CTRL-3")

GPU, SECOND = "0000:23:00.0", "0000:24:00.0"


@pytest.fixture
def machine(tree: Path, script: Any, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """A prepared host with two GPUs in groups of their own, and two blank disks."""
    machine = Machine(tree)
    fill(machine)
    prepared(machine, script)
    script.on("devlink", "-j", "dev", "info", out='{"info":{}}')
    monkeypatch.setattr(_block, "disks", lambda: [disk(0), disk(1)])
    monkeypatch.setattr(
        _block, "usages", lambda disks: {disk.kernel_name: _block.Usage() for disk in disks}
    )
    return machine


def discovered(stack: Stack) -> list[dict[str, Any]]:
    """Look at the host and record it as the node's; the bundles that it suggests."""
    document = _slice_discovery.discover(PROFILE)
    identity = document["identity"] | {"host_key": "ssh-ed25519 AAAA"}
    with transaction(stack.engine) as conn:
        host.enrolled(conn, NODE, ACT, **identity)
        host.bootstrapped(conn, NODE, ACT, identity=identity)
        host.record_discovery(conn, NODE, document | {"identity": identity}, ACT)
    return [candidate["bundle"] for candidate in document["candidates"]]


def test_groups_of_their_own_are_approved(new: Stack, machine: Machine) -> None:
    assert approve(new, *discovered(new)).status_code == 201


@pytest.mark.parametrize(
    ("neighbour", "code"),
    [
        (("0000:23:00.1", "8086:1533", "igb"), "group_not_viable"),
        # No driver, and yet it would go to the tenant of the first.
        ((SECOND, "1234:11e8", ""), "group_shared"),
        ((SECOND, "1234:11e8", "vfio-pci"), "group_shared"),
    ],
)
def test_a_neighbour_in_the_gpus_group_is_refused(
    new: Stack, machine: Machine, neighbour: tuple[str, str, str], code: str
) -> None:
    address, id_, driver = neighbour
    machine.pci(address, id_, above=LEFT, node=0, group=10, driver=driver)
    bundle = discovered(new)[0]
    assert bundle["gpu_pci_address"] == GPU
    problem = refused(new, lambda: approve(new, bundle))
    assert problem["code"] == code
    assert address in problem["found"]

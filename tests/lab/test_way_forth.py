"""Return of an ordinary machine to slice mode, by a single call (HOST-15).

The same is then done by hand: the single-file program, and both directions as playbooks.
"""

from __future__ import annotations

import re
import time

import pytest

from lab.demo import host_steps
from lab.demo.stage import Stage
from tests.lab import byhand
from tests.lab.conftest import Chapter
from tests.lab.proof import prove_again

pytestmark = pytest.mark.covers("HOST-15")

BOOTSTRAP = byhand.PROGRAMS / "ops" / "gpuaas_slice_host_deploy_bootstrap.sh"
_STEP = "GPUAAS_SLICE_BOOTSTRAP"


@pytest.mark.covers("HOST-1")
def test_the_commissioning_script_takes_the_firmwares_word_for_the_iommu(
    stage: Stage, story: Chapter
) -> None:
    """No kernel argument enables the IOMMU; some kernels use it all the same, and then groups
    count."""
    story.needs("baremetal")
    assert "DMAR" in stage.on_host("ls", "/sys/firmware/acpi/tables").split()
    groups = stage.on_host("ls", "/sys/kernel/iommu_groups").split()
    checks = {check["check"]: check for check in byhand.commissioning(stage)["FIRMWARE"]}
    assert (checks["kvm"]["status"], checks["sriov"]["status"]) == ("PASS", "PASS")
    check = checks["iommu_groups"]
    if groups:
        assert (check["status"], check["detail"]) == ("PASS", f"{len(groups)} IOMMU groups")
    else:
        assert check["status"] == "WARN"
        assert "the firmware shows DMAR, the kernel does not ask for it" in check["detail"]


@pytest.mark.covers("HOST-4")
def test_the_standalone_script_bootstraps_with_a_reboot_of_its_own(
    stage: Stage, story: Chapter
) -> None:
    """Run it as cloud-init does: the machine has no other file of the project."""
    story.needs("baremetal")
    before = byhand.boot(stage)
    settings = {"GPUAAS_SLICE_PROFILE": "lab", "GPUAAS_SLICE_REBOOT_IF_REQUIRED": "1"}
    first = byhand.standalone(stage, BOOTSTRAP, **settings)
    # The reboot may cut the connection before the exit status arrives.
    assert first.returncode in (0, 255), first.stdout + first.stderr
    steps = _steps(first)
    assert (steps["kernel"], steps["fabric"], steps["network"], steps["reboot"]) == (
        *("CHANGED", "CHANGED", "CHANGED", "CHANGED"),
    ), first.stdout
    byhand.booted(stage, after=before)

    again = byhand.standalone(stage, BOOTSTRAP, **settings)
    assert again.returncode == 0, again.stdout + again.stderr
    proved = _steps(again)
    assert set(proved) == {*steps, "in_effect"} - {"reboot"}
    assert set(proved.values()) == {"PASS"}, again.stdout
    assert "intel_iommu=on" in stage.on_host("cat", "/proc/cmdline")
    story.done["bootstrapped"] = True


def test_one_playbook_leads_back(stage: Stage, story: Chapter) -> None:
    """Play it without the reconciler, which records a bare-metal machine all the time."""
    story.needs("bootstrapped")
    output = byhand.playbooks(stage, "restore_baremetal", slice_allow_reboot=True)
    assert byhand.changed(output) != {"0"}
    # The playbook itself fails if anything remains, so its success covers the rest.
    assert "intel_iommu" not in stage.on_host("cat", "/proc/cmdline")
    byhand.booted(stage)
    end = time.monotonic() + 300
    # A task may have reached the host while it booted.
    while stage.api().get(stage.path())["state"] != "ready":
        assert time.monotonic() < end, "the node is not ready"
        time.sleep(1)


def test_it_becomes_a_slice_host_again(stage: Stage, story: Chapter) -> None:
    story.needs("baremetal")
    body = {"to": "slice", "allow_reboot": True, "reason": "sold in slices"}
    first = stage.api().post(stage.path("/conversion"), body)
    bootstrap = stage.follow(first)
    assert bootstrap["rebooted"]
    assert stage.api().get(stage.path())["mode"] == "slice"
    slots = stage.api().get(stage.path("/resource-slots"))["items"]
    # The slots are approved as before, and not sold before the host is proven.
    assert {slot["status"] for slot in slots} == {"disabled"}
    kinds, result = [first["kind"]], bootstrap
    while following := result.get("next_task_id"):
        result = stage.follow({"id": following})
        kinds.append(stage.api().get(f"/admin/tasks/{following}")["kind"])
    assert kinds == [
        "node.bootstrap",
        "node.bind_topology",
        "slice.topology_discover",
        "node.parity",
    ]
    checks = stage.api().get(stage.path("/parity"))["document"]["checks"]
    assert result["failures"] == 0, [check for check in checks if check["status"] == "FAIL"]
    # Nothing recorded how the disks were used on the ordinary machine, so their proofs have ended.
    host_steps.transition(stage)
    prove_again(stage)
    slots = stage.api().get(stage.path("/resource-slots"))["items"]
    assert {slot["status"] for slot in slots} == {"available"}
    story.done["way_forth"] = True


@pytest.mark.covers("HOST-6", "HOST-8")
def test_one_playbook_leads_forth(stage: Stage, story: Chapter) -> None:
    """Do the steps of the single call by hand: missing parts are made, bound and proven."""
    story.needs("way_forth")
    slot = stage.bundles()[0]
    subnet, function = stage.profile()["network"]["subnet"], slot["fabric_vf_pci_address"]
    lost = f"""set -e
iptables -t nat -D POSTROUTING -s {subnet} -j MASQUERADE
cd /sys/bus/pci
echo > devices/{function}/driver_override
echo {function} > drivers/vfio-pci/unbind
"""
    stage.on_host("sh", "-s", stdin=lost)
    output = byhand.playbooks(stage, "convert_to_slice", slice_allow_reboot=True)
    assert byhand.changed(output) != {"0"}
    assert re.search(r"GPUAAS_SLICE_PARITY_SUMMARY status=\w+ checks=\d+ failures=0 ", output)
    driver = stage.on_host("readlink", f"/sys/bus/pci/devices/{function}/driver")
    assert driver.strip().endswith("/vfio-pci")
    # The service may have compared while the function was missing; the next comparison clears that.
    stage.task(stage.path("/drift"))
    prove_again(stage)
    again = byhand.playbooks(stage, "convert_to_slice")
    assert byhand.changed(again) == {"0"}, again[-6000:]


def _steps(done: byhand.Done) -> dict[str, str]:
    """Return the result of each step of the script."""
    steps = [byhand.fields(_STEP, line) for line in done.stdout.splitlines()]
    return {step["step"]: step["status"] for step in steps}

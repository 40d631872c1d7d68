"""Slice host over time: drift is repaired, a second run changes nothing, a reboot is survived.

Plays on the host that test_main_path.py left: two slots, bound and available.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lab.demo import slice_steps
from lab.demo.stage import NODE, Stage
from tests.lab import scenario
from tests.lab.byhand import parity, reboot, token
from tests.lab.conftest import Chapter
from tests.lab.proof import prove_again


@pytest.mark.covers("HOST-4", "HOST-6")
def test_a_second_bootstrap_changes_nothing_and_drift_is_repaired(
    stage: Stage, story: Chapter
) -> None:
    """Play the scenario: converge, idempotence, drift with repair by the same run, verify."""
    story.needs("prepared")
    scenario.play(stage, "slice_host")


@pytest.mark.covers("I14", "I15", "I17")
def test_what_the_host_holds_is_what_the_records_say(stage: Stage, story: Chapter) -> None:
    """Host and records agree before, with and after a tenant; a stopped VM keeps its claim."""
    story.needs("prepared")
    assert _differences(stage) == set()
    slice_steps.provision(stage)
    assert _differences(stage) == set()
    allocation = stage.facts["allocation"]
    # From outside this looks like a guest that has powered itself off.
    stage.on_host("virsh", "destroy", f"gpuaas-slice-{allocation['id'].replace('-', '')}")
    assert _differences(stage) == {"guest_stopped"}
    slot = slice_steps.slot_of(stage, allocation)
    assert (slot["status"], slot["health_state"]) == ("active", "degraded")
    assert stage.api().get(f"/admin/allocations/{allocation['id']}")["state"] == "active"
    assert slice_steps.release(stage)["slot"] == "available"
    assert _differences(stage) == set()


def _differences(stage: Stage) -> set[str]:
    result = stage.task(stage.path("/drift"))
    assert (result["unknown"], result["skipped"]) == ({}, [])
    return {one["code"] for one in result["differences"]}


@pytest.mark.covers("HOST-10")
def test_an_operator_who_is_not_root_proves_and_repairs_by_sudo(
    stage: Stage, story: Chapter
) -> None:
    story.needs("prepared")
    subnet = stage.profile()["network"]["subnet"]
    rule = ["POSTROUTING", "-s", subnet, "-j", "MASQUERADE"]
    try:
        stage.on_host("sh", "-s", stdin=OPERATOR)
        stage.on_host("iptables", "-t", "nat", "-D", *rule)
        report = parity(stage, *token(stage), "--remediate", user="hpcadmin")
    finally:
        stage.on_host("systemctl", "restart", "gpuaas-slice-network-baseline.service")
        stage.on_host("sh", "-s", stdin=GONE)
    assert (report.status, report.having("FAIL")) == (0, {}), report.told
    assert report.checks["vfio_binding"]["status"] == "PASS"
    told = [line for line in report.told.splitlines() if "repaired: " in line]
    assert told == ["repaired: slice_network"]


@pytest.mark.covers("HOST-4", "HOST-6", "HOST-7", "HOST-8", "I16")
def test_a_reboot_closes_the_gate_until_the_host_is_proven_again(
    stage: Stage, story: Chapter
) -> None:
    """Boot services bring the slice host back, but nothing is sold before parity passes (I16)."""
    story.needs("prepared")
    functions = _functions(stage)
    assert len(functions) == stage.profile()["fabric"]["vfs_per_pf"]
    gpus, approved = _gpus(stage), _recorded(stage)
    stage.on_host("sh", "-c", f"'{GREEDY}'")
    try:
        reboot(stage)
        told = stage.on_host("dmesg").splitlines()
    finally:
        stage.on_host("sh", "-c", f"'{CONTENT}'")
    # The stub driver was there before the binding and got only the GPUs that belong to no slot.
    claims = [line for line in told if "claimed by stub" in line]
    had = {address for address in gpus if any(address in line for line in claims)}
    assert had == gpus - approved != set()
    allocation = slice_steps.launch(stage)
    ended = slice_steps.wait_for(stage, allocation["id"], {"active", "failed"})
    assert ended["state"] == "failed"
    assert ended["error"]["code"] == "boot_changed"
    # Nothing was written, so no wipe is needed; but nothing may be sold either.
    assert slice_steps.slot_of(stage, ended)["status"] == "disabled"
    prove_again(stage)
    # The card assigns new MAC addresses at every boot; guests are identified by these.
    assert _functions(stage) == functions


@pytest.mark.covers("HOST-13")
def test_the_hosts_certificate_is_renewed_and_sshd_shows_the_new_one(
    stage: Stage, story: Chapter
) -> None:
    story.needs("prepared")
    old = stage.api().get(stage.path())
    told = stage.task(stage.path("/certificate"))["certificate"]
    new = stage.api().get(stage.path())
    assert told["principals"] == [NODE]
    assert new["certificate_valid_until"] > old["certificate_valid_until"]
    shown = stage.on_host("ssh-keyscan", "-T", "60", "-c", "-t", "ed25519", "127.0.0.1")
    assert new["certificates"][0]["certificate"] in shown
    assert old["certificates"][0]["certificate"] not in shown
    # Only the next connection uses the new certificate, so a separate run follows.
    stage.task(stage.path("/slice-topology/discovery"))


OPERATOR = """set -e
useradd --create-home --shell /bin/sh hpcadmin
install -d -m 700 -o hpcadmin /home/hpcadmin/.ssh
install -m 600 -o hpcadmin /root/.ssh/authorized_keys /home/hpcadmin/.ssh/
echo 'hpcadmin ALL=(ALL) NOPASSWD:ALL' > /etc/sudoers.d/gpuaas-test
"""
# The user's last session may take a moment to end.
GONE = """
rm -f /etc/sudoers.d/gpuaas-test
id hpcadmin || exit 0
loginctl terminate-user hpcadmin
for _ in $(seq 30); do userdel -r hpcadmin && exit; sleep 1; done
exit 1
"""
# A driver that takes every GPU at boot, as the vendor's does; the lab's stand-in has none.
GREEDY = """
echo options pci-stub ids=1234:11e8 > /etc/modprobe.d/gpuaas-test.conf
echo pci-stub > /etc/modules-load.d/gpuaas-test.conf
"""
CONTENT = """
rm -f /etc/modprobe.d/gpuaas-test.conf /etc/modules-load.d/gpuaas-test.conf
modprobe -r pci-stub
"""


def _gpus(stage: Stage) -> set[str]:
    found = stage.on_host("sh", "-c", "'grep -lx 0x11e8 /sys/bus/pci/devices/*/device'")
    return {Path(line).parent.name for line in found.split()}


def _recorded(stage: Stage) -> set[str]:
    return set(json.loads(stage.on_host("cat", "/etc/gpuaas/vfio-binding.json"))["devices"])


def _functions(stage: Stage) -> dict[str, str]:
    """Return the MAC of every virtual function, by its card's MAC, which no boot changes."""
    links = json.loads(stage.on_host("ip", "-j", "link", "show"))
    return {
        f"{link['address']}/{function['vf']}": function.get("address") or function["mac"]
        for link in links
        for function in link.get("vfinfo_list", [])
    }

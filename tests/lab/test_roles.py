"""Molecule scenarios on the slice host: idempotence, drift, repair, and no leftovers.

Plays on a prepared host with two slots, bound and available. No scenario touches a slot's devices.
A scenario that needs a device or a disk takes an unapproved candidate.
"""

from __future__ import annotations

import pytest

from lab.demo.stage import Stage
from scripts import scenarios
from tests.lab import scenario
from tests.lab.conftest import Chapter
from tests.lab.proof import changed_lines, prove_again

# Requirements that each scenario shows. A scenario without an entry cannot be played.
ROWS = {
    "api_names": ("HOST-14",),
    "baremetal": ("CTRL-15",),
    # Plays on the test machine with a stand-in for RACADM, because the lab host has no iDRAC.
    "bios_settings": (),
    "boot_configuration": ("HOST-4",),
    "fabric_functions": ("HOST-7",),
    "host_tuning": ("HOST-5",),
    "libvirt_host": ("HOST-4",),
    "racadm": ("HOST-2",),
    "slice_disk": ("I10",),
    "slice_network": ("HOST-6",),
    "slice_packages": ("HOST-4",),
    "slice_parity": ("HOST-10",),
    "slice_vm": ("I10", "I17"),
    "vfio_binding": ("HOST-8",),
}
SCENARIOS = [
    pytest.param(name, marks=pytest.mark.covers("ECO-5", *ROWS[name]))
    for name in scenarios.SCENARIOS.rows
    if name != scenarios.EVERY_DAY
]

# Possible leftovers of a scenario. Wipe proofs are true statements and stay, and so does the mark
# that a GPU has been used, which the tenant of a whole machine leaves.
LOOK = r"""
cd /
for place in etc/gpuaas etc/hosts etc/passwd etc/group etc/sudoers.d etc/apt etc/sysctl.d \
  etc/modprobe.d etc/modules-load.d etc/initramfs-tools etc/default/grub etc/default/grub.d \
  boot/grub/grub.cfg etc/fstab etc/netplan etc/dnsmasq.d etc/systemd/system \
  etc/security/limits.d usr/local/sbin var/lib/gpuaas/before \
  var/lib/gpuaas/dnsmasq/hosts.d var/lib/gpuaas/clones var/lib/gpuaas/seeds; do
  [ -e $place ] || continue
  find $place -type l -printf "%p -> %l\n"
  find $place -type f ! -name "*lock*" -exec sha256sum {} +
done | sort -k 2
for entry in var/lib/gpuaas/ledger/*.json; do
  echo "$(sed 's/"gpu_used": [a-z]*//' $entry | sha256sum) $entry"
done
ls -d var/lib/gpuaas-molecule* home/* 2> /dev/null
for device in sys/bus/pci/devices/*; do echo $device $(readlink $device/driver); done
grep . sys/bus/pci/drivers_autoprobe sys/bus/pci/devices/*/sriov_drivers_autoprobe \
  sys/bus/pci/devices/*/sriov_numvfs /dev/null
for card in sys/bus/pci/devices/*; do
  [ -e $card/virtfn0 ] || continue
  # Of every function its number and its MAC, which the first comma ends.
  for port in $card/net/*; do
    ip link show dev ${port##*/} | sed -n "s|^ *\(vf [0-9][^,]*\).*|$card \1|p"
  done
done
dpkg-query -W
iptables -t nat -S | sort
ovs-vsctl list-ports ovsbr0
virsh -q list --all
sysctl net.ipv4.ip_forward net.core.rmem_max net.ipv4.tcp_rmem
stat -c %a /var/lib/libvirt
systemctl is-active libvirtd.socket libvirtd-ro.socket libvirtd-admin.socket dnsmasq
systemctl is-enabled libvirtd.socket libvirtd-ro.socket libvirtd-admin.socket dnsmasq
systemctl list-unit-files --no-legend --no-pager "gpuaas*"
true
"""


@pytest.fixture(scope="module")
def looks(stage: Stage) -> list[str]:
    """Snapshots of the host before the first scenario and after each.

    A scenario is compared with the latest snapshot, so that it answers for itself only."""
    return [_look(stage)]


@pytest.mark.parametrize("name", SCENARIOS)
def test_drift_of_what_a_role_owns_is_repaired(
    name: str, stage: Stage, story: Chapter, looks: list[str]
) -> None:
    story.needs("prepared")
    try:
        scenario.play(stage, name)
    finally:
        looks.append(_look(stage))
    assert changed_lines(*looks[-2:]) == []


@pytest.mark.covers("HOST-10")
def test_the_host_is_still_one_that_may_be_sold(stage: Stage, story: Chapter) -> None:
    story.needs("prepared")
    prove_again(stage)


def _look(stage: Stage) -> str:
    return stage.on_host("sh", "-s", stdin=LOOK)

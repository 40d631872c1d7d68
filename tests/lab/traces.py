"""Snapshot of a machine, for a comparison that is independent of the records of slice mode.

The way back compares only its own recorded changes. Here every part counts that is not excepted
below.
"""

from __future__ import annotations

import re

from ansible_collections.gpuaas.slice.plugins.module_utils.boot import _tuning_profiles
from ansible_collections.gpuaas.slice.plugins.module_utils.network import _baseline_files

from lab.demo.stage import Stage

# Permitted differences between a machine as deployed and the same after its time as a slice host.
EXPECTED = {
    r"/etc/gpuaas/enrolment\.env": "the machine stays enrolled",
    r"/etc/ssh/gpuaas_.*": "the machine stays enrolled: whose operators it believes",
    r"/etc/ssh/ssh_host_ed25519_key-cert\.pub": "the machine stays enrolled: its certificate",
    r"/etc/ssh/sshd_config\.d/60-gpuaas\.conf": "the machine stays enrolled: what sshd shows",
    r"/etc/fstab": "the disks that were taken over were wiped: their lines stay out of force",
    r"/etc/fstab\.gpuaas-slice-storage-backup-\d+": "how fstab was before the first wipe",
    r"/etc/(passwd|group|shadow|gshadow|subuid|subgid)-": "useradd's copies: test_upkeep, roles",
    r"/etc/\.pwd\.lock": "useradd's lock, which is empty: test_upkeep, roles",
    r"/boot/grub/grub\.cfg": "the image's own was written by hand; now update-grub wrote it",
    r"/boot/grub/grubenv": "GRUB's record of the last boot",
    # These programs may start for the first time after the first snapshot.
    r"/etc/openvswitch/.*": "Open vSwitch's database and log of changes; bridges are asked by name",
    r"/etc/libvirt/nwfilter/.*\.xml": "libvirtd gives each a UUID at its first start",
    r"/etc/libvirt/qemu/networks/default\.xml": "libvirtd gives it a UUID at its first start",
    r"/etc/apparmor\.d/libvirt/libvirt-[0-9a-f-]+(\.files)?": "libvirt's, one for each UUID it ran",
}
_EXPECTED = re.compile("|".join(EXPECTED))
_SYSCTL = sorted(
    {
        "net.ipv4.ip_forward",
        *_baseline_files.NEIGHBOURS,
        *(key for definition in _tuning_profiles.DEFINITIONS.values() for key in definition.sysctl),
    }
)

# Each build makes a different initramfs; its content follows from the files, which are compared.
LOOK = rf"""set -e
udevadm settle --timeout=240 || true
find /etc /usr/local /boot -xdev ! -type d ! -name 'initrd.img-*' -printf '%p\tis %M %U:%G %l\n'
find /etc /usr/local /boot -xdev -type f ! -name 'initrd.img-*' -exec sha256sum {{}} + \
  | sed 's/^\([^ ]*\)  \(.*\)$/\2\tholds \1/'
find /var/cache -maxdepth 1 -name 'gpuaas*' -printf '%p\tis %M %U:%G\n'
systemctl list-unit-files --state=enabled,masked --plain --no-legend \
  | while read -r unit state _preset; do printf 'unit %s\tis %s\n' "$unit" "$state"; done
for key in {" ".join(_SYSCTL)}; do printf 'sysctl %s\tis %s\n' "$key" "$(sysctl -n "$key")"; done
cd /sys/bus/pci/devices
for device in *; do
  printf 'device %s\tdriver %s, override %s, functions %s\n' "$device" \
    "$(basename "$(readlink "$device/driver")" | sed 's/^$/none/')" \
    "$(cat "$device/driver_override")" \
    "$(cat "$device/sriov_numvfs" "$device/sriov_drivers_autoprobe" 2> /dev/null | tr '\n' ' ')"
done
"""


def look(stage: Stage) -> set[str]:
    """Return files with their digests, enabled units, kernel settings and PCI devices."""
    return set(stage.on_host("sh", "-s", stdin=LOOK, limit_s=600).splitlines())


def differences(before: set[str], after: set[str]) -> list[str]:
    """Return the removed and added entries except EXPECTED, sorted by subject."""
    rows = [(row, f"- {row}") for row in before - after]
    rows += [(row, f"+ {row}") for row in after - before]
    return [line for row, line in sorted(rows) if not _EXPECTED.fullmatch(row.split("\t")[0])]

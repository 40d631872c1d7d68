#!/bin/sh
# Removal of all traces of script.sh, outside its timing: domain, address, every byte on the slot's disk.
# The product refuses a disk that holds data although its wipe proof stands.
# Usage: undo.sh NAME DISK MAC IP
set -u
name=$1 disk=$2 mac=$3 ip=$4

# Each of these may already be gone, or may never have existed.
virsh -q destroy "$name"
virsh -q undefine "$name"
rm -f "/var/lib/libvirt/images/$name.iso" "/var/lib/gpuaas/dnsmasq/hosts.d/$name" "/var/log/libvirt/qemu/$name-console.log"
dhcp_release ovsbr0 "$ip" "$mac"

set -e
systemctl restart dnsmasq
# The whole disk: a guest has grown its root file system to the end, and the wipe proof covers all of it.
blkdiscard --zeroout "$disk"
udevadm settle
# The kernel must forget the guest's partitions before the product looks at the disk.
blockdev --rereadpt "$disk"
udevadm settle

"""Packages of a freshly deployed slice host, per distribution."""

from __future__ import annotations

from lab.rootfs import Recipe

KERNEL = {"debian": ["linux-image-amd64"], "ubuntu": ["linux-image-generic"]}

BASE = [
    "systemd-sysv", "udev", "dbus", "kmod", "initramfs-tools", "lz4", "zstd", "busybox",
    "grub-efi-amd64", "openssh-server", "python3", "ca-certificates", "curl", "sudo",
    "util-linux", "procps", "psmisc", "lsof", "less", "file", "iproute2", "iputils-ping",
    "netplan.io", "ethtool", "apparmor", "dmidecode", "pciutils", "numactl", "python3-apt", "gpg",
    "cloud-init",
]  # fmt: skip
STORAGE = [
    "nvme-cli", "e2fsprogs", "dosfstools", "fdisk", "gdisk", "parted", "mdadm", "lvm2", "fio",
]  # fmt: skip
VIRTUALIZATION = [
    "libvirt-daemon-system", "libvirt-clients", "qemu-system-x86", "qemu-utils", "ovmf",
    "openvswitch-switch", "dnsmasq", "dnsmasq-utils", "nftables", "iptables", "conntrack",
    "genisoimage", "xorriso",
]  # fmt: skip
FABRIC = ["rdma-core", "ibverbs-utils", "rdmacm-utils", "perftest"]

# The OS disk is NVMe, but a lab may fall back to virtio, so both disk drivers are needed.
INITRAMFS = ["nvme", "virtio_pci", "virtio_blk", "virtio_net", "ext4", "vfat"]


def recipe(distribution: str) -> Recipe:
    """Return the recipe of the host's root filesystem."""
    packages = KERNEL[distribution] + BASE + STORAGE + VIRTUALIZATION + FABRIC
    return Recipe("host", packages, INITRAMFS)

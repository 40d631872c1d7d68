"""Image of the host's OS disk: a freshly deployed UEFI server, not yet a slice host."""

from __future__ import annotations

import os
import uuid
from dataclasses import replace
from pathlib import Path

from lab import cache, image, rootfs
from lab.command import run
from lab.distro import Distro
from lab.progress import step

FOLDER = Path(__file__).parent / "host"
SIZE_MIB = 12 * 1024
ESP_ID = "5E00-1AB0"
PRIVATE = frozenset({"etc/netplan/01-mgmt.yaml"})
NOUN = "host-image"

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
# Further packages of the host, separated by spaces, for what a site may have on its machines.
MORE_VARIABLE = "GPUAAS_LAB_PACKAGES"

# Guests' UEFI, for a host of Debian 12, from the next release. Debian 12's waits for a TPM that is
# not there, by counting to 100,000 with four accesses to devices each: that takes three seconds on
# hardware and minutes on an emulated host.
UEFI_RELEASE = {"bookworm": "trixie"}

# The OS disk is NVMe, but a lab may fall back to virtio, so both disk drivers are needed.
INITRAMFS = ["nvme", "virtio_pci", "virtio_blk", "virtio_net", "ext4", "vfat"]


def noun(distro: Distro) -> str:
    """Return the kind of image in the cache."""
    return f"{NOUN}-{distro.suite}" if distro.suite == "trixie" else NOUN


def name(distro: Distro) -> str:
    """Return the name of the image's folder in the cache, whether or not it is built."""
    return f"{noun(distro)}-{_key(distro)}"


def _key(distro: Distro) -> str:
    base = rootfs.key(_recipe(distro), distro)
    sources = [FOLDER, Path(image.__file__), Path(__file__)]
    made = {"rootfs": base, "size": SIZE_MIB, "uefi": _uefi_distro(distro).sources}
    return cache.content_key(made, sources)


def ensure(distro: Distro) -> Path:
    """Return the cached image; build it if its packages, files or builder changed."""
    base = rootfs.ensure(_recipe(distro), distro)
    overlays = [FOLDER / "overlay", *_uefi(distro)]
    key = _key(distro)
    layout = image.Layout(SIZE_MIB, str(uuid.uuid5(uuid.NAMESPACE_OID, key)), ESP_ID)

    def build(folder: Path) -> None:
        with step("host disk image"):
            image.write(
                folder / "host.raw",
                layout,
                rootfs=base,
                overlays=overlays,
                finish=FOLDER / "finish.sh",
                private=PRIVATE,
                log=folder / "build.log",
            )

    return cache.ensure(noun(distro), key, build) / "host.raw"


def _recipe(distro: Distro) -> rootfs.Recipe:
    packages = KERNEL[distro.id] + BASE + STORAGE + VIRTUALIZATION + FABRIC
    packages += os.environ.get(MORE_VARIABLE, "").split()
    return rootfs.Recipe("host", packages, INITRAMFS)


def _uefi_distro(distro: Distro) -> Distro:
    return replace(distro, suite=UEFI_RELEASE.get(distro.suite, distro.suite))


def _uefi(distro: Distro) -> list[Path]:
    """Folder with the UEFI firmware of another release; none if the host has its own."""
    other = _uefi_distro(distro)
    if other == distro:
        return []

    def build(folder: Path) -> None:
        with step("UEFI firmware of guests"):
            tar = folder / "uefi.tar"
            words: list[str | Path] = [
                "mmdebstrap",
                "--variant=extract",
                "--include=ovmf",
                other.suite,
                tar,
            ]
            run([*words, *other.sources], log=folder / "mmdebstrap.log")
            (folder / "overlay").mkdir()
            files = [f"./usr/share/OVMF/OVMF_{part}_4M.fd" for part in ("CODE", "VARS")]
            run(["tar", "-C", folder / "overlay", "-xf", tar, *files])
            tar.unlink()

    key = cache.content_key({"sources": other.sources})
    return [cache.ensure("uefi", key, build) / "overlay"]

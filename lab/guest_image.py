"""Image of the slice VM: boots by BIOS and UEFI, configured by cloud-init from a NoCloud seed."""

from __future__ import annotations

import hashlib
import json
import uuid
from dataclasses import dataclass
from pathlib import Path

from lab import cache, image, rootfs
from lab.command import run
from lab.distro import Distro
from lab.progress import step

FOLDER = Path(__file__).parent / "guest"
# Of every image of slices, and of the lab's own guest after it.
FINISH, LEAN = FOLDER / "finish.sh", FOLDER / "lean.sh"
SIZE_MIB = 1152
ESP_ID = "5E00-61E5"

# The cloud kernel is small and has every driver that a slice VM needs in the lab.
KERNEL = {"debian": ["linux-image-cloud-amd64"], "ubuntu": ["linux-image-generic"]}
PACKAGES = [
    "systemd-sysv", "systemd-resolved", "udev", "dbus", "kmod", "initramfs-tools", "lz4", "zstd",
    "grub-common", "grub-efi-amd64-bin", "grub-pc-bin", "openssh-server", "sudo", "python3",
    "cloud-init", "cloud-guest-utils", "fdisk", "e2fsprogs", "iproute2", "iputils-ping", "pciutils",
    "procps", "ca-certificates", "curl",
]  # fmt: skip
INITRAMFS = ["virtio_pci", "virtio_blk", "virtio_net", "nvme", "ext4"]


@dataclass(frozen=True)
class GuestImage:
    """Entry of the image catalogue for this image."""

    raw: str
    zst: str
    sha256: str
    size: int


def ensure(distro: Distro) -> GuestImage:
    """Return the cached image and digest; build it if its packages, files or builder changed."""
    recipe = rootfs.Recipe("guest", KERNEL[distro.id] + PACKAGES, INITRAMFS)
    base = rootfs.ensure(recipe, distro)
    # The proof script lies in the same folder but is not part of the image.
    sources = [FOLDER / "overlay", FINISH, LEAN]
    sources += [Path(module) for module in (image.__file__, __file__)]
    key = cache.content_key({"rootfs": base.parent.name, "size": SIZE_MIB}, sources)
    layout = image.Layout(SIZE_MIB, str(uuid.uuid5(uuid.NAMESPACE_OID, key)), ESP_ID, bios=True)

    def build(folder: Path) -> None:
        raw, finish = folder / "guest.raw", folder / "finish.sh"
        finish.write_text(FINISH.read_text() + LEAN.read_text())
        with step("guest disk image"):
            image.write(
                raw,
                layout,
                rootfs=base,
                overlays=[FOLDER / "overlay"],
                finish=finish,
                log=folder / "build.log",
            )
            run(["zstd", "-q", "-3", "-T0", raw, "-o", folder / "guest.raw.zst"])
            with raw.open("rb") as stream:
                digest = hashlib.file_digest(stream, "sha256").hexdigest()
            facts = {"sha256": digest, "size": raw.stat().st_size}
            (folder / "guest.json").write_text(json.dumps(facts, indent=1) + "\n")

    folder = cache.ensure("guest-image", key, build)
    facts = json.loads((folder / "guest.json").read_text())
    return GuestImage(
        str(folder / "guest.raw"), str(folder / "guest.raw.zst"), facts["sha256"], facts["size"]
    )

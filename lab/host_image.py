"""Image of the host's OS disk: a freshly deployed UEFI server, not yet a slice host."""

from __future__ import annotations

import uuid
from pathlib import Path

from lab import cache, host_packages, image, rootfs
from lab.distro import Distro
from lab.progress import step

FOLDER = Path(__file__).parent / "host"
SIZE_MIB = 12 * 1024
ESP_ID = "5E00-1AB0"
PRIVATE = frozenset({"etc/netplan/01-mgmt.yaml"})
NOUN = "host-image"


def name(distro: Distro) -> str:
    """Return the name of the image's folder in the cache, whether or not it is built."""
    return f"{NOUN}-{_key(distro)}"


def _key(distro: Distro) -> str:
    base = rootfs.key(host_packages.recipe(distro.id), distro)
    sources = [FOLDER, Path(image.__file__), Path(__file__)]
    return cache.content_key({"rootfs": base, "size": SIZE_MIB}, sources)


def ensure(distro: Distro) -> Path:
    """Return the cached image; build it if its packages, files or builder changed."""
    base = rootfs.ensure(host_packages.recipe(distro.id), distro)
    key = _key(distro)
    layout = image.Layout(SIZE_MIB, str(uuid.uuid5(uuid.NAMESPACE_OID, key)), ESP_ID)

    def build(folder: Path) -> None:
        with step("host disk image"):
            image.write(
                folder / "host.raw",
                layout,
                rootfs=base,
                overlay=FOLDER / "overlay",
                finish=FOLDER / "finish.sh",
                private=PRIVATE,
                log=folder / "build.log",
            )

    return cache.ensure(NOUN, key, build) / "host.raw"
